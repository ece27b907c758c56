"""The policy's own layer of multi-token prediction as a drafter in slots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from lit_grpo.policy.architecture.decoder import token_head
from lit_grpo.policy.architecture.heads import MORE_KEYS, prediction_head
from lit_grpo.policy.architecture.states import HIDDEN
from lit_grpo.rollout.sampling import sample_tokens
from lit_grpo.rollout.slots.attention import Attention, AttentionInputs, KVLayer, KVShape
from lit_grpo.rollout.slots.drafts import Draft, Drafter

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from lit_grpo.rollout.slots.kv.cache import SlotCache
    from lit_grpo.rollout.slots.rows import SampledStep, TokenRows
    from lit_grpo.types import SamplingParams


class Heads(Drafter):
    """Drafts with the policy's own layer of multi-token prediction.

    Its keys and values are those of one more layer in the slots' cache, and the hidden state of a row's last token that
    has been through the policy is one more state of the row. So prompts share them, and forks, resumed requests and
    rows that move take them along. A token is drafted by the random number of its own position, from the layer's
    distribution under the run's sampling parameters: the closer that is to the policy's, the more often the two agree.

    Args:
        policy: The policy, whose layers have states.
        most_tokens: The most tokens that are drafted for a row in a step.

    Raises:
        ValueError: The policy has no such layer, or one that cannot draft in slots.
    """

    def __init__(self, policy: PreTrainedModel, most_tokens: int) -> None:
        self.most_tokens, self._layer, self._logits = most_tokens, prediction_head(policy), token_head(policy)
        self._number = 0  # of the attention call

    def beside(self, shape: KVShape) -> KVShape:
        """Return what the slots keep of a policy with this layer."""
        if shape.states is None:
            raise ValueError(
                "The policy's own heads draft in slots only where its layers keep recurrent states, and this policy's "
                "keep none; set model.generator.drafter to text."
            )
        attention: Any = self._layer.layers[0].self_attn
        self._number, num_heads = len(shape.layers), attention.k_proj.out_features // attention.head_dim
        own = KVLayer(num_heads, attention.head_dim + MORE_KEYS, attention.head_dim)
        states = replace(shape.states, num_bytes=shape.states.num_bytes + 4 * self._layer.fc.out_features)
        return replace(shape, layers=(*shape.layers, own), states=states, heads=self)

    def follow(
        self,
        cache: Attention,
        hidden_BTD: torch.Tensor,
        tokens_BT: torch.Tensor,
        positions_BT: torch.Tensor,
        draft: Draft | None = None,
    ) -> None:
        """Keep the layer's keys and values of tokens of the first rows, which have just been through the policy.

        With a ``draft`` a row here is a query, and has one token.
        """
        assert cache.states is not None
        own = cache.states.tensors
        if HIDDEN not in own:  # before the first token of prompts
            own[HIDDEN] = torch.zeros_like(hidden_BTD[:, 0])
        if draft is None:
            last_BD = hidden_BTD[:, -1]
            before_BTD = torch.cat([own[HIDDEN][: len(last_BD), None], hidden_BTD[:, :-1]], 1)
        else:
            last_BD = hidden_BTD[: len(draft.tokens_BK), 0]
            before_N = np.where(draft.ahead_N == 1, draft.rows_N, np.arange(len(draft.rows_N)) - 1)
            drafted_D1D = hidden_BTD[torch.from_numpy(before_N[len(last_BD) :])]
            before_BTD = torch.cat([own[HIDDEN][: len(last_BD), None], drafted_D1D])
        self._run(cache, before_BTD, tokens_BT, positions_BT)
        own[HIDDEN][: len(last_BD)] = last_BD

    def _run(self, cache: Attention, *of_tokens: torch.Tensor) -> torch.Tensor:
        return self._layer(*of_tokens, lambda *inputs: cache.attend(self._number, AttentionInputs(*inputs)))

    def draft(
        self, rows: TokenRows, most_B: np.ndarray, cache: SlotCache, sampling: SamplingParams
    ) -> Sequence[Sequence[int]]:
        """Draft tokens one after another, each from what the layer has made of the one before."""
        assert cache.states is not None
        drafted, rows_N = list[torch.Tensor](), np.arange(len(most_B))
        hidden_ND, tokens_N = cache.states.tensors[HIDDEN], torch.empty(0)
        is_tried_KB = np.arange(int(most_B.max()))[:, None] < most_B
        for ahead, is_tried_B in enumerate(is_tried_KB):
            before_N, rows_N = rows_N, np.flatnonzero(is_tried_B)
            own = {name: each[rows_N] for name, each in rows.inputs(len(most_B), num_ahead=ahead).items()}
            own["before"] = np.searchsorted(before_N, rows_N)
            there = cache.prepare(rows.counts[rows_N] - 1 + ahead, own, rows_N)
            tokens_N = tokens_N.index_select(0, there["before"]) if ahead else there["tokens"]
            hidden_N1D = hidden_ND.index_select(0, there["before"])[:, None]
            hidden_ND = self._run(cache, hidden_N1D, tokens_N[:, None], there["positions"][:, None])[:, 0]
            tokens_N = sample_tokens(self._logits(hidden_ND), sampling, there["uniform"])[0]
            drafted.append(tokens_N)
        tokens_KB = np.zeros_like(is_tried_KB, dtype=np.int64)
        tokens_KB[is_tried_KB] = torch.cat(drafted).cpu().numpy()
        return [tokens_K[:most].tolist() for tokens_K, most in zip(tokens_KB.T, most_B, strict=True)]

    def took(self, rows: TokenRows, step: SampledStep, accepted_B: np.ndarray) -> dict[str, int]:
        """Return the number of accepted tokens; nothing is learned, for the cache has taken them."""
        return {"heads": int(accepted_B.sum())} if accepted_B.any() else {}
