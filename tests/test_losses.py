"""The clipped objective, its KL term, and what a token counts."""

from __future__ import annotations

import math

import pytest
import torch
from hand_made import make_tokens

from lit_grpo.update.objective.kl import KLTerm, k3
from lit_grpo.update.objective.objective import Objective
from lit_grpo.update.objective.policy_loss import policy_loss
from lit_grpo.update.objective.recipes import RECIPES, clipped
from lit_grpo.update.objective.tokens import Normalization, StepTotals, log_ratios, token_weights

RATIOS = (0.5, 0.9, 1.0, 1.1, 1.5)  # below, within (three times) and above 0.8 to 1.2


def objective(
    ratios: tuple[float, ...], advantage: float, epsilon: float = 0.2, epsilon_high: float = 0.2
) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    """Losses, gradients by log-prob, and metrics, of tokens sampled with log-prob -1 whose ratios are these."""
    sampled_N = torch.full((len(ratios),), -1.0)
    logprobs_N = (sampled_N + torch.tensor(ratios).log()).requires_grad_()
    lengths_C = torch.tensor([len(ratios)])
    advantages_N = torch.full((len(logprobs_N),), advantage)
    tokens = make_tokens(logprob=logprobs_N, old_logprob=sampled_N, advantage=advantages_N, length=lengths_C)
    loss_N, metrics = clipped(log_ratios(tokens, "token"), tokens, epsilon=epsilon, epsilon_high=epsilon_high)
    loss_N.sum().backward()
    assert logprobs_N.grad is not None
    return loss_N.tolist(), logprobs_N.grad.tolist(), metrics


def test_metrics_tell_which_tokens_were_clipped_and_by_how_much_they_moved() -> None:
    good, bad = objective(RATIOS, advantage=2.0)[2], objective(RATIOS, advantage=-2.0)[2]
    assert good["clip_ratio/high"].tolist() == [0, 0, 0, 0, 1]
    assert good["clip_ratio/low"].tolist() == [0, 0, 0, 0, 0]
    assert bad["clip_ratio/high"].tolist() == [0, 0, 0, 0, 0]
    assert bad["clip_ratio/low"].tolist() == [1, 0, 0, 0, 0]
    assert good["ratio/mean"].tolist() == pytest.approx(RATIOS)
    assert not any(values.requires_grad for values in good.values())


@pytest.mark.parametrize(
    ("normalization", "weights"),
    [
        ("token", [1 / 10, 1 / 10, 1 / 10]),
        ("sequence", [1 / (2 * 4), 1 / (5 * 4), 1 / (1 * 4)]),
        ("constant", [1 / (4 * 16), 1 / (4 * 16), 1 / (4 * 16)]),
        ("sequence_sum", [1 / 4, 1 / 4, 1 / 4]),
    ],
)
def test_token_weights_of_rows_of_2_5_and_1_tokens(normalization: Normalization, weights: list[float]) -> None:
    totals = StepTotals(num_tokens=10, num_sequences=4, max_tokens=16)
    result = token_weights(torch.tensor([2, 5, 1]), totals, normalization)
    assert result.dtype == torch.float32
    assert result.tolist() == pytest.approx(weights)


def test_k3_is_zero_where_the_models_agree_and_positive_elsewhere() -> None:
    logprobs_N = torch.tensor([-1.0, -1.0, -1.0])
    reference_N = logprobs_N + torch.tensor([0.0, math.log(2), -math.log(2)])
    # 2 - ln 2 - 1 and 1/2 + ln 2 - 1
    assert k3(logprobs_N, reference_N).tolist() == pytest.approx([0.0, 0.30685282, 0.19314718])


@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("log_ratio", [90.0, -90.0])
@pytest.mark.parametrize("name", sorted(RECIPES))
def test_a_log_ratio_that_float32_cannot_raise_costs_no_step(name: str, log_ratio: float, advantage: float) -> None:
    """``exp(90)`` is infinite in float32; as in verl the log-ratio of such a token is cut at 20, without a gradient."""
    logprobs_N = torch.tensor([-1.0, min(log_ratio, 0.0) - 1, -1.0], requires_grad=True)
    old_N = torch.tensor([-1.2, -max(log_ratio, 0.0) - 1, -0.9])
    tokens = make_tokens(
        logprob=logprobs_N,
        old_logprob=old_N,
        entropy=torch.zeros(3),
        advantage=torch.full((3,), advantage),
        length=torch.tensor([1, 1, 1]),
        reference_logprob=logprobs_N.detach() + torch.tensor([0.0, 90.0, 0.0]),
    )
    objective = Objective(name, kl=KLTerm(0.1, importance_weighted=True))
    loss, metrics, *_ = policy_loss(tokens, objective, StepTotals(3, 3, 12))
    loss.backward()
    assert loss.isfinite() and logprobs_N.grad is not None and logprobs_N.grad.isfinite().all()
    assert metrics["ratio/clamped"].tolist() == [0.0, 1.0, 0.0]
