"""The update phase beside TRL's, on the same groups and the same random policy: completion tokens/s and peak memory.

Both sides do what training does from finished rollouts to changed weights: ours is a fit of GRPOModule, TRL's is
GRPOTrainer's own preparation, loss and backward (chunked LM head, no reference), and the same fused AdamW. The terms
are equal: the same memory switches (both with gradient checkpointing, or both without), as many sizes of micro-batches
tried of ours as of TRL's, as many threads, and steps in turn. Speed is that of each side's fastest setting, memory that
of each side's most frugal one. On a CPU TRL's LM head scores prompt tokens too, unless it is made to take its GPU path,
as it is here; a row of its own shows it as installed, and what counts is the best of all rows.

Memory is the peak above the idle process, gradients and AdamW's moments included, each setting in a process of its own;
what a method can save is told as the peak above these, which both sides must hold.
The floor is the FLOPs that any method must do (see ``floor_flops``); how near we come is told as the share of the rate
at which the same process multiplies large matrices just before and after the step, for a shared machine's rate drifts.
The first layer of a policy runs once a micro-batch without checkpointing and twice with it, which ``layer_runs`` shows.

``hybrid_update`` is a work on a Qwen3.5, three of whose four layers are gated DeltaNet, by torch alone on both sides.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

from benchmarks.report import Claim, Options, Row, finish, need, options_parser
from benchmarks.update_case import TIMED_ROWS, Case, Steps
from benchmarks.update_work import SIGMA, Work

THREADS = 1


@dataclass(frozen=True)
class Sizes:
    """Of the micro-batches that are tried: tokens of ours, rows of TRL's."""

    ours: Sequence[int]
    theirs: Sequence[int]


WORKS = {  # the limits on completions are beyond the longest, so that none is cut
    "a": Work(1024, 128, 16, max_tokens=512),
    "b": Work(64, 256, 16, max_tokens=640),
    "c": Work(512, 128, 64, max_tokens=512),
}
HYBRID = Work(512, 128, 16, max_tokens=512)
SIZES = {
    "d": Sizes((576, 4096), (1, 4)),
    "a": Sizes((1024, 4096), (1, 4)),
    "b": Sizes((640, 2560), (1, 4)),
    "c": Sizes((576, 2304), (1, 4)),
}
QUICK = Work(48, 12, 8, vocab_size=512)
TIMES_FASTER, MOST_MEMORY, LEAST_SHARE = 2.0, 0.5, 0.6


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure all works of a study in all sizes, with checkpointing and without."""
    parser = options_parser(__doc__ or "")
    parser.add_argument("study", nargs="?", choices=("update_vs_trl", "hybrid_update"), default="update_vs_trl")
    asked = parser.parse_args(arguments)
    options, is_hybrid = Options(asked.quick, asked.device, asked.policy, asked.output), asked.study == "hybrid_update"
    rows: list[Row] = []
    claims: list[Claim] = []
    if options.quick:
        policy = "smallest hybrid" if is_hybrid else "smallest"
        case = Case("lit_grpo", 0, QUICK, policy, options.device, THREADS, checkpointing=True)
        rows, claims = compare("quick", case, Sizes((4096,), (4,)), repeats=1)
        return finish(asked.study, options, settings(case, 1), rows, claims)
    works = {"d": HYBRID} if is_hybrid else WORKS
    policy = "hybrid, 31M" if is_hybrid else "34M"
    case = Case("lit_grpo", 0, HYBRID, policy, options.device, THREADS, first=TIMED_ROWS)
    for name, work in works.items():
        for checkpointing in (True, False):
            more = compare(name, replace(case, work=work, checkpointing=checkpointing), SIZES[name], repeats=2)
            rows += more[0]
            claims += more[1]
    program = f"update_vs_trl {asked.study}".replace(" update_vs_trl", "")
    return finish(asked.study, options, settings(case, 2), rows, claims, program)


def settings(case: Case, repeats: int) -> Row:
    """Return the settings that all cases have in common."""
    return {
        "policy": f"random Qwen3, {case.policy}",
        "lengths": f"log-normal, sigma {SIGMA}",
        "vocab_size": case.work.vocab_size,
        "threads": case.threads,
        "repeats": f"{repeats} of each setting, ours and TRL's in turn",
        "trl": f"{TIMED_ROWS} rows timed, scaled to all",
    }


def compare(name: str, case: Case, sizes: Sizes, repeats: int) -> tuple[list[Row], list[Claim]]:
    """Measure one work on both sides, each setting of ours in turn with one of TRL's."""
    on_gpu = case.device == "cuda"
    peer = replace(case, system="TRL" if on_gpu else "TRL, GPU path of its head")
    measured: list[Steps] = []
    for ours, theirs in zip(sizes.ours, sizes.theirs, strict=True):
        measured += in_turn([replace(case, size=ours), replace(peer, size=theirs)], repeats)
    if not on_gpu and not case.checkpointing:
        measured += in_turn([replace(peer, system="TRL", size=sizes.theirs[0])], 1)
    return [figures_of(name, steps) for steps in measured], _claims(name, case, measured)


def in_turn(cases: Sequence[Case], repeats: int) -> list[Steps]:
    """Warm all cases up, and take steps of each in turn."""
    with ExitStack() as stack:
        measured = [stack.enter_context(Steps(case)) for case in cases]
        for steps in measured:
            steps.warm_up()
        for steps in measured * repeats:
            steps.take()
    return measured


def _seconds(steps: Steps) -> float:
    return statistics.median(steps.seconds)


def figures_of(name: str, steps: Steps) -> Row:
    """Return the row of one setting."""
    case, figures, seconds = steps.case, steps.figures, _seconds(steps)
    return {
        "system": case.system,
        "work": f"{name}: {case.work.prompt_tokens} + {case.work.mean_tokens} x {case.work.group_size}",
        "checkpointing": "yes" if case.checkpointing else "no",
        "micro-batch": f"{case.size} {'tokens' if case.system == 'lit_grpo' else 'rows'}",
        "seconds": round(seconds, 3),
        "spread_s": round(max(steps.seconds) - min(steps.seconds), 3),
        "tokens_per_s": round(case.work.num_completion_tokens / seconds, 1),
        "peak_mib": round(figures["peak_mib"], 1),
        "above_state_mib": round(figures["peak_mib"] - figures["state_mib"], 1),
        "layer_runs": figures["layer_runs"],
        "floor_tflop": round(figures["floor_tflop"], 4),
        "share_of_matmul_rate": round(statistics.median(steps.shares), 3),
    }


def _claims(name: str, case: Case, measured: Sequence[Steps]) -> list[Claim]:
    ours = [steps for steps in measured if steps.case.system == "lit_grpo"]
    theirs = [steps for steps in measured if steps.case.system != "lit_grpo"]
    what = f"{case.policy}, work {name}, both {'with' if case.checkpointing else 'without'} checkpointing"
    peak, peer_peak = (min(steps.figures["peak_mib"] for steps in side) for side in (ours, theirs))
    state = ours[0].figures["state_mib"]
    above = (peak - state) / (peer_peak - state)
    claims = [
        Claim(f"{what}: tokens/s at the fastest over TRL's at its fastest", _faster(ours, theirs), ">=", TIMES_FASTER),
        Claim(f"{what}: least peak memory over TRL's least", peak / peer_peak, "<=", 1.0),
        Claim(f"{what}: the same above gradients and moments", above, "<=", MOST_MEMORY if case.checkpointing else 1.0),
    ]
    if not case.checkpointing:
        share = max(statistics.median(steps.shares) for steps in ours)
        claims.append(Claim(f"{what}: share of the matmul rate", share, ">=", LEAST_SHARE))
    return claims


def _faster(ours: Sequence[Steps], theirs: Sequence[Steps]) -> float:
    return min(map(_seconds, theirs)) / min(map(_seconds, ours))


if __name__ == "__main__":
    need("trl")
    sys.exit(main())
