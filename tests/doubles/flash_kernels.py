"""Torch's kernels for sequences of any lengths, in plain operations: the same arguments, results and refusals.

What a kernel leaves unwritten is NaN here: queries and keys of no sequence. A query without a key has the output 0 and
the log-sum-exp infinity of the flash kernels; the memory-efficient ones leave its output and gradient unwritten, and
its log-sum-exp is negative infinity. Probabilities are rounded to the dtype of values, as the kernels do.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch


def forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    starts_q: torch.Tensor,
    starts_k: torch.Tensor,
    max_q: int,
    max_k: int,
    dropout: float,
    causal: bool,
    return_debug_mask: bool,
    *,
    scale: float,
    window_size_left: int | None = None,
    multiple: int = 8,
) -> tuple[torch.Tensor, ...]:
    """Return what ``aten::_flash_attention_forward`` does: output, log-sum-exp, and three tensors of no use."""
    assert dropout == 0.0 and not return_debug_mask and query.shape[-1] % multiple == 0
    output, exact = torch.full_like(query, torch.nan), _exact(query)
    logsumexp_HT = torch.full((query.shape[1], len(query)), torch.nan, dtype=exact)
    for queries, keys, sees in _sequences(query, key, starts_q, starts_k, max_q, max_k, causal, window_size_left):
        scores_HQK, values_HKS = _scores(query[queries], key[keys], scale, sees), _by_head(value[keys], query)
        logsumexp_HQ = scores_HQK.logsumexp(-1)
        weights = (scores_HQK - logsumexp_HQ[..., None]).exp().nan_to_num(0.0).to(value.dtype).to(exact)
        output[queries] = (weights @ values_HKS).transpose(0, 1).to(output.dtype)
        logsumexp_HT[:, queries] = logsumexp_HQ.masked_fill(logsumexp_HQ == -torch.inf, torch.inf)
    return output, logsumexp_HT, torch.empty(2), torch.empty(0), torch.empty(0)


def backward(
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    logsumexp_HT: torch.Tensor,
    starts_q: torch.Tensor,
    starts_k: torch.Tensor,
    max_q: int,
    max_k: int,
    dropout: float,
    causal: bool,
    rng_state: torch.Tensor,
    unused: torch.Tensor,
    *,
    scale: float,
    window_size_left: int | None = None,
    multiple: int = 8,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return what ``aten::_flash_attention_backward`` does: the gradients of queries, keys and values."""
    assert dropout == 0.0 and gradient.dtype == output.dtype == query.dtype and query.shape[-1] % multiple == 0
    assert logsumexp_HT.is_contiguous() and logsumexp_HT.shape == (query.shape[1], len(query))
    grads = [torch.full_like(each, torch.nan) for each in (query, key, value)]
    exact, group = _exact(query), query.shape[1] // key.shape[1]
    for queries, keys, sees in _sequences(query, key, starts_q, starts_k, max_q, max_k, causal, window_size_left):
        its_query, its_gradient, its_output = (
            each[queries].transpose(0, 1).to(exact) for each in (query, gradient, output)
        )
        scores_HQK = _scores(query[queries], key[keys], scale, sees)
        weights = (scores_HQK - logsumexp_HT[:, queries, None]).exp().nan_to_num(0.0)
        above = its_gradient @ _by_head(value[keys], query).transpose(1, 2)
        of_scores = weights * (above - (its_gradient * its_output).sum(-1, keepdim=True)) * scale
        of_scores, weights = of_scores.to(query.dtype).to(exact), weights.to(query.dtype).to(exact)
        grads[0][queries] = (of_scores @ _by_head(key[keys], query)).transpose(0, 1).to(query.dtype)
        for grad, per_head in ((grads[1], of_scores.mT @ its_query), (grads[2], weights.mT @ its_gradient)):
            rounded = per_head.to(grad.dtype).to(exact)  # the kernels sum up heads afterwards
            grad[keys] = rounded.unflatten(0, (-1, group)).sum(1).transpose(0, 1).to(grad.dtype)
    return grads[0], grads[1], grads[2]


def efficient_forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: None,
    starts_q: torch.Tensor,
    starts_k: torch.Tensor,
    max_q: int,
    max_k: int,
    dropout: float,
    mask_type: int,
    compute_logsumexp: bool,
    *,
    scale: float,
    window_size: int | None = None,
) -> tuple[Any, ...]:
    """Return what ``aten::_efficient_attention_forward`` does: output, log-sum-exp, and four things of no use."""
    assert bias is None and compute_logsumexp
    causal, left = _checked(query, key, starts_q, starts_k, mask_type, window_size)
    output, logsumexp_HT, *_ = forward(
        query[0], key[0], value[0], starts_q, starts_k, max_q, max_k, dropout, causal, False,
        scale=scale, window_size_left=left, multiple=4,
    )  # fmt: skip
    blind_HT = logsumexp_HT == torch.inf
    shape = len(starts_q) - 1, query.shape[2], -(-max_q // 32) * 32
    logsumexp_SHL = torch.full(shape, torch.nan, dtype=logsumexp_HT.dtype)
    for number, (start, stop) in enumerate(itertools.pairwise(starts_q.tolist())):
        logsumexp_SHL[number, :, : -(-(stop - start) // 32) * 32] = torch.inf
        logsumexp_SHL[number, :, : stop - start] = logsumexp_HT.masked_fill(blind_HT, -torch.inf)[:, start:stop]
    output = output.masked_fill(blind_HT.T[..., None], torch.nan)
    return output[None], logsumexp_SHL, torch.empty(()), torch.empty(()), max_q, max_k


def efficient_backward(
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: None,
    output: torch.Tensor,
    starts_q: torch.Tensor,
    starts_k: torch.Tensor,
    max_q: int,
    max_k: int,
    logsumexp_SHL: torch.Tensor,
    dropout: float,
    seed: torch.Tensor,
    offset: torch.Tensor,
    mask_type: int,
    bias_requires_grad: bool,
    *,
    scale: float,
    window_size: int | None = None,
) -> tuple[torch.Tensor, ...]:
    """Return what ``aten::_efficient_attention_backward`` does: gradients of queries, keys, values and the bias."""
    assert bias is None and not bias_requires_grad and 0 < max_q <= query.shape[1] and 0 < max_k <= key.shape[1]
    causal, left = _checked(query, key, starts_q, starts_k, mask_type, window_size)
    pairs = [*zip(starts_q.diff().tolist(), starts_k.diff().tolist(), strict=True)]
    assert left is None or all(queries == keys for queries, keys in pairs), "its window is off by their difference"
    assert logsumexp_SHL.shape == (len(pairs), query.shape[2], -(-max_q // 32) * 32) and logsumexp_SHL.is_contiguous()
    assert not logsumexp_SHL.isnan().any()
    logsumexp_HT = torch.cat([its[:, :number] for its, (number, _) in zip(logsumexp_SHL, pairs, strict=True)], 1)
    of_query, of_key, of_value = backward(
        gradient[0], query[0], key[0], value[0], output[0], logsumexp_HT, starts_q, starts_k, max_q, max_k, dropout,
        causal, seed, offset, scale=scale, window_size_left=left, multiple=4,
    )  # fmt: skip
    blind_T = (starts_k.diff() == 0).repeat_interleave(starts_q.diff())
    of_query[: len(blind_T)][blind_T] = torch.nan
    return of_query[None], of_key[None], of_value[None], torch.empty(())


def _checked(
    query: torch.Tensor, key: torch.Tensor, starts_q: torch.Tensor, starts_k: torch.Tensor, mask: int, window: Any
) -> tuple[bool, int | None]:
    """Check what the memory-efficient kernels ask for; return causal, and how many keys before its own a query sees."""
    assert query.dim() == key.dim() == 4 and len(query) == len(key) == 1 and query.shape[2] == key.shape[2]
    assert mask in (0, 2) and (window is None or (mask == 2 and window > 0))
    return mask == 2, None if window is None else window - 1


def _exact(query: torch.Tensor) -> torch.dtype:
    return torch.float64 if query.dtype == torch.float64 else torch.float32


def _by_head(tensor: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """Shape (keys, KV heads, size) to (heads, keys, size)."""
    group = query.shape[1] // tensor.shape[1]
    return tensor.to(_exact(query)).transpose(0, 1).repeat_interleave(group, 0)


def _scores(query: torch.Tensor, key: torch.Tensor, scale: float, sees: torch.Tensor) -> torch.Tensor:
    scores_HQK = query.to(_exact(query)).transpose(0, 1) @ _by_head(key, query).mT * scale
    return scores_HQK.masked_fill(~sees, -torch.inf)


def _sequences(
    query: torch.Tensor,
    key: torch.Tensor,
    starts_q: torch.Tensor,
    starts_k: torch.Tensor,
    max_q: int,
    max_k: int,
    causal: bool,
    left: int | None,
) -> Iterator[tuple[slice, slice, torch.Tensor]]:
    """Check the arguments as torch does; give queries and keys of each sequence, and which see which."""
    assert query.dim() == 3 and query.stride(-1) == key.stride(-1) == 1
    assert starts_q.dtype == starts_k.dtype == torch.int32 and starts_q.shape == starts_k.shape
    assert starts_q.is_contiguous() and starts_k.is_contiguous()
    assert max_q > 1 or query.shape[1] == key.shape[1], "sequences would be taken for queries"
    bounds = [*zip(starts_q.tolist(), starts_k.tolist(), strict=True)]
    assert bounds[0] == (0, 0)
    for begin, end in itertools.pairwise(bounds):
        queries, keys = (slice(*pair) for pair in zip(begin, end, strict=True))
        num_queries, num_keys = queries.stop - queries.start, keys.stop - keys.start
        assert 0 <= num_queries <= max_q and 0 <= num_keys <= max_k
        behind = torch.arange(num_queries)[:, None] + num_keys - num_queries - torch.arange(num_keys)
        sees = torch.ones_like(behind, dtype=torch.bool)
        sees = sees & (behind >= 0) if causal else sees
        yield queries, keys, sees if left is None else sees & (behind <= left)
