"""Decode steps saved by the order of requests, predicted lengths and a probe, with a pretrained chat model.

SmolLM2-135M-Instruct answers the word problems of its configuration, at temperature 1 and with a limit that lets it
talk, over three visits of the same prompts; its weights move by a little between two visits, as in training. Each
rollout is sampled once, which is not counted; then all systems decode completions of these lengths (with other
neighbours in a batch a token or two of a thousand comes out another one, and so may a length), in the same slots, on
one thread, from packed weights, and in turn: first come; the default plan without
a probe, with a probe after 8 or 32 tokens, and as shipped, where it chooses by what has saved most so far; and the
default plan that knows every length. The real predictor learns from each rollout, and the third visit is counted. Its
rank correlation is that of the last completions before decoding and at each point, "within" that of the differences
within a prompt's group.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from benchmarks.length_prediction import drift
from benchmarks.one_prompt import Figures, Runner, System
from benchmarks.report import Claim, Options, Row, finish, note, parse_options
from benchmarks.shipped_tasks import ShippedTask
from benchmarks.workloads import load
from lit_grpo.types import Key, Prompt

CONFIG = "word_problems"
FIRST_COME, NO_PROBE, DEFAULT, KNOWN = "first come", "default, no probe", "default", "default, lengths known"
SYSTEMS = (
    System(FIRST_COME, "fcfs", lengths="none"),
    System(NO_PROBE, "short_last"),
    System("default, k = 8", "short_last", (8,)),
    System("default, k = 32", "short_last", (32,)),
    System(DEFAULT, "short_last", None),
    System(KNOWN, "short_last", lengths="known"),
)
VISITS, DRIFT = 3, 0.005


@dataclass(frozen=True)
class Size:
    """Of all rollouts."""

    prompts: int
    per_rollout: int
    group: int
    limit: int
    slots: tuple[int, ...]


FULL, QUICK = Size(8, 4, 8, 96, (8,)), Size(2, 1, 2, 10, (2,))


def main(options: Options) -> int:
    """Decode by all systems, and report the third visit."""
    torch.set_num_threads(1)
    size, task = QUICK if options.quick else FULL, ShippedTask(CONFIG)
    rows: list[Row] = []
    claims: list[Claim] = []
    for num_slots in size.slots:
        torch.manual_seed(0)
        policy, tokenizer = load(options.policy or task.policy, options.device)
        prompts = task.prompts(tokenizer, task.rows("train", size.prompts))
        lengths: dict[Key, int] = {}
        sampler, *runners = (
            Runner(system, policy, tokenizer, num_slots, size.group, size.limit, forced, packed_weights=True)
            for system, forced in [(SYSTEMS[0], None), *((system, lengths) for system in SYSTEMS)]
        )
        found = _decoded(policy, sampler, lengths, runners, prompts, size)
        rows += [_row(runner, found[runner.system.name], num_slots) for runner in runners]
        claims += _claims(found, num_slots)
    settings: Row = {"threads": 1, "prompts": size.prompts, "per_rollout": size.per_rollout, "G": size.group}
    settings |= {"limit": size.limit, "visits": VISITS, "drift": DRIFT, "policy": "SmolLM2-135M-Instruct"}
    return finish("real_model_lengths", options, settings, rows, claims)


def _decoded(
    policy: torch.nn.Module,
    sampler: Runner,
    lengths: dict[Key, int],
    runners: Sequence[Runner],
    prompts: Sequence[Prompt],
    size: Size,
) -> dict[str, Figures]:
    """Decode all visits, each rollout by all systems in turn; return what the last visit took.

    Args:
        policy: Moves a little between visits.
        sampler: Decides how long completions are.
        lengths: Takes them; all runners read it.
        runners: One for each system.
        prompts: Of each visit.
        size: Of a rollout.
    """
    figures = {runner.system.name: Figures() for runner in runners}
    for visit in range(VISITS):
        if visit:
            drift(policy, DRIFT, visit)
        for first in range(0, len(prompts), size.per_rollout):
            part = [replace(prompt, visit=visit) for prompt in prompts[first : first + size.per_rollout]]
            sampled = Figures()
            sampler.run(part, sampled, {})
            lengths |= {key: len(tokens) for key, tokens in sampled.samples.items()}
            for runner in runners:
                runner.run(part, figures[runner.system.name] if visit == VISITS - 1 else Figures(), lengths)
        note(f"visit {visit}")
    return figures


def _row(runner: Runner, figures: Figures, num_slots: int) -> Row:
    row: Row = {"slots": num_slots, "system": runner.system.name, "steps": figures.steps}
    row |= {"over_bound": figures.steps / figures.bound, "seconds": figures.seconds}
    row |= {"tokens_per_s": figures.tokens / figures.seconds, "completions": len(figures.samples)}
    row["mean_tokens"] = figures.tokens / len(figures.samples)
    if runner.system.lengths == "predicted":
        row |= {name.removeprefix("lengths/"): value for name, value in runner.predictor.metrics().items()}
    if runner.system.points is None:
        row["chosen"] = ", ".join(str(points) for points in figures.points)
    return row


def _claims(found: dict[str, Figures], num_slots: int) -> list[Claim]:
    def over_first_come(name: str, what: str) -> float:
        return getattr(found[name], what) / getattr(found[FIRST_COME], what)

    where = f"{num_slots} slots"
    return [
        Claim(f"{where}: default: steps over first come's", over_first_come(DEFAULT, "steps"), "<=", 1.0),
        Claim(f"{where}: default: seconds over first come's", over_first_come(DEFAULT, "seconds"), "<=", 1.0),
    ]


if __name__ == "__main__":
    assert __doc__ is not None
    sys.exit(main(parse_options(__doc__)))
