"""Random conversations of a random policy, by the chat templates of families that people train."""

from __future__ import annotations

import random
import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import torch

from lit_grpo.data.chat import Message
from lit_grpo.data.rendering import PromptRenderer
from lit_grpo.environments import Environments
from lit_grpo.environments.calls import ToolCall, Turn
from lit_grpo.environments.chat import Chat
from lit_grpo.environments.tools import Tool
from lit_grpo.plugins import Answer, Listener, fresh
from lit_grpo.policy.spec import PolicySpec
from lit_grpo.rollout.generator import Generator, StepEvents
from lit_grpo.rollout.loop import RolloutLoop
from lit_grpo.types import Completion, Key, Prompt, RolloutGroup, SamplingParams

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|begin_of_text|>", "<|start_header_id|>")
SPECIAL += ("<|end_header_id|>", "<|eot_id|>", "<tool_call>", "</tool_call>", "<think>", "</think>")
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\\n' }}"
    "{% if message.content %}{{ message.content }}{% endif %}"
    "{% for call in message.tool_calls or [] %}"
    "{{ '<tool_call>' + (call.function | tojson) + '</tool_call>' }}"
    "{% endfor %}{{ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""ChatML as SmolLM2 has it, with calls; it shows no tools."""
FAMILIES = {"qwen3": "<|im_end|>", "qwen2_5": "<|im_end|>", "llama3_1": "<|eot_id|>", "smollm2": "<|im_end|>"}
"""Chat templates, with the token that ends a turn."""
MOST_TURNS = 16
SAMPLING = SamplingParams(max_tokens=200, max_observed=1600)
NUM_GROUPS, GROUP_SIZE, MOST_OF_SIBLINGS = 4, 4, 3
NUM_SLOTS = 16
LONGEST = 3072
"""Tokens of a prompt with its conversation."""
History = Literal["appended", "rerendered"]
WORDS = ("the", "answer", "is", "here,", "go on.", "\n\n", " ", "<b>", "42", "ü", "…", "</think>", "{}", "tool")


def template_of(family: str) -> str | None:
    """The chat template of a family, as the installed TRL has it; None without TRL."""
    if family == "smollm2":
        return CHATML
    trl = find_spec("trl")
    if trl is None or trl.origin is None:
        return None
    return (Path(trl.origin).parent / "chat_templates" / f"{family}.jinja").read_text()


@cache
def chat_tokenizer(template: str = CHATML, end: str = "<|im_end|>") -> Any:
    """A byte-level BPE tokenizer with merges, special tokens and a chat template."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    words = "the answer of a tool is here, and the user says: go on.\n\n" * 4
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=320, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([words], trainer)
    tokenizer.add_special_tokens([AddedToken(each, special=not each.endswith(("call>", "think>"))) for each in SPECIAL])
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=end, pad_token="<|endoftext|>")
    made.chat_template = template
    return made


def chatty_policy(tokenizer: Any, sharpness: float = 4.5) -> Any:
    """A random Qwen3 of a tokenizer's size, in float32, that ends its turns soon.

    Its head size is one that vLLM's CPU kernels know.
    """
    from transformers import Qwen3Config, Qwen3ForCausalLM

    end: int = tokenizer.eos_token_id
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=4096,
        eos_token_id=end,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        initializer_range=0.2,  # a distribution with something to sample from
        tie_word_embeddings=False,
    )
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        policy: Any = Qwen3ForCausalLM(config).eval()
        states = policy.model(torch.arange(10, 200)[None]).last_hidden_state[0].mean(0)
        policy.lm_head.weight[end] = states * (sharpness / states.pow(2).sum())
    return policy


class Talkative:
    """Says random things, as a tool or as the user."""

    def reset(self, seed: int) -> str:
        """Begin a conversation that may take more than ``MOST_TURNS`` turns.

        Args:
            seed: Decides how many, and what is said.
        """
        self._rng = random.Random(seed)
        self._left = self._rng.randint(1, 2 * MOST_TURNS)
        return self._words()

    def respond(self, text: str) -> str | None:
        return self._next()

    def tell(self) -> str:
        """Say something."""  # a tool's description, which is asked for
        return self._next() or "."

    @property
    def done(self) -> bool:
        return self._left < 0

    def _next(self) -> str | None:
        self._left -= 1
        return None if self._left < 0 else self._words()

    def _words(self) -> str:
        return " ".join(self._rng.choices(WORDS, k=self._rng.randint(0, 9)))


class Calling(Chat):
    """Takes two of three turns for calls, which a random policy cannot write, and notes the tokens of answers."""

    def __init__(self, tokenizer: Any) -> None:
        super().__init__(tokenizer)
        self.said: set[tuple[int, ...]] = set()

    def read(self, token_ids: Sequence[int], before: Sequence[int], tools: Mapping[str, Tool]) -> Turn:
        """Read a turn, and make calls of it."""
        turn = super().read(token_ids, before, tools)
        number = zlib.crc32(repr(list(token_ids)).encode())
        calls = (ToolCall("tell", {}),) * (1 + number % 2) if number % 3 else ()
        return Turn(turn.content, turn.reasoning, calls)

    def opening(self, prompt: Prompt, text: Any, tools: Sequence[Mapping[str, Any]]) -> list[int]:
        return self._noted(super().opening(prompt, text, tools))

    def following(self, messages: Sequence[Message], last: int) -> list[int]:
        return self._noted(super().following(messages, last))

    def _noted(self, observed: list[int]) -> list[int]:
        self.said.add(tuple(observed))
        return observed


class EndsSiblings(Listener):
    """Ends all trajectories of a group but the first after ``MOST_OF_SIBLINGS`` turns."""

    def __init__(self) -> None:
        self._turns: Counter[Key] = Counter()

    def on_turn(self, completion: Completion) -> Answer | None:
        """Let no other listener hear of the turn that is the last."""
        key = completion.request.key
        self._turns[key] += 1
        ends = completion.request.path != (0,) and self._turns[key] == MOST_OF_SIBLINGS
        return Answer() if ends else None


@dataclass
class Played:
    """Conversations that are over.

    Args:
        policy: That took the turns.
        alone: Groups of one trajectory.
        siblings: Groups of several.
        order: The tokens of each turn as the generator gave them, in the order in which turns ended.
        said: The tokens of each answer as the chat template made them.
    """

    policy: Any
    alone: list[RolloutGroup]
    siblings: list[RolloutGroup]
    order: list[tuple[Key, list[int]]] = field(default_factory=list)
    said: set[tuple[int, ...]] = field(default_factory=set)

    @property
    def groups(self) -> list[RolloutGroup]:
        return [*self.alone, *self.siblings]


def slots() -> Generator:
    """The policy itself."""
    from lit_grpo.rollout.slots.generator import SlotGenerator

    return SlotGenerator(NUM_SLOTS)


def engine() -> Generator:
    """One vLLM engine, in this process."""
    from lit_grpo.rollout.vllm.engine import VLLMGenerator

    return VLLMGenerator(NUM_SLOTS, kv_memory="64MiB", engine_args={"max_model_len": LONGEST, "block_size": 32})


def servers() -> Generator:
    """Two vLLM servers."""
    from lit_grpo.rollout.vllm.server import VLLMServerGenerator

    arguments = {"max_model_len": LONGEST, "block_size": 32, "kv_cache_memory_bytes": 64 * 2**20, "stream_interval": 1}
    return VLLMServerGenerator(NUM_SLOTS // 2, num_servers=2, server_args=arguments)


GENERATORS: dict[str, Callable[[], Generator]] = {
    "slots": slots,
    "vLLM in process": engine,
    "two vLLM servers": servers,
}


def play(family: str, make: Callable[[], Generator], num_conversations: int, history: History = "appended") -> Played:
    """Play conversations by a family's template, each alone in its group, and then some in groups of several.

    Args:
        family: Of the template.
        make: The generator.
        num_conversations: How many are alone.
        history: See :class:`lit_grpo.environments.Environments`.

    Raises:
        ValueError: TRL, whose wheel has the template, is not installed.
    """
    template = template_of(family)
    if template is None:
        raise ValueError(f"The chat template of {family} comes with TRL, which is not installed.")
    tokenizer = chat_tokenizer(template, FAMILIES[family])
    policy, chat = chatty_policy(tokenizer), Calling(tokenizer)
    worker = fresh(Environments(factory=Talkative, max_turns=MOST_TURNS, history=history))
    worker.prepare(tokenizer, {})
    worker.chat = chat
    renderer = PromptRenderer(conversing=worker, max_prompt_tokens=LONGEST)
    prompts = []
    for seed in range(num_conversations + NUM_GROUPS):
        row = {"prompt": "Talk.", "seed": seed}
        rendered = renderer.render(row, tokenizer)
        prompts.append(Prompt(f"train/{seed}", rendered.token_ids, rendered.text, row, messages=rendered.messages))
    generator = make()
    generator.start(PolicySpec(policy, tokenizer))
    try:
        generator.load_weights(generator.weights(), 0)
        played = Played(policy, [], [], said=chat.said)
        loop = RolloutLoop(_noted(generator, played.order), listeners=[EndsSiblings(), worker])
        played.alone = loop.collect(prompts[:num_conversations], 1, SAMPLING, seed=0)[0]
        played.siblings = loop.collect(prompts[num_conversations:], GROUP_SIZE, SAMPLING, seed=0)[0]
    finally:
        worker.close()
        generator.close()
    return played


def _noted(generator: Any, order: list[tuple[Key, list[int]]]) -> Generator:
    """Have a generator note what it samples, before anything else sees that."""
    step = generator.step

    def noted() -> StepEvents:
        events: StepEvents = step()
        order.extend((completion.request.key, completion.turns[-1]) for completion in events.finished)
        return events

    generator.step = noted
    return generator
