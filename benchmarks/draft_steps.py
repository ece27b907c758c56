"""Steps and modeled seconds of whole rollouts by the default plan, by drafts, and by both, over first come.

Completions of a chat model with their token ids (``benchmarks/traces/answers.jsonl``) are decoded again from the
record, in slots of which there are twice as many as completions, half and a sixteenth. Predicted lengths have errors
of 0.35 in the logarithm. Drafts come from the same source as those of the slots: from what each completion and its
siblings have come to at that moment, and from the prompt's last visit. A drafted token that equals the recorded one is
the one that would have been sampled. Either each row tries a fixed number of tokens, or what is worth the price of a
step on an H100.

Seconds are modeled, by that price (``DEVICES`` of ``lit_grpo.tools.simulation.drafts`` says of what model and where its
parts were measured): nothing here was timed. The price is of up to 64 rows; more are extrapolated.

With ``--policy`` the completions are recorded anew: two visits of the prompts below, at temperature 1.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.report import ROOT, Claim, Options, Row, finish, note, parse_options
from lit_grpo.rollout.slots.drafts.price import PricedDrafter
from lit_grpo.rollout.slots.drafts.suffix import SuffixDrafter
from lit_grpo.tools.simulation import Engine, Schedule, Trace, load_trace, simulate
from lit_grpo.tools.simulation.drafts import DEVICES, DraftingReplay
from lit_grpo.tools.simulation.known import lengths_of

RECORDED = ROOT / "benchmarks" / "traces" / "answers.jsonl"
PLAN, NOISE, DEVICE = "short_last", 0.35, "h100"
OVER_SLOTS = (0.5, 2.0, 16.0)
DRAFTS = (3, 7, "auto")
TARGET = 0.7
GROUP, LIMIT = 8, 512
TASK = " Solve it step by step, and end with the answer."
QUESTIONS = (
    "A baker makes 24 rolls an hour for 5 hours and sells them in bags of 6 for 3 dollars a bag. What does he earn?",
    "A train leaves at 9:40 and arrives at 13:15. It stops for 25 minutes in all. How long does it move?",
    "Anna is twice as old as Ben. In 6 years they will be 42 together. How old is each of them now?",
    "A tank holds 240 liters. One pipe fills it in 6 hours, another in 4 hours. How long do both take together?",
    "Tom reads 18 pages a day and has 45 pages left on the morning of day 6. How many pages does the book have?",
    "A shirt costs 40 dollars. It is reduced by 25%, and then by another 10%. What does it cost in the end?",
    "Three friends share 96 marbles in the ratio 3 to 4 to 5. How many does each of them get?",
    "A rectangle is 4 cm longer than it is wide, and its perimeter is 48 cm. What is its area?",
    "Maria saves 15 dollars a week and has spent 62 dollars after 10 weeks. How many weeks until she has 200 dollars?",
    "A car needs 7 liters for 100 km. Fuel costs 1.80 dollars a liter. What does a trip of 350 km and back cost?",
    "In a class of 30, 18 play football, 12 play chess, and 5 play neither. How many play both?",
    "A number is multiplied by 3, then 8 is taken away, and the result is halved. That gives 11. What is the number?",
)


def main(options: Options) -> int:
    """Decode all visits one after another, so that later ones draft from earlier ones."""
    if options.policy is not None:
        record(options.policy)
    trace = load_trace(str(RECORDED))
    batches = trace.batches()[:1] if options.quick else trace.batches()
    ratios = OVER_SLOTS[1:2] if options.quick else OVER_SLOTS
    rows = [row for ratio in ratios for row in measure(batches, ratio)]
    lengths = np.concatenate([batch.lengths for batch in batches])
    settings: Row = {
        "completions of a batch": len(batches[0]),
        "batches": len(batches),
        "mean tokens": round(float(lengths.mean()), 1),
        "longest": int(lengths.max()),
        "at the limit": round(float((lengths == lengths.max()).mean()), 3),
        "device": DEVICE,
        "plan": PLAN,
        "noise": NOISE,
    }
    return finish("draft_steps", options, settings, rows, _claims(rows))


def record(name: str) -> None:
    """Sample the completions, and write them down visit by visit; tokens are numbered in the order of their coming."""
    import torch

    from benchmarks.rollouts import slots
    from lit_grpo.data.chat import render_chat
    from lit_grpo.data.control import ControlTokens
    from lit_grpo.policy import load_policy, load_tokenizer
    from lit_grpo.policy.named import resolve_policy
    from lit_grpo.rollout.loop import RolloutLoop
    from lit_grpo.types import Prompt, SamplingParams

    place = resolve_policy(name)
    policy, tokenizer = load_policy(place), load_tokenizer(place)
    numbers: dict[int, int] = {}
    RECORDED.write_text("")
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        loop = RolloutLoop(slots(policy, tokenizer, len(QUESTIONS) * GROUP))
        for visit in range(2):
            prompts = []
            for number, question in enumerate(QUESTIONS):
                text = render_chat([{"role": "user", "content": question + TASK}], tokenizer, {})
                token_ids = ControlTokens.of(tokenizer).encode(text, add_special_tokens=False)
                prompts.append(Prompt(f"train/{number}", tuple(token_ids), text, visit=visit))
            groups, stats = loop.collect(prompts, GROUP, SamplingParams(max_tokens=LIMIT), seed=0)
            note(f"visit {visit}: {stats.num_tokens} tokens, {stats.num_steps} steps, {stats.rollout_s:.0f} s")
            with RECORDED.open("a") as file:
                for group in groups:
                    for rollout in group.rollouts:
                        (prompt_id, _, path), tokens = rollout.completion.request.key, rollout.completion.sampled_ids
                        row: dict[str, Any] = {"step": visit, "prompt_id": prompt_id, "visit": visit}
                        row |= {"sample_id": path[0], "prompt_tokens": len(group.prompt.token_ids)}
                        row["tokens"] = len(tokens)
                        if not path[0]:
                            prompt_ids = group.prompt.token_ids
                            row["prompt_token_ids"] = [numbers.setdefault(each, len(numbers)) for each in prompt_ids]
                        row["token_ids"] = [numbers.setdefault(each, len(numbers)) for each in tokens]
                        file.write(json.dumps(row, separators=(",", ":")) + "\n")


def measure(batches: Sequence[Trace], ratio: float) -> list[Row]:
    """Return a row for each way of drafting: figures are over those of first come without drafts."""
    engine, rows = Engine(max(round(len(batches[0]) / ratio), 1)), list[Row]()
    plain = {plan: _decode(batches, plan, engine, None) for plan in ("fcfs", PLAN)}
    steps, seconds = _totals(plain["fcfs"])
    for drafts in DRAFTS:
        row: Row = {"completions over slots": ratio, "slots": engine.num_slots, "drafts": drafts, "fcfs steps": steps}
        row["fcfs h100 s"] = seconds
        drafted = {plan: _decode(batches, plan, engine, drafts) for plan in plain}
        for name, schedules in {"plan": plain[PLAN], "drafts": drafted["fcfs"], "both": drafted[PLAN]}.items():
            own_steps, own_seconds = _totals(schedules)
            row |= {f"{name} steps": own_steps / steps, f"{name} s": own_seconds / seconds}
        work = np.concatenate([schedule.work for schedule in drafted[PLAN]])
        tokens = sum(int(batch.lengths.sum()) for batch in batches)
        row["tokens a step"] = tokens / float((work[:, 0] - work[:, 2]).sum())
        row["drafted over accepted"] = float(work[:, 2].sum()) / max(tokens - float((work[:, 0] - work[:, 2]).sum()), 1)
        rows.append(row)
        note(str(row))
    return rows


def _decode(batches: Sequence[Trace], plan: str, engine: Engine, drafts: int | str | None) -> list[Schedule]:
    drafter = None
    if drafts is not None:
        auto = drafts == "auto"
        drafter = PricedDrafter(engine.num_slots, DEVICES[DEVICE]) if auto else SuffixDrafter(int(drafts))
    schedules = []
    for seed, batch in enumerate(batches):
        replay = None if drafter is None else DraftingReplay(engine, batch, drafter)
        schedules.append(simulate(batch, plan, engine, lengths_of(batch, NOISE, seed), (), replay))
    return schedules


def _totals(schedules: Sequence[Schedule]) -> tuple[int, float]:
    return sum(each.steps for each in schedules), sum(each.seconds(DEVICES[DEVICE]) for each in schedules)


def _claims(rows: Sequence[Row]) -> list[Claim]:
    claims = []
    for row in rows:
        name = f"{row['completions over slots']} times the slots, drafts {row['drafts']}"
        if row["drafts"] == 7 and float(row["completions over slots"]) <= 2:
            claims.append(Claim(f"{name}: steps with both over first come", float(row["both steps"]), "<=", TARGET))
        if row["drafts"] == "auto":
            text = f"{name}: modeled seconds with both over the plan's"
            claims.append(Claim(text, float(row["both s"]) / float(row["plan s"]), "<=", 1.01))
    return claims


if __name__ == "__main__":
    assert __doc__ is not None
    sys.exit(main(parse_options(__doc__)))
