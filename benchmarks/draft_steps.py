"""Steps and modeled seconds of whole rollouts by the default plan, by drafts, and by both, over first come.

Completions of a chat model with their token ids (``benchmarks/traces/answers.jsonl``: the first visit of some prompts,
and their second one after training) are decoded again from the record, in slots of which there are twice as many as
completions, half and a sixteenth. Drafts come from the same source as those of the slots: from what each completion
and its siblings have come to at that moment, and from the prompt's last visit. A drafted token that equals the recorded
one is the one that would have been sampled. Either each row tries a fixed number of tokens, or what is worth the price
of a step on an H100.

More than half of the recorded completions end at their limit, so that they have no long tail. Rows with *drawn* lengths
have one: each completion is cut to a length of the family ``lognormal_heavy``, with a longest of about the limit; what
is drafted and accepted is recorded as before. Predicted lengths have errors of 0.35 in the logarithm.

Seconds are modeled, by that price (``DEVICES`` of ``lit_grpo.tools.simulation.drafts`` says of what model and where its
parts were measured): nothing here was timed.

With ``--policy`` the completions are recorded again (``recorded_rollouts``), or read from a folder with such a record.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.report import ROOT, Claim, Options, Row, finish, note, parse_options
from lit_grpo.rollout.slots.drafts.price import PricedDrafter
from lit_grpo.rollout.slots.drafts.suffix import SuffixDrafter
from lit_grpo.tools.simulation import Engine, Schedule, Trace, load_trace, simulate
from lit_grpo.tools.simulation.drafts import DEVICES, DraftingReplay
from lit_grpo.tools.simulation.known import lengths_of
from lit_grpo.tools.simulation.traces import synthetic_lengths

RECORDED = ROOT / "benchmarks" / "traces" / "answers.jsonl"
PLAN, NOISE, DEVICE = "short_last", 0.35, "h100"
OVER_SLOTS = (0.5, 2.0, 16.0)
DRAFTS = (3, 7, "auto")
TARGET = 0.7
LENGTHS = ("recorded", "drawn")
VISITS = ("before, first visit", "after, second visit")


def main(options: Options) -> int:
    """Decode both visits one after another, so that the later one drafts from the earlier one."""
    if options.policy is not None:
        record(options.policy)
    recorded = load_trace(str(RECORDED)).batches()
    recorded = recorded[:1] if options.quick else recorded
    rows: list[Row] = []
    for lengths in LENGTHS:
        batches = recorded if lengths == "recorded" else [cut(batch, seed) for seed, batch in enumerate(recorded)]
        for ratio in OVER_SLOTS[1:2] if options.quick else OVER_SLOTS:
            rows += [{"lengths": lengths} | row for row in measure(batches, ratio)]
    settings: Row = {"completions of a visit": len(recorded[0]), "visits": len(recorded)}
    for name, batches in (("recorded", recorded), ("drawn", [cut(each, seed) for seed, each in enumerate(recorded)])):
        tokens = np.concatenate([batch.lengths for batch in batches])
        settings |= {f"mean tokens, {name}": round(float(tokens.mean()), 1), f"longest, {name}": int(tokens.max())}
        settings[f"at the longest, {name}"] = round(float((tokens == tokens.max()).mean()), 3)
    settings |= {"device": DEVICE, "plan": PLAN, "noise": NOISE}
    return finish("draft_steps", options, settings, rows, _claims(rows))


def record(name: str) -> None:
    """Write the trace; tokens are numbered in the order of their coming, which makes the file smaller."""
    from benchmarks.recorded_rollouts import read_prompts, read_rollout

    folder = Path(name)
    if not (folder / "prompts.json").exists():
        from benchmarks.recorded_rollouts import Recording
        from benchmarks.recorded_rollouts import record as record_rollouts

        folder = ROOT / "runs" / "draft_steps"
        record_rollouts(Recording(name), folder)
    numbers: dict[int, int] = {}
    with RECORDED.open("w") as file:
        for visit, rollout in enumerate(VISITS):
            prompts, shown = read_prompts(folder), set[str]()
            for each in read_rollout(folder, rollout):
                prompt_ids = prompts[each.prompt]
                row: dict[str, Any] = {
                    "step": visit,
                    "prompt_id": each.prompt,
                    "visit": visit,
                    "sample_id": each.sample,
                }
                row |= {"prompt_tokens": len(prompt_ids), "tokens": len(each.token_ids)}
                if each.prompt not in shown:
                    row["prompt_token_ids"] = [numbers.setdefault(token, len(numbers)) for token in prompt_ids]
                    shown.add(each.prompt)
                row["token_ids"] = [numbers.setdefault(token, len(numbers)) for token in each.token_ids]
                file.write(json.dumps(row, separators=(",", ":")) + "\n")


def cut(trace: Trace, seed: int) -> Trace:
    """Return the completions cut to lengths of a family with a long tail."""
    assert trace.texts is not None
    limit = int(trace.lengths.max())
    drawn = synthetic_lengths("lognormal_heavy", len(trace), 1, limit, np.random.default_rng(seed))[:, 0]
    lengths = np.minimum(drawn, trace.lengths)
    longest = int(np.argmax(np.where(trace.lengths == limit, drawn, 0)))
    lengths[longest] = limit
    texts = [(prompt, own[:length]) for (prompt, own), length in zip(trace.texts, lengths.tolist(), strict=True)]
    return replace(trace, lengths=lengths, texts=texts)


def measure(batches: Sequence[Trace], ratio: float) -> list[Row]:
    """Return a row for each way of drafting: figures are over those of first come without drafts."""
    engine, rows = Engine(max(round(len(batches[0]) / ratio), 1)), list[Row]()
    plain = {plan: _decode(batches, plan, engine, None) for plan in ("fcfs", PLAN)}
    steps, seconds = _totals(plain["fcfs"])
    for drafts in DRAFTS:
        row: Row = {"over slots": ratio, "slots": engine.num_slots, "drafts": drafts, "fcfs steps": steps}
        row["fcfs h100 s"] = seconds
        drafted = {plan: _decode(batches, plan, engine, drafts) for plan in plain}
        for name, schedules in {"plan": plain[PLAN], "drafts": drafted["fcfs"], "both": drafted[PLAN]}.items():
            own_steps, own_seconds = _totals(schedules)
            row |= {f"{name} steps": own_steps / steps, f"{name} s": own_seconds / seconds}
        row_steps, tried = (np.concatenate([each.work for each in drafted[PLAN]])[:, [0, 2]].sum(0)).tolist()
        tokens = sum(int(batch.lengths.sum()) for batch in batches)
        row["tokens a step"] = tokens / (row_steps - tried)
        row["drafted over accepted"] = tried / max(tokens - row_steps + tried, 1)
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
        name = f"{row['lengths']} lengths, {row['over slots']} times the slots, drafts {row['drafts']}"
        if row["drafts"] == 7 and float(row["over slots"]) <= 2:
            claims.append(Claim(f"{name}: steps with both over first come", float(row["both steps"]), "<=", TARGET))
        if row["drafts"] == "auto":
            text = f"{name}: modeled seconds with both over the plan's"
            claims.append(Claim(text, float(row["both s"]) / float(row["plan s"]), "<=", 1.01))
    return claims


if __name__ == "__main__":
    assert __doc__ is not None
    sys.exit(main(parse_options(__doc__)))
