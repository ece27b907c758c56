"""Token log-probs and entropy of a linear head, block by block over tokens and vocabulary."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear

from lit_grpo.policy.architecture.decoder import NEVER, logit_map

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class LinearHead:
    """Maps hidden states to logits ``x = scale (weight h + bias)``, or where there is a cap to ``cap tanh(x / cap)``.

    With ``keeps_gradient`` the backward pass adds the weight's gradient to its ``.grad`` block by block, so that no
    second array of V x D exists; hooks on the weight run as ever. ``is_tied``: the weight is the input embedding as
    well, whose backward pass ends the weight's gradient. Tokens of ``never`` are in no distribution.
    """

    weight_VD: torch.Tensor
    bias_V: torch.Tensor | None = None
    scale: float = 1.0
    cap: float | None = None
    keeps_gradient: bool = False
    is_tied: bool = False
    never: tuple[int, ...] = ()


def linear_head(model: PreTrainedModel) -> LinearHead | None:
    """Return the model's output embedding, where that is a plain linear layer (one with adapters is not)."""
    layer = model.get_output_embeddings()
    if type(layer) is not torch.nn.Linear or layer._forward_hooks or layer._forward_pre_hooks:
        return None
    finish, weight = logit_map(model), layer.weight
    is_leaf = type(weight) is torch.nn.Parameter and weight.requires_grad and torch.is_grad_enabled()
    is_tied = getattr(model.get_input_embeddings(), "weight", None) is weight
    return LinearHead(weight, layer.bias, finish.scale, finish.cap, is_leaf, is_tied, finish.never)


TOKENS_PER_BLOCK = 2048
_COLUMN_STEP = 128  # a GPU multiplies matrices whose rows begin at odd places several times slower
LOGITS_PER_BLOCK = {"cpu": 2**21, "cuda": 2**25}  # 8 MiB in float32, most of which caches hold; 128 MiB


class LogitBlocks:
    """A head applied to tokens, in the dtype that matrices are multiplied in.

    Attributes:
        exact: The dtype that sums are kept in.
        tokens: The tokens, cut into blocks.
        vocabulary: The vocabulary, cut so that a block has about the same size whatever V is.
    """

    def __init__(
        self,
        hidden_ND: torch.Tensor,
        weight_VD: torch.Tensor,
        bias_V: torch.Tensor | None,
        head: LinearHead,
        temperature: float,
        dtype: torch.dtype,
    ) -> None:
        self.hidden_ND, self.weight_VD = hidden_ND.to(dtype), weight_VD.to(dtype)
        self.bias_V = None if bias_V is None else bias_V.to(dtype)
        self.scale, self.cap, self.never, self.temperature = head.scale, head.cap, head.never, temperature
        self.exact = torch.float64 if dtype == torch.float64 else torch.float32
        num_tokens, size = len(hidden_ND), len(weight_VD)
        logits = LOGITS_PER_BLOCK.get(hidden_ND.device.type, 2**21)
        columns = max(1, logits // max(1, min(num_tokens, TOKENS_PER_BLOCK)))
        columns = max(columns // _COLUMN_STEP * _COLUMN_STEP, min(columns, _COLUMN_STEP))
        self.tokens = [
            slice(start, min(start + TOKENS_PER_BLOCK, num_tokens)) for start in range(0, num_tokens, TOKENS_PER_BLOCK)
        ]
        self.vocabulary = [slice(start, min(start + columns, size)) for start in range(0, size, columns)]

    def logits(self, tokens: slice, vocabulary: slice) -> torch.Tensor:
        """Return a block, scaled, capped and divided by the temperature, in the dtype that sums are kept in."""
        bias_v = None if self.bias_V is None else self.bias_V[vocabulary]
        logits_nv = linear(self.hidden_ND[tokens], self.weight_VD[vocabulary], bias_v).to(self.exact)
        if self.scale != 1:
            logits_nv = logits_nv.mul_(self.scale)
        if self.cap is not None:
            logits_nv = logits_nv.div_(self.cap).tanh_().mul_(self.cap)
        for token in self.never:
            if vocabulary.start <= token < vocabulary.stop:
                logits_nv[:, token - vocabulary.start] = NEVER
        return logits_nv if self.temperature == 1 else logits_nv.div_(self.temperature)


def linear_logprobs(
    hidden_ND: torch.Tensor,
    target_ids_N: torch.Tensor,
    head: LinearHead,
    temperature: float = 1.0,
    entropy_gradient: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the log-prob of each target token and the entropy of its distribution in nats, both of shape N.

    Logits exist for one block of tokens and vocabulary at a time, in the forward pass under a running maximum (as the
    softmax of M. Milakov and N. Gimelshein, arXiv 1805.02867, and Cut Cross-Entropy, arXiv 2411.09009), and once more
    in the backward pass, for which a few numbers per token are kept. So memory does not grow with N x V, nor, where the
    head keeps its gradient, with V. Matrices are multiplied in autocast's dtype where that is on; everything after the
    logits is float32 (float64 where the head is).

    Args:
        hidden_ND: Hidden states that predict the targets.
        target_ids_N: Token ids. Or a token and K candidates for each place, shape (N, 1 + K): then log-probs have the
            shape (N, K + 2), and the last is the log of the probability of all tokens that are no candidates.
        head: The head, of vocabulary V.
        temperature: Divides the logits, as it did when the tokens were sampled.
        entropy_gradient: Whether the entropy carries a gradient.
    """
    logprobs_N, entropy_N = _LinearLogprobs.apply(
        hidden_ND, head.weight_VD, head.bias_V, target_ids_N, head, temperature
    )
    return logprobs_N, entropy_N if entropy_gradient else entropy_N.detach()


class _LinearLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: torch.Tensor,
        weight_VD: torch.Tensor,
        bias_V: torch.Tensor | None,
        target_ids_N: torch.Tensor,
        head: LinearHead,
        temperature: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.set_materialize_grads(False)
        device = hidden_ND.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight_VD.dtype
        ctx.head, ctx.of_blocks = head, (head, temperature, dtype)
        blocks = LogitBlocks(hidden_ND, weight_VD, bias_V, *ctx.of_blocks)
        columns = [number + 1 for number in target_ids_N.shape[1:]]  # candidates have the rest beside them
        logprobs_N = hidden_ND.new_empty((len(hidden_ND), *columns), dtype=blocks.exact)
        kept_4N = hidden_ND.new_empty((4, len(hidden_ND)), dtype=blocks.exact)
        with torch.autocast(device, enabled=False):
            for tokens in blocks.tokens:
                logprobs_N[tokens], kept_4N[:, tokens] = _statistics(blocks, tokens, target_ids_N[tokens])
        ctx.shape = logprobs_N.shape
        ctx.save_for_backward(hidden_ND, weight_VD, bias_V, target_ids_N, kept_4N)
        return logprobs_N, kept_4N[0].clone()

    @staticmethod
    @once_differentiable
    def backward(  # pyrefly: ignore[bad-override]
        ctx: Any, *grad_outputs: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        hidden_ND, weight_VD, bias_V, target_ids_N, kept_4N = ctx.saved_tensors
        logprob_grad_N, entropy_grad_N = grad_outputs
        blocks = LogitBlocks(hidden_ND, weight_VD, bias_V, *ctx.of_blocks)
        wanted, exact = ctx.needs_input_grad, blocks.exact
        if logprob_grad_N is None:
            logprob_grad_N = kept_4N.new_zeros(ctx.shape)
        hidden_grad = torch.zeros_like(hidden_ND, dtype=exact)
        weight_grad, bias_grad = None, None
        if wanted[1] and ctx.head.keeps_gradient:  # added up where it stays
            weight_grad = weight_VD.grad = torch.zeros_like(weight_VD) if weight_VD.grad is None else weight_VD.grad
        elif wanted[1]:
            weight_grad = torch.zeros_like(weight_VD, dtype=exact)
        if wanted[2] and bias_V is not None:
            bias_grad = torch.zeros_like(bias_V, dtype=exact)
        with torch.autocast(hidden_ND.device.type, enabled=False):
            for vocabulary in blocks.vocabulary:
                sums = None if weight_grad is None else weight_grad[vocabulary]
                if sums is not None and sums.dtype != exact:  # to add in place would round
                    sums = torch.zeros_like(sums, dtype=exact)
                for tokens in blocks.tokens:
                    entropy_grad_n = None if entropy_grad_N is None else entropy_grad_N[tokens, None]
                    slope_nv = _logit_gradient(
                        blocks, tokens, vocabulary, target_ids_N, kept_4N, logprob_grad_N[tokens], entropy_grad_n
                    )
                    if bias_grad is not None:
                        bias_grad[vocabulary] += slope_nv.sum(0)
                    slope_nv = slope_nv.to(blocks.weight_VD.dtype)
                    _add_product(hidden_grad[tokens], slope_nv, blocks.weight_VD[vocabulary])
                    if sums is not None:
                        _add_product(sums, slope_nv.T, blocks.hidden_ND[tokens])
                if weight_grad is not None and sums is not None and sums.dtype != weight_grad.dtype:
                    weight_grad[vocabulary] += sums
        if weight_grad is not None and ctx.head.keeps_gradient:
            weight_grad = None if ctx.head.is_tied else weight_grad.new_zeros(()).expand_as(weight_grad)
        weight_grad = None if weight_grad is None else weight_grad.to(weight_VD.dtype)
        bias_grad = None if bias_grad is None or bias_V is None else bias_grad.to(bias_V.dtype)
        return hidden_grad.to(hidden_ND.dtype), weight_grad, bias_grad, None, None, None


def _statistics(blocks: LogitBlocks, tokens: slice, target_ids_n: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """One pass over the vocabulary for some tokens.

    Returns:
        The log-probs of the targets, and of the rest if there are candidates, and of each token entropy, highest logit,
        sum of exp(logit - highest), and the part of this sum that is of no candidate, shape (4, tokens).
    """
    targets_nk, has_candidates = target_ids_n.view(len(target_ids_n), -1), target_ids_n.dim() == 2
    target_nk = torch.zeros(targets_nk.shape, dtype=blocks.exact, device=targets_nk.device)
    highest_n1 = torch.full((len(targets_nk), 1), -torch.inf, dtype=blocks.exact, device=targets_nk.device)
    total_n1, weighted_n1, rest_n1 = torch.zeros((3, *highest_n1.shape), dtype=blocks.exact, device=targets_nk.device)
    for vocabulary in blocks.vocabulary:
        logits_nv = blocks.logits(tokens, vocabulary)
        column_nk, inside_nk = _columns(targets_nk, vocabulary)
        target_nk += logits_nv.gather(1, column_nk) * inside_nk
        raised_n1 = torch.maximum(highest_n1, logits_nv.amax(1, keepdim=True))
        shift_n1 = highest_n1 - raised_n1
        rescale_n1 = shift_n1.exp()
        logits_nv -= raised_n1  # at most 0, so that the entropy's sum cancels nothing large
        chances_nv = logits_nv.exp()
        # weighted is the sum of exp(x - highest) (x - highest); a new maximum moves both factors
        weighted_n1 = rescale_n1 * (weighted_n1 + total_n1 * shift_n1.nan_to_num_(neginf=0.0))
        total_n1 = total_n1 * rescale_n1 + chances_nv.sum(1, keepdim=True)
        if has_candidates:
            others_nv = _but_for(chances_nv, column_nk[:, 1:], inside_nk[:, 1:])
            rest_n1 = rest_n1 * rescale_n1 + others_nv.sum(1, keepdim=True)
        weighted_n1 += chances_nv.mul_(logits_nv).sum(1, keepdim=True)
        highest_n1 = raised_n1
    log_total_n1 = total_n1.log()
    logprobs_nk, entropy_n1 = target_nk - highest_n1 - log_total_n1, log_total_n1 - weighted_n1 / total_n1
    rest_n1 = rest_n1.clamp(min=torch.finfo(blocks.exact).tiny)  # nothing where all tokens are candidates
    kept_4n = torch.cat([entropy_n1, highest_n1, total_n1, rest_n1], 1).T
    if has_candidates:
        return torch.cat([logprobs_nk, rest_n1.log() - log_total_n1], 1), kept_4n
    return logprobs_nk.squeeze(1), kept_4n


def _logit_gradient(
    blocks: LogitBlocks,
    tokens: slice,
    vocabulary: slice,
    target_ids_N: torch.Tensor,
    kept_4N: torch.Tensor,
    logprob_grad_n: torch.Tensor,
    entropy_grad_n1: torch.Tensor | None,
) -> torch.Tensor:
    """The loss's derivative with respect to a block of what the matrix product gives.

    Of the log-prob of token t it is ``[v = t] - p_v``; of the entropy ``-p_v (log p_v + entropy)``; of the log of the
    rest's probability ``r`` it is ``[v is no candidate] p_v / r - p_v``.
    """
    targets_nk = target_ids_N[tokens].view(len(logprob_grad_n), -1)
    logprob_grad_nk = logprob_grad_n.view(len(logprob_grad_n), -1)
    entropy_n1, highest_n1, total_n1, rest_n1 = kept_4N[:, tokens, None]
    logits_nv = blocks.logits(tokens, vocabulary)
    slope: torch.Tensor | float = blocks.scale / blocks.temperature  # of the logits by what the matrix product gives
    if blocks.cap is not None:
        slope = (1 - (logits_nv * (blocks.temperature / blocks.cap)).square()) * slope
    logits_nv -= highest_n1
    weights = -logprob_grad_nk.sum(1, keepdim=True) / total_n1
    if entropy_grad_n1 is not None:
        weights = weights - (logits_nv + (entropy_n1 - total_n1.log())) * (entropy_grad_n1 / total_n1)
    column_nk, inside_nk = _columns(targets_nk, vocabulary)
    chances_nv, others_nv = logits_nv.exp_(), None
    if target_ids_N.dim() == 2:
        logprob_grad_nk, rest_grad_n1 = logprob_grad_nk[:, :-1], logprob_grad_nk[:, -1:]
        others_nv = _but_for(chances_nv, column_nk[:, 1:], inside_nk[:, 1:]).mul_(rest_grad_n1 / rest_n1)
    gradient_nv = chances_nv.mul_(weights)
    if others_nv is not None:
        gradient_nv += others_nv
    gradient_nv.scatter_add_(1, column_nk, logprob_grad_nk * inside_nk)
    return gradient_nv if blocks.cap is None and slope == 1 else gradient_nv.mul_(slope)


def _but_for(chances_nv: torch.Tensor, column_nk: torch.Tensor, inside_nk: torch.Tensor) -> torch.Tensor:
    """Return a copy of a block that is 0 in the columns that are inside of it."""
    none_nk = torch.zeros_like(column_nk, dtype=chances_nv.dtype).masked_fill_(~inside_nk, torch.inf)
    return chances_nv.scatter_reduce(1, column_nk, none_nk, "amin")


def _columns(targets_nk: torch.Tensor, vocabulary: slice) -> tuple[torch.Tensor, torch.Tensor]:
    """Each target's column in a block, somewhere in it where the target is not, and whether it is."""
    column_nk = targets_nk - vocabulary.start
    inside_nk = (targets_nk >= vocabulary.start) & (targets_nk < vocabulary.stop)
    return column_nk.clamp(0, vocabulary.stop - vocabulary.start - 1), inside_nk


def _add_product(sums: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """Add ``left @ right`` to ``sums``, whose dtype may be wider."""
    if sums.dtype == left.dtype:
        sums.addmm_(left, right)
    else:
        sums += left @ right
