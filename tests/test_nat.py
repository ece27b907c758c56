"""An unbiased gradient of part of the tokens: its mean over draws, its chances, and what goes through the policy."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conftest import table_rows
from hand_made import watch_rows
from test_learner import PlainSteps, make_learner, ragged_groups

from lit_grpo.methods.nat import Prefix, RandomTokens, Uniform
from lit_grpo.methods.vcpo import EffectiveSamples
from lit_grpo.plugins import Plugin
from lit_grpo.update.learner import Learner
from lit_grpo.update.logprobs.reference import Reference, ReferenceSettings
from lit_grpo.update.objective.corrections import Correction
from lit_grpo.update.objective.kl import KLTerm
from lit_grpo.update.objective.objective import EntropyBonus, Objective

DRAWS = 60


def error_in_deviations(steps: PlainSteps, whole: torch.Tensor) -> float:
    """How far the mean gradient is from the whole one, in its standard error along that direction."""
    along = torch.stack(steps.gradients) @ whole / whole.square().sum()
    assert along.std() > 0.01  # draws differ
    return float((along.mean() - 1).abs() / (along.std() / len(along) ** 0.5))


def learn_often(learner: Learner, times: int = DRAWS) -> None:
    groups = ragged_groups()
    for _ in range(times):
        learner.learn(groups)


OBJECTIVES: dict[str, Any] = {
    "each token alike": {},
    "each completion alike": {"objective": Objective("grpo")},
    "with a bonus": {"objective": Objective("dapo", entropy=EntropyBonus(0.05))},
}


@pytest.mark.parametrize("rule", [Prefix(0.4), Uniform(0.25)], ids=repr)
@pytest.mark.parametrize("name", table_rows(OBJECTIVES, ("with a bonus",)))
def test_the_mean_gradient_over_draws_is_that_of_all_tokens(rule: RandomTokens, name: str) -> None:
    whole, steps_of_whole = make_learner(**OBJECTIVES[name])
    whole.learn(ragged_groups())
    learner, steps = make_learner(plugins=[rule], max_tokens_per_micro_batch=20, **OBJECTIVES[name])
    learn_often(learner)
    assert error_in_deviations(steps, steps_of_whole.gradients[0]) < 3.5


def test_a_kl_term_is_of_the_tokens_that_go_through_with_their_weights() -> None:
    def make(**changes: Any) -> tuple[Learner, PlainSteps]:
        objective = Objective(kl=KLTerm(0.5))
        learner, steps = make_learner(objective=objective, **changes)
        other, _ = make_learner()
        with torch.no_grad():
            for parameter in other.policy.parameters():
                parameter.mul_(1.05)
        learner.reference = Reference(other.policy, torch.device("cpu"), ReferenceSettings())
        return learner, steps

    whole, steps_of_whole = make()
    whole.learn(ragged_groups())
    learner, steps = make(plugins=[Prefix(0.4)])
    learn_often(learner)
    assert error_in_deviations(steps, steps_of_whole.gradients[0]) < 3.5


@pytest.mark.parametrize("rule", [Prefix(1.0), Uniform(1.0)], ids=repr)
def test_all_tokens_are_plain_grpo_bit_for_bit(rule: RandomTokens) -> None:
    plain, steps_of_plain = make_learner(num_minibatches=2)
    learner, steps = make_learner(num_minibatches=2, plugins=[rule])
    assert learner.learn(ragged_groups()) == pytest.approx(plain.learn(ragged_groups()), abs=0, nan_ok=True)
    for gradient, expected in zip(steps.gradients, steps_of_plain.gradients, strict=True):
        assert torch.equal(gradient, expected)


@pytest.mark.parametrize("share", table_rows([0.1, 0.25, 0.5, 0.9], [0.25, 0.9]))
@pytest.mark.parametrize("rule", [Prefix, Uniform])
def test_tokens_are_kept_as_often_as_their_chances_say(rule: type[RandomTokens], share: float) -> None:
    """Against counts of draws; the mean of a prefix's chances is the share, and no weight is above 2 / share."""
    generator, chances_T = torch.Generator().manual_seed(1), rule(share).chances(40)
    kept = torch.stack([rule(share).draw(chances_T, generator).expand(40) for _ in range(20_000)]).double()
    deviation_T = (chances_T * (1 - chances_T) / 20_000).sqrt() + 1e-9
    assert float(((kept.mean(0) - chances_T).abs() / deviation_T).max()) < 5
    assert float(rule(share).chances(10_000).mean()) == pytest.approx(share, rel=2e-3)
    assert float((1 / chances_T).max()) <= 2 / share
    if rule is Prefix:
        assert (kept.diff() <= 0).all()  # nothing after a gap


def test_the_cut_of_a_prefix_is_the_one_that_its_formula_says() -> None:
    """Whole with chance f, else ceil(T u**k) tokens, by counting lengths."""
    share, length, rng = 0.5, 12, torch.Generator().manual_seed(2)
    whole = share / 2
    exponent = (1 - whole) / (share - whole) - 1
    lengths = torch.where(
        torch.rand(200_000, generator=rng) < whole,
        float(length),
        (length * torch.rand(200_000, generator=rng) ** exponent).ceil(),
    )
    expected_T = torch.stack([(lengths >= t).double().mean() for t in range(1, length + 1)])
    torch.testing.assert_close(Prefix(share).chances(length), expected_T, atol=6e-3, rtol=0)


def test_what_comes_after_the_cut_does_not_go_through_the_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    learner, _ = make_learner(plugins=[Prefix(0.25)])
    seen = watch_rows(learner, monkeypatch)
    groups = ragged_groups()
    most = sum(len(group.prompt.token_ids) for group in groups if group.rollouts)
    most += sum(r.completion.num_tokens - 1 for group in groups for r in group.rollouts if r.kept)
    rows = []
    for _ in range(50):
        seen.clear()
        logs = learner.learn(groups)
        rows.append(sum(micro_batch.input_ids_BT.numel() for micro_batch in seen))
        assert logs["update/tokens"] == sum(len(micro_batch.columns["target_id"]) for micro_batch in seen)
    assert max(rows) <= most and sum(rows) / len(rows) < 0.7 * most


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"objective": Objective("gspo")}, r"ratio sequence needs all tokens of a completion"),
        ({"objective": Objective("vespo")}, r"loss vespo needs all tokens of a completion"),
        ({"objective": Objective(correction=Correction("geometric_mask"))}, r"geometric_mask needs all tokens"),
        ({"objective": Objective(off_policy_threshold=0.1)}, r"off_policy_threshold 0\.1 needs all tokens"),
        ({"objective": Objective(off_policy_kl=50.0)}, r"off_policy_kl 50\.0 needs all tokens"),
        ({"others": [EffectiveSamples()]}, r"EffectiveSamples needs all tokens"),
        ({"objective": Objective(top_entropy_quantile=0.5)}, r"top_entropy_quantile 0\.5 needs all tokens of a step"),
    ],
    ids=str,
)
def test_what_needs_whole_completions_is_refused(changes: dict[str, Any], said: str) -> None:
    changes = dict(changes)
    others: list[Plugin] = changes.pop("others", [])
    with pytest.raises(ValueError, match=said + r".*Prefix learns from a random share of each completion's tokens, 0"):
        make_learner(**changes, plugins=[*others, Prefix()])
    make_learner(**changes, plugins=[*others, Prefix(1.0)])


def test_old_log_probs_are_those_of_the_tokens_that_stay() -> None:
    """They are measured of whole completions, and weigh each token."""
    objective = Objective(correction=Correction("token_truncate"))
    whole, steps_of_whole = make_learner(objective=objective, num_iterations=2)
    whole.learn(ragged_groups())
    learner, steps = make_learner(objective=objective, num_iterations=2, plugins=[Uniform(0.5)])
    learn_often(learner)
    assert error_in_deviations(steps, steps_of_whole.gradients[0]) < 3.5
