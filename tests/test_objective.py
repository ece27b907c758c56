"""The objective as a whole: what splitting must not change, its terms, and what is refused."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hand_made import make_tokens, step_of
from test_learner import make_learner

from lit_grpo.budgets.history import Visit
from lit_grpo.methods.entropy_target import EntropyTarget
from lit_grpo.plugins import GroupBatch, fresh
from lit_grpo.types import PassRule
from lit_grpo.update.metrics import gap_metrics, gap_sums
from lit_grpo.update.objective.corrections import Correction, correction_weights
from lit_grpo.update.objective.kl import KLTerm, k1, k2, k3
from lit_grpo.update.objective.objective import EntropyBonus, Objective
from lit_grpo.update.objective.policy_loss import policy_loss
from lit_grpo.update.objective.recipes import RECIPES
from lit_grpo.update.objective.tokens import StepTotals, Tokens, entropy_threshold, on_policy_completions, spread

EVERYTHING: dict[str, Any] = {
    "kl": KLTerm(0.1, "k2", importance_weighted=True),
    "entropy": EntropyBonus(0.02),
    "top_entropy_quantile": 0.5,
    "off_policy_threshold": 0.1,
    "off_policy_kl": 0.4,
}


def random_tokens(lengths: list[int], seed: int = 0) -> Tokens:
    """Ragged float64 tokens with all log-probs that an objective can ask for."""
    random = torch.Generator().manual_seed(seed)

    def normal(count: int) -> torch.Tensor:
        return torch.randn(count, generator=random, dtype=torch.float64)

    total = sum(lengths)
    old_N = -normal(total).abs() - 0.1
    return make_tokens(
        logprob=(old_N + 0.5 * normal(total)).requires_grad_(),
        sampled_logprob=old_N + 0.3 * normal(total),
        old_logprob=old_N,
        entropy=normal(total).abs().requires_grad_(),
        advantage=spread(normal(len(lengths)), torch.tensor(lengths)),
        length=torch.tensor(lengths, dtype=torch.int64),
        reference_logprob=old_N + 0.5 * normal(total),
    )


def having(tokens: Tokens, **columns: torch.Tensor) -> Tokens:
    """These tokens with other values of some columns."""
    return Tokens(tokens.columns | columns)


def cut(tokens: Tokens, rows: list[int]) -> Tokens:
    """These completions alone, with the same leaves."""
    parts_N = torch.arange(len(tokens.logprobs_N)).split(tokens.lengths_C.tolist())
    places_N = torch.cat([torch.empty(0, dtype=torch.int64), *(parts_N[row] for row in rows)])
    return Tokens({name: its[rows if name == "length" else places_N] for name, its in tokens.columns.items()})


LENGTHS = [3, 1, 7, 2, 5, 4]
SPLITS = [[[0, 1, 2, 3, 4, 5]], [[5], [4], [3], [2], [1], [0]], [[2, 0], [], [1, 5, 3, 4]]]
COMPOSED = {name: Objective(name) for name in RECIPES} | {
    f"{name}_with_everything": Objective(
        name,
        correction=Correction("token_mask" if name == "vespo" else "sequence_truncate", 0.5, 2.0),
        **EVERYTHING,
    )
    for name in RECIPES
}
COMPOSED["geometric"] = Objective(correction=Correction("geometric_mask", 0.9, 1.1))


@pytest.mark.parametrize("name", COMPOSED)
def test_loss_and_gradient_do_not_depend_on_how_a_step_is_split(name: str) -> None:
    objective = COMPOSED[name]
    results = []
    for split in SPLITS:
        tokens = random_tokens(LENGTHS)
        entropy_N = tokens.entropy_N.detach()
        mask_N = entropy_N >= entropy_threshold(entropy_N, objective.top_entropy_quantile)
        totals = StepTotals(sum(LENGTHS), len(LENGTHS), 9, int(mask_N.sum()))
        whole = tokens if objective.top_entropy_quantile == 1 else having(tokens, mask=mask_N)
        loss = torch.zeros((), dtype=torch.float64)
        for rows in split:
            loss = loss + policy_loss(cut(whole, rows), objective, totals).loss
        gradients = torch.autograd.grad(loss, [tokens.logprobs_N, tokens.entropy_N], allow_unused=True)
        results.append((loss.detach(), *(torch.zeros(0) if g is None else g for g in gradients)))
    for result in results[1:]:
        for ours, expected in zip(result, results[0], strict=True):
            torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-15)
    assert results[0][1].norm() > 1e-3


@pytest.mark.parametrize("name", ["dapo", "grpo", "dr_grpo", "cispo"])
def test_each_token_has_the_gradient_of_its_own_advantage(name: str) -> None:
    """Where the ratio is 1: minus the advantage, times what a token counts, for two segments of one completion too."""
    tokens = random_tokens([4, 1])
    advantages_N = torch.tensor([2.0, 2.0, -1.0, -1.0, 0.5], dtype=torch.float64)
    on_policy = having(tokens, old_logprob=tokens.logprobs_N.detach(), advantage=advantages_N)
    loss = policy_loss(on_policy, Objective(name), StepTotals(5, 2, 9)).loss
    (gradient_N,) = torch.autograd.grad(loss, tokens.logprobs_N)
    counts = {"grpo": [1 / 8] * 4 + [1 / 2], "dr_grpo": [1 / 18] * 5}.get(name, [1 / 5] * 5)
    assert gradient_N.tolist() == pytest.approx([-a * c for a, c in zip(advantages_N.tolist(), counts, strict=True)])
    assert on_policy.advantages_C.tolist() == [0.5, 0.5]


@pytest.mark.parametrize("name", RECIPES)
def test_on_the_policy_that_sampled_each_objective_has_the_gradient_of_reinforce(name: str) -> None:
    """All of them agree where the ratio is 1: the advantage, times what a token counts."""
    tokens = random_tokens([2, 3])
    on_policy = having(tokens, old_logprob=tokens.logprobs_N.detach())
    objective = Objective(name)
    loss = policy_loss(on_policy, objective, StepTotals(5, 2, 9)).loss
    (gradient_N,) = torch.autograd.grad(loss, tokens.logprobs_N)
    counts_for = {
        "token": [1 / 5] * 5,
        "sequence": [1 / 4] * 2 + [1 / 6] * 3,
        "constant": [1 / 18] * 5,
        "sequence_sum": [1 / 2] * 5,
    }[objective.normalized_by]
    expected_N = -torch.tensor(counts_for, dtype=torch.float64) * tokens.advantages_N
    torch.testing.assert_close(gradient_N, expected_N, rtol=1e-12, atol=0)


@pytest.mark.parametrize("name", COMPOSED)
def test_no_tokens_give_a_loss_of_zero_with_a_graph(name: str) -> None:
    tokens = cut(random_tokens([2]), [])
    tokens = having(tokens, mask=torch.empty(0, dtype=torch.bool)) if "everything" in name else tokens
    loss, metrics, *_ = policy_loss(tokens, COMPOSED[name], StepTotals(0, 0, 9))
    assert loss.detach() == 0 and loss.requires_grad
    assert all(values.shape == (0,) for values in metrics.values())


# ---- terms ---------------------------------------------------------------------------------------------


def test_k1_and_k2_of_literal_numbers() -> None:
    policy_N, reference_N = torch.tensor([-1.0, -2.0, -1.0]), torch.tensor([-1.0, -1.0, -3.0])
    assert k1(policy_N, reference_N).tolist() == [0.0, -1.0, 2.0]
    assert k2(policy_N, reference_N).tolist() == [0.0, 0.5, 2.0]


def test_the_expected_gradient_of_k2_is_that_of_the_divergence_and_of_k1_nothing() -> None:
    """Exactly, over a distribution of four tokens; importance weighted, that of k1 and k3 is right too."""
    logits_V = torch.tensor([0.3, -0.2, 1.0, 0.1], dtype=torch.float64, requires_grad=True)
    reference_V = torch.tensor([0.1, 0.4, 0.2, 0.3], dtype=torch.float64).log()

    def gradient(values_V: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad(values_V.sum(), logits_V, retain_graph=True)[0]

    logprobs_V = logits_V.log_softmax(-1)
    sampled_V = logprobs_V.exp().detach()
    exact = gradient(logprobs_V.exp() * (logprobs_V - reference_V))
    weight_V = (logprobs_V - logprobs_V.detach()).exp()
    torch.testing.assert_close(gradient(sampled_V * k2(logprobs_V, reference_V)), exact)
    torch.testing.assert_close(gradient(sampled_V * k1(logprobs_V, reference_V)), torch.zeros(4, dtype=torch.float64))
    for estimator in (k1, k3):
        torch.testing.assert_close(gradient(sampled_V * weight_V * estimator(logprobs_V, reference_V)), exact)


def test_a_kl_term_without_reference_logprobs_is_an_error() -> None:
    tokens = random_tokens([2])
    del tokens.columns["reference_logprob"]
    with pytest.raises(
        ValueError, match=r"kl\.beta is 0\.1, but there are no reference log-probs; .* set kl\.beta to 0"
    ):
        policy_loss(tokens, Objective(kl=KLTerm(0.1)), StepTotals(2, 1, 9))


def test_a_kl_term_in_the_reward_is_not_in_the_loss() -> None:
    tokens, totals = random_tokens([2, 3]), StepTotals(5, 2, 9)
    with_kl = policy_loss(tokens, Objective(kl=KLTerm(0.5, place="reward")), totals)
    assert torch.equal(with_kl.loss, policy_loss(tokens, Objective(), totals).loss)


def test_a_bad_completion_that_the_policy_has_left_is_masked_and_a_good_one_is_not() -> None:
    sampled_N = torch.tensor([-1.0, -1.0, -1.0, -1.0, -1.0, -1.0])
    logprobs_N = sampled_N - torch.tensor([0.2, 0.0, 0.2, 0.0, 0.3, 0.1])
    advantages_N = torch.tensor([-1.0, -1.0, 1.0, 1.0, -1.0, -1.0])
    lengths_C = torch.tensor([2, 2, 2])
    tokens = make_tokens(logprob=logprobs_N, sampled_logprob=sampled_N, advantage=advantages_N, length=lengths_C)
    assert on_policy_completions(tokens, 0.15).tolist() == [True, True, False]
    assert on_policy_completions(tokens, 0.05).tolist() == [False, True, False]


@pytest.mark.parametrize("share", [0.01, 0.2, 0.5, 0.999, 1.0])
@pytest.mark.parametrize("count", [1, 2, 7, 100])
def test_the_entropy_threshold_is_torchs_quantile(share: float, count: int) -> None:
    entropy_N = torch.rand(count, generator=torch.Generator().manual_seed(count), dtype=torch.float64)
    expected = float(torch.quantile(entropy_N, 1 - share))
    assert entropy_threshold(entropy_N, share) == pytest.approx(expected, rel=1e-12)


def test_no_token_is_above_the_threshold_of_nothing() -> None:
    assert entropy_threshold(torch.empty(0), 0.2) == math.inf


def test_token_weights_correct_an_expectation_over_another_distribution() -> None:
    """Untruncated, the weighted mean over samples of q is the mean over p."""
    p_V, q_V = torch.tensor([0.5, 0.3, 0.2]).double(), torch.tensor([0.2, 0.2, 0.6]).double()
    value_V, one_each = torch.tensor([1.0, -2.0, 4.0]).double(), torch.ones(3, dtype=torch.int64)
    weights_V = correction_weights(p_V.log(), q_V.log(), one_each, Correction("token_truncate", high=None))
    assert float((q_V * weights_V * value_V).sum()) == pytest.approx(float((p_V * value_V).sum()))
    capped_V = correction_weights(p_V.log(), q_V.log(), one_each, Correction("token_truncate", high=2.0))
    masked_V = correction_weights(p_V.log(), q_V.log(), one_each, Correction("token_mask", low=0.5, high=2.0))
    assert capped_V.tolist() == pytest.approx([2.0, 1.5, 1 / 3])
    assert masked_V.tolist() == pytest.approx([0.0, 1.5, 0.0])


def test_the_gap_is_told_by_its_mean_its_divergence_and_effective_sample_sizes() -> None:
    p_V, q_V = torch.tensor([0.5, 0.3, 0.2]).double(), torch.tensor([0.2, 0.2, 0.6]).double()
    counts = torch.tensor([2, 2, 6])  # ten tokens as q has them
    difference_N = (p_V.log() - q_V.log()).repeat_interleave(counts)
    logs = gap_metrics(
        {name: float(v) for name, v in gap_sums(difference_N, torch.ones(10, dtype=torch.int64)).items()}
    )
    divergence = float((q_V * (q_V / p_V).log()).sum())
    weights = (p_V / q_V).repeat_interleave(counts)
    assert logs["sampling/kl"] == pytest.approx(divergence)
    assert logs["sampling/logprob_gap_mean"] == pytest.approx(float(difference_N.abs().mean()))
    assert logs["sampling/ess_token"] == pytest.approx(float(weights.sum() ** 2 / (10 * weights.square().sum())))
    assert logs["sampling/ess_sequence"] == pytest.approx(logs["sampling/ess_token"])
    in_two = gap_sums(difference_N, torch.tensor([9, 1]))
    product = float(weights[:9].prod()), float(weights[9])
    expected = sum(product) ** 2 / (2 * sum(w * w for w in product))
    assert gap_metrics({name: float(v) for name, v in in_two.items()})["sampling/ess_sequence"] == pytest.approx(
        expected
    )


# ---- coefficients that adapt ---------------------------------------------------------------------------


def test_beta_grows_by_at_most_a_fifth_of_its_horizon_and_follows_the_target() -> None:
    """The numbers of verl's AdaptiveKLController, worked out by hand."""
    term, beta = KLTerm(0.1, target=0.5, horizon=100), 0.1
    for kl, num_sequences, expected in (
        (5.0, 50, 0.1 * (1 + 0.2 * 0.5)),  # error 9, held to 0.2
        (0.45, 100, 0.11 * 0.9),  # error -0.1
        (math.nan, 100, 0.11 * 0.9),
        (0.0, 10_000, 0.11 * 0.9 * 0.8),  # a hundred times the horizon
    ):
        beta = term.next_beta(beta, kl, num_sequences)
        assert beta == pytest.approx(expected)
    assert KLTerm(0.1).next_beta(0.1, 5.0, 50) == 0.1


def adaptive(coefficient: float = 0.1) -> EntropyTarget:
    return fresh(EntropyTarget(0.5, coefficient, 0.04, max_coefficient=0.15))


def applied_by(plugin: EntropyTarget) -> float:
    return step_of(plugin, "on_minibatch")["entropy_coefficient"]


def test_the_entropy_coefficient_steps_towards_the_target_and_counts_only_below_it() -> None:
    plugin, batch = adaptive(), GroupBatch([], 1, PassRule(), lambda own: [own])
    assert applied_by(plugin) == 0.0  # nothing measured yet
    applied, coefficients = [], []
    for entropy in (0.4, 0.5, 0.6, 0.6, 0.6, 0.6, math.nan, 0.1):
        step_of(plugin, "on_optimizer_step", entropy=entropy)
        applied.append(applied_by(plugin))
        coefficients.append(plugin.on_update_end(batch)["entropy_coefficient"])
    assert coefficients == pytest.approx([0.14, 0.15, 0.11, 0.07, 0.03, 0.0, 0.0, 0.04])
    assert applied == pytest.approx([0.14, 0.15, 0.0, 0.0, 0.0, 0.0, 0.0, 0.04], rel=1e-12)
    again = adaptive(0.0)
    again.load_state_dict(plugin.state_dict())
    assert applied_by(again) == pytest.approx(0.04) and again.last_entropy == 0.1


@pytest.mark.parametrize("target", [0.5, None])
def test_a_checkpoint_brings_back_what_adapts_and_not_what_is_configured(target: float | None) -> None:
    before = make_learner(objective=Objective(kl=KLTerm(0.1, target=0.5)))[0]
    before.beta = 0.11
    before.history.note([Visit("train/0", 0, [0.0, 1.0], 1, 2, 0)])
    before.history.commit()
    after = make_learner(objective=Objective(kl=KLTerm(0.3, target=target)))[0]
    after.load_state_dict(before.state_dict())
    assert after.beta == (0.3 if target is None else 0.11)
    assert after.history.records == before.history.records


# ---- what is refused -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"loss": "math.pi"},
            r"must be one of .* or the import path of a Recipe of your own.*, not 'math\.pi'",
        ),
        ({"loss": "math.NOPE"}, r"objective\.loss math\.NOPE cannot be loaded \(.*NOPE.*\); give one of grpo"),
        ({"loss": "sapo", "epsilon": 0.2}, r"epsilon has no meaning for loss sapo; .* temperature_positive"),
        ({"loss": "cispo", "epsilon": 0.2}, r"epsilon has no meaning for loss cispo; .* epsilon_high"),
        ({"parameters": {"k_positive": 2.0}}, r"objective.parameters.k_positive has no meaning for loss dapo"),
        ({"loss": "sapo", "parameters": {"temperature_negative": 0.0}}, r"temperature_negative must be above 0"),
        (
            {"parameters": {"epsilon": 0.1}},
            r"parameters has epsilon, .* set model.objective.epsilon",
        ),
        (
            {"loss": "sapo", "parameters": {"temperature_negative": "hot"}},
            r"must be a finite number above 0, not 'hot'",
        ),
        ({"loss": "cispo", "epsilon_high": 0.28}, r"largest weight itself.* what verl calls 0\.28 is 1\.28 here"),
        ({"delta": 1.1}, r"delta is 1\.1, inside the clip range, which ends at 1\.2; set it above"),
        (
            {"ratio": "sequence"},
            r"ratio sequence needs .* by itself.*normalization token adds up tokens; .* to gspo or luspo",
        ),
        (
            {"normalization": "sequence_sum"},
            r"sequence_sum needs one ratio .*objective\.ratio token takes one for each .*; take constant",
        ),
        (
            {"loss": "vespo", "ratio": "sequence"},
            r"vespo needs a ratio .*each token, .*; set model\.objective\.ratio to token",
        ),
        (
            {"loss": "luspo", "ratio": "token"},
            r"luspo needs a ratio .*all tokens of .*; set model\.objective\.ratio to sequence",
        ),
    ],
)
def test_an_objective_that_means_something_else_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Objective(**options)


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (
            KLTerm,
            {"beta": 0.1, "estimator": "k1"},
            r"estimator k1 has one of 0 there; take k3 or k2",
        ),
        (
            KLTerm,
            {"beta": 0.1, "place": "reward", "importance_weighted": True},
            r"takes it from the reward, which has no gradient",
        ),
        (
            KLTerm,
            {"target": 0.1},
            r"kl\.target 0\.1 needs a KL term, but .*beta 0\.0 leaves it out",
        ),
        (KLTerm, {"place": "reward"}, r"needs a KL term, but .* set model\.objective\.kl\.beta above 0"),
        (
            Correction,
            {"mode": "token_mask", "low": 4.0},
            r"correction\.low must be below high, 3\.0, not 4\.0",
        ),
    ],
)
def test_a_term_that_cannot_be_is_refused(make: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(**options)


def test_epsilon_set_alone_holds_on_both_sides() -> None:
    assert Objective(epsilon=0.3).surrogate_parameters == {"epsilon": 0.3, "epsilon_high": 0.3, "delta": None}
    assert Objective(epsilon=0.3, epsilon_high=0.0).surrogate_parameters["epsilon_high"] == 0.0
    assert Objective("gspo").surrogate_parameters == {"epsilon": 3e-4, "epsilon_high": 4e-4, "delta": None}
    assert Objective("gspo", epsilon=0.1).surrogate_parameters["epsilon_high"] == 0.1
    assert Objective("gspo", epsilon_high=0.1).surrogate_parameters["epsilon"] == 3e-4


ONE_SIDED = replace(RECIPES["dapo"], parameters={"epsilon": 0.2})


def test_a_row_of_ones_own_gets_the_parameters_that_it_takes() -> None:
    own = Objective(f"{__name__}.ONE_SIDED", epsilon=0.3)
    assert own.recipe is ONE_SIDED and own.surrogate_parameters == {"epsilon": 0.3}
    with pytest.raises(ValueError, match=r"epsilon_high has no meaning for loss .*ONE_SIDED; .*: epsilon\."):
        Objective(f"{__name__}.ONE_SIDED", epsilon_high=0.3)
