"""The update phase beside TRL's, on the same groups and the same random policy: completion tokens/s and peak memory.

Both sides do what training does from finished rollouts to changed weights: ours is a fit of GRPOModule, TRL's is
GRPOTrainer's own preparation, loss and backward (chunked LM head, gradient checkpointing off, no reference), and the
same fused AdamW. TRL gets the number of rows a micro-batch that is fastest of those tried. On a CPU its LM head scores
prompt tokens too. Memory is the peak above the idle process, gradients and AdamW's moments included, each case in a
process of its own. The floor is the FLOPs that any method must do (see ``floor_flops``); how near we come is told as
the share of the rate at which this machine multiplies large matrices.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

from benchmarks.report import Claim, Options, Row, finish, parse_options
from benchmarks.update_case import TIMED_ROWS, Case, Figures, measure
from benchmarks.update_work import SIGMA, Work
from lit_grpo.update.logprobs.checkpointing import Checkpointing


@dataclass(frozen=True)
class Setting:
    """Tokens of our micro-batches, and whether activations are computed again in the backward pass."""

    tokens: int
    checkpointing: Checkpointing = False


WORKS = {  # the limits on completions are beyond the longest, so that none is cut
    "a": Work(1024, 128, 16, max_tokens=512),
    "b": Work(64, 256, 16, max_tokens=640),
    "c": Work(512, 128, 64, max_tokens=512),
}
TIMES_FASTER = {"a": 5.0, "b": 1.7, "c": 6.0}
OURS = {
    "34M": {
        "a": Setting(1024, checkpointing="selective"),
        "b": Setting(640, checkpointing=True),
        "c": Setting(576, checkpointing="selective"),
    },
    "demo": {"a": Setting(4096), "b": Setting(1024), "c": Setting(1536)},
}
QUICK = Work(48, 12, 8, vocab_size=512)


def main(options: Options) -> int:
    """Measure all cases, and report each of ours beside the fastest of TRL's."""
    works = {"quick": QUICK} if options.quick else WORKS
    policies, trl_rows = (("smallest",), (2, 4)) if options.quick else (("34M", "demo"), (1, 4))
    rows: list[Row] = []
    claims: list[Claim] = []
    for policy in policies:
        for name, work in works.items():
            setting = OURS.get(policy, {}).get(name, Setting(4096))
            size, checkpointing = setting.tokens, setting.checkpointing
            ours = Case("lit_grpo", size, work, policy, options.device, repeats=2, checkpointing=checkpointing)
            more_rows, more_claims = compare(name, ours, trl_rows)
            rows += more_rows
            claims += more_claims
    return finish("update_vs_trl", options, settings(works), rows, claims)


def settings(works: dict[str, Work]) -> Row:
    """What all cases have in common."""
    vocab_size = next(iter(works.values())).vocab_size
    trl = f"{TIMED_ROWS} rows timed, scaled to all"
    return {"lengths": f"log-normal, sigma {SIGMA}", "vocab_size": vocab_size, "trl": trl}


def compare(
    name: str, case: Case, trl_rows: Sequence[int], trl_checkpointing: bool = False
) -> tuple[list[Row], list[Claim]]:
    """Measure a case of ours and the same work in TRL."""
    ours = measure(case)
    theirs = replace(case, system="trl", repeats=1, checkpointing=trl_checkpointing)
    peers = [(size, measure(replace(theirs, size=size))) for size in trl_rows]
    size, peer = min(peers, key=lambda one: _seconds(one[1]))
    kinds = {True: ", checkpointing", "selective": ", selective checkpointing"}
    checkpointing = kinds.get(case.checkpointing, "")
    rows = [_row("lit_grpo", f"{case.size} tokens{checkpointing}", name, case, ours, ours)]
    rows += [_row("TRL", f"{size} rows", name, case, one, ours) for size, one in peers]
    return rows, _claims(case.policy, name, size, ours, peer)


def _seconds(figures: Figures) -> float:
    return statistics.median(figures["seconds"])


def _row(system: str, size: str, name: str, case: Case, figures: Figures, ours: Figures) -> Row:
    work = case.work
    rate = ours["floor_tflop"] / _seconds(figures)
    return {
        "system": system,
        "policy": case.policy,
        "work": f"{name}: {work.prompt_tokens} + {work.mean_tokens} x {work.group_size}",
        "micro-batch": size,
        "seconds": round(_seconds(figures), 3),
        "tokens_per_s": round(work.num_completion_tokens / _seconds(figures), 1),
        "peak_mib": round(figures["peak_mib"], 1),
        "floor_tflop": round(ours["floor_tflop"], 4),
        "share_of_matmul_rate": round(rate / max(figures["matmul_tflops"], ours["matmul_tflops"]), 3),
    }


def _claims(policy: str, name: str, size: int, ours: Figures, peer: Figures) -> list[Claim]:
    what = f"{policy}, work {name}, over TRL at its fastest ({size} rows)"
    return [
        Claim(f"tokens/s, {what}", _seconds(peer) / _seconds(ours), ">=", TIMES_FASTER.get(name, 1.0)),
        Claim(f"peak memory, {what}", ours["peak_mib"] / peer["peak_mib"], "<=", 0.5),
    ]


if __name__ == "__main__":
    assert __doc__ is not None
    sys.exit(main(parse_options(__doc__)))
