"""The policy as a generator sees it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from lit_grpo.memory import update_bytes
from lit_grpo.policy.architecture.decoder import context_length
from lit_grpo.policy.architecture.vision import sees, vision_of
from lit_grpo.policy.saving import save_settings
from lit_grpo.policy.sharding import class_of
from lit_grpo.policy.tokenizers import save_for_engines
from lit_grpo.policy.weights import Adapters, PolicyWeights, find_adapters

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

    from lit_grpo.trajectory import Trajectory
    from lit_grpo.types import Prompt

_NUM_BEFORE = 8  # tokens of a prompt with which a text that continues it is decoded

TOKENIZER = "tokenizer"
"""The folder of the tokenizer in that of a policy's skeleton."""


@dataclass(frozen=True)
class PolicySpec:
    """A policy for the generators that decode with it: its architecture, its tokenizer, and its weights by name.

    Args:
        module: The model. A generator in this process decodes on it; every other generator reads this object only.
        tokenizer: Tokenizer of the policy.
        keep_special_tokens: Whether the text of a completion keeps its special tokens, except those at its end.
        keeps_kv: Whether requests that are stopped before a sync resume with the KV cache of the old weights, as far as
            the generator still has it.
        longest_row: The most tokens of a prompt of the run and what may follow it; None where that is not known.
        trained: Whether updates follow, which need memory beside the generator's.
    """

    module: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    keep_special_tokens: bool = False
    keeps_kv: bool = False
    longest_row: int | None = None
    trained: bool = True

    @property
    def name(self) -> str:
        return class_of(self.module).__name__

    @property
    def config(self) -> PreTrainedConfig:
        return self.module.config

    @property
    def dtype(self) -> torch.dtype:
        return self.module.dtype

    @property
    def device(self) -> torch.device:
        return self.module.device

    @property
    def signature(self) -> str:
        """A text that is equal for policies that one engine can serve, one after the other."""
        vision = vision_of(self.module).settings if sees(self.module) else ""
        return f"{self.config.to_json_string()} {self.dtype} {self.device} {vision}"

    @property
    def context_length(self) -> int:
        """The most tokens of a prompt and its completion together."""
        return context_length(self.module)

    @property
    def eos_ids(self) -> Sequence[int]:
        return eos_token_ids(self.module, self.tokenizer)

    def text_of(self, token_ids: Sequence[int], prompt: Prompt | None = None) -> str:
        """Return the text of a completion as reward functions get it, without the tokens that end it.

        Args:
            token_ids: The tokens that were sampled.
            prompt: The prompt. If it is a text, or gave the beginning of the answer, the completion's text continues
                it, with the space before its first word that tokenizers of SentencePiece's kind leave out of a text
                alone. A message in a conversation is a text of its own.
        """
        kept, skips = list(token_ids), not self.keep_special_tokens
        while not skips and kept and kept[-1] in self._ends:
            kept.pop()
        continues = prompt is not None and (prompt.given or prompt.messages is None)
        asked = list(prompt.token_ids[-_NUM_BEFORE:]) if prompt is not None and continues else []
        before, text = (str(self.tokenizer.decode(ids, skip_special_tokens=skips)) for ids in (asked, asked + kept))
        if not text.startswith(before):  # a character began in the prompt
            return str(self.tokenizer.decode(kept, skip_special_tokens=skips))
        return text[len(before) :]

    def unseen_tokens(self, completions: Iterable[Trajectory]) -> list[str]:
        """Return the special tokens that completions hold and their texts do not show, end tokens excepted."""
        if self.keep_special_tokens:
            return []
        hidden = set(self.tokenizer.all_special_ids)
        for token_id, token in self.tokenizer.added_tokens_decoder.items():
            if token.special:
                hidden.add(token_id)
        hidden -= self._ends
        held: set[int] = set()
        for completion in completions:
            held |= hidden.intersection(completion.sampled_ids)
        return [str(self.tokenizer.convert_ids_to_tokens(token_id)) for token_id in sorted(held)]

    @cached_property
    def _ends(self) -> set[Any]:
        padding: Any = self.tokenizer.pad_token_id
        return {*eos_token_ids(self.module, self.tokenizer), padding}

    @property
    def embeddings(self) -> torch.nn.Module:
        return self.module.get_input_embeddings()

    @property
    def embeddings_name(self) -> str:
        weight: Any = self.embeddings.weight
        return self.weights().name_of(weight)

    @property
    def adapters(self) -> Adapters | None:
        return find_adapters(self.module)

    @property
    def update_bytes(self) -> int:
        """The bytes that an update will take and that are not allocated yet; 0 where none follows."""
        return update_bytes(self.module) if self.trained else 0

    def weights(self, merged: bool = True, dtype: torch.dtype | None = None) -> PolicyWeights:
        return PolicyWeights(self.module, merged, dtype)

    def save_skeleton(self, folder: Path) -> None:
        """Save configuration and, in :data:`TOKENIZER`, tokenizer for an engine; the weights are sent to it later."""
        wrapper: Any = self.module
        bare = wrapper.get_base_model() if hasattr(wrapper, "get_base_model") else wrapper
        if sees(self.module):  # vLLM's processor of images wants a tokenizer beside it
            save_for_engines(self.tokenizer, folder)
            vision_of(self.module).save(folder)
        save_settings(bare, folder)
        save_for_engines(self.tokenizer, folder / TOKENIZER)


def eos_token_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Return all ids that end a sequence: the tokenizer's and those of the model's generation config."""
    ids = {cast(int, tokenizer.eos_token_id)}
    generation = model.generation_config
    configured = None if generation is None else generation.eos_token_id
    ids.update([configured] if isinstance(configured, int) else configured or [])
    return tuple(sorted(ids))
