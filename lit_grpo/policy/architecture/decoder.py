"""The decoder of a model, which turns tokens into hidden states, and its head, which turns these into logits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

import torch
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast

from lit_grpo.memory import is_out_of_memory
from lit_grpo.process.terminal import first_line

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


RUN_FAILURES = (
    AssertionError,
    AttributeError,
    ImportError,
    IndexError,
    KeyError,
    NotImplementedError,
    RuntimeError,
    TypeError,
    UnboundLocalError,
    ValueError,
)
"""Errors of a model's forward that needs other inputs than token ids, or another attention."""
_NUM_PLACED = 4  # tokens whose positions are moved
_DEVICE_FAILURES = ("CUDA error", "CUDA driver error", "cuDNN error", "HIP error", "Triton Error [CUDA]")


def raise_device_failure(error: BaseException) -> None:
    """Raise an error of a trial again if the device failed or memory ran out: it says nothing about the model.

    torch.compile wraps such errors; then the inner one is raised.
    """
    inner: BaseException = getattr(error, "inner_exception", error)
    failed = isinstance(inner, torch.AcceleratorError) or str(inner).startswith(_DEVICE_FAILURES)
    if failed or is_out_of_memory(inner):
        raise inner


def decoder_of(model: PreTrainedModel) -> PreTrainedModel:
    """Return the decoder without the head.

    ``get_decoder`` of some models returns the model itself (Llama 4) or a head of that name (ModernBERT). Then the
    decoder is the only model among the parts of the model.

    Raises:
        ValueError: The model has no such part.
    """
    found: Any = model.get_decoder()
    if found is not model and isinstance(found, torch.nn.Module) and not isinstance(found, torch.nn.Linear):
        return cast(PreTrainedModel, found)
    inside: Iterator[Any] = (child for child in model.children() if isinstance(child, PreTrainedModel))
    found = next(inside, None)
    if found is None or next(inside, None) is not None:
        raise ValueError(f"{type(model).__name__} has no decoder beside its head, so it is not supported.")
    return found


def attention_name(model: PreTrainedModel) -> str:
    return str(decoder_of(model).config._attn_implementation)


@contextmanager
def in_evaluation(model: torch.nn.Module) -> Iterator[None]:
    """Switch a model to evaluation mode for the code within."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


def hidden_states(model: PreTrainedModel, input_ids_BT: torch.Tensor, seen: Any = None, **kwargs: Any) -> torch.Tensor:
    """Run the decoder without its head; return the last hidden states, shape (B, T, hidden size).

    Args:
        model: A causal language model.
        input_ids_BT: Token ids.
        seen: The features of images among them, of :func:`lit_grpo.policy.architecture.vision.image_features`.
        **kwargs: Further arguments of the decoder.
    """
    run = decoder_of(model) if seen is None else inner_model(model)
    return run(input_ids=input_ids_BT, **{"use_cache": False, **(seen or {}), **kwargs}).last_hidden_state


def inner_model(model: PreTrainedModel) -> PreTrainedModel:
    """Return the part of a policy that puts features of images in place of tokens and runs the decoder.

    Raises:
        ValueError: The policy has no vision tower.
    """
    for child in model.children():
        if hasattr(child, "get_image_features"):
            return cast(PreTrainedModel, child)
    raise ValueError(f"{type(model).__name__} has no vision tower, so its prompts can have no images.")


@torch.no_grad()
def ignores_positions(model: PreTrainedModel) -> bool:
    """Return whether a forward pass ignores ``position_ids``: tokens at other distances have the same hidden states."""
    input_ids_1T = torch.arange(_NUM_PLACED, device=model.device)[None]
    with in_evaluation(model):
        adjacent, apart = (hidden_states(model, input_ids_1T, position_ids=input_ids_1T * step) for step in (1, 2))
    return torch.equal(adjacent, apart)


def compute_dtype(device: torch.device, dtype: torch.dtype) -> torch.dtype:
    """Return what linear layers of ``dtype`` compute in, and keys come in: autocast's dtype where that is on."""
    lowers = torch.is_autocast_enabled(device.type) and dtype != torch.float64
    return torch.get_autocast_dtype(device.type) if lowers else dtype


_LENGTHS = ("max_position_embeddings", "seq_length", "max_seq_len")


def context_length(model: PreTrainedModel) -> int:
    """Return the most tokens of a prompt and its completion together.

    Raises:
        ValueError: The config names no such number, for example that of a state-space or recurrent model.
    """
    if (length := configured_length(model.config)) is not None:
        return length
    raise ValueError(
        f"The config of {type(model).__name__} names no longest sequence; add max_position_embeddings to the policy's "
        "config.json: the most tokens of a prompt and its completion."
    )


def configured_length(config: PreTrainedConfig) -> int | None:
    """Return the most tokens of a sequence; None if a model's config names no such number."""
    own = config.get_text_config(decoder=True)
    for name in _LENGTHS:
        if (length := getattr(own, name, None)) and length > 0:  # XLNet says -1 for none
            return int(length)
    return None


_KNOWN = "_lit_grpo_logit_map"
_LARGE, _SMALL = 2.0**30, 2.0**-20
NEVER = -1e9  # finite, so that a product with its probability, 0, is 0


@dataclass(frozen=True)
class LogitMap:
    """Logits are ``scale x head(h)``, and with a cap ``cap tanh(scale x head(h) / cap)``.

    Tokens of ``never`` are in no distribution: the placeholders of images, which stand for nothing if they are sampled.
    """

    scale: float = 1.0
    cap: float | None = None
    never: tuple[int, ...] = ()

    def __call__(self, outputs: torch.Tensor) -> torch.Tensor:
        scaled = outputs if self.scale == 1 else outputs * self.scale
        logits = scaled if self.cap is None else torch.tanh(scaled / self.cap) * self.cap
        if self.never:
            logits = logits.clone()
            for token in self.never:
                logits[..., token] = NEVER
        return logits


def never_sample(model: PreTrainedModel, tokens: Sequence[int]) -> None:
    """Take tokens out of a model's distribution, wherever it is computed."""
    object.__setattr__(model, _KNOWN, replace(logit_map(model), never=tuple(tokens)))


def never_sampled(model: PreTrainedModel) -> tuple[int, ...]:
    """Return the tokens that are in no distribution of a model; none where nobody has said so."""
    known: LogitMap | None = vars(model).get(_KNOWN)
    return () if known is None else known.never


def logit_map(model: PreTrainedModel) -> LogitMap:
    """Find out by a model's ``forward`` how its logits follow from its hidden states and its head.

    For this call decoder and head are replaced by functions that return known numbers, so no weights are needed and the
    result is exact. It is stored with the model.

    Raises:
        ValueError: The model does more than multiply by one number and cap.
    """
    known = vars(model).get(_KNOWN)
    if known is None:
        known = _found_out(model)
        object.__setattr__(model, _KNOWN, known)
    return known


def token_logits(model: PreTrainedModel, hidden: torch.Tensor) -> torch.Tensor:
    """Apply the head to hidden states of any shape; the last axis becomes V, in float32 (float64 stays)."""
    return token_head(model)(hidden)


def token_head(model: PreTrainedModel) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return :func:`token_logits` of a model as a function, which decoding calls at every token.

    Looking up the head takes longer than computing a small head.
    """
    head, finish = cast(torch.nn.Module, model.get_output_embeddings()), logit_map(model)

    def logits_of(hidden: torch.Tensor) -> torch.Tensor:
        logits = head(hidden)
        return finish(logits if logits.dtype == torch.float64 else logits.float())

    return logits_of


class _Decoded(BaseModelOutputWithPast):
    """A decoder's output in which every further field is None."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


def _found_out(model: PreTrainedModel) -> LogitMap:
    kind = type(model).__name__
    head = model.get_output_embeddings()
    weight: Any = getattr(head, "weight", None)
    if head is None or weight is None or weight.dim() != 2:
        raise ValueError(f"{kind} has no output embedding of its own, so it is not supported; take another policy.")
    vocab_size, hidden_size = weight.shape
    hidden_1TD = (
        torch.tensor([1.0, -2.0, 0.5, -0.25], dtype=torch.float32)
        .repeat(2 * hidden_size)[: 2 * hidden_size]
        .view(1, 2, -1)
    )
    outputs_1TV = torch.linspace(-64, 64, 2 * vocab_size, dtype=torch.float32).view(1, 2, -1).clone()
    outputs_1TV[..., 0], outputs_1TV[..., -1] = _LARGE, _SMALL
    seen: list[torch.Tensor] = []

    def decode(*_: Any, **__: Any) -> _Decoded:
        return _Decoded(last_hidden_state=cast(Any, hidden_1TD))

    def project(hidden: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        seen.append(hidden)
        return outputs_1TV.clone()

    input_ids_1T = torch.zeros((1, 2), dtype=torch.int64, device=model.device)
    try:
        with torch.no_grad(), _instead(decoder_of(model), decode), _instead(head, project):
            logits_1TV = model.forward(input_ids=input_ids_1T, use_cache=False).logits
    except RUN_FAILURES as error:
        raise_device_failure(error)
        raise ValueError(
            f"{kind} cannot be a policy: a forward over token ids alone fails ({first_line(error)}); take another."
        ) from error
    refusal = ValueError(
        f"The logits of {kind} are not its output embedding applied to its last hidden state, times a number, so it is "
        "not supported; take another policy."
    )
    if len(seen) != 1 or seen[0].shape != hidden_1TD.shape or logits_1TV.shape != outputs_1TV.shape:
        raise refusal
    before = float(seen[0].flatten()[0])
    is_scaled = torch.allclose(seen[0].float(), hidden_1TD * before, rtol=1e-6, atol=0)
    if not is_scaled or (before != 1 and getattr(head, "bias", None) is not None):
        raise refusal
    logits_1TV = logits_1TV.float()
    slope, limit = float(logits_1TV[0, 0, -1]) / _SMALL, float(logits_1TV[0, 0, 0])
    found = LogitMap(slope, None if limit > 1e-3 * slope * _LARGE else limit)
    if not torch.allclose(found(outputs_1TV), logits_1TV, rtol=1e-5, atol=1e-6 * max(slope, 1)):
        raise refusal
    scale = slope * before
    return LogitMap(1.0 if abs(scale - 1) < 1e-7 else scale, found.cap)  # float32 cannot tell it from 1


@contextmanager
def _instead(module: torch.nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    own = vars(module).get("forward")
    module.forward = forward
    try:
        yield
    finally:
        if own is None:
            del module.forward
        else:
            module.forward = own
