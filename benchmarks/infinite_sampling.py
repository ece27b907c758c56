"""Infinite Sampling (arXiv 2506.22950) part by part: one prompt, 32 completions, few slots; and our default beside it.

Two workloads. *announcing*: a policy trained on the spot that first says how long it is going to be, and mostly keeps
to it: the case that a probe is made for. *demo*: the demo's policy as its training begins, whose completions of one
prompt differ by little. Both sample, and lengths are predicted by the real predictor, which has learned from some
rollouts before.

Rows, from top to bottom: the whole group in as many slots; naive micro groups (rounds, whose rows leave the
computation when they have ended, which makes them faster than padded ones); a list a slot; slots that are refilled; and
the paper's plan (balanced lists, shortest first), without a probe and with probes of k tokens; and our default, which
takes what probe or time slices have saved most so far, or none.

Below, the demo's own rollouts (16 prompts x 16), default and first come in turn, over three visits of its prompts.
"""

from __future__ import annotations

import statistics
import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.announcing import LIMIT, announcing_policy
from benchmarks.one_prompt import SYSTEMS, Figures, Runner, System, gradient_of
from benchmarks.report import Claim, Options, Row, finish, note, parse_options
from benchmarks.workloads import arithmetic_prompts, load
from lit_grpo.types import Key, Prompt

GROUP, SLOTS = 32, 8
DEFAULT, NAIVE, COMPLETE = "default", "naive micro groups", ("complete, k = 8", "complete, k = 32", "complete, k = 64")


def main(options: Options) -> int:
    """Measure all, and report sums over rollouts."""
    torch.set_num_threads(1)
    claims: list[Claim] = []
    rows: list[Row] = []
    seeds = 1 if options.quick else 3
    group = 4 if options.quick else GROUP
    for task in ("announcing", "demo"):
        policy, tokenizer, limit = _policy(task, options)
        for num_slots in (2,) if options.quick else (SLOTS, 4, 16):
            found: dict[str, list[Figures]] = {system.name: [] for system in SYSTEMS}
            for seed in range(seeds if num_slots == SLOTS else 1):
                note(f"{task}, {num_slots} slots, seed {seed}")
                prompts = arithmetic_prompts(tokenizer, 100 * (seed + 1))[100 * seed :]
                of_seed = _one_prompt(policy, tokenizer, limit, prompts[: 2 if options.quick else 12], num_slots, group)
                for name, figures in of_seed.items():
                    found[name].append(figures)
                claims += _equality(policy, limit, of_seed, f"{task}, {num_slots} slots, seed {seed}")
            rows += _rows(task, num_slots, found)
            claims += _claims(task, num_slots, found) if num_slots == SLOTS or options.quick else []
    rows_of_groups, claims_of_groups = _demo_rollouts(options, seeds)
    settings: Row = {"G": group, "seeds": seeds, "warm-up rollouts": 4, "measured": 8}
    return finish("infinite_sampling", options, settings, rows + rows_of_groups, claims + claims_of_groups)


def _policy(task: str, options: Options) -> tuple[Any, Any, int]:
    if task == "announcing":
        policy: Any
        policy, tokenizer = announcing_policy(0, 4 if options.quick else 150)
        return policy.to(options.device), tokenizer, 72 if options.quick else LIMIT  # pyrefly: ignore[bad-argument-type]
    return *load("tiny", options.device), 72 if options.quick else 128


def _one_prompt(
    policy: Any, tokenizer: Any, limit: int, prompts: Sequence[Prompt], num_slots: int, group: int
) -> dict[str, Figures]:
    """Decode prompt after prompt, each by all systems in turn; the first third is not counted."""
    runners = [Runner(system, policy, tokenizer, num_slots, group, limit) for system in SYSTEMS]
    figures = {system.name: Figures() for system in SYSTEMS}
    for number, prompt in enumerate(prompts):
        known: dict[Key, int] = {}
        for runner in runners:
            count = figures[runner.system.name] if number >= len(prompts) / 3 else Figures()
            runner.run([prompt], count, known)
            if not known:  # the first system tells the others, where they are to know
                known = {key: len(tokens) for key, tokens in count.samples.items()}
    return figures


def _equality(policy: Any, limit: int, found: dict[str, Figures], where: str) -> list[Claim]:
    """Whether all systems have sampled the same, and would learn the same from it."""
    first, *others = found.values()
    differing = max(sum(first.samples[key] != other.samples[key] for key in first.samples) for other in others)
    reference = gradient_of(policy, first.groups, limit)
    norm = max(float(reference.norm()), 1e-12)
    gradients = (gradient_of(policy, other.groups, limit) for other in others)
    furthest = max(float((gradient - reference).norm()) / norm for gradient in gradients)
    return [
        Claim(f"{where}: completions that differ between systems, at most", float(differing), "<=", 0),
        Claim(f"{where}: gradients that differ by, at most, relative", furthest, "<=", 1e-4),
    ]


def _rows(task: str, num_slots: int, found: dict[str, list[Figures]]) -> list[Row]:
    naive = _total(found[NAIVE], "steps")
    rows: list[Row] = []
    for system in SYSTEMS:
        figures = found[system.name]
        steps, seconds = _total(figures, "steps"), _total(figures, "seconds")
        row: Row = {"task": task, "slots": num_slots, "system": system.name, "steps": steps}
        row |= {"over_bound": steps / _total(figures, "bound"), "saved_of_naive": 1 - steps / naive}
        row["tokens_per_s"] = _total(figures, "tokens") / seconds
        rows.append(row | ({"points": _chosen(figures)} if system.points is None else {}))
    bound = _total(found["first come"], "bound")
    rows.append(
        {"task": task, "slots": num_slots, "system": "bound", "steps": bound, "saved_of_naive": 1 - bound / naive}
    )
    return rows


def _total(figures: Sequence[Figures], name: str) -> float:
    return sum(getattr(each, name) for each in figures)


def _chosen(figures: Sequence[Figures]) -> str:
    """Return the number of rollouts in which the default chose each set of points."""
    names = [
        "none" if not points else f"k = {points[0]}" if len(points) == 1 else "slices"
        for each in figures
        for points in each.points
    ]
    return ", ".join(f"{name}: {count}" for name, count in Counter(names).most_common())


def _claims(task: str, num_slots: int, found: dict[str, list[Figures]]) -> list[Claim]:
    where = f"{task}, {GROUP} on {num_slots}"
    naive = _total(found[NAIVE], "steps")
    saved = {name: 1 - _total(figures, "steps") / naive for name, figures in found.items()}
    rate = {name: _total(figures, "tokens") / _total(figures, "seconds") for name, figures in found.items()}
    best = max(COMPLETE, key=lambda name: saved[name])
    return [
        Claim(f"{where}: {best}: steps saved of naive's", saved[best], ">=", 0.45),
        Claim(f"{where}: default: steps saved of naive's, less those of {best}", saved[DEFAULT] - saved[best], ">=", 0),
        Claim(f"{where}: {best}: tokens/s over naive's", rate[best] / rate[NAIVE], ">=", 1.25),
        Claim(f"{where}: default: tokens/s over naive's", rate[DEFAULT] / rate[NAIVE], ">=", 1.25),
    ]


# ---- the demo's rollouts ------------------------------------------------------------------------------


def _demo_rollouts(options: Options, seeds: int) -> tuple[list[Row], list[Claim]]:
    """Decode the demo's batches by default and first come in turn, three visits each."""
    policy, tokenizer = load("tiny", options.device)
    size, batches = (2, 2) if options.quick else (16, 6)
    rows: list[Row] = []
    claims: list[Claim] = []
    for num_slots, least in ((2, 1.1),) if options.quick else ((16, 1.1), (64, 1.0)):
        ratios: list[float] = []
        default, first_come = Figures(), Figures()
        for seed in range(seeds):
            runners = [
                Runner(System(name, plan, points, lengths), policy, tokenizer, num_slots, size, 128)
                for name, plan, points, lengths in (
                    ("default", "short_last", None, "predicted"),
                    ("first come", "fcfs", (), "none"),
                )
            ]
            rows_of_seed = arithmetic_prompts(tokenizer, 100 * (seed + 1))[100 * seed :][: size * batches]
            for visit in range(3):
                for first in range(0, len(rows_of_seed), size):
                    prompts = [_again(prompt, visit) for prompt in rows_of_seed[first : first + size]]
                    one, two = Figures(), Figures()
                    for runner, figures in zip(runners, (one, two), strict=True):
                        runner.run(prompts, figures, {})
                    if visit == 2:
                        ratios.append(two.seconds / one.seconds)
                        for total, figures in ((default, one), (first_come, two)):
                            for name in ("steps", "bound", "tokens", "seconds"):
                                setattr(total, name, getattr(total, name) + getattr(figures, name))
                            total.points += figures.points
        faster = statistics.median(ratios)
        note(f"demo, {size} x {size} on {num_slots}: {faster:.3f}")
        for name, figures in (("default", default), ("first come", first_come)):
            row: Row = {"task": f"demo, {size} x {size}", "slots": num_slots, "system": name, "steps": figures.steps}
            row |= {"over_bound": figures.steps / figures.bound, "tokens_per_s": figures.tokens / figures.seconds}
            rows.append(row | ({"points": _chosen([figures])} if name == "default" else {}))
        where = f"demo, {size} x {size} on {num_slots}, third visit"
        claims += [
            Claim(f"{where}: default: steps over the bound", default.steps / default.bound, "<=", 1.05),
            Claim(f"{where}: time of first come over the default's, median", faster, ">=", least),
        ]
    return rows, claims


def _again(prompt: Prompt, visit: int) -> Prompt:
    return Prompt(prompt.prompt_id, prompt.token_ids, prompt.text, prompt.columns, visit)


if __name__ == "__main__":
    assert __doc__ is not None
    sys.exit(main(parse_options(__doc__)))
