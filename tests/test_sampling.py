"""Random numbers per token, sampling by inversion, and truncation as Hugging Face does it."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from lit_grpo.rollout import sampling as sampling_module
from lit_grpo.rollout.sampling import request_key, truncate, uniform
from lit_grpo.types import Prompt, Request, SamplingParams

MASK_64 = (1 << 64) - 1


def sample_tokens(
    logits_BV: torch.Tensor, sampling: SamplingParams, numbers_B: np.ndarray
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return sampling_module.sample_tokens(logits_BV, sampling, torch.from_numpy(numbers_B))


def splitmix64(key: int, position: int) -> float:
    """The reference algorithm in plain integers: the ``position``-th output of the generator seeded with ``key``."""
    state = (key + (position + 1) * 0x9E3779B97F4A7C15) & MASK_64
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & MASK_64
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & MASK_64
    state ^= state >> 31
    return (state >> 11) / 2**53


def keys(count: int, seed: int = 0) -> np.ndarray:
    prompt = Prompt("train/0", (1,), "")
    numbers = [request_key(Request(prompt, (sample,), SamplingParams(), seed)) for sample in range(count)]
    return np.array(numbers, dtype=np.uint64)


def draw(logits_V: torch.Tensor, count: int, sampling: SamplingParams) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample ``count`` tokens of one distribution."""
    numbers = uniform(keys(count), np.zeros(count, dtype=np.int64))
    return sample_tokens(logits_V.expand(count, -1), sampling, numbers)[:2]


def test_uniform_is_splitmix64() -> None:
    pairs = [(0, 0), (1, 0), (-1, 3), (2**63 - 1, 10_000), (-(2**63), 1), (0x1234567890ABCDEF, 511)]
    keys_B = np.array([key % 2**64 for key, _ in pairs], np.uint64)
    actual = uniform(keys_B, np.array([position for _, position in pairs]))
    assert actual.dtype == np.float64
    assert actual.tolist() == [splitmix64(key & MASK_64, position) for key, position in pairs]


def test_uniform_gives_the_published_first_output_of_splitmix64() -> None:
    # 0xE220A8397B1DCDAF is the first output for seed 0 in the generator's reference implementation.
    assert uniform(np.zeros(1, np.uint64), np.zeros(1, np.int64)).item() == (0xE220A8397B1DCDAF >> 11) / 2**53


@pytest.mark.parametrize("along", ["samples", "positions"])
def test_uniform_is_uniform_over_samples_and_over_positions(along: str) -> None:
    count, bins = 30_000, 100
    if along == "samples":
        values = uniform(keys(count), np.full(count, 7))
    else:
        values = uniform(keys(1).repeat(count), np.arange(count))
    assert values.min() >= 0 and values.max() < 1
    values = torch.from_numpy(values)
    histogram = torch.histc(values, bins, 0, 1)
    chi_square = ((histogram - count / bins).square() / (count / bins)).sum().item()
    assert 50 < chi_square < 160  # 99 degrees of freedom: far beyond one in ten thousand on either side
    serial = torch.corrcoef(torch.stack([values[:-1], values[1:]]))[0, 1].item()
    assert abs(serial) < 0.025


def test_request_key_differs_by_seed_prompt_visit_and_sample_alone() -> None:
    requests = {
        (seed, name, visit, sample): Request(Prompt(name, (1,), "", visit=visit), (sample,), SamplingParams(), seed)
        for seed, name, visit, sample in itertools.product(
            [0, 1, 12], ["train/1", "train/11", "validation/1"], [0, 1], [0, 1, 2]
        )
    }
    assert len({request_key(request) for request in requests.values()}) == len(requests)
    other_text = Request(Prompt("train/1", (5, 6), "other", {"answer": 3}), (0,), SamplingParams(max_tokens=9), 0)
    assert request_key(other_text) == request_key(requests[0, "train/1", 0, 0])
    assert 0 <= request_key(other_text) < 2**64


def test_request_key_is_the_same_in_every_process() -> None:
    request = Request(Prompt("train/17", (1,), "", visit=2), (5,), SamplingParams(), 42)
    assert request_key(request) == 3059160939103929216


def test_frequencies_match_the_distribution() -> None:
    probabilities_V = torch.tensor([0.5, 0.3, 0.15, 0.05])
    tokens_B, _ = draw(probabilities_V.log(), 40_000, SamplingParams())
    frequencies_V = torch.bincount(tokens_B, minlength=4) / 40_000
    assert torch.allclose(frequencies_V, probabilities_V, atol=0.01)


def test_temperature_divides_the_logits() -> None:
    logits_V = torch.tensor([2.0, 1.0, 0.0, -1.0])
    tokens_B, logprobs_B = draw(logits_V, 40_000, SamplingParams(temperature=0.5))
    expected_V = (logits_V / 0.5).softmax(-1)
    assert torch.allclose(torch.bincount(tokens_B, minlength=4) / 40_000, expected_V, atol=0.01)
    assert torch.allclose(logprobs_B, expected_V.log()[tokens_B], atol=1e-6)


def test_bfloat16_logits_are_sampled_in_float32() -> None:
    logits_BV = (torch.randn(8, 50, generator=torch.Generator().manual_seed(0)) * 3).bfloat16()
    tokens_B, logprobs_B, _ = sample_tokens(logits_BV, SamplingParams(), uniform(keys(8), np.arange(8)))
    assert torch.equal(logprobs_B, logits_BV.float().log_softmax(-1)[torch.arange(8), tokens_B])


def test_temperature_zero_is_greedy_with_the_logprobs_of_temperature_one() -> None:
    logits_BV = torch.randn(16, 30, generator=torch.Generator().manual_seed(1))
    tokens_B, logprobs_B, _ = sample_tokens(logits_BV, SamplingParams(temperature=0), uniform(keys(16), np.arange(16)))
    assert torch.equal(tokens_B, logits_BV.argmax(-1))
    assert torch.equal(logprobs_B, logits_BV.log_softmax(-1).max(-1).values)


def test_a_token_does_not_depend_on_the_other_rows() -> None:
    logits_BV = torch.randn(20, 40, generator=torch.Generator().manual_seed(2))
    keys_B, positions_B = keys(20), np.arange(20)
    together, *_ = sample_tokens(logits_BV, SamplingParams(), uniform(keys_B, positions_B))
    alone = [
        sample_tokens(logits_BV[i, None], SamplingParams(), uniform(keys_B[i, None], positions_B[i, None]))[0].item()
        for i in range(20)
    ]
    assert together.tolist() == alone
    assert len(set(alone)) > 5


def hugging_face(logits_BV: Any, top_k: int, top_p: float, min_p: float) -> torch.Tensor:
    """Warp as ``generate`` does: top-k, then top-p, then min-p."""
    ids: Any = torch.zeros((len(logits_BV), 1), dtype=torch.int64)
    if top_k:
        logits_BV = TopKLogitsWarper(top_k)(ids, logits_BV)
    if top_p < 1:
        logits_BV = TopPLogitsWarper(top_p)(ids, logits_BV)
    if min_p:
        logits_BV = MinPLogitsWarper(min_p)(ids, logits_BV)
    return logits_BV.log_softmax(-1)


@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"),
    [
        (1, 1.0, 0.0),
        (7, 1.0, 0.0),
        (1000, 1.0, 0.0),
        (0, 0.9, 0.0),
        (0, 0.05, 0.0),
        (0, 1.0, 0.1),
        (0, 1.0, 0.9),
        (20, 0.7, 0.0),
        (20, 1.0, 0.05),
        (0, 0.8, 0.2),
        (30, 0.85, 0.15),
    ],
)
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_truncation_is_that_of_hugging_face(top_k: int, top_p: float, min_p: float, temperature: float) -> None:
    logits_BV = torch.randn(200, 60, generator=torch.Generator().manual_seed(3)) * 2 / temperature
    sampling = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    expected_BV = hugging_face(logits_BV, top_k, top_p, min_p)
    actual_BV = truncate(logits_BV.log_softmax(-1), sampling)
    assert torch.equal(actual_BV.isneginf(), expected_BV.isneginf())
    assert torch.allclose(actual_BV.exp(), expected_BV.exp(), atol=1e-6)

    tokens_B, logprobs_B, _ = sample_tokens(logits_BV * temperature, sampling, uniform(keys(200), np.arange(200)))
    chosen_B = expected_BV[torch.arange(200), tokens_B]
    assert not chosen_B.isneginf().any()
    assert torch.allclose(logprobs_B, chosen_B, atol=1e-5)


def test_impossible_tokens_at_either_end_are_never_picked() -> None:
    logits_V = torch.tensor([-torch.inf, 0.0, -torch.inf, 0.0, -torch.inf])
    tokens_B, logprobs_B = draw(logits_V, 5000, SamplingParams())
    assert set(tokens_B.tolist()) == {1, 3}
    assert torch.allclose(logprobs_B, torch.tensor(0.5).log())


def test_tokens_of_a_vocabulary_of_150_thousand_have_their_probability_down_to_the_rarest() -> None:
    size = 151_936
    logits_V = torch.randn(size, generator=torch.Generator().manual_seed(0)) * 4
    probs_V = logits_V.double().softmax(-1)
    order = probs_V.argsort(descending=True).tolist()
    chosen = [order[0], order[1000], order[size // 2], order[-1], 0, 511, 512, size - 1]
    assert probs_V[chosen].max() > 1e-3 and probs_V[chosen].min() < 1e-12

    def first_number(targets: list[int]) -> np.ndarray:
        """The least random number that gives a token or one behind it, by bisection: tokens rise with it."""
        low, high = np.zeros(len(targets)), np.ones(len(targets))
        for _ in range(54):
            middle = (low + high) / 2
            tokens_B, *_ = sample_tokens(logits_V.expand(len(targets), -1), SamplingParams(), middle)
            reached = tokens_B.numpy() >= targets
            low, high = np.where(reached, low, middle), np.where(reached, middle, high)
        return high

    shares = first_number([token + 1 for token in chosen]) - first_number(chosen)
    expected = probs_V[chosen].numpy()
    np.testing.assert_allclose(shares, expected, rtol=1e-5, atol=1e-15)  # float64 numbers near 1 are 1e-16 apart


def test_sampling_takes_the_memory_of_two_float32_numbers_a_logit() -> None:
    logits_BV, numbers = torch.randn(4, 50_000), np.full(4, 0.5)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        sample_tokens(logits_BV, SamplingParams(), numbers)
    allocated = sum(max(event.self_cpu_memory_usage, 0) for event in profiler.key_averages())
    assert allocated < 9 * logits_BV.numel()


def test_nan_logits_give_a_token_of_the_vocabulary_with_a_nan_logprob() -> None:
    tokens_B, logprobs_B = draw(torch.full((5,), torch.nan), 3, SamplingParams())
    assert all(0 <= token < 5 for token in tokens_B.tolist())
    assert logprobs_B.isnan().all()
