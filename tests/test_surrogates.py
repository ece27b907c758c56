"""Surrogates that TRL has not, beside a float64 reference: the formula of the source, one token after another.

The references are written with the standard library from the formulas (GPPO: arXiv 2508.07629 and its README; DCPO:
arXiv 2509.02333 and its README; dual clip: arXiv 1912.09729, eq. 5). Each gives the loss of a token and its
derivative by the log-prob.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest
import torch
from hand_made import make_tokens

from lit_grpo.trajectory import OBSERVED, Trajectory
from lit_grpo.update.objective.objective import Objective
from lit_grpo.update.objective.tokens import Tokens, completion_means, completion_sums, log_ratios, spread

Token = tuple[float, float]
LOW, HIGH, C = 0.2, 0.28, 3.0


def clip_reference(ratio: float, advantage: float, low: float, high: float, c: float) -> Token:
    """PPO's clip between two bounds, and dual clip beyond ``c``."""
    if advantage >= 0:
        return (-advantage * ratio, -advantage * ratio) if ratio <= high else (-advantage * high, 0.0)
    if ratio < low:
        return -advantage * low, 0.0
    return (-advantage * ratio, -advantage * ratio) if ratio <= c else (-advantage * c, 0.0)


def dual_clip_reference(logprob: float, old: float, advantage: float) -> Token:
    return clip_reference(math.exp(logprob - old), advantage, 1 - LOW, 1 + HIGH, C)


def gppo_reference(logprob: float, old: float, advantage: float) -> Token:
    """The value of the clip; where it clips, the derivative is the bound times the advantage."""
    ratio = math.exp(logprob - old)
    value, slope = clip_reference(ratio, advantage, 1 - LOW, 1 + HIGH, C)
    if advantage >= 0 and ratio > 1 + HIGH:
        slope = -advantage * (1 + HIGH)
    if advantage < 0 and ratio < 1 - LOW:
        slope = -advantage * (1 - LOW)
    return value, slope


def dcpo_reference(logprob: float, old: float, advantage: float) -> Token:
    q = math.exp(old)
    low = 0.5 + 0.5 * math.sqrt(max(1 - 4 * 0.16 / q, 0.0))
    high = min(0.5 + 0.5 * math.sqrt(1 + 4 * 0.2 / q), 10.0)
    return clip_reference(math.exp(logprob - old), advantage, low, high, 10.0)


REFERENCES: dict[str, tuple[Objective, Callable[[float, float, float], Token]]] = {
    "dual_clip": (Objective(epsilon=LOW, epsilon_high=HIGH, delta=C), dual_clip_reference),
    "gppo": (Objective("gppo", epsilon=LOW, epsilon_high=HIGH), gppo_reference),
    "dcpo": (Objective("dcpo"), dcpo_reference),
}


def tokens_of(rows: list[tuple[float, float, float]], lengths: list[int]) -> Tokens:
    """Tokens with these log-probs, old log-probs and advantages (those of a completion's first token)."""
    logprobs_N, old_N, advantages_N = torch.tensor(rows, dtype=torch.float64).unbind(1)
    starts = [sum(lengths[:row]) for row in range(len(lengths))]
    lengths_C = torch.tensor(lengths)
    advantages_N = spread(advantages_N[starts], lengths_C)
    logprobs_N = logprobs_N.clone().requires_grad_()
    return make_tokens(logprob=logprobs_N, old_logprob=old_N, advantage=advantages_N, length=lengths_C)


def losses_and_gradients(
    objective: Objective, tokens: Tokens
) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    log_ratio_N = log_ratios(tokens, objective.ratio_level)
    loss_N, metrics = objective.recipe.surrogate(log_ratio_N, tokens, **objective.surrogate_parameters)
    loss_N.sum().backward()
    assert tokens.logprobs_N.grad is not None
    return loss_N.tolist(), tokens.logprobs_N.grad.tolist(), metrics


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", REFERENCES)
def test_a_surrogate_and_its_gradient_are_those_of_the_formula(name: str, seed: int) -> None:
    objective, reference = REFERENCES[name]
    rng = random.Random(seed)
    rows = []
    for _ in range(400):
        old = -abs(rng.gauss(0, 2)) - 1e-3
        rows.append((min(old + rng.gauss(0, 1.2), -1e-4), old, rng.gauss(0, 1)))
    losses, gradients, metrics = losses_and_gradients(objective, tokens_of(rows, [1] * len(rows)))
    expected = [reference(*row) for row in rows]
    assert losses == pytest.approx([value for value, _ in expected], rel=1e-12)
    assert gradients == pytest.approx([slope for _, slope in expected], rel=1e-12)
    assert metrics["clip_ratio/low"].sum() > 5 and metrics["clip_ratio/high"].sum() > 5


def test_the_ratio_of_a_sequence_is_the_geometric_mean_of_its_tokens() -> None:
    rows = [(-1.0, -1.5, 1.0), (-2.0, -1.0, 1.0), (-1.0, -4.0, 2.0)]
    ratios = log_ratios(tokens_of(rows, [2, 1]), "sequence").exp().tolist()
    assert ratios == pytest.approx([math.exp(-0.25), math.exp(-0.25), math.exp(3.0)])


def turns_of(rows: list[tuple[float, float, float]], lengths: list[int], turns: list[int]) -> Tokens:
    """The tokens of ``tokens_of`` with this many in each turn."""
    return Tokens(tokens_of(rows, lengths).columns | {"turn_length": torch.tensor(turns)})


@pytest.mark.parametrize("seed", range(4))
def test_the_clip_by_turns_is_that_of_its_formula_one_turn_after_another(seed: int) -> None:
    """Turn-PPO: ``-min(w A, clip(w) A)`` for each token, w the geometric mean of the ratios of its turn."""
    rng = random.Random(seed)
    turns = [[rng.randint(1, 5) for _ in range(rng.randint(1, 4))] for _ in range(30)]
    lengths, flat = [sum(each) for each in turns], [length for each in turns for length in each]
    rows = [(old + rng.gauss(0, 0.6), old, rng.gauss(0, 1)) for old in (-rng.random() for _ in range(sum(flat)))]
    tokens = turns_of(rows, lengths, flat)
    losses, gradients, _ = losses_and_gradients(Objective("dapo", ratio="turn"), tokens)
    wanted_losses, wanted_gradients, begin = [], [], 0
    for length in flat:
        mean = math.fsum(logprob - old for logprob, old, _ in rows[begin : begin + length]) / length
        of_tokens = [
            clip_reference(math.exp(mean), float(tokens.advantages_N[place]), 0.8, 1.2, math.inf)
            for place in range(begin, begin + length)
        ]
        wanted_losses += [loss for loss, _ in of_tokens]
        wanted_gradients += [math.fsum(slope for _, slope in of_tokens) / length] * length
        begin += length
    assert losses == pytest.approx(wanted_losses, rel=1e-12)
    assert gradients == pytest.approx(wanted_gradients, rel=1e-12, abs=1e-15)


def test_a_completion_of_one_turn_has_the_ratio_of_gspo() -> None:
    rows = [(-1.0, -1.5, 1.0), (-2.0, -1.0, 1.0), (-1.0, -4.0, 2.0)]
    for tokens in (tokens_of(rows, [2, 1]), turns_of(rows, [2, 1], [2, 1])):
        assert torch.equal(log_ratios(tokens, "turn"), log_ratios(tokens, "sequence"))
    by_turn = log_ratios(turns_of(rows, [3], [1, 2]), "turn").tolist()
    assert by_turn == pytest.approx([0.5, 1.0, 1.0])


def test_turns_are_counted_by_their_tokens_that_are_trained_on() -> None:
    """Sampled, observed, sampled by two versions, observed, sampled and not trained on."""
    versions = [3, 3, OBSERVED, 4, 5, 5, OBSERVED, OBSERVED, 6]
    trained = [True, True, False, True, True, False, False, False, False]
    trajectory = Trajectory(range(9), [-1.0] * 9, versions, trained)
    assert [len(turn) for turn in trajectory.turns] == [2, 3, 1]
    assert [number for _, _, number in trajectory.places_of_turns] == [2, 2, 0]
    assert trajectory.of_turns([1.0, 2.0, 3.0]).tolist() == [1.0, 1.0, 2.0, 2.0]
    assert Trajectory().places_of_turns == []


def test_sums_and_means_over_completions_take_empty_ones_and_none_at_all() -> None:
    values_N, lengths_C = torch.tensor([1.0, 2.0, 4.0]), torch.tensor([2, 0, 1])
    assert completion_sums(values_N, lengths_C).tolist() == [3, 0, 4]
    assert completion_means(values_N, lengths_C).tolist() == [1.5, 0, 4]
    assert spread(torch.tensor([5.0, 6.0, 7.0]), lengths_C).tolist() == [5, 5, 7]
    nothing = torch.empty(0, dtype=torch.int64)
    assert completion_sums(torch.empty(0), nothing).tolist() == []
