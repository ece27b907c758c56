"""Chat tokenizers of families, made on the spot, and a generator that says what a test tells it to."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from lit_grpo.data.rendering import PromptRenderer
from lit_grpo.environments.plugin import EnvironmentWorker
from lit_grpo.rollout.generator import Capacity, StepEvents
from lit_grpo.rollout.loop import RolloutLoop
from lit_grpo.types import Completion, Key, Prompt, Request, RolloutGroup, SamplingParams

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|begin_of_text|>", "<|start_header_id|>")
SPECIAL += ("<|end_header_id|>", "<|eot_id|>", "<tool_call>", "</tool_call>", "<think>", "</think>")
PLAIN = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\\n' }}"
    "{% if message.content %}{{ message.content }}{% endif %}"
    "{% for call in message.tool_calls or [] %}"
    "{{ '<tool_call>' + (call.function | tojson) + '</tool_call>' }}"
    "{% endfor %}{{ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""ChatML as SmolLM2 has it, with calls; it shows no tools."""
FAMILIES = {"qwen3": "<|im_end|>", "qwen2_5": "<|im_end|>", "llama3_1": "<|eot_id|>", "smollm2": "<|im_end|>"}
TRL = find_spec("trl")


def template_of(family: str) -> str | None:
    """The chat template of a family, as the installed TRL has it; None without TRL."""
    if family == "smollm2":
        return PLAIN
    if TRL is None or TRL.origin is None:
        return None
    return (Path(TRL.origin).parent / "chat_templates" / f"{family}.jinja").read_text()


@functools.cache
def chat_tokenizer(template: str = PLAIN, end: str = "<|im_end|>") -> Any:
    """A byte-level BPE tokenizer with merges, special tokens and a chat template."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore
    words = "the answer of a tool is here, and the user says: go on.\n\n" * 4
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=320, initial_alphabet=alphabet, show_progress=False)  # pyright: ignore
    tokenizer.train_from_iterator([words], trainer)
    tokenizer.add_special_tokens([AddedToken(each, special=not each.endswith(("call>", "think>"))) for each in SPECIAL])
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=end, pad_token="<|endoftext|>")
    made.chat_template = template
    return made


Says = Callable[[Request, int], str]
"""What a request says in its n-th turn, counted from 0."""


class Scripted:
    """Decodes whole turns that a test dictates, one turn of each slot a step."""

    version = 0
    feature_points: tuple[int, ...] = ()

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


def prompts_of(worker: EnvironmentWorker, rows: Sequence[dict[str, Any]]) -> list[Prompt]:
    renderer = PromptRenderer(conversing=worker)
    rendered = [renderer.render(row, chat_tokenizer()) for row in rows]
    return [
        Prompt(f"train/{number}", token_ids, text, row, messages=messages)
        for number, (row, (token_ids, text, messages)) in enumerate(zip(rows, rendered, strict=True))
    ]


def play(
    worker: EnvironmentWorker,
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


def chatty_policy(tokenizer: Any, sharpness: float = 6.0) -> torch.nn.Module:
    """A random policy of a tokenizer's size that ends its turns soon."""
    from conftest import random_policy

    end: int = tokenizer.eos_token_id
    policy: Any = random_policy(
        vocab_size=len(tokenizer),
        max_position_embeddings=4096,
        eos_token_id=end,
        pad_token_id=tokenizer.pad_token_id,
        tie_word_embeddings=False,
    )
    with torch.no_grad():
        states = policy.model(torch.arange(10, 200)[None]).last_hidden_state[0].mean(0)
        policy.lm_head.weight[end] = states * (sharpness / states.pow(2).sum())
    return policy
