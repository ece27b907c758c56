"""Masks of tokens by models of curvature: beside derivatives and an optimizer's own step, and a learner's gradient."""

from __future__ import annotations

import copy
import math
from typing import Any, cast

import pytest
import torch
from hand_made import Unshaped, make_step
from test_learner import make_learner, ragged_groups

from lit_grpo.methods import make_plugins
from lit_grpo.methods.capo import Capo, HeadStep, curvature_models
from lit_grpo.update.objective.objective import Objective
from lit_grpo.update.step import Step


def trained_head(num_steps: int, rows: int = 12) -> tuple[torch.nn.Parameter, torch.optim.Adam]:
    """A head of 4 features, and Adam after so many steps on random gradients of 1e-3."""
    generator = torch.Generator().manual_seed(num_steps)
    weight = torch.nn.Parameter(torch.randn(rows, 4, generator=generator, dtype=torch.float64))
    optimizer = torch.optim.AdamW([weight], lr=0.05, betas=(0.9, 0.99), weight_decay=0.0)
    for _ in range(num_steps):
        weight.grad = 1e-3 * torch.randn(rows, 4, generator=generator, dtype=torch.float64)
        optimizer.step()
    return weight, optimizer


def models_by_autograd(
    weight: torch.Tensor, optimizer: torch.optim.Optimizer, hidden: torch.Tensor, token: int, advantage: float, top: int
) -> tuple[float, float]:
    """The step is the optimizer's own; gradient and Hessian are of ``A pi / pi_old``, Fisher of the sampled token."""
    likeliest = (weight @ hidden).argsort(descending=True)[:top].detach()
    if token not in likeliest:
        likeliest[-1] = token

    def logprob(flat: torch.Tensor) -> torch.Tensor:
        logits = (flat.view_as(weight) @ hidden)[likeliest]
        return logits.log_softmax(-1)[likeliest.tolist().index(token)]

    before = weight.detach().flatten()
    old = logprob(before)

    def surrogate(flat: torch.Tensor) -> torch.Tensor:
        return advantage * (logprob(flat) - old).exp()

    gradient: Any = torch.autograd.functional.jacobian(surrogate, before)
    hessian: Any = torch.autograd.functional.hessian(surrogate, before)
    score: Any = torch.autograd.functional.jacobian(logprob, before)
    moved = torch.nn.Parameter(weight.detach().clone())
    after = type(optimizer)([moved], **{name: optimizer.param_groups[0][name] for name in ("lr", "weight_decay")})
    after.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    moved.grad = -gradient.view_as(moved)
    after.step()
    in_top = torch.zeros_like(moved).index_fill(0, likeliest, 1.0)  # of other rows the momentum alone is left
    step = ((moved.detach() - weight.detach()) * in_top).flatten()
    fisher = torch.outer(score, score)
    return float(gradient @ step + step @ hessian @ step / 2), float(step @ fisher @ step / 2)


@pytest.mark.parametrize("num_steps", [1, 7])
@pytest.mark.parametrize("top", [12, 5])
def test_both_models_are_those_of_derivatives_and_of_the_optimizers_own_step(num_steps: int, top: int) -> None:
    """Late and early, over the whole vocabulary and its likeliest tokens; with two of them not among the likeliest."""
    weight, optimizer = trained_head(num_steps)
    hidden_ND = torch.randn(6, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    ranks_ND = (hidden_ND @ weight.detach().T).argsort(1, descending=True)
    ids_N = torch.stack([ranks_ND[row, rank] for row, rank in enumerate((0, 1, 2, 4, 8, 11))])
    advantages_N = torch.tensor([0.7, -1.3, 0.01, 2.0, 0.7, -0.4], dtype=torch.float64)
    step = HeadStep.of(optimizer, weight)
    assert step is not None
    found_N2 = curvature_models(weight, hidden_ND, ids_N, advantages_N, step, top)
    for found, hidden, token, advantage in zip(found_N2, hidden_ND, ids_N, advantages_N, strict=True):
        expected = models_by_autograd(weight, optimizer, hidden, int(token), float(advantage), top)
        assert found.tolist() == pytest.approx(expected, rel=1e-9)


def test_with_sgd_a_token_moves_the_head_by_its_gradient_and_adams_first_step_is_not_known() -> None:
    weight, adam = trained_head(0)
    assert HeadStep.of(adam, weight) is None
    sgd = torch.optim.SGD([weight], lr=0.05)
    hidden_ND, ids_N = torch.eye(4, dtype=torch.float64), torch.tensor([0, 3, 5, 11])
    advantages_N = torch.tensor([1.0, -1.0, 0.5, 2.0], dtype=torch.float64)
    found_N2 = curvature_models(weight, hidden_ND, ids_N, advantages_N, HeadStep(0.05), 50)
    assert HeadStep.of(sgd, weight) == HeadStep(0.05)
    for row in range(4):
        expected = models_by_autograd(weight, sgd, hidden_ND[row], int(ids_N[row]), float(advantages_N[row]), 50)
        assert found_N2[row].tolist() == pytest.approx(expected, rel=1e-9)


def test_the_gradient_is_that_of_the_tokens_within_the_bounds() -> None:
    """Bounds at the median of what the tokens have; those left out stay in the denominator."""
    groups = ragged_groups()
    plain, steps_of_plain = make_learner()
    plain.learn(groups)
    used = [r for g in groups for r in g.rollouts if r.kept and r.completion.num_trained]
    learner, steps = make_learner(plugins=[Capo(fisher=math.inf, hessian=math.inf)])
    steps.optimizer = torch.optim.SGD(learner.policy.parameters(), lr=0.0)
    learner.learn(groups)
    assert torch.equal(steps.gradients[0], steps_of_plain.gradients[0])
    seen: dict[Any, torch.Tensor] = {}

    def measured(rollouts: Any, what: Any) -> Any:
        seen.update(plain.passes.by_completion(rollouts, what))
        return seen

    optimizer = torch.optim.SGD(plain.policy.parameters(), lr=0.5)
    Capo().on_minibatch(make_step(used, measured, optimizer=optimizer))
    moved = {r.completion.request.key: seen[r.completion.request.key][:, 1] for r in used}
    bound = float(torch.cat(list(moved.values())).median()) * (1 + 1e-9)
    masked, steps_of_masked = make_learner(plugins=[Capo(fisher=bound, hessian=1e9)])
    steps_of_masked.optimizer = torch.optim.SGD(masked.policy.parameters(), lr=0.5)
    steps_of_masked.before_step = lambda: steps_of_masked.optimizer.param_groups[0].update(lr=0.0)
    logs = masked.learn(groups)
    number = sum(len(one) for one in moved.values())
    assert logs["update/kept_share"] == pytest.approx((number // 2 + number % 2) / number, abs=1.5 / number)
    by_hand, steps_by_hand = make_learner(plugins=[ByHand({key: one < bound for key, one in moved.items()})])
    by_hand.learn(groups)
    torch.testing.assert_close(steps_of_masked.gradients[0], steps_by_hand.gradients[0])
    assert not torch.allclose(steps_of_masked.gradients[0], steps_of_plain.gradients[0])


class ByHand(Capo):
    """A mask that is given."""

    def __init__(self, given: Any) -> None:
        super().__init__()
        object.__setattr__(self, "given", given)

    def on_minibatch(self, step: Step) -> None:
        for rollout in step.rollouts:
            step.set("mask", rollout, self.given[rollout.completion.request.key])


def test_two_choices_of_tokens_and_bounds_of_nothing_are_refused() -> None:
    with pytest.raises(ValueError, match=r"top_entropy_quantile 0\.5 needs all tokens .* Capo leaves tokens out by a"):
        make_learner(objective=Objective(top_entropy_quantile=0.5), plugins=[Capo()])
    with pytest.raises(ValueError, match="fisher must be above 0"):
        Capo(fisher=0.0)
    assert make_plugins(["capo:fisher=0.001"])["capo"] == Capo(0.001)


def test_at_the_papers_learning_rate_the_gradient_is_nearly_that_of_plain_grpo() -> None:
    """A simulated step that divides by the moments of the batch's mean gradient leaves a hundredth from update 2 on."""
    norms: dict[bool, list[float]] = {}
    for cut in (False, True):
        learner, steps = make_learner(plugins=[Capo() if cut else Unshaped()])
        steps.optimizer = cast("Any", torch.optim.AdamW(learner.policy.parameters(), lr=1.5e-5, betas=(0.9, 0.99)))
        shares = [learner.learn(ragged_groups()).get("update/kept_share", 1.0) for _ in range(4)]
        norms[cut] = [float(gradient.norm()) for gradient in steps.gradients]
        assert min(shares) > 0.9
    assert norms[True] == pytest.approx(norms[False], rel=0.1)
