"""Chunked token log-probs against a full log-softmax in double precision."""

from __future__ import annotations

import pytest
import torch

from lit_grpo.update import logprobs
from lit_grpo.update.logprobs import token_logprobs

NUM_TOKENS, HIDDEN, VOCAB = 23, 8, 31


def make_inputs(num_tokens: int = NUM_TOKENS) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden states, targets and the weight of a head, of which both floats want a gradient."""
    generator = torch.Generator().manual_seed(3)
    hidden_ND = torch.randn(num_tokens, HIDDEN, generator=generator).requires_grad_()
    weight_VD = (2 * torch.randn(VOCAB, HIDDEN, generator=generator)).requires_grad_()
    return hidden_ND, torch.randint(0, VOCAB, (num_tokens,), generator=generator), weight_VD


def full(hidden_ND: torch.Tensor, targets_N: torch.Tensor, weight_VD: torch.Tensor, temperature: float) -> torch.Tensor:
    logprobs_NV = (hidden_ND @ weight_VD.T / temperature).log_softmax(-1)
    return logprobs_NV.gather(-1, targets_N[:, None]).squeeze(-1)


class CountingHead:
    """A linear head that notes how many tokens it is given at a time."""

    def __init__(self, weight_VD: torch.Tensor) -> None:
        self.weight_VD = weight_VD
        self.sizes: list[int] = []

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        self.sizes.append(len(hidden))
        return hidden @ self.weight_VD.T


@pytest.mark.parametrize("tokens_per_chunk", [1, 7, 22, 23, 24, 1000])
@pytest.mark.parametrize("temperature", [1.0, 0.7, 2.5])
def test_values_and_gradients_are_those_of_the_full_logits(
    monkeypatch: pytest.MonkeyPatch, tokens_per_chunk: int, temperature: float
) -> None:
    monkeypatch.setattr(logprobs, "LOGITS_PER_CHUNK", tokens_per_chunk * VOCAB)
    hidden_ND, targets_N, weight_VD = make_inputs()
    hidden64, weight64 = (tensor.detach().double().requires_grad_() for tensor in (hidden_ND, weight_VD))
    upstream_N = torch.linspace(-1, 2, NUM_TOKENS)

    logprobs_N, entropy_N = token_logprobs(hidden_ND, targets_N, CountingHead(weight_VD), VOCAB, temperature)
    expected_N = full(hidden64, targets_N, weight64, temperature)
    (logprobs_N * upstream_N).sum().backward()
    (expected_N * upstream_N.double()).sum().backward()

    torch.testing.assert_close(logprobs_N.double(), expected_N, rtol=1e-6, atol=1e-6)
    distribution = torch.distributions.Categorical(logits=hidden64 @ weight64.T / temperature)
    torch.testing.assert_close(entropy_N.double(), distribution.entropy(), rtol=1e-6, atol=1e-6)
    for actual, expected in ((hidden_ND, hidden64), (weight_VD, weight64)):
        assert actual.grad is not None and expected.grad is not None
        torch.testing.assert_close(actual.grad.double(), expected.grad, rtol=1e-5, atol=1e-5)


def test_golden_numbers_of_three_tokens() -> None:
    logits_NV = torch.tensor([[0.0, 0.0], [0.0, 1.0986123], [0.0, 1.0986123]])  # chances 1/2, 1/2; 1/4, 3/4
    logprobs_N, entropy_N = token_logprobs(logits_NV, torch.tensor([0, 0, 1]), lambda hidden: hidden, 2)
    assert logprobs_N.tolist() == pytest.approx([-0.6931472, -1.3862944, -0.2876821])
    assert entropy_N.tolist() == pytest.approx([0.6931472, 0.5623351, 0.5623351])


def test_the_head_never_sees_more_than_a_chunk_and_runs_again_in_the_backward_pass(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(logprobs, "LOGITS_PER_CHUNK", 10 * VOCAB + 5)
    hidden_ND, targets_N, weight_VD = make_inputs()
    head = CountingHead(weight_VD)
    logprobs_N, _ = token_logprobs(hidden_ND, targets_N, head, VOCAB)
    assert head.sizes == [10, 10, 3]
    logprobs_N.sum().backward()
    assert sorted(head.sizes) == [3, 3, 10, 10, 10, 10]


def test_a_vocabulary_larger_than_a_chunk_goes_one_token_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logprobs, "LOGITS_PER_CHUNK", VOCAB - 1)
    hidden_ND, targets_N, weight_VD = make_inputs(3)
    head = CountingHead(weight_VD)
    with torch.no_grad():
        token_logprobs(hidden_ND, targets_N, head, VOCAB)
    assert head.sizes == [1, 1, 1]


def test_without_gradients_nothing_is_kept_and_the_values_are_the_same() -> None:
    hidden_ND, targets_N, weight_VD = make_inputs()
    with_gradient = token_logprobs(hidden_ND, targets_N, CountingHead(weight_VD), VOCAB)
    with torch.no_grad():
        without = token_logprobs(hidden_ND, targets_N, CountingHead(weight_VD), VOCAB)
    assert with_gradient[0].requires_grad and not without[0].requires_grad
    torch.testing.assert_close(with_gradient, without, rtol=0, atol=0)


def test_the_entropy_carries_no_gradient() -> None:
    hidden_ND, targets_N, weight_VD = make_inputs()
    assert not token_logprobs(hidden_ND, targets_N, CountingHead(weight_VD), VOCAB)[1].requires_grad


def test_no_token_at_all_still_gives_every_weight_a_gradient_of_zero() -> None:
    hidden_ND, targets_N, weight_VD = make_inputs(0)
    logprobs_N, entropy_N = token_logprobs(hidden_ND, targets_N, CountingHead(weight_VD), VOCAB)
    assert logprobs_N.shape == entropy_N.shape == (0,)
    logprobs_N.sum().backward()
    assert hidden_ND.grad is not None and hidden_ND.grad.shape == (0, HIDDEN)
    assert weight_VD.grad is not None and weight_VD.grad.abs().max() == 0
