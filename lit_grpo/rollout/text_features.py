"""What tokens and log-probs alone show of a completion's length, where an engine keeps its hidden states to itself."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from lit_grpo.rollout.generator import Observation
from lit_grpo.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from lit_grpo.rollout.streams import Stream

_LAST_TOKENS = 4


class TextFeatures:
    """The policy's input embeddings of a text, averaged over all of it and over its end, and the log-probs so far.

    Args:
        policy: Whose embeddings are used; they are read where they lie.
        points: The numbers of tokens at which a completion is looked at; 0 is its prompt.
    """

    def __init__(self, policy: PreTrainedModel, points: tuple[int, ...]) -> None:
        self._embeddings: Any = policy.get_input_embeddings()
        self._points = tuple(sorted(points))

    def of_prompts(self, prompts: Iterable[Prompt]) -> list[Observation]:
        """Observe prompts; the list is empty where they are not to be looked at."""
        prompts = list(prompts)
        if 0 not in self._points or not prompts:
            return []
        rows = [self._rows(torch.tensor([prompt.token_ids]), np.zeros((1, 1))) for prompt in prompts]
        return [Observation([(prompt.prompt_id, prompt.visit) for prompt in prompts], 0, np.concatenate(rows))]

    def reached(self, num_before: int, num_tokens: int) -> int | None:
        """Return the last point that a completion has come to since it had ``num_before`` tokens."""
        return next((point for point in reversed(self._points) if num_before < point <= num_tokens), None)

    def of_completions(self, streams: Sequence[Stream], point: int) -> Observation:
        """Observe completions as they were at ``point`` tokens."""
        rows = self._rows(
            torch.tensor([stream.token_ids[:point] for stream in streams]),
            np.array([stream.logprobs[:point] for stream in streams]),
        )
        return Observation([stream.request.key for stream in streams], point, rows)

    @torch.no_grad()
    def _rows(self, ids_BT: torch.Tensor, logprobs_BT: np.ndarray) -> np.ndarray:
        weight = self._embeddings.weight
        embedded_BTD = weight[ids_BT.to(weight.device)].float()
        pooled = torch.cat([embedded_BTD.mean(1), embedded_BTD[:, -_LAST_TOKENS:].mean(1)], 1).cpu().numpy()
        scalars = np.stack([logprobs_BT.mean(1), logprobs_BT.std(1)], 1)
        return np.concatenate([pooled, scalars], 1, dtype=np.float32)
