"""A generator that says what a test tells it to, and what environments make of that."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from lit_grpo.data.rendering import PromptRenderer
from lit_grpo.environments.plugin import Trajectories
from lit_grpo.rollout.generator import Capacity, StepEvents
from lit_grpo.rollout.loop import RolloutLoop
from lit_grpo.types import Completion, Key, Prompt, Request, RolloutGroup, SamplingParams
from tests.doubles.conversations import chat_tokenizer

Says = Callable[[Request, int], str]
"""What a request says in its n-th turn, counted from 0."""


class Scripted:
    """Decodes whole turns that a test dictates, one turn of each slot a step."""

    version = 0
    feature_points: tuple[int, ...] = ()
    keeps_ended = one_by_one = False
    num_likeliest = 0

    def __init__(self, tokenizer: Any, says: Says, num_slots: int = 8) -> None:
        self.tokenizer, self.says, self.num_slots = tokenizer, says, num_slots
        self.rows: dict[Key, Request] = {}
        self.num_steps = 0

    def capacity(self) -> Capacity:
        return Capacity(self.num_slots, self.num_slots - len(self.rows))

    def submit(self, requests: Sequence[Request], expected: Sequence[float] | None = None) -> None:
        assert len(self.rows) + len(requests) <= self.num_slots
        self.rows |= {request.key: request for request in requests}

    def step(self) -> StepEvents:
        self.num_steps += 1
        finished = [self._turn(request) for request in self.rows.values()]
        active, self.rows = len(self.rows), {}
        return StepEvents(active, active, finished=finished)

    def _turn(self, request: Request) -> Completion:
        turn = len(Completion.of(request, request.prefix, "stop").turns)
        text = self.says(request, turn)
        token_ids = self.tokenizer(text, add_special_tokens=False)["input_ids"] + [self.tokenizer.eos_token_id]
        token_ids = token_ids[: request.sampling.max_tokens - request.prefix.num_sampled]
        whole = request.prefix.followed_by(token_ids, [-1.0] * len(token_ids), self.version)
        reason = "stop" if token_ids[-1] == self.tokenizer.eos_token_id else "length"
        said = self.tokenizer.decode(whole.sampled_ids, skip_special_tokens=True)
        return request.after(whole).ended(reason, said)

    def abort(self, keys: Iterable[Key]) -> list[Request]:
        return [self.rows.pop(key) for key in list(keys) if key in self.rows]

    def expect(self, prompts: Any) -> None:
        """Nothing is computed."""

    def release(self, prompts: Any) -> None:
        """Nothing is kept."""


SAMPLING = SamplingParams(max_tokens=400, max_observed=800)


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def prompts_of(worker: Trajectories, rows: Sequence[dict[str, Any]]) -> list[Prompt]:
    assert worker.chat is not None
    renderer, tokenizer = PromptRenderer(conversing=worker), worker.chat.tokenizer
    rendered = [renderer.render(row, tokenizer) for row in rows]
    return [
        Prompt(f"train/{number}", token_ids, text, row, messages=messages)
        for number, (row, (token_ids, text, messages, _)) in enumerate(zip(rows, rendered, strict=True))
    ]


def play(
    worker: Trajectories,
    says: Says,
    rows: Sequence[dict[str, Any]],
    num_generations: int = 1,
    sampling: SamplingParams = SAMPLING,
    listeners: Sequence[Any] = (),
    num_slots: int = 8,
) -> list[RolloutGroup]:
    """One rollout, after which the worker is closed."""
    loop = RolloutLoop(Scripted(chat_tokenizer(), says, num_slots), listeners=[worker, *listeners])
    try:
        return loop.collect(prompts_of(worker, rows), num_generations, sampling, seed=0)[0]
    finally:
        worker.close()


def only(groups: Sequence[RolloutGroup]) -> Completion:
    (group,) = groups
    (rollout,) = group.rollouts
    return rollout.completion


def text_of(completion: Completion) -> str:
    """All that the policy read and wrote."""
    return chat_tokenizer().decode([*completion.request.prompt.token_ids, *completion.token_ids_T.tolist()])
