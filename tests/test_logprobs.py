"""Chunked token log-probs against a full log-softmax in double precision."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from conftest import random_policy
from hand_made import full_logprobs, make_micro_batch, make_rollout
from torch.nn.functional import embedding

from lit_grpo.update.logprobs import forward
from lit_grpo.update.logprobs import linear_head as logit_blocks
from lit_grpo.update.logprobs.forward import micro_batch_logprobs, token_logprobs
from lit_grpo.update.logprobs.linear_head import LinearHead, linear_head, linear_logprobs

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


def categorical(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, cap: float | None, temperature: float
) -> torch.distributions.Categorical:
    """The definition, in double precision."""
    logits = torch.nn.functional.linear(hidden, weight, bias)
    logits = logits if cap is None else torch.tanh(logits / cap) * cap
    return torch.distributions.Categorical(logits=logits / temperature)


@pytest.mark.parametrize(("tokens", "logits"), [(1, 1), (7, 50), (5, 5 * VOCAB), (1000, 2**20)])
@pytest.mark.parametrize(("bias", "cap"), [(False, None), (True, None), (False, 3.0), (True, 3.0)])
@pytest.mark.parametrize(("temperature", "entropy_weight"), [(1.0, 0.0), (0.7, 0.5), (2.5, -1.0)])
def test_a_linear_head_gives_values_and_gradients_of_the_definition_however_it_is_cut(
    monkeypatch: pytest.MonkeyPatch,
    tokens: int,
    logits: int,
    bias: bool,
    cap: float | None,
    temperature: float,
    entropy_weight: float,
) -> None:
    monkeypatch.setattr(logit_blocks, "TOKENS_PER_BLOCK", tokens)
    monkeypatch.setattr(logit_blocks, "LOGITS_PER_BLOCK", {"cpu": logits})
    hidden_ND, targets_N, weight_VD = make_inputs()
    bias_V = torch.linspace(-2, 2, VOCAB).requires_grad_() if bias else None
    ours = [tensor for tensor in (hidden_ND, weight_VD, bias_V) if tensor is not None]
    theirs = [tensor.detach().double().requires_grad_() for tensor in ours]
    upstream_N = torch.linspace(-1, 2, NUM_TOKENS)

    head = LinearHead(weight_VD, bias_V, cap=cap)
    logprobs_N, entropy_N = linear_logprobs(hidden_ND, targets_N, head, temperature, entropy_weight != 0)
    expected = categorical(theirs[0], theirs[1], theirs[2] if bias else None, cap, temperature)
    torch.testing.assert_close(logprobs_N.double(), expected.log_prob(targets_N), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(entropy_N.double(), expected.entropy(), rtol=2e-6, atol=2e-6)
    assert entropy_N.requires_grad == (entropy_weight != 0)
    actual_loss = (logprobs_N * upstream_N + entropy_weight * upstream_N.flip(0) * entropy_N).sum()
    exact_N = expected.log_prob(targets_N) * upstream_N
    (exact_N + entropy_weight * upstream_N.flip(0) * expected.entropy()).sum().backward()
    actual_loss.backward()
    for actual, reference in zip(ours, theirs, strict=True):
        assert actual.grad is not None and reference.grad is not None
        error = (actual.grad.double() - reference.grad).norm() / reference.grad.norm()
        assert error < 1e-6


@pytest.mark.parametrize("num_candidates", [1, 5, VOCAB])
@pytest.mark.parametrize("is_linear", [True, False])
def test_the_rest_is_the_probability_of_all_tokens_but_the_candidates(
    is_linear: bool, num_candidates: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Block by block, by 1 less the sum in float64; where all are candidates there is none, and no gradient."""
    monkeypatch.setattr(logit_blocks, "TOKENS_PER_BLOCK", 3)
    monkeypatch.setattr(logit_blocks, "LOGITS_PER_BLOCK", {"cpu": 3 * 7})
    hidden_ND, targets_N, weight_VD = (
        each.detach().double() if each.is_floating_point() else each for each in make_inputs()
    )
    hidden_ND.requires_grad_()
    order_NV = torch.rand(len(targets_N), VOCAB, generator=torch.Generator().manual_seed(2)).argsort(1)
    ids_NK = torch.cat([targets_N[:, None], order_NV[:, :num_candidates]], 1)
    if is_linear:
        logprobs_NX, _ = linear_logprobs(hidden_ND, ids_NK, LinearHead(weight_VD))
    else:
        logprobs_NX, _ = token_logprobs(hidden_ND, ids_NK, lambda hidden: hidden @ weight_VD.T, VOCAB)
    expected_NV = (hidden_ND @ weight_VD.T).log_softmax(-1)
    torch.testing.assert_close(logprobs_NX[:, :-1], expected_NV.gather(1, ids_NK))
    rest_N = 1 - expected_NV.gather(1, ids_NK[:, 1:]).exp().sum(1)
    torch.testing.assert_close(logprobs_NX[:, -1].exp(), rest_N, rtol=0, atol=1e-12)
    (found_ND,) = torch.autograd.grad(logprobs_NX[:, -1].exp().sum(), hidden_ND, retain_graph=True)
    (expected_ND,) = torch.autograd.grad(rest_N.sum(), hidden_ND)
    torch.testing.assert_close(found_ND, expected_ND, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("cap", [None, 2.0])
@pytest.mark.parametrize("scale", [1.0, 0.3])
def test_a_linear_head_in_double_precision_is_exact(scale: float, cap: float | None) -> None:
    hidden_ND, targets_N, weight_VD = (
        tensor.detach().double() if tensor.is_floating_point() else tensor for tensor in make_inputs()
    )
    inputs = (hidden_ND.requires_grad_(), weight_VD.requires_grad_())
    assert torch.autograd.gradcheck(
        lambda hidden, weight: linear_logprobs(hidden, targets_N, LinearHead(weight, scale=scale, cap=cap), 0.8, True),
        inputs,
    )


def test_a_frozen_head_gets_no_gradient_and_the_hidden_states_the_same() -> None:
    hidden_ND, targets_N, weight_VD = make_inputs()
    linear_logprobs(hidden_ND, targets_N, LinearHead(weight_VD))[0].sum().backward()
    expected, hidden_ND.grad = hidden_ND.grad, None
    linear_logprobs(hidden_ND, targets_N, LinearHead(weight_VD.detach()))[0].sum().backward()
    assert expected is not None and hidden_ND.grad is not None
    assert torch.equal(expected, hidden_ND.grad)


def test_only_the_entropy_may_be_asked_for_its_gradient() -> None:
    hidden_ND, targets_N, weight_VD = make_inputs()
    linear_logprobs(hidden_ND, targets_N, LinearHead(weight_VD), entropy_gradient=True)[1].sum().backward()
    generic_ND = hidden_ND.detach().clone().requires_grad_()
    token_logprobs(generic_ND, targets_N, lambda hidden: hidden @ weight_VD.T, VOCAB, entropy_gradient=True)[
        1
    ].sum().backward()
    assert hidden_ND.grad is not None and generic_ND.grad is not None
    torch.testing.assert_close(hidden_ND.grad, generic_ND.grad, rtol=1e-5, atol=1e-5)


def test_a_linear_head_under_autocast_multiplies_in_bfloat16_and_sums_in_float32() -> None:
    hidden_ND, targets_N, weight_VD = make_inputs()
    generic_ND, generic_VD = (tensor.detach().clone().requires_grad_() for tensor in (hidden_ND, weight_VD))
    upstream_N = torch.linspace(-1, 2, NUM_TOKENS)
    with torch.autocast("cpu", torch.bfloat16):
        ours_N, _ = linear_logprobs(hidden_ND, targets_N, LinearHead(weight_VD))
        theirs_N, _ = token_logprobs(generic_ND, targets_N, lambda hidden: (hidden @ generic_VD.T).float(), VOCAB)
    assert ours_N.dtype == torch.float32
    torch.testing.assert_close(ours_N, theirs_N, rtol=1e-6, atol=1e-6)
    (ours_N * upstream_N).sum().backward()
    (theirs_N * upstream_N).sum().backward()
    for actual, expected in ((hidden_ND.grad, generic_ND.grad), (weight_VD.grad, generic_VD.grad)):
        assert actual is not None and expected is not None and actual.dtype == torch.float32
        assert (actual - expected).norm() < 0.01 * expected.norm()


def test_very_unequal_logits_neither_overflow_nor_lose_the_entropy() -> None:
    logits_NV = torch.tensor([[1000.0, 0.0, 999.0, -1000.0], [-5e4, -5e4, -5e4, -5e4]])
    logprobs_N, entropy_N = linear_logprobs(logits_NV, torch.tensor([0, 1]), LinearHead(torch.eye(4)))
    assert logprobs_N.tolist() == pytest.approx([-0.3132617, -1.3862944])
    assert entropy_N.tolist() == pytest.approx([0.5822031, 1.3862944])


def test_a_head_with_adapters_goes_the_generic_way() -> None:
    from peft import LoraConfig, get_peft_model

    model: Any = random_policy()
    assert linear_head(model) is not None
    adapted: Any = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "lm_head"], init_lora_weights=False))
    assert linear_head(adapted) is None
    rollout = make_rollout([3, 4], [5, 6, 7])
    actual_N, _ = micro_batch_logprobs(adapted, make_micro_batch([rollout], [0.0]), 1.0)
    torch.testing.assert_close(actual_N.detach(), full_logprobs(adapted, rollout), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("tokens_per_chunk", [1, 7, 22, 23, 24, 1000])
@pytest.mark.parametrize("temperature", [1.0, 0.7, 2.5])
def test_values_and_gradients_are_those_of_the_full_logits(
    monkeypatch: pytest.MonkeyPatch, tokens_per_chunk: int, temperature: float
) -> None:
    monkeypatch.setattr(forward, "LOGITS_PER_CHUNK", tokens_per_chunk * VOCAB)
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


def test_the_head_never_sees_more_than_a_chunk_and_runs_again_in_the_backward_pass(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(forward, "LOGITS_PER_CHUNK", 10 * VOCAB + 5)
    hidden_ND, targets_N, weight_VD = make_inputs()
    head = CountingHead(weight_VD)
    logprobs_N, _ = token_logprobs(hidden_ND, targets_N, head, VOCAB)
    assert head.sizes == [10, 10, 3]
    logprobs_N.sum().backward()
    assert sorted(head.sizes) == [3, 3, 10, 10, 10, 10]


def test_a_vocabulary_larger_than_a_chunk_goes_one_token_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forward, "LOGITS_PER_CHUNK", VOCAB - 1)
    hidden_ND, targets_N, weight_VD = make_inputs(3)
    head = CountingHead(weight_VD)
    with torch.no_grad():
        token_logprobs(hidden_ND, targets_N, head, VOCAB)
    assert head.sizes == [1, 1, 1]


def test_no_token_at_all_still_gives_every_weight_a_gradient_of_zero() -> None:
    hidden_ND, targets_N, weight_VD = make_inputs(0)
    logprobs_N, entropy_N = token_logprobs(hidden_ND, targets_N, CountingHead(weight_VD), VOCAB)
    assert logprobs_N.shape == entropy_N.shape == (0,)
    logprobs_N.sum().backward()
    assert hidden_ND.grad is not None and hidden_ND.grad.shape == (0, HIDDEN)
    assert weight_VD.grad is not None and weight_VD.grad.abs().max() == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("is_tied", [False, True])
def test_a_head_that_keeps_its_gradient_ends_with_the_same_and_runs_its_hooks(
    monkeypatch: pytest.MonkeyPatch, is_tied: bool, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(logit_blocks, "TOKENS_PER_BLOCK", 3)
    monkeypatch.setattr(logit_blocks, "LOGITS_PER_BLOCK", {"cpu": 40})
    _, targets_N, weight_VD = make_inputs()
    gradients, calls = [], []
    for keeps_gradient in (False, True):
        weight = torch.nn.Parameter(weight_VD.detach().to(dtype))
        weight.register_post_accumulate_grad_hook(lambda _: calls.append(1))
        for _ in range(2):  # the second adds to the first
            hidden_ND = embedding(targets_N.flip(0), weight) if is_tied else make_inputs()[0].to(dtype)
            head = LinearHead(weight, keeps_gradient=keeps_gradient, is_tied=is_tied)
            linear_logprobs(hidden_ND, targets_N, head)[0].sum().backward()
        gradients.append(weight.grad)
    assert len(calls) == 4
    tolerance = {torch.float32: 1e-6, torch.bfloat16: 1e-2, torch.float64: 1e-12}[dtype]
    torch.testing.assert_close(gradients[1], gradients[0], rtol=tolerance, atol=tolerance)


def test_the_head_of_a_policy_keeps_its_gradient_while_there_is_one() -> None:
    model: Any = random_policy()
    head = linear_head(model)
    assert head is not None and head.keeps_gradient
    assert head.is_tied == (model.get_input_embeddings().weight is head.weight_VD)
    with torch.no_grad():
        assert not cast(LinearHead, linear_head(model)).keeps_gradient
    head.weight_VD.requires_grad_(False)
    assert not cast(LinearHead, linear_head(model)).keeps_gradient
