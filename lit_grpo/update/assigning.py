"""Rewards of a batch become the advantages of its rollouts and tokens: by the run's estimator, then by plug-ins."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch

from lit_grpo.budgets.history import PromptHistory, Visit
from lit_grpo.plugins import ask, writing
from lit_grpo.plugins.columns import OF_CANDIDATES, row_name
from lit_grpo.types import Rollout
from lit_grpo.update.advantages.estimator import GroupRewards
from lit_grpo.update.passes import PolicyPasses
from lit_grpo.update.plugin import Batch


def fill_batch(batch: Batch, passes: PolicyPasses, history: PromptHistory, is_whole: bool = True) -> None:
    """Give each rollout of a batch its advantage, and let plug-ins write their columns.

    ``Rollout.advantage`` is NaN if the rollout is not trained on.

    Args:
        batch: Batch to fill, whose ``rewards`` are compared.
        passes: Sends tokens through the policy, with the estimator and plug-ins of its settings. All ranks of the run
            call this together, unless settings and plug-ins need no ``all_ranks``.
        history: Earlier visits of prompts; it takes these too, and counts them once it is committed.
        is_whole: Whether all ranks have their part of the batch, so that an error is raised on all of them.

    Raises:
        ValueError: A plug-in writes something that does not fit.
    """
    settings, ranks = passes.settings, passes.ranks
    for rollout in batch.rollouts:
        rollout.advantage = 0.0
        rollout.columns.pop("token_advantage", None)
        rollout.columns.pop("ce_weight", None)
    scores = passes.measure(batch.rollouts, "scores") if settings.advantages.by_scores else None
    estimate = partial(_estimate, batch, passes, history, scores)
    estimate(batch)
    for plugin in settings.hooked["on_batch"]:
        own = batch.of(plugin, settings.source_of(plugin))
        call = partial(ask, plugin, "on_batch", replace(own, estimate=partial(estimate, own)))
        ranks.together(call) if is_whole else call()
        if "old_logprob" in plugin.writes:
            _check_old_logprobs(own)
        if "candidates" in plugin.writes:
            _fill_candidates(replace(batch, writer=own.writer))
    history.note(_visits(batch))


def _estimate(
    batch: Batch, passes: PolicyPasses, history: PromptHistory, scores: list[torch.Tensor] | None, own: Batch
) -> None:
    """Give rollouts the advantages of the run's estimator; those whose advantage is NaN are left out of it.

    Args:
        batch: The whole batch on this rank.
        passes: Settings of the run, with its estimator, plug-ins and ranks.
        history: Earlier visits of prompts.
        scores: Scores of the tokens of all rollouts, if the estimator needs them.
        own: The part whose rollouts get them: all, or those of one plug-in.

    Raises:
        ValueError: The estimator needs the whole batch, and another plug-in chooses rollouts of other data sets.
    """
    settings, ranks, estimator = passes.settings, passes.ranks, passes.settings.advantages
    if (
        own.writer.plugin is not None
        and "all_ranks" in estimator.needs
        and len(writing(settings.plugins, "chosen")) > 1
    ):
        raise ValueError(
            f"{own.writer} calls batch.compare, but model.advantages.estimator {estimator.estimator} needs the whole "
            "batch, in which another plug-in chooses for other data sets; take an estimator that compares within "
            "groups, or one choice for all data sets."
        )
    left_R = torch.tensor([math.isnan(rollout.advantage) for rollout in batch.rollouts], dtype=torch.bool)
    rewards = batch.rewards.only(~left_R) if left_R.any() else batch.rewards
    if scores is not None:
        rewards = replace(rewards, log_weights_R=_log_baseline_weights(batch.rollouts, scores))
    weights_K = torch.tensor(list(settings.weights.values()), dtype=torch.float64)
    if "all_ranks" in estimator.needs:
        everyone = ranks.gather(rewards)
        of_all_R = estimator.compute(GroupRewards.concatenate(everyone), weights_K, history)
        advantages_R = of_all_R.split([len(rank.rewards_R) for rank in everyone])[ranks.rank]
    else:
        advantages_R = estimator.compute(rewards, weights_K, history)
    advantages_R = advantages_R.masked_fill(rewards.rewards_R.isnan(), math.nan)
    theirs = {id(rollout) for rollout in own.rollouts}
    for rollout, advantage, reward in zip(
        batch.rollouts, advantages_R.tolist(), batch.rewards.rewards_R.tolist(), strict=True
    ):
        if id(rollout) not in theirs:
            continue
        learns = settings.learns_unrewarded and math.isnan(reward) and settings.learns_without_reward(rollout.prompt)
        rollout.advantage = 0.0 if learns else advantage


def _visits(batch: Batch) -> list[Visit]:
    """Return what the groups of a batch are remembered by; what is replayed has been counted at an earlier visit."""
    rewards, visits = iter(batch.rewards.rewards_R.tolist()), list[Visit]()
    for group in batch.groups:
        sampled, num_passed, num_tokens = list[float](), 0, 0
        for rollout, reward in zip(group.rollouts, rewards, strict=False):
            if rollout.replayed:
                continue
            sampled.append(reward)
            num_passed += batch.pass_rule.passes(rollout.rewards) and not math.isnan(reward)
            num_tokens += rollout.completion.num_sampled
        prompt = group.prompt
        visit = Visit(prompt.prompt_id, prompt.visit, sampled, num_passed, num_tokens, batch.version, prompt.altered)
        visits.append(visit)
    return visits


def _check_old_logprobs(batch: Batch) -> None:
    """Check that tokens without a log-prob get it in the pass that trains on them; a rollout without any has NaN.

    Raises:
        ValueError: One does not.
    """
    if not any("old_logprob" in rollout.columns for rollout in batch.rollouts):
        return
    for rollout in batch.rollouts:
        completion = rollout.completion
        unknown_N = torch.full((completion.num_trained,), math.nan)
        unknown_N = rollout.columns.setdefault("old_logprob", unknown_N).isnan()
        is_past_N = completion.versions_T[completion.trained_T] != batch.version
        unknown_N = unknown_N & (is_past_N | batch.several_steps)
        if rollout.kept and not rollout.trained_before and unknown_N.any():
            why = f"the policy is version {batch.version}"
            why = "there are several steps on the batch" if batch.several_steps else why
            raise ValueError(
                f"{batch.writer} gives {row_name(rollout)} no old_logprob (NaN) at place {int(unknown_N.nonzero()[0])} "
                f"of its tokens that are trained on, and {why}, so that no pass computes it; give the log-prob."
            )


def _fill_candidates(batch: Batch) -> None:
    """Give rollouts without candidates those that count nothing; of all ranks they are equally many.

    Raises:
        ValueError: Some have others.
    """
    shapes = {
        place: tuple(rollout.columns[name].shape[1] for name in OF_CANDIDATES)
        for place, rollout in enumerate(batch.rollouts)
        if OF_CANDIDATES[0] in rollout.columns
    }
    everyone = [shape for of_rank in batch.all_gather([*shapes.values()]) for shape in of_rank]
    width, num_values = max(everyone, default=(0, 0))
    for place, rollout in enumerate(batch.rollouts if width else ()):
        number, own = rollout.completion.num_trained, shapes.get(place, (width, num_values))
        if own != (width, num_values):
            raise ValueError(
                f"{batch.writer} gives {row_name(rollout)} {own[0]} candidates with {own[1]} values at each place, and "
                f"another rollout {width} with {num_values}; on all ranks give as many."
            )
        none = torch.zeros((number, width), dtype=torch.int64), torch.full((number, num_values), math.nan)
        for name, values in zip(OF_CANDIDATES, none, strict=True):
            rollout.columns.setdefault(name, values)


def _log_baseline_weights(rollouts: Sequence[Rollout], scores: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the log of ``w^2 |grad log pi|^2`` of each rollout, for a baseline of least variance.

    ``w`` is policy / sampler of the whole completion. The square of the gradient's norm is approximated by the sum of
    its tokens', each with respect to the last hidden state: a token's score has mean 0 given those before, so that
    products of two tokens' are 0 on average, and layers below are taken to stretch all tokens' gradients alike.

    Args:
        rollouts: Of whole groups; without a token to learn from a rollout counts nothing.
        scores: Log-prob and squared norm of each rollout's tokens that are trained on, shape (T, 2).
    """
    weights = []
    for rollout, scores_T2 in zip(rollouts, scores, strict=True):
        completion = rollout.completion
        if not completion.num_trained:
            weights.append(-torch.inf)
            continue
        logprobs_T, squares_T = scores_T2.unbind(1)
        log_ratio = float((logprobs_T - completion.logprobs_T[completion.trained_T]).sum())
        weights.append(2 * log_ratio + float(squares_T.sum().log()))
    return torch.tensor(weights, dtype=torch.float64)
