"""Counts of GPU waits, copies, kernels and weight casts in decoding and an update, beside an earlier commit.

Nothing runs on a GPU: both commits run in precision bf16-mixed under the pretended one (``pretend_cuda``), on a random
Qwen3 of four layers, with all weights trained and with LoRA. Counts are exact, and do not depend on the machine; they
say nothing of the time that a kernel takes. A decode step is the median of a rollout's; of an update two numbers of
micro-batches are compared, so that what each adds can be told from what a step costs.

Launches of a decode step are counted twice: of a recorded step of the small policy, and of Qwen3-1.7B's configuration
compiled to binaries (``decode_launches``). The time of a step is *modeled* from them: the bytes that it reads over the
memory's bandwidth, and 2.5 us a launch. Beside the H100's measured steps stands what the model says of them.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

from benchmarks.decode_launches import LaunchCase
from benchmarks.earlier_commit import earlier_commit
from benchmarks.processes import measured
from benchmarks.random_policies import QWEN3_1_7B
from benchmarks.report import RESULTS, ROOT, Claim, Options, Row, finish, note, parse_options

BEFORE = "23f661f"
BUDGETS = {
    "decode": {"waits, most": 1, "unpinned copies, most": 0, "pinned copies, median": 1, "weights cast, most": 0},
    "update": {
        **{"waits, micro-batch": 0, "waits, step": 1},
        **{"unpinned copies, micro-batch": 0, "pinned copies, micro-batch": 1},
    },
    "launches, bf16-mixed, kernels": {"a layer": 11, "besides, in the graph": 12},
    "launches, weights in place, kernels": {"a layer": 14, "besides, in the graph": 12},
}
MEASURED = RESULTS / "gpu-2026-11-27.json"
LAUNCH_S = 2.5e-6
PROMPT, MEAN_COLUMN = 512, 100  # tokens of a row's prompt and, on average, of its completion, as measured
MOST_MS, LEAST_SHARE = 2.3, 0.5  # of a step of 8 rows
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
            rows.append(row | ({"before": round(then[case][what], 3)} if case in then else {}))
        budget = BUDGETS.get(case, BUDGETS.get(case.partition(",")[0], {}))
        for what, most in budget.items():
            claims.append(Claim(f"{case}: {what}", counts[what], "<=", most))
    binaries = _binaries(options.quick)
    for case, figures in binaries.items():
        rows += [{"case": case, "what": what, "now": figures[what]} for what in ("a layer", "besides")]
        if "kernels" in case:
            claims.append(Claim(f"{case}: a layer", figures["a layer"], "<=", 11 if "mixed" in case else 14))
    if binaries:
        modeled, about_it = _modeled(binaries, now)
        rows, claims = rows + modeled, claims + about_it
    return finish("device_counts", options, {"before": BEFORE, "precision": "bf16-mixed"}, rows, claims)


def _binaries(quick: bool) -> dict[str, dict[str, int]]:
    """Count launches of Qwen3-1.7B's configuration by compiled binaries, where there are Triton and g++."""
    if find_spec("triton") is None or shutil.which("g++") is None:
        note("no binaries are compiled: Triton or g++ is missing")
        return {}
    cases = {}
    for capability in [(9, 0)] if quick else [(9, 0), (8, 9), (8, 0)]:
        for weights in ("bf16-mixed", "weights in place"):
            for way in ("kernels", "operations") if capability == (9, 0) else ("kernels",):
                name = f"binaries for sm_{capability[0]}{capability[1]}, {weights}, {way}"
                note(f"compiling {name}")
                case = LaunchCase(capability, weights == "bf16-mixed", way == "kernels")
                cases[name] = measured("benchmarks.decode_launches", case)
    return cases


def _modeled(binaries: dict[str, dict[str, int]], counts: Counts) -> tuple[list[Row], list[Claim]]:
    """Return the modeled time of steps of Qwen3-1.7B's configuration, beside the H100's; and claims of 8 rows."""
    gpu = json.loads(MEASURED.read_text())
    bytes_per_s = gpu["machine"]["copies_gb_per_s"] * 1e9
    sizes = QWEN3_1_7B
    heads = sizes.head_dim * (2 * sizes.heads + 2 * sizes.kv_heads)  # of query, key, value and output
    weights = 2 * (sizes.layers * sizes.hidden * (heads + 3 * sizes.intermediate) + sizes.hidden * sizes.vocab_size)
    token = 2 * 2 * sizes.layers * sizes.kv_heads * sizes.head_dim
    weights_ms = 1e3 * weights / bytes_per_s

    def step_ms(case: str, num_rows: int) -> float:
        compiled, outside = binaries[f"binaries for sm_90, {case}"], counts[f"launches, {case}"]["outside of the graph"]
        launches = sizes.layers * compiled["a layer"] + compiled["besides"] + 1 + outside  # the copy that ends a graph
        read = num_rows * token * (PROMPT + MEAN_COLUMN)
        return weights_ms + 1e3 * (read / bytes_per_s + launches * LAUNCH_S)

    rows: list[Row] = []
    for known in gpu["rows"]:
        if "device_ms_a_step" in known:
            num_rows, device_ms = known["rows"], known["device_ms_a_step"]
            before = step_ms("weights in place, operations", num_rows)
            for case in ("weights in place", "bf16-mixed"):
                after = step_ms(f"{case}, kernels", num_rows)
                row: Row = {"case": f"modeled step, {case}, {num_rows} rows", "what": "device ms"}
                row |= {"now": round(after, 3), "before": round(before, 3), "measured before": device_ms}
                row |= {"error of the model": round(before / device_ms - 1, 3)}
                row |= {"now, if the error stays": round(after * device_ms / before, 3)}
                rows.append(row | {"share of the bandwidth": round(weights_ms / after, 3)})
    ms = step_ms("bf16-mixed, kernels", 8)
    return rows, [
        Claim("modeled step of 8 rows, bf16-mixed: device ms", ms, "<=", MOST_MS),
        Claim("modeled step of 8 rows, bf16-mixed: share of the bandwidth", weights_ms / ms, ">=", LEAST_SHARE),
    ]


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
