"""Whether a model is one that tokens can be sampled from and learnt from, asked before anything expensive starts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from lit_grpo.policy.architecture.decoder import RUN_FAILURES, context_length, first_line, hidden_states
from lit_grpo.policy.architecture.logits import logit_map, token_logits

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_SEEN, _NUM_TOKENS = 3, 67  # a prime number beyond 64, for attention that goes by blocks
_TOLERANCES = {torch.float64: 1e-3, torch.float32: 1e-3}  # of a norm; other dtypes 0.25, for experts change over


def check_policy(model: PreTrainedModel) -> None:
    """Run a few tokens through a model in all the ways in which a run does, which have to come out the same.

    Raises:
        ValueError: A forward takes more than token ids; logits are not the head's outputs, times a number and perhaps
            capped; a token sees later ones, or other rows; positions from zero on are not the model's own; or training
            mode computes something else than evaluation mode.
    """
    kind, training = type(model).__name__, model.training
    logit_map(model)  # or a sentence of its own
    num_tokens = min(_NUM_TOKENS, context_length(model))
    vocab_size = model.config.get_text_config(decoder=True).vocab_size
    tokens_T = (torch.arange(num_tokens, device=model.device) * 5 + 4) % vocab_size
    others_T = torch.cat([tokens_T[:_SEEN], tokens_T[_SEEN:].flip(0)])
    positions_1T = torch.arange(num_tokens, device=model.device)[None]
    try:
        with torch.no_grad():
            model.eval()
            hidden_TD = hidden_states(model, tokens_T[None])[0]
            logits_TV, own_TV = (
                token_logits(model, hidden_TD),
                model(input_ids=tokens_T[None], use_cache=False).logits[0],
            )
            rows_BTD = hidden_states(model, torch.stack([others_T, tokens_T]), position_ids=positions_1T.expand(2, -1))
            trained_TD = hidden_states(model.train(), tokens_T[None])[0]
    except RUN_FAILURES as error:
        raise ValueError(
            f"{kind} cannot be a policy: a forward over tokens and positions fails ({first_line(error)}); take another."
        ) from error
    finally:
        model.train(training)
    lowers = torch.is_autocast_enabled(model.device.type)
    tolerance = 0.25 if lowers else _TOLERANCES.get(model.dtype, 0.25)
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
