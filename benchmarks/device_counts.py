"""Counts of GPU waits, copies, kernels and weight casts in decoding and an update, beside an earlier commit.

Nothing runs on a GPU: both commits run in precision bf16-mixed under the pretended one (``pretend_cuda``), on a random
Qwen3 of four layers, with all weights trained and with LoRA. Counts are exact, and do not depend on the machine; they
say nothing of the time that a kernel takes. A decode step is the median of a rollout's; of an update two numbers of
micro-batches are compared, so that what each adds can be told from what a step costs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from benchmarks.earlier_commit import earlier_commit
from benchmarks.report import ROOT, Claim, Options, Row, finish, note, parse_options

BEFORE = "23f661f"
BUDGETS = {
    "decode": {"waits, most": 1, "unpinned copies, most": 0, "pinned copies, median": 1, "weights cast, most": 0},
    "update": {
        **{"waits, micro-batch": 0, "waits, step": 1},
        **{"unpinned copies, micro-batch": 0, "pinned copies, micro-batch": 1},
    },
}
Counts = dict[str, dict[str, float]]


def main(options: Options) -> int:
    """Count here and, unless the run is quick, in the earlier commit."""
    now, then = _counted(ROOT), {}
    if not options.quick:
        with earlier_commit(BEFORE) as before:
            if before is not None:
                then = _counted(before)
    rows: list[Row] = []
    claims: list[Claim] = []
    for case, counts in now.items():
        for what, count in counts.items():
            row: Row = {"case": case, "what": what, "now": round(count, 3)}
            rows.append(row | ({"before": round(then[case][what], 3)} if then else {}))
        for what, most in BUDGETS[case.partition(",")[0]].items():
            claims.append(Claim(f"{case}: {what}", counts[what], "<=", most))
    return finish("device_counts", options, {"before": BEFORE, "precision": "bf16-mixed"}, rows, claims)


def _counted(root: Path) -> Counts:
    """Run the case in a checkout."""
    note(f"counting in {'this commit' if root == ROOT else BEFORE}")
    command = [sys.executable, "-m", "benchmarks.device_counts_case"]
    environment = os.environ | {"PYTHONPATH": str(root)}
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    sys.exit(main(parse_options(__doc__ or "")))
