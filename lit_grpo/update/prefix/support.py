"""Checks of a model that is to take packed rows, before anything expensive starts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from lit_grpo.policy.architecture.attention import attention_calls
from lit_grpo.policy.architecture.decoder import (
    RUN_FAILURES,
    compute_dtype,
    context_length,
    hidden_states,
    ignores_positions,
    raise_device_failure,
)
from lit_grpo.policy.sharding import compute
from lit_grpo.process.terminal import first_line
from lit_grpo.update.prefix.layout import Stretch
from lit_grpo.update.prefix.sharing import SharedPrefix, shared_prefixes

if TYPE_CHECKING:
    from transformers import PreTrainedModel


_PROMPT, _RESPONSES = 3, (2, 3)  # tokens
_TOLERANCES = {torch.float64: 1e-4, torch.float32: 1e-4}  # of the norm of the hidden states; other dtypes 0.05


def prefix_refusal(model: PreTrainedModel) -> str | None:
    """Say why ``model`` cannot share a prefix in the update, or return ``None`` if it can.

    A few tokens go through it both ways; that finds layers that mix tokens by other means than attention as well.
    """
    config, training, context = model.config.get_text_config(decoder=True), model.training, context_length(model)
    try:
        calls = compute(model.eval(), lambda: attention_calls(model, context))
    except ValueError as refusal:
        return str(refusal)
    finally:
        model.train(training)
    if any(call.sight.chunk for call in calls):
        return "its attention is cut into chunks"
    rope = getattr(config, "rope_parameters", None) or {}
    if "longrope" in str(rope):
        return "its positions turn differently for a long row"
    layout = SharedPrefix([Stretch(0, 0, 3, last=2), Stretch(3, 3, 2, last=1), Stretch(5, 3, 3, last=2)])
    try:
        with torch.no_grad():
            error = compute(model.eval(), lambda: _relative_error(model, layout))
    except RUN_FAILURES as failure:  # its own arguments, or some other kind of attention
        raise_device_failure(failure)
        return str(failure) if isinstance(failure, ValueError) else _said(failure)
    finally:
        model.train(training)
    if not error < _TOLERANCES.get(compute_dtype(model.device, model.dtype), 0.05):
        why = f"its hidden states come out {error:.1%} off"
        ignores = bool(calls) and compute(model, lambda: ignores_positions(model))
        return f"{why}, and its forward ignores position_ids" if ignores else why
    told = [None if window is None or window >= context else window for _, window in layout.calls]
    if told != [call.sight.window for call in calls]:
        return "it does not tell its attention of its sliding window"
    if len({layer for layer, _ in layout.calls}) < len(layout.calls):
        return "some of its layers run several times"
    return None


def _said(failure: BaseException) -> str:
    what = "torch.compile fails on its attention" if _is_of_compiler(failure) else "its attention cannot be replaced"
    return f"{what} ({first_line(failure)})"


def _is_of_compiler(failure: BaseException) -> bool:
    from torch._dynamo.exc import TorchDynamoException  # imported late, for it takes a second

    return isinstance(failure, TorchDynamoException)


def _relative_error(model: PreTrainedModel, layout: SharedPrefix) -> float:
    """Return the relative error of the packed row's hidden states, against each response alone after its prompt."""
    vocab_size = model.config.get_text_config().vocab_size
    input_ids_BT = (torch.arange(_PROMPT + sum(_RESPONSES), device=model.device)[None] * 7 + 1) % vocab_size
    prompt = torch.arange(_PROMPT, device=model.device)
    rows, start = [prompt], _PROMPT
    for length in _RESPONSES:
        rows.append(torch.arange(start, start + length, device=model.device))
        start += length
    positions_T = torch.cat([prompt, *(torch.arange(len(row), device=model.device) + _PROMPT for row in rows[1:])])
    with shared_prefixes(model):
        actual_TD = hidden_states(model, input_ids_BT, position_ids=positions_T[None], shared_prefix=layout)[0]
    expected = [hidden_states(model, input_ids_BT[:, torch.cat([prompt, row])])[0, -len(row) :] for row in rows[1:]]
    expected_TD = torch.cat(expected)
    return float((actual_TD[_PROMPT:] - expected_TD).float().norm() / expected_TD.float().norm())
