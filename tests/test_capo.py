"""Masks of tokens by a model of curvature: against dense derivatives in float64, and against the learner's gradient."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from test_learner import make_learner, ragged_groups

from lit_grpo.methods import make_plugins
from lit_grpo.methods.capo import Capo, models, preconditioner, slopes_and_variances
from lit_grpo.update.objective.objective import Objective


@pytest.mark.parametrize("advantage", [-1.3, 0.7])
def test_both_models_are_those_of_dense_derivatives(advantage: float) -> None:
    """Gradient, Hessian and Fisher matrix of one token's head by autograd; the vocabulary has 7 tokens."""
    generator = torch.Generator().manual_seed(0)
    weight, factors = (torch.rand(7, 4, generator=generator, dtype=torch.float64) for _ in range(2))
    hidden_ND = torch.randn(5, 4, generator=generator, dtype=torch.float64)
    ids_N = torch.tensor([0, 6, 3, 3, 1])
    slope_N, variance_N = slopes_and_variances(weight, hidden_ND, ids_N, factors).unbind(1)
    change_N, moved_N = models(slope_N, variance_N, torch.full((5,), advantage, dtype=torch.float64))
    for number in range(5):

        def logprobs(flat: torch.Tensor, number: int = number) -> torch.Tensor:
            return (flat.view(7, 4) @ hidden_ND[number]).log_softmax(-1)

        flat = weight.flatten()
        jacobian: Any = torch.autograd.functional.jacobian(logprobs, flat)
        hessian: Any = torch.autograd.functional.hessian(lambda w, n=number: advantage * logprobs(w, n)[ids_N[n]], flat)
        gradient = advantage * jacobian[ids_N[number]]
        step = factors.flatten() * gradient
        fisher = (jacobian.T * logprobs(flat).exp()) @ jacobian
        assert float(change_N[number]) == pytest.approx(float(gradient @ step + step @ hessian @ step / 2), rel=1e-10)
        assert float(moved_N[number]) == pytest.approx(float(step @ fisher @ step / 2), rel=1e-10)


def test_a_preconditioner_makes_the_step_of_adam_without_momentum() -> None:
    weight = torch.nn.Parameter(torch.ones(3, 2, dtype=torch.float64))
    optimizer = torch.optim.AdamW([weight], lr=0.1, betas=(0.0, 0.9), weight_decay=0.0)
    assert preconditioner(optimizer, weight) is None
    for value in (1.0, -2.0, 0.5):
        weight.grad = torch.full_like(weight, value)
        before = weight.detach().clone()
        optimizer.step()
    factors = preconditioner(optimizer, weight)
    assert isinstance(factors, torch.Tensor) and weight.grad is not None
    torch.testing.assert_close(before - factors * weight.grad, weight.detach())
    assert preconditioner(torch.optim.SGD([weight], lr=0.3), weight) == 0.3


def test_the_gradient_is_that_of_the_tokens_within_the_bounds() -> None:
    """Bounds at the median of what the tokens have; those left out stay in the denominator."""
    groups = ragged_groups()
    plain, steps_of_plain = make_learner()
    plain.learn(groups)
    learnt = [(r, r.advantage) for g in groups for r in g.rollouts if r.kept and r.completion.num_trained]
    learner, steps = make_learner(selection=Capo(fisher=math.inf, hessian=math.inf))
    steps.optimizer = torch.optim.SGD(learner.policy.parameters(), lr=0.0)
    learner.learn(groups)
    assert torch.equal(steps.gradients[0], steps_of_plain.gradients[0])
    seen: dict[Any, torch.Tensor] = {}

    def measured(rollouts: Any, what: Any) -> Any:
        seen.update(plain.passes.measure(rollouts, what))
        return seen

    optimizer = torch.optim.SGD(plain.policy.parameters(), lr=0.5)
    Capo().token_mask(learnt, measured, optimizer)
    moved: dict[Any, torch.Tensor] = {}
    for rollout, advantage in learnt:
        slope_T, variance_T = seen[rollout.completion.request.key].double().unbind(1)
        moved[rollout.completion.request.key] = models(slope_T, variance_T, torch.tensor(advantage))[1]
    bound = float(torch.cat(list(moved.values())).median())
    masked, steps_of_masked = make_learner(selection=Capo(fisher=bound, hessian=1e9))
    steps_of_masked.optimizer = torch.optim.SGD(masked.policy.parameters(), lr=0.5)
    steps_of_masked.before_step = lambda: steps_of_masked.optimizer.param_groups[0].update(lr=0.0)
    logs = masked.learn(groups)
    number = sum(len(one) for one in moved.values())
    assert logs["update/kept_share"] == pytest.approx((number // 2 + number % 2) / number, abs=1.5 / number)
    by_hand, steps_by_hand = make_learner(selection=ByHand({key: one <= bound for key, one in moved.items()}))
    by_hand.learn(groups)
    torch.testing.assert_close(steps_of_masked.gradients[0], steps_by_hand.gradients[0])
    assert not torch.allclose(steps_of_masked.gradients[0], steps_of_plain.gradients[0])


class ByHand(Capo):
    """A mask that is given."""

    def __init__(self, given: Any) -> None:
        super().__init__()
        object.__setattr__(self, "given", given)

    def token_mask(self, learnt: Any, measure: Any, optimizer: Any) -> Any:
        return self.given  # pyright: ignore[reportAttributeAccessIssue]


def test_two_choices_of_tokens_and_bounds_of_nothing_are_refused() -> None:
    with pytest.raises(ValueError, match=r"top_entropy_quantile 0\.5 needs all tokens .* Capo leaves tokens out by a"):
        make_learner(objective=Objective(top_entropy_quantile=0.5), selection=Capo())
    with pytest.raises(ValueError, match="fisher must be above 0"):
        Capo(fisher=0.0)
    assert make_plugins(["capo:fisher=0.001"])["capo"] == Capo(0.001)
