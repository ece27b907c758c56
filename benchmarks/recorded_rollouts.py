"""Rollouts of a chat model, recorded before and after training on a task with a checked answer.

Three rollouts of the same prompts: the policy's first visit of them, a second one with other random numbers, and one
after updates in which the policy has learned word problems by LoRA. Answers have 100 to 500 tokens. The slots decode
in bf16-mixed, at temperature 1, in first come order; a line of JSON for each completion is written when it ends, so
that a recording that was stopped goes on with the rollout that it was in.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.report import note
from lit_grpo.data.chat import render_chat
from lit_grpo.data.control import ControlTokens
from lit_grpo.plugins import Listener
from lit_grpo.policy import LoraSettings, PolicySpec, load_policy, load_tokenizer
from lit_grpo.policy.adapters import add_adapters
from lit_grpo.policy.named import resolve_policy
from lit_grpo.rewards import ExactMatch
from lit_grpo.rollout.loop import RolloutLoop
from lit_grpo.rollout.slots.generator import SlotGenerator
from lit_grpo.tasks import WordProblemRows
from lit_grpo.types import Completion, Prompt, SamplingParams, StepEvents
from lit_grpo.update.advantages.estimator import Advantages
from lit_grpo.update.learner import Learner
from lit_grpo.update.learner_settings import LearnerSettings
from lit_grpo.update.objective.objective import Objective

QUESTIONS = {
    "number theory": (
        "Find all prime numbers between 50 and 80. Show how you check each of them.",
        "What is the greatest common divisor of 252 and 198? Use Euclid's algorithm, step by step.",
        "What is the last digit of 7 to the power of 23? Explain your reasoning.",
        "Write 360 as a product of primes, and say how many divisors it has. Show your work.",
        "What is the remainder of 2 to the power of 50 when it is divided by 7? Explain step by step.",
    ),
    "code": (
        "Write a Python function that returns the two most frequent words of a text, with a short explanation.",
        "Write a Python function that merges two sorted lists into one sorted list without using sort().",
        "Write a Python function is_palindrome(text) that ignores case and punctuation, and three tests of it.",
        "Write a Python class Stack with push, pop, peek and a method that returns its smallest element.",
        "Fix this Python function and explain the error: def mean(xs): return sum(xs) / len(xs) + 1 if xs else None",
    ),
    "word problem": (
        "A shop sells 3 pens for 2 dollars and a notebook for 4 dollars. What do 12 pens and 5 notebooks cost? "
        "Explain step by step.",
        "A train leaves at 9:40 and arrives at 13:15. It stops for 25 minutes in all. How long does it move?",
        "Anna is twice as old as Ben. In 6 years they will be 42 together. How old is each now? Show your work.",
        "A tank holds 240 liters. One pipe fills it in 6 hours, another in 4 hours. How long do both take together?",
        "Tom reads 18 pages a day and has 45 pages left on day 6. How many pages does the book have? Explain.",
    ),
    "divisibility and logic": (
        "Which of the numbers 132, 275, 396 and 451 are divisible by 11? Check each of them.",
        "Find the smallest number that is divisible by 4, 6 and 9, and explain how you found it.",
        "A says: B lies. B says: C lies. C says: A and B both lie. Who tells the truth? Go through the cases.",
        "Is 123456 divisible by 3, by 4 and by 9? Explain each answer by a rule.",
        "Three boxes are labeled apples, oranges and mixed, and every label is wrong. You may take one fruit out of "
        "one box. How do you find out what is in each box?",
    ),
}
ROLLOUTS = ("before, first visit", "before, second visit", "after, second visit")
LEARNING_RATE, LORA = 2e-4, LoraSettings(r=16, alpha=32)
_TASK = " Explain each step, and end with the answer as a number."


@dataclass(frozen=True)
class Recording:
    """What is recorded of a policy.

    Args:
        policy: Name or folder of the policy.
        per_kind: Prompts of each kind of question.
        group: Completions of each prompt.
        max_tokens: Most tokens of a completion.
        num_slots: Slots of the generator.
        updates: Updates between the second and the third rollout, each of ``task_prompts`` prompts with as many
            completions of at most ``task_tokens`` tokens.
    """

    policy: str
    per_kind: int = 5
    group: int = 8
    max_tokens: int = 300
    num_slots: int = 64
    updates: int = 20
    task_prompts: int = 4
    task_tokens: int = 128


@dataclass(frozen=True)
class RecordedCompletion:
    """A completion: its prompt, its sample, its tokens, and the step of the rollout with which it ended."""

    prompt: str
    sample: int
    token_ids: list[int]
    ended: int


class _Writer(Listener):
    """Writes each completion when it ends."""

    def __init__(self, path: Path) -> None:
        self._file, self._step = path.open("w"), 0

    def on_step(self, events: StepEvents) -> None:
        self._step += events.num_steps

    def on_completion(self, completion: Completion) -> None:
        key, tokens = completion.request.key, completion.token_ids_T.tolist()
        line = {"prompt": key[0], "sample": key[2][0], "token_ids": tokens, "ended": self._step}
        print(json.dumps(line), file=self._file, flush=True)


class _Steps:
    """Backward passes and optimizer steps of the learner."""

    policy_version = 0

    def __init__(self, policy: Any) -> None:
        trained = [weight for weight in policy.parameters() if weight.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=LEARNING_RATE, betas=(0.9, 0.99), weight_decay=0.0)

    def add_gradient(self, compute_loss: Any, exchange: bool) -> None:
        compute_loss().backward()

    def take_step(self, scale: float = 1.0) -> float:
        self.optimizer.step()
        self.policy_version += 1
        return LEARNING_RATE


def record(recording: Recording, folder: Path) -> None:
    """Write what is missing of the prompts, the three rollouts and the updates between them into ``folder``.

    Files are ``recording.json`` (the settings), ``prompts.json`` (kind and token ids by name), ``ROLLOUT.jsonl``,
    ``updates.jsonl`` (reward and mean length of each update) and ``trained.pt``.
    """
    if is_recorded(folder):
        return
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "recording.json").write_text(json.dumps(asdict(replace(recording, policy=folder.name))))
    place = resolve_policy(recording.policy)
    policy, tokenizer = load_policy(place), load_tokenizer(place)
    texts = {
        f"{kind} {number}": text
        for kind, each in QUESTIONS.items()
        for number, text in enumerate(each[: recording.per_kind])
    }
    prompts = [_prompt(name, text, tokenizer) for name, text in texts.items()]
    named = {prompt.prompt_id: list(prompt.token_ids) for prompt in prompts}
    (folder / "prompts.json").write_text(json.dumps(named))
    first, second, trained = (folder / f"{name}.jsonl" for name in ROLLOUTS)
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        for visit, path in ((0, first), (1, second)):
            _roll_out(policy, tokenizer, prompts, visit, recording, path)
        if not trained.exists():
            add_adapters(policy, LORA)
            _train(policy.train(), tokenizer, recording, folder)
            _roll_out(policy, tokenizer, prompts, 1, recording, trained)


def is_recorded(folder: Path) -> bool:
    """Return whether a folder has the three rollouts."""
    return all((folder / f"{name}.jsonl").exists() for name in ROLLOUTS)


def read_recording(folder: Path) -> Recording:
    """Return the settings of a recording, with the folder's name for the policy."""
    return Recording(**json.loads((folder / "recording.json").read_text()))


def read_rollout(folder: Path, name: str) -> list[RecordedCompletion]:
    """Return the completions of a rollout, in the order in which they were asked for."""
    lines = (folder / f"{name}.jsonl").read_text().splitlines()
    order = {prompt: number for number, prompt in enumerate(read_prompts(folder))}
    return sorted(
        (RecordedCompletion(**json.loads(line)) for line in lines), key=lambda each: (order[each.prompt], each.sample)
    )


def read_prompts(folder: Path) -> dict[str, list[int]]:
    """Return the token ids of the prompts by name, in their order."""
    return json.loads((folder / "prompts.json").read_text())


def _prompt(name: str, question: str, tokenizer: Any, columns: dict[str, Any] | None = None) -> Prompt:
    text = question
    if tokenizer.chat_template is not None:
        text = render_chat([{"role": "user", "content": question}], tokenizer, {})
    token_ids = ControlTokens.of(tokenizer).encode(text, add_special_tokens=False)
    return Prompt(name, tuple(token_ids), text, columns or {})


def _generator(policy: Any, tokenizer: Any, num_slots: int) -> SlotGenerator:
    generator = SlotGenerator(num_slots)
    generator.start(PolicySpec(policy, tokenizer))
    generator.load_weights(policy.named_parameters(), 0)
    return generator


def _roll_out(
    policy: Any, tokenizer: Any, prompts: Sequence[Prompt], visit: int, recording: Recording, path: Path
) -> None:
    if path.exists():
        return
    visited = [Prompt(each.prompt_id, each.token_ids, each.text, visit=visit) for each in prompts]
    part, generator = path.with_suffix(".part"), _generator(policy, tokenizer, recording.num_slots)
    loop = RolloutLoop(generator, listeners=[_Writer(part)])
    _, stats = loop.collect(visited, recording.group, SamplingParams(max_tokens=recording.max_tokens), seed=0)
    generator.close()
    part.rename(path)
    note(f"{path.stem}: {stats.num_tokens} tokens, {stats.num_steps} steps, {stats.rollout_s:.0f} s")


def _train(policy: Any, tokenizer: Any, recording: Recording, folder: Path) -> None:
    """Take the updates that have not been taken; what each has come to is kept in ``folder``."""
    saved, num_prompts, first = folder / "trained.pt", recording.task_prompts, 0
    sampling = SamplingParams(max_tokens=recording.task_tokens)
    reward, steps = ExactMatch(pattern=r"(\d+)\D*$"), _Steps(policy)
    if saved.exists():
        first, weights, state = torch.load(saved)
        policy.load_state_dict(weights, strict=False)
        steps.optimizer.load_state_dict(state)
    generator = _generator(policy, tokenizer, num_prompts * num_prompts)
    settings = LearnerSettings(
        Objective(), Advantages(), {"exact": 1.0}, 1.0, sampling.max_tokens, max_tokens_per_micro_batch=512
    )
    learner = Learner(policy, steps, settings)
    rows = list(WordProblemRows(num_rows=recording.updates * num_prompts).rows())
    for update in range(first, recording.updates):
        drawn = enumerate(rows[update * num_prompts :][:num_prompts], update * num_prompts)
        prompts = [
            _prompt(f"task/{number}", row["prompt"][-1]["content"] + _TASK, tokenizer, row) for number, row in drawn
        ]
        generator.load_weights(policy.named_parameters(), update)
        groups, stats = RolloutLoop(generator).collect(prompts, num_prompts, sampling, seed=0)
        members = [member for group in groups for member in group.rollouts]
        for member in members:
            member.reward = float(reward(member.completion.text, **member.prompt.columns) or 0)
            member.rewards = {"exact": member.reward}
        learner.learn(groups)
        mean, tokens = sum(member.reward for member in members) / len(members), stats.num_tokens / len(members)
        line = {"update": update + 1, "reward": mean, "mean_tokens": tokens}
        with (folder / "updates.jsonl").open("a") as log:
            print(json.dumps(line), file=log)
        note(str(line))
        weights = {name: weight for name, weight in policy.named_parameters() if weight.requires_grad}
        torch.save((update + 1, weights, steps.optimizer.state_dict()), saved)
    generator.close()
