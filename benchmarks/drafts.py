"""What SlotGenerator's drafts cost and save when it really decodes, and whether they change a token.

The embedded policies decode a few batches of their tasks on one thread, with up to K drafted tokens a completion and
without, by turns, each with its own generator; the first batch is not timed. In float32 all tokens have to be the same.
In bfloat16 a step of other rows rounds otherwise, with drafts or without: completions that differ are counted, beside
those that differ between two numbers of slots, without drafts.

What a GPU would make of it is in the steps: there a step of few rows takes as long as one of many.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import yaml
from transformers import AutoModelForCausalLM

from benchmarks.policy_scores import SOURCES
from benchmarks.report import ROOT, Claim, Options, Row, finish, parse_options
from lit_grpo.policy.loading import EMBEDDED, load_tokenizer
from lit_grpo.policy.spec import PolicySpec
from lit_grpo.rollout.loop import RolloutLoop
from lit_grpo.rollout.slots import SlotGenerator
from lit_grpo.types import Key, Prompt, SamplingParams

TASKS, SLOTS, DRAFTED = ("arithmetic", "knights"), (64, 256), (0, 2, 4, 8)
PROMPTS, GROUP, BATCHES = 16, 16, 4
QUARTER = 0.75
Tokens = dict[Key, list[int]]


@dataclass
class Side:
    """One generator, and what it has come to in all timed batches."""

    slots: int
    drafted: int
    loop: RolloutLoop
    seconds: float = 0.0
    steps: int = 0
    tried: int = 0
    right: int = 0
    tokens: Tokens = field(default_factory=dict)

    def collect(self, prompts: Sequence[Prompt], group: int, sampling: SamplingParams, timed: bool) -> None:
        """Decode a batch."""
        began = time.perf_counter()
        groups, stats = self.loop.collect(prompts, group, sampling, seed=0)
        if timed:
            self.seconds += time.perf_counter() - began
            self.steps += stats.num_steps
            self.tried += stats.num_drafted
            self.right += stats.num_accepted
        for rollout in (rollout for each in groups for rollout in each.rollouts):
            self.tokens[rollout.completion.request.key] = rollout.completion.token_ids_T.tolist()


def main(options: Options) -> int:
    """Decode, and compare."""
    torch.set_num_threads(1)
    tasks, batches = (TASKS[:1], 2) if options.quick else (TASKS, BATCHES)
    prompts, group = (2, 4) if options.quick else (PROMPTS, GROUP)
    rows: list[Row] = []
    for task in tasks:
        for dtype in (torch.float32, torch.bfloat16):
            rows += decode(task, dtype, batches, prompts, group)
    settings: Row = {"prompts": prompts, "group": group, "timed batches": batches - 1, "threads": 1}
    return finish("drafts", options, settings, rows, _claims(rows))


def decode(task: str, dtype: torch.dtype, batches: int, num_prompts: int, group: int) -> list[Row]:
    """Decode the same batches by all sides, in turn."""
    settings = yaml.safe_load((ROOT / "configs" / f"{task}.yaml").read_text())
    folder = str(EMBEDDED[settings["model"]["policy"]])
    policy: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    tokenizer = load_tokenizer(folder)
    source = settings["data"]["train"]
    texts = [row["prompt"] for row in SOURCES[source["class_path"]](batches * num_prompts).rows()]
    prompts = [Prompt(str(n), tuple(tokenizer.encode(text)), text) for n, text in enumerate(texts)]
    sampling = SamplingParams(max_tokens=settings["model"]["sampling"]["max_tokens"])
    sides = [_side(policy, tokenizer, slots, drafted) for slots in SLOTS for drafted in DRAFTED]
    for batch in range(batches):
        for side in sides:
            some = prompts[batch * num_prompts : (batch + 1) * num_prompts]
            side.collect(some, group, sampling, timed=batch > 0)
    return [_row(task, dtype, side, sides) for side in sides]


def _side(policy: Any, tokenizer: Any, slots: int, drafted: int) -> Side:
    generator = SlotGenerator(slots, speculate=drafted)
    generator.start(PolicySpec(policy, tokenizer))
    generator.load_weights(policy.named_parameters(), 0)
    return Side(slots, drafted, RolloutLoop(generator))


def _row(task: str, dtype: torch.dtype, side: Side, sides: Sequence[Side]) -> Row:
    """Compare with the same slots without drafts; without drafts, with the other number of slots."""
    plain = next(each for each in sides if each.drafted == 0 and (each.slots == side.slots) == bool(side.drafted))
    return {
        "task": task,
        "dtype": str(dtype).removeprefix("torch."),
        "slots": side.slots,
        "drafted": side.drafted,
        "steps": side.steps,
        "seconds": side.seconds,
        "right": side.right / max(side.tried, 1),
        "steps_over_without": side.steps / plain.steps if side.drafted else 1.0,
        "seconds_over_without": side.seconds / plain.seconds if side.drafted else 1.0,
        "differ": sum(plain.tokens[key] != tokens for key, tokens in side.tokens.items()) / len(side.tokens),
    }


def _claims(rows: Sequence[Row]) -> list[Claim]:
    claims = []
    exact = [row for row in rows if row["dtype"] == "float32" and row["drafted"]]
    claims.append(
        Claim("completions that drafts change in float32", max(float(row["differ"]) for row in exact), "<=", 0)
    )
    for task, slots in dict.fromkeys((str(row["task"]), int(row["slots"])) for row in exact):
        own = [row for row in exact if (row["task"], row["slots"]) == (task, slots)]
        steps, seconds = (min(float(row[f"{name}_over_without"]) for row in own) for name in ("steps", "seconds"))
        claims.append(Claim(f"{task}, {slots} slots: steps over those without drafts", steps, "<=", QUARTER))
        claims.append(Claim(f"{task}, {slots} slots: seconds over those without drafts", seconds, "<=", 1.0))
    return claims


if __name__ == "__main__":
    assert __doc__ is not None
    sys.exit(main(parse_options(__doc__)))
