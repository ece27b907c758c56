"""The objective's pieces in a real Trainer: one gradient however a step is split, and that of the formula."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from conftest import random_policy, table_rows
from hand_made import (
    Batches,
    Budgets,
    Nudge,
    StepRecorder,
    fit,
    flat,
    full_logprobs,
    make_module,
    make_trainer,
    random_groups,
    relative_error,
    sgd,
    weights_of,
)

from lit_grpo.module import GRPOModule
from lit_grpo.types import Rollout, RolloutGroup
from lit_grpo.update.advantages.estimator import ESTIMATORS, Advantages, GroupRewards
from lit_grpo.update.advantages.functions import group_advantages
from lit_grpo.update.batches.microbatch import num_row_tokens
from lit_grpo.update.objective.corrections import Correction
from lit_grpo.update.objective.kl import KLTerm
from lit_grpo.update.objective.objective import EntropyBonus, Objective
from lit_grpo.update.objective.recipes import RECIPES

NAN = math.nan
REWARDS = [[1.0, 0.0, 0.0, 1.0], [0.5, 0.5, 0.5, 0.5], [NAN, 1.0, 0.0, 0.5], [0.0, 0.3, 1.0, 0.2]]
EVERYTHING: dict[str, Any] = {
    "kl": KLTerm(0.1, importance_weighted=True),
    "entropy": EntropyBonus(0.05),
    "top_entropy_quantile": 0.4,
    "off_policy_threshold": 0.2,
    "mask_truncated": True,
}


def stale_groups(policy: Any, rewards_PG: Sequence[Sequence[float]] = REWARDS) -> list[RolloutGroup]:
    """Groups off the policy, every third completion of which ended at the limit."""
    groups = random_groups(policy, rewards_PG, noise=0.4)
    for index, rollout in enumerate(rollout for group in groups for rollout in group.rollouts):
        rollout.rewards = {"exact_match": None if math.isnan(rollout.reward) else rollout.reward}
        if index % 3 == 2:
            rollout.completion.finish_reason = "length"
    return groups


def logits_of(model: Any, rollout: Rollout) -> torch.Tensor:
    """Logits of a rollout's completion, alone in a batch, with gradient."""
    prompt, completion = rollout.prompt.token_ids, rollout.completion.token_ids_T
    input_ids = torch.cat([torch.tensor(prompt), completion])[None]
    return model(input_ids=input_ids, use_cache=False).logits[0, len(prompt) - 1 : -1]


def gradient_of(model: Any, rollouts: Sequence[Rollout], loss_of: Callable[..., torch.Tensor]) -> torch.Tensor:
    """Gradient of the sum over rollouts of ``loss_of(place, log-probs, entropies)``."""
    model.zero_grad()
    for place, rollout in enumerate(rollouts):
        logprobs_TV = logits_of(model, rollout).log_softmax(-1)
        chosen_T = logprobs_TV.gather(-1, rollout.completion.token_ids_T[:, None]).squeeze(-1)
        loss_of(place, chosen_T, -(logprobs_TV.exp() * logprobs_TV).sum(-1)).backward()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


def clip_loss(logprobs_T: torch.Tensor, old_T: torch.Tensor, advantage: float) -> torch.Tensor:
    ratio_T = (logprobs_T - old_T).exp()
    return -torch.minimum(ratio_T * advantage, ratio_T.clamp(0.8, 1.2) * advantage)


def scored(groups: Sequence[RolloutGroup]) -> tuple[list[Rollout], list[float]]:
    """Rollouts with a reward, and their advantages."""
    rewards = GroupRewards.of(groups, [])
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    pairs = zip(rollouts, group_advantages(rewards.rewards_R, rewards.groups_R).tolist(), strict=True)
    valid = [(rollout, advantage) for rollout, advantage in pairs if not math.isnan(advantage)]
    return [rollout for rollout, _ in valid], [advantage for _, advantage in valid]


# ---- one gradient however a step is split --------------------------------------------------------------


def composed(name: str) -> Objective:
    correction = Correction("token_truncate" if name == "vespo" else "sequence_mask", None, 3.0)
    return Objective(name, correction=correction, **EVERYTHING)


OBJECTIVES = {name: Objective(name) for name in RECIPES} | {f"{name}_composed": composed(name) for name in RECIPES}


@pytest.mark.parametrize("name", table_rows(OBJECTIVES, ("gspo", "dapo_composed", "vespo_composed", "luspo_composed")))
def test_the_gradient_of_each_objective_does_not_depend_on_micro_batches(
    policy_folder: Path, policy: Any, name: str
) -> None:
    groups = stale_groups(policy)
    longest = max(num_row_tokens(rollout) for group in groups for rollout in group.rollouts)
    module = make_module(policy_folder, objective=OBJECTIVES[name])
    recorder = fit(module, *[groups] * 3, callbacks=[Nudge(), Budgets([10_000, longest, 3 * longest])])
    whole, *others = recorder.gradients
    assert flat(whole).norm() > 1e-3
    for part, logs in zip(others, recorder.logs[1:], strict=True):
        assert relative_error(flat(part), flat(whole)) < 2e-5
        same = {name: value for name, value in recorder.logs[0].items() if not name.startswith(("step", "staleness"))}
        assert {name: logs[name] for name in same} == pytest.approx(same, rel=1e-4, abs=1e-6, nan_ok=True)


@pytest.mark.parametrize("estimator", table_rows(ESTIMATORS, ("grpo", "dcpo", "reinforce_plus_plus")))
def test_each_estimator_trains_on_groups_that_are_split_over_micro_batches(
    policy_folder: Path, policy: Any, estimator: Any
) -> None:
    groups = stale_groups(policy)
    gradients = []
    for budget in (25, 10_000):  # a completion or two, or all
        module = make_module(policy_folder, advantages=Advantages(estimator), max_tokens_per_micro_batch=budget)
        gradients.append(flat(fit(module, groups).gradients[0]))
    assert gradients[0].norm() > 1e-3
    assert relative_error(gradients[0], gradients[1]) < 2e-5


# ---- that of the formula -------------------------------------------------------------------------------


def test_masked_truncated_completions_count_in_the_mean_over_completions_and_teach_nothing(
    policy_folder: Path, policy: Any
) -> None:
    groups = stale_groups(policy)
    rollouts, advantages = scored(groups)
    whole = [rollout.completion.finish_reason != "length" for rollout in rollouts]
    num_tokens = sum(r.completion.num_tokens for r, is_whole in zip(rollouts, whole, strict=True) if is_whole)
    assert 0 < sum(whole) < len(whole)
    for normalization in ("token", "sequence"):

        def loss_of(place: int, logprobs_T: torch.Tensor, _: Any, by: str = normalization) -> torch.Tensor:
            divisor = num_tokens if by == "token" else len(rollouts) * len(logprobs_T)
            losses_T = clip_loss(logprobs_T, rollouts[place].completion.logprobs_T, advantages[place])
            return losses_T.sum() / divisor * whole[place]

        objective = Objective(normalization=normalization, mask_truncated=True)
        recorder = fit(make_module(policy_folder, objective=objective), groups)
        assert relative_error(flat(recorder.gradients[0]), gradient_of(policy, rollouts, loss_of)) < 1e-5


def test_only_tokens_of_high_entropy_are_trained_on_and_rewarded_for_it(policy_folder: Path, policy: Any) -> None:
    groups = stale_groups(policy)
    rollouts, advantages = scored(groups)
    entropies: list[torch.Tensor] = []
    gradient_of(
        policy, rollouts, lambda _, logprobs_T, entropy_T: entropies.append(entropy_T.detach()) or 0 * logprobs_T.sum()
    )
    threshold = torch.quantile(torch.cat(entropies), 0.7)
    num_kept = int((torch.cat(entropies) >= threshold).sum())

    def loss_of(place: int, logprobs_T: torch.Tensor, entropy_T: torch.Tensor) -> torch.Tensor:
        kept_T = entropies[place] >= threshold
        losses_T = clip_loss(logprobs_T, rollouts[place].completion.logprobs_T, advantages[place])
        num_tokens = sum(rollout.completion.num_tokens for rollout in rollouts)
        return (losses_T * kept_T).sum() / num_tokens - 0.1 * (entropy_T * kept_T).sum() / num_kept

    objective = Objective(top_entropy_quantile=0.3, entropy=EntropyBonus(0.1))
    recorder = fit(make_module(policy_folder, objective=objective, max_tokens_per_micro_batch=40), groups)
    assert 0 < num_kept < len(torch.cat(entropies)) / 2
    assert relative_error(flat(recorder.gradients[0]), gradient_of(policy, rollouts, loss_of)) < 1e-5


def test_a_kl_term_in_the_reward_is_taken_from_it_before_advantages(policy_folder: Path, policy: Any) -> None:
    groups, lowered = stale_groups(policy), stale_groups(policy)
    total, num_tokens = 0.0, 0
    for rollout in (rollout for group in lowered for rollout in group.rollouts):
        kl_T = rollout.completion.logprobs_T - full_logprobs(policy, rollout)
        rollout.reward -= 0.1 * float(kl_T.sum())
        total, num_tokens = total + float(kl_T.sum()), num_tokens + len(kl_T)
    term = KLTerm(0.1, "k1", place="reward")
    recorder = fit(make_module(policy_folder, objective=Objective(kl=term)), groups, callbacks=[Nudge()])
    expected = fit(make_module(policy_folder), lowered, callbacks=[Nudge()])
    assert relative_error(flat(recorder.gradients[0]), flat(expected.gradients[0])) < 1e-4
    assert recorder.logs[0]["kl"] == pytest.approx(total / num_tokens, rel=1e-4)
    assert recorder.logs[0]["reward"] == pytest.approx(7 / 15)  # as the reward functions gave it


@pytest.mark.parametrize("mode", ["token_truncate", "sequence_mask"])
def test_a_corrected_step_takes_ratios_to_the_trainers_own_logprobs_before_the_first(
    policy_folder: Path, policy: Any, mode: Any
) -> None:
    """Both steps on a batch: weights trainer / generator of the first policy, ratios of the second to the first."""
    groups = stale_groups(policy, [REWARDS[0], REWARDS[3]])
    rollouts, advantages = scored(groups)
    num_tokens = sum(rollout.completion.num_tokens for rollout in rollouts)
    old = [full_logprobs(policy, rollout) for rollout in rollouts]
    correction = Correction(mode, 0.5, 2.0)

    def weights(place: int) -> torch.Tensor:
        log_ratio_T = old[place] - rollouts[place].completion.logprobs_T
        if mode == "token_truncate":
            return log_ratio_T.exp().clamp(0.5, 2.0)
        ratio = float(log_ratio_T.sum().exp())
        return torch.full_like(log_ratio_T, ratio if 0.5 <= ratio <= 2.0 else 0.0)

    def loss_of(place: int, logprobs_T: torch.Tensor, _: Any) -> torch.Tensor:
        return (weights(place) * clip_loss(logprobs_T, old[place], advantages[place])).sum() / num_tokens

    objective = Objective(correction=correction)
    module = make_module(policy_folder, objective=objective, num_iterations=2, optimizer=sgd(0.5))
    recorder = fit(module, groups)
    trained = random_policy()
    first = gradient_of(trained, rollouts, loss_of)
    torch.optim.SGD(trained.parameters(), lr=0.5).step()
    second = gradient_of(trained, rollouts, loss_of)
    assert relative_error(flat(recorder.gradients[0]), first) < 1e-4
    assert relative_error(flat(recorder.gradients[1]), second) < 1e-4
    assert relative_error(second, first) > 0.05
    masked = torch.cat([weights(place) == 0 for place in range(len(rollouts))]).float().mean()
    assert recorder.logs[0]["correction/masked"] == pytest.approx(float(masked))


# ---- what is remembered --------------------------------------------------------------------------------


def test_a_resumed_run_goes_on_with_what_the_objective_remembers(
    policy_folder: Path, policy: Any, tmp_path: Path
) -> None:
    objective = Objective(
        kl=KLTerm(0.1, target=0.001, horizon=40),
        mask_truncated=True,
    )
    options: dict[str, Any] = {
        "objective": objective,
        "advantages": Advantages("dcpo"),
        "optimizer": sgd(0.2),
        "num_minibatches": 2,
    }
    first, second = stale_groups(policy), stale_groups(policy, [row[::-1] for row in REWARDS])

    def run(*batches: Any, **resume: Any) -> tuple[GRPOModule, StepRecorder, pl.Trainer]:
        module, recorder = make_module(policy_folder, **options), StepRecorder()
        trainer = make_trainer(Nudge(), recorder) if not resume else make_trainer(recorder, max_epochs=2)
        trainer.fit(module, train_dataloaders=Batches(batches), **resume)
        return module, recorder, trainer

    whole, logs, _ = run(first, second)
    half, _, trainer = run(first)
    trainer.save_checkpoint(tmp_path / "half.ckpt")
    resumed, resumed_logs, _ = run(second, ckpt_path=tmp_path / "half.ckpt")
    assert torch.equal(weights_of(resumed), weights_of(whole))
    assert resumed.learner.state_dict() == whole.learner.state_dict()
    assert resumed.learner.state_dict() != half.learner.state_dict()
    for name in ("kl_beta", "loss"):
        assert resumed_logs.logs[0][name] == pytest.approx(logs.logs[1][name])
    assert whole.learner.beta > 0.1
    assert whole.learner.history["train/0"].num_visits == 2
