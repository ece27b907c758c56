"""What tokens and log-probs alone show of a completion's length, where an engine keeps its hidden states to itself."""

from __future__ import annotations

from collections.abc import Iterable
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
        self._points = points

    def of_prompts(self, prompts: Iterable[Prompt]) -> list[Observation]:
        """Observe prompts; the list is empty where they are not to be looked at."""
        prompts = list(prompts)
        if 0 not in self._points or not prompts:
            return []
        rows = [self._row(prompt.token_ids, [0.0]) for prompt in prompts]
        return [Observation([(prompt.prompt_id, prompt.visit) for prompt in prompts], 0, np.stack(rows))]

    def of_completion(self, stream: Stream, num_before: int) -> Observation | None:
        """Observe a completion where it has come to a point since it had ``num_before`` tokens."""
        reached = [point for point in self._points if num_before < point <= len(stream.token_ids)]
        if not reached:
            return None
        point = reached[-1]
        row = self._row(stream.token_ids[:point], stream.logprobs[:point])
        return Observation([stream.request.key], point, row[None])

    @torch.no_grad()
    def _row(self, token_ids: Iterable[int], logprobs: list[float]) -> np.ndarray:
        weight = self._embeddings.weight
        ids_T = torch.tensor(list(token_ids), device=weight.device)
        embedded_TD = weight[ids_T].float()
        pooled = torch.cat([embedded_TD.mean(0), embedded_TD[-_LAST_TOKENS:].mean(0)]).cpu().numpy()
        return np.concatenate([pooled, [np.mean(logprobs), np.std(logprobs)]], dtype=np.float32)
