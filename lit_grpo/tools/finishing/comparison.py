"""Opens a GGUF file again, and compares it with the policy that it was written from."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from lit_grpo.memory import free_bytes
from lit_grpo.policy.loading import load_policy, load_tokenizer
from lit_grpo.policy.saving import ExportError
from lit_grpo.tools.finishing.vocabulary import comparable, conversations_of, plain, texts_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

MAX_TEXTS, MAX_TOKENS = 16, 256
MOST_MEAN = {"f32": 1e-3}
"""The mean difference in nats above which a file does not hold the policy; :data:`ROUNDED` of other kinds."""
ROUNDED = 0.5


@dataclass(frozen=True)
class Cost:
    """Cost of a GGUF file: differences between its log-probs and the policy's, over the tokens of texts.

    Args:
        mean: The mean absolute difference, in nats per token.
        most: The largest absolute difference of a log-prob, in nats.
        num_tokens: The number of tokens; 0 if there was no memory to open the file.
        num_texts: The number of texts that the policy's tokenizer and transformers' reader of the file were given.
        num_apart: The number of these texts that the reader splits into other tokens.
    """

    mean: float
    most: float
    num_tokens: int
    num_texts: int
    num_apart: int


class PolicyLogprobs:
    """A policy's log-probs and tokens of some texts, which those of GGUF files are compared with.

    Args:
        folder: Folder of the policy.
        texts: Texts, such as a run's prompts with their completions; without any, random tokens are compared.
    """

    def __init__(self, folder: Path, texts: Sequence[str]) -> None:
        tokenizer, policy = load_tokenizer(str(folder)), load_policy(str(folder)).eval()
        texts = list(texts)[:MAX_TEXTS]
        self.conversations = conversations_of(tokenizer)
        self.split = comparable(plain(tokenizer), [*texts, *self.conversations, *texts_of(tokenizer)])
        rows = [ids[:MAX_TOKENS] for ids in (_tokens(tokenizer, text) for text in texts) if len(ids) > 1]
        if not rows:
            drawn = torch.Generator().manual_seed(0)
            rows = [torch.randint(0, len(tokenizer), (MAX_TOKENS // 4,), generator=drawn).tolist()]
        self.rows = rows
        self.logprobs_N = _logprobs(policy, rows)

    def cost(self, path: Path, kind: str) -> Cost:
        """Open a GGUF file and compare it."""
        tokenizer = load_tokenizer(str(path))
        if conversations_of(tokenizer) != self.conversations:
            raise ExportError(
                f"The GGUF file {path.name} was opened again, and its chat template renders a conversation in another "
                "way than the policy's; report this with the chat template, and leave GGUF out with --gguf none."
            )
        apart = sum(_tokens(tokenizer, text) != ids for text, ids in self.split)
        if 6 * path.stat().st_size > free_bytes(torch.device("cpu")):  # q8_0 takes 3.8 times its file as float32
            return Cost(math.nan, math.nan, 0, len(self.split), apart)
        apart_N = (_logprobs(load_policy(str(path)).eval(), self.rows) - self.logprobs_N).abs()
        mean, most = float(apart_N.mean()), float(apart_N.max())
        if not mean <= MOST_MEAN.get(kind, ROUNDED):
            raise ExportError(
                f"The GGUF file {path.name} was opened again, and its log-probs differ from the policy's by {mean:.2g} "
                f"nats on average, where {kind} explains {MOST_MEAN.get(kind, ROUNDED)}; report this with the policy's "
                "config.json, and leave GGUF out with --gguf none."
            )
        return Cost(mean, most, len(apart_N), len(self.split), apart)


def _tokens(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Return the tokens of a text without those that only begin or end a sequence: GGUF's reader adds none."""
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


@torch.no_grad()
def _logprobs(policy: PreTrainedModel, rows: Sequence[list[int]]) -> torch.Tensor:
    """Return the log-probs of all tokens but the first of each row, one row after the other, shape (tokens,)."""
    found = []
    for ids in rows:
        ids_T = torch.tensor(ids, device=policy.device)
        logits_TV = policy(input_ids=ids_T[None], use_cache=False).logits[0, :-1].float()
        found.append(logits_TV.log_softmax(-1).gather(-1, ids_T[1:, None])[:, 0])
    return torch.cat(found)
