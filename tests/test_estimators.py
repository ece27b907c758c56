"""Advantage estimators beside the group's mean: the formulas with the standard library, and every edge case."""

from __future__ import annotations

import itertools
import math
import random
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hand_made import as_groups, make_rollout

from lit_grpo.budgets.history import PromptHistory, Visit
from lit_grpo.compatibility import check_together
from lit_grpo.update.advantages.estimator import ESTIMATORS, Advantages, GroupRewards
from lit_grpo.update.advantages.functions import (
    globally_normalized_advantages,
    leave_one_out_advantages,
    mean_normalized_advantages,
    median_advantages,
    per_reward_advantages,
    virtual_maximum_advantages,
)
from lit_grpo.update.advantages.smoothing import smoothed_advantages
from lit_grpo.update.objective.kl import KLTerm

NAN = math.nan
Rewards = list[list[float]]


def rows(function: Callable[..., torch.Tensor], rewards_PG: torch.Tensor, *options: Any) -> torch.Tensor:
    """What a function of ragged groups makes of groups of one size; a row each."""
    groups_R = torch.arange(len(rewards_PG)).repeat_interleave(rewards_PG.shape[1])
    return function(rewards_PG.flatten(0, 1), groups_R, *options).view(rewards_PG.shape[:2])


def tensor(rewards: Any) -> torch.Tensor:
    return torch.tensor(rewards, dtype=torch.float64)


def assert_close(actual: torch.Tensor, expected: Any, rtol: float = 1e-9) -> None:
    torch.testing.assert_close(actual, tensor(expected), rtol=rtol, atol=1e-12, equal_nan=True)


def of(estimator: str) -> Callable[[Rewards], torch.Tensor]:
    """The estimator as the module calls it, on float32: one reward function, of weight 1, and no earlier visit."""

    def compute(rewards: Rewards) -> torch.Tensor:
        def compute_flat(rewards_R: torch.Tensor, groups_R: torch.Tensor) -> torch.Tensor:
            prompt_ids = [f"train/{row}" for row in range(len(rewards))]
            groups = GroupRewards(rewards_R, rewards_R[:, None], groups_R, prompt_ids)
            return Advantages(estimator).compute(groups, torch.ones(1), PromptHistory())

        return rows(compute_flat, torch.tensor(rewards))

    return compute


# ---- edge cases of all of them -------------------------------------------------------------------------


@pytest.mark.parametrize("value", [0.1, 1 / 3, 0.0, 1.0])
@pytest.mark.parametrize("size", [2, 3, 7, 16])
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_equal_rewards_teach_nothing_but_what_ngrpo_says_of_failure(estimator: str, size: int, value: float) -> None:
    result = of(estimator)([[value] * size, [value] * size])
    if estimator == "ngrpo" and value < 1:
        assert (result < 0).all()
    else:
        assert (result.nan_to_num(0.0) == 0).all()
    assert int(result.isnan().sum()) == (2 if estimator == "mc_grpo" and size % 2 else 0)  # the median itself


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_missing_rewards_take_no_part(estimator: str) -> None:
    rewards = [[1.0, 0.0, 0.25, 0.5], [0.0, 0.0, 0.75, 0.5]]
    full = of(estimator)(rewards)
    with_gaps = of(estimator)([[NAN, *row[:2], NAN, *row[2:]] for row in rewards])
    assert with_gaps[:, [0, 3]].isnan().all()
    torch.testing.assert_close(with_gaps[:, [1, 2, 4, 5]], full, rtol=1e-6, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_a_group_without_rewards_harms_no_other(estimator: str) -> None:
    group = [1.0, 0.0, 0.25, 0.5]
    result = of(estimator)([[NAN] * 4, group])
    assert result[0].isnan().all()
    torch.testing.assert_close(result[1:], of(estimator)([group]), rtol=1e-12, atol=0, equal_nan=True)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_the_order_of_members_and_groups_does_not_matter(estimator: str) -> None:
    rewards = [[0.1, 0.9, NAN, 0.4], [1.0, 0.0, 0.2, 0.6]]
    expected = of(estimator)(rewards)
    for groups in itertools.permutations(range(2)):
        for members in itertools.permutations(range(4)):
            result = of(estimator)([[rewards[group][member] for member in members] for group in groups])
            original = expected[list(groups)][:, list(members)]
            torch.testing.assert_close(result, original, rtol=1e-6, atol=1e-6, equal_nan=True)


# ---- each by itself ------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
def test_rloo_is_the_reward_minus_the_mean_of_the_others(seed: int) -> None:
    rng = random.Random(seed)
    rewards = [[rng.gauss(0, 2) for _ in range(rng.randint(2, 20))]]
    (row,) = rewards
    expected = [value - statistics.fmean(row[:i] + row[i + 1 :]) for i, value in enumerate(row)]
    assert_close(rows(leave_one_out_advantages, tensor(rewards)), [expected])
    deviation = statistics.stdev(row) + 1e-4
    assert_close(rows(leave_one_out_advantages, tensor(rewards), "group"), [[value / deviation for value in expected]])


@pytest.mark.parametrize(
    ("scale", "row", "advantages"),
    [
        ("mad", [1, 0, 0.5, 0.25, 0.75], [1.99203187, -1.99203187, NAN, -0.99601594, 0.99601594]),
        ("mad", [0.5, 0.5, 1, 0, 0.25], [NAN, 0.0, 1.99203187, -1.99203187, -0.99601594]),
        ("mad_nonzero", [1, 0, 0.5, 0.25, 0.75], [2.49003984, -2.49003984, NAN, -1.24501992, 1.24501992]),
        ("mad_nonzero", [0.5, 0.5, 1, 0, 0.25], [NAN, 0.0, 3.32005312, -3.32005312, -1.66002656]),
    ],
)
def test_mc_grpo_is_that_of_its_two_trainers(scale: str, row: list[float], advantages: list[float]) -> None:
    """Printed by grpo_trainer_math.py and grpo_trainer_gsm.py of lotusroot-kim/MC-GRPO at da07745."""
    assert rows(median_advantages, tensor([row]), scale)[0].tolist() == pytest.approx(advantages, abs=1e-8, nan_ok=True)


@pytest.mark.parametrize("size", [3, 5, 9])
def test_where_the_median_distance_is_zero_mc_grpo_divides_by_the_mean_distance(size: int) -> None:
    """Every odd group of zeros and ones: the formula with its 1e-3 alone would give 1000."""
    rewards = [1.0] + [0.0] * (size - 1)
    result = rows(median_advantages, tensor([rewards]))[0]
    assert float(result[0]) == pytest.approx(1 / (1 / size + 1e-3))
    assert int(result.isnan().sum()) == 1 and result[1:].nan_to_num(0.0).tolist() == [0.0] * (size - 1)


@pytest.mark.parametrize(("size", "chance"), [(2, 0.5), (4, 0.1), (8, 0.02)])
def test_the_expected_step_of_maxrl_is_the_gradient_of_a_truncated_log_likelihood(size: int, chance: float) -> None:
    """The gradient of log p = - sum over k of (1 - p)^k / k, cut after order n - 1 (arXiv 2602.02710, section 3).

    All groups of rewards 0 and 1 are enumerated; p is the logistic function of its one parameter.
    """
    outcomes = tensor(list(itertools.product((0, 1), repeat=size)))
    likelihood_P = torch.where(outcomes == 1, chance, 1 - chance).prod(1)
    step_P = (rows(mean_normalized_advantages, outcomes) * (outcomes - chance)).mean(1)  # grad log pi is r - p
    truncated = sum((1 - chance) ** (k - 1) for k in range(1, size))
    of_all = (likelihood_P * step_P).sum()
    assert float(of_all) == pytest.approx(chance * (1 - chance) * float(truncated), rel=1e-6)


def test_maxrl_is_that_of_its_authors_and_refuses_penalties() -> None:
    """By hand after compute_p_normalization_outcome_advantage of tajwarfahim/maxrl at 7db6bb9, which adds 1e-6."""
    rewards = [[1, 0, 0, 0], [1, 1, 1, 0], [0, 0, 0, 0], [0.5, 0.25, 0, 1]]
    expected = [[3, -1, -1, -1], [1 / 3, 1 / 3, 1 / 3, -1], [0] * 4, [1 / 7, -3 / 7, -1, 9 / 7]]
    actual = of("maxrl")([[float(value) for value in row] for row in rewards])
    assert actual.flatten().tolist() == pytest.approx([each for row in expected for each in row], abs=1e-4)
    with pytest.raises(ValueError, match=r"has reward -0\.5; use reward functions without negative values"):
        of("maxrl")([[1.0, -0.5]])


@pytest.mark.parametrize("baseline", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_reinforce_plus_plus_is_normalized_over_the_whole_step(seed: int, baseline: bool) -> None:
    rng = random.Random(seed)
    groups = [[rng.gauss(number, 2) for _ in range(rng.randint(1, 9))] for number in range(rng.randint(2, 6))]
    values = [value - baseline * statistics.fmean(group) for group in groups for value in group]
    mean, deviation = statistics.fmean(values), statistics.stdev(values)
    groups_R = torch.tensor([number for number, group in enumerate(groups) for _ in group])
    result = globally_normalized_advantages(tensor([v for group in groups for v in group]), groups_R, baseline)
    assert_close(result, [(value - mean) / (deviation + 1e-4) for value in values])


@pytest.mark.parametrize("estimator", ["reinforce_plus_plus", "reinforce_plus_plus_baseline"])
def test_statistics_over_tokens_are_of_all_ranks_and_of_completions_with_a_reward(estimator: str) -> None:
    def compute(rewards: Sequence[float]) -> torch.Tensor:
        rollouts = [
            make_rollout((3,), [4] * length, reward, prompt_id=str(number // 3), sample_id=number)
            for number, (length, reward) in enumerate(zip((1, 5, 2, 9, 3, 4), rewards, strict=True))
        ]
        ranks = [GroupRewards.of([group], []) for group in as_groups(rollouts)]
        batch = GroupRewards.concatenate(ranks)
        return Advantages(estimator, "tokens").compute(batch, torch.empty(0), PromptHistory())

    found_R = compute([1.0, 0.0, 0.25, NAN, 0.5, 1.0])
    assert found_R.isnan().tolist() == [False, False, False, True, False, False]
    of_tokens_N = found_R[[0, 1, 2, 4, 5]].double().repeat_interleave(torch.tensor([1, 5, 2, 3, 4]))
    assert float(of_tokens_N.mean()) == pytest.approx(0, abs=1e-6)
    assert float(of_tokens_N.var(unbiased=False)) == pytest.approx(1, abs=1e-6)
    assert compute([1 / 3] * 6).tolist() == [0.0] * 6
    assert compute([NAN] * 6).isnan().all()


def test_a_reward_above_the_maximum_is_an_error() -> None:
    with pytest.raises(
        ValueError, match=r"advantages\.max_reward is 1\.0, but a completion has reward 1\.5; set it to"
    ):
        rows(virtual_maximum_advantages, tensor([[0.0, 1.5, NAN]]), 1.0)


def gdpo_reference(rewards: list[list[list[float]]], weights: list[float]) -> list[list[float]]:
    """GDPO by the standard library; functions that gave nothing (NaN) add nothing."""

    def present(values: list[float]) -> list[float]:
        return [value for value in values if not math.isnan(value)]

    summed: list[list[float]] = []
    for group in rewards:
        row = []
        for member in group:
            terms = []
            for k, value in enumerate(member):
                others = present([other[k] for other in group])
                deviation = statistics.stdev(others) if len(others) > 1 else 0.0
                if not math.isnan(value):
                    terms.append(weights[k] * (value - statistics.fmean(others)) / (deviation + 1e-4))
            row.append(sum(terms) if terms else NAN)
        summed.append(row)
    everything = present([value for row in summed for value in row])
    mean, deviation = statistics.fmean(everything), statistics.stdev(everything)
    return [[(value - mean) / (deviation + 1e-4) for value in row] for row in summed]


@pytest.mark.parametrize("seed", range(5))
def test_gdpo_normalizes_each_reward_function_by_itself(seed: int) -> None:
    rng = random.Random(seed)

    def draw(scale: float) -> float:
        return NAN if rng.random() < 0.15 else rng.gauss(0, scale)

    rewards = [[[draw(1.0), draw(100.0), draw(0.01)] for _ in range(6)] for _ in range(4)]
    weights = [1.0, 0.5, 2.0]
    result = rows(per_reward_advantages, tensor(rewards), tensor(weights))
    assert_close(result, gdpo_reference(rewards, weights), rtol=1e-8)


# ---- DCPO: earlier visits ------------------------------------------------------------------------------


def smoothed(history: PromptHistory, rewards: Rewards) -> torch.Tensor:
    """Advantages of a visit of as many prompts as there are rows, which is counted then."""
    prompt_ids = [f"train/{row}" for row in range(len(rewards))]
    advantages = rows(smoothed_advantages, tensor(rewards), prompt_ids, history)
    number = history["train/0"].num_visits
    seen = zip(prompt_ids, rewards, strict=True)
    history.note([Visit(prompt_id, number, row, 0, len(row), 0) for prompt_id, row in seen])
    history.commit()
    return advantages


def test_a_visit_without_rewards_does_not_count() -> None:
    history = PromptHistory()
    smoothed(history, [[0.0, 1.0]])
    assert smoothed(history, [[NAN, NAN]]).isnan().all()
    known = history["train/0"]
    assert (known.num_visits, known.mean, known.deviation) == pytest.approx((1, 0.5, math.sqrt(0.5)))


# ---- GiGPO: steps --------------------------------------------------------------------------------------


# ---- the configuration ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"estimator": "ppo"}, r"advantages\.estimator must be one of grpo, rloo, .*, not 'ppo'"),
        (
            {"estimator": "math.pi"},
            r"must be one of grpo, .* or the import path of an EstimatorRow .*, not 'math\.pi'",
        ),
        (
            {"estimator": "no_such_file.ROW"},
            r"no_such_file\.ROW cannot be loaded \(No module named 'no_such_file'\)",
        ),
        ({"scale": "std"}, r"advantages\.scale must be one of group, batch, none for estimator grpo, not 'std'"),
        ({"estimator": "mc_grpo", "scale": "group"}, r"must be one of mad, mad_nonzero, none for estimator mc_grpo"),
        ({"estimator": "gdpo", "scale": "none"}, r"must be one of batch for estimator gdpo"),
    ],
)
def test_an_estimator_that_cannot_be_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Advantages(**options)


def test_a_median_of_two_is_refused_and_a_kl_term_where_rewards_have_no_room_for_it() -> None:
    with pytest.raises(ValueError, match=r"num_generations is 2, but of two .*; set it to at least 3, or .* rloo"):
        Advantages("mc_grpo").check(2)
    for estimator in ("gdpo", "ngrpo"):
        said = (
            rf"estimator {estimator} needs rewards without a KL term, but .*kl\.place reward takes .*; set .* to loss"
        )
        with pytest.raises(ValueError, match=said):
            check_together([*KLTerm(0.1, place="reward").parts, *Advantages(estimator).parts])
    Advantages("mc_grpo").check(3)
    check_together([*KLTerm(0.1, place="reward").parts, *Advantages("mc_grpo").parts])
