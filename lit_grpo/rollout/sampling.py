"""Sampling whose random numbers depend only on the sample and the position of the token.

A token's random number is a hash of (seed, prompt id, visit, path, position). So neither the slot that decodes a
completion, nor the other completions, nor their order can change it.
"""

from __future__ import annotations

import math
from hashlib import blake2b

import numpy as np
import torch

from lit_grpo.types import Request, SamplingParams

# The increment and multipliers of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014).
_GOLDEN_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MULTIPLIERS = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
_BLOCK = 512  # tokens of a large vocabulary


def request_key(request: Request) -> int:
    """Hash a request's key and seed to an unsigned 64-bit integer."""
    prompt_id, visit, path = request.key
    text = repr((request.seed, prompt_id, visit, *path)).encode()
    return int.from_bytes(blake2b(text, digest_size=8).digest(), "little")


def uniform(keys_B: np.ndarray, positions_B: np.ndarray) -> np.ndarray:
    """Return a float64 number in [0, 1) for each row from its uint64 key and token position (SplitMix64)."""
    bits = keys_B + (positions_B.astype(np.uint64) + np.uint64(1)) * _GOLDEN_GAMMA
    bits = (bits ^ (bits >> np.uint64(30))) * _MULTIPLIERS[0]
    bits = (bits ^ (bits >> np.uint64(27))) * _MULTIPLIERS[1]
    bits = bits ^ (bits >> np.uint64(31))
    return (bits >> np.uint64(11)) * 2.0**-53


def sample_tokens(
    logits_BV: torch.Tensor, sampling: SamplingParams, uniform_B: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sample a token a row by inverting the cumulative distribution at the row's random number.

    Args:
        logits_BV: Logits of any float dtype.
        sampling: Temperature and truncation. Temperature 0 takes the likeliest token, and its log-prob
            is that of the model's distribution at temperature 1.
        uniform_B: A number in [0, 1) a row, float64, beside the logits: :func:`uniform` of the row's key and the
            token's position.

    Returns:
        Token ids (int64), their log-probs (float32) under the distribution that was sampled from, that is after
        temperature and truncation, and that distribution's entropy in nats (float32). All have shape B.
    """
    logits_BV, temperature = logits_BV.float(), sampling.temperature
    logprobs_BV = (logits_BV if temperature in (0, 1) else logits_BV / temperature).log_softmax(-1)
    if temperature and sampling.truncates:
        logprobs_BV = truncate(logprobs_BV, sampling)
    probs_BV = logprobs_BV.exp()
    tokens_B = _draw(probs_BV, uniform_B) if temperature else logits_BV.argmax(-1)
    logprobs_B = logprobs_BV.gather(-1, tokens_B.unsqueeze(-1)).squeeze(-1)
    entropies_B = -logprobs_BV.mul_(probs_BV).nansum(-1)  # NaN where a token is impossible
    return tokens_B, logprobs_B, entropies_B


def distribution(logits_BV: torch.Tensor, sampling: SamplingParams) -> torch.Tensor:
    """Return the log-probs with which :func:`sample_tokens` samples: float32, shape (B, V)."""
    logprobs_BV = (logits_BV.float() / (sampling.temperature or 1.0)).log_softmax(-1)
    return truncate(logprobs_BV, sampling) if sampling.temperature and sampling.truncates else logprobs_BV


def _draw(probs_BV: torch.Tensor, uniform_B: torch.Tensor) -> torch.Tensor:
    """Draw a token for each row.

    From a large vocabulary a block of tokens is drawn first, by the sums of the blocks, and then a token of the block.
    So float64 is needed for some hundred numbers a row instead of V, and the rounding error of each token's probability
    is relative to that probability.
    """
    num_tokens = probs_BV.shape[-1]
    if num_tokens <= 2 * _BLOCK:
        return _invert(probs_BV.cumsum(-1, dtype=torch.float64), uniform_B)[0].squeeze(-1)
    whole = num_tokens // _BLOCK * _BLOCK
    blocks_BN, rest_BT = probs_BV[:, :whole].unflatten(-1, (-1, _BLOCK)), probs_BV[:, whole:]
    sums_BN = torch.cat([blocks_BN.sum(-1), rest_BT.sum(-1, keepdim=True)], -1)
    cumulative_BN = sums_BN.cumsum(-1, dtype=torch.float64)
    block_B1, share_B1 = _invert(cumulative_BN, uniform_B)
    left_B1 = (cumulative_BN.gather(-1, block_B1) - share_B1) / sums_BN.gather(-1, block_B1)  # of the block
    tokens_BT = block_B1 * _BLOCK + torch.arange(_BLOCK, device=block_B1.device)
    probs_BT = probs_BV.gather(-1, tokens_BT.clamp(max=num_tokens - 1)).masked_fill_(tokens_BT >= num_tokens, 0)
    within_B = (1 - left_B1).clamp_(0, 1 - 2**-53).squeeze(-1)
    tokens_B1 = block_B1 * _BLOCK + _invert(probs_BT.cumsum(-1, dtype=torch.float64), within_B)[0]
    return tokens_B1.squeeze(-1).clamp_(max=num_tokens - 1)


def _invert(cumulative_BN: torch.Tensor, uniform_B: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return where each row's cumulative mass passes the share that its random number asks for, and that share.

    For a row of NaN it is any place.
    """
    share_B1 = (uniform_B * cumulative_BN[:, -1]).unsqueeze(-1)
    index_B1 = torch.searchsorted(cumulative_BN, share_B1, right=True)
    return index_B1.clamp_(max=cumulative_BN.shape[-1] - 1), share_B1


def truncate(logprobs_BV: torch.Tensor, sampling: SamplingParams) -> torch.Tensor:
    """Apply top-k, then top-p, then min-p, and renormalize; dropped tokens get minus infinity.

    The order is that of Hugging Face ``generate``: each rule sees the distribution that the rules before
    it left, renormalized.
    """
    dropped = -torch.inf
    if 0 < sampling.top_k < logprobs_BV.shape[-1]:
        smallest_B1 = logprobs_BV.topk(sampling.top_k, dim=-1).values[:, -1:]
        logprobs_BV = logprobs_BV.masked_fill(logprobs_BV < smallest_B1, dropped).log_softmax(-1)
    if sampling.top_p < 1:
        sorted_BV, order_BV = logprobs_BV.sort(dim=-1, descending=True)
        before_BV = sorted_BV.exp().cumsum(-1) - sorted_BV.exp()
        cut_BV = torch.empty_like(before_BV, dtype=torch.bool).scatter_(-1, order_BV, before_BV >= sampling.top_p)
        logprobs_BV = logprobs_BV.masked_fill(cut_BV, dropped).log_softmax(-1)
    if sampling.min_p > 0:
        floor_B1 = logprobs_BV.max(-1, keepdim=True).values + math.log(sampling.min_p)
        logprobs_BV = logprobs_BV.masked_fill(logprobs_BV < floor_B1, dropped).log_softmax(-1)
    return logprobs_BV
