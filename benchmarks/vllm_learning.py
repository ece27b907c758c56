"""The demo's task learnt through each generator: embedded, vLLM in process, and two vLLM servers.

Each is its config, run whole by the command line with the same seed; what is compared is the exact match on held-out
exercises after the same number of updates.
"""

from __future__ import annotations

import sys

from benchmarks.demo import curve, learnt
from benchmarks.report import Claim, Options, Row, finish, note, parse_options

CONFIGS = {
    "arithmetic": ("arithmetic",),
    "arithmetic_vllm": ("arithmetic", "generators/vllm"),
    "arithmetic_vllm_server": ("arithmetic", "generators/vllm_servers"),
}
QUICK = ["--trainer.max_steps", "2", "--trainer.val_check_interval", "2", "--data.train.init_args.num_rows", "64",
         "--data.validation.init_args.num_rows", "8", "--model.num_generations", "4"]  # fmt: skip
QUICK_CONFIGS = ("arithmetic", "arithmetic_vllm")
SEED_NOISE = 0.03


def main(options: Options) -> int:
    """Run the configs one after another, and write after each what is known: a run takes minutes."""
    first, *others = QUICK_CONFIGS if options.quick else CONFIGS
    rows, code = [_run(first, QUICK if options.quick else [])], 0
    for name in others:
        note(str(rows[-1]))
        rows.append(_run(name, QUICK if options.quick else []))
        code = finish("vllm_learning", options, {"seed": 0}, rows, _claims(rows))
    return code


def _claims(rows: list[Row]) -> list[Claim]:
    embedded, *others = rows
    return [
        claim
        for row in others
        for claim in (
            Claim(
                f"{row['config']}: final exact match below the embedded generator's",
                float(embedded["final"]) - float(row["final"]),
                "<=",
                SEED_NOISE,
            ),
            Claim(f"{row['config']}: largest sync/logprob_gap", float(row["gap"]), "<=", 1e-3),
        )
    ]


def _run(name: str, arguments: list[str]) -> Row:
    """Train in an empty folder; return the curve by update."""
    seconds, logged = learnt(CONFIGS[name], arguments)
    exact = curve(logged)
    gaps = [float(row["sync/logprob_gap"]) for row in logged if row.get("sync/logprob_gap")]
    return {
        "config": name,
        "minutes": round(seconds / 60, 2),
        "gap": max(gaps, default=0.0),
        **exact,
        "final": list(exact.values())[-1],
    }


if __name__ == "__main__":
    assert __doc__ is not None
    sys.exit(main(parse_options(__doc__)))
