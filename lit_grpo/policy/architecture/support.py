"""Checks of a model that is to be a policy, before anything expensive starts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from lit_grpo.policy.architecture.decoder import (
    RUN_FAILURES,
    context_length,
    hidden_states,
    in_evaluation,
    logit_map,
    raise_device_failure,
    token_logits,
)
from lit_grpo.process.terminal import first_line

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_SEEN, _NUM_TOKENS = 3, 67  # more than a block of 64 tokens, and no multiple of a block
_TOLERANCES = {torch.float64: 1e-3, torch.float32: 1e-3}  # relative to the norm
_LOW_TOLERANCE = 0.25  # of other dtypes, in which rounding can send a token to other experts


def check_policy(model: PreTrainedModel) -> None:
    """Run a few tokens through a model in all the ways that a run does, and compare the results.

    Raises:
        ValueError: A forward needs more than token ids; the logits are not the head's outputs, times a number and
            perhaps capped; a token sees later tokens, or other rows; positions do not count from zero; or training
            mode computes something else than evaluation mode.
    """
    kind = type(model).__name__
    logit_map(model)  # raises an error of its own
    num_tokens = min(_NUM_TOKENS, context_length(model))
    vocab_size = model.config.get_text_config(decoder=True).vocab_size
    tokens_T = (torch.arange(num_tokens, device=model.device) * 5 + 4) % vocab_size
    others_T = torch.cat([tokens_T[:_SEEN], tokens_T[_SEEN:].flip(0)])
    positions_1T = torch.arange(num_tokens, device=model.device)[None]
    try:
        with torch.no_grad(), in_evaluation(model):
            hidden_TD = hidden_states(model, tokens_T[None])[0]
            logits_TV = token_logits(model, hidden_TD)
            own_TV = model(input_ids=tokens_T[None], use_cache=False).logits[0]
            rows_BTD = hidden_states(model, torch.stack([others_T, tokens_T]), position_ids=positions_1T.expand(2, -1))
            trained_TD = hidden_states(model.train(), tokens_T[None])[0]
    except RUN_FAILURES as error:
        raise_device_failure(error)
        raise ValueError(
            f"{kind} cannot be a policy: a forward over tokens and positions fails ({first_line(error)}); take another."
        ) from error
    is_mixed = torch.is_autocast_enabled(model.device.type)
    tolerance = _LOW_TOLERANCE if is_mixed else _TOLERANCES.get(model.dtype, _LOW_TOLERANCE)
    findings = {
        "its logits are not its output embedding applied to its last hidden state, times a number": (logits_TV, own_TV),
        "a token's hidden state depends on those that follow it": (rows_BTD[0, :_SEEN], hidden_TD[:_SEEN]),
        "a row's hidden states depend on other rows, or on positions that do not count from 0": (
            rows_BTD[1],
            hidden_TD,
        ),
        "training mode computes something else than evaluation mode, which samples": (trained_TD, hidden_TD),
    }
    for finding, (actual, expected) in findings.items():
        gap = float((actual - expected).float().norm() / expected.float().norm())
        if not gap < tolerance:
            raise ValueError(f"{kind} cannot be a policy: {finding} (they differ by {gap:.1%}); take another.")
