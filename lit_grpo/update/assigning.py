"""Rewards of a batch become the advantages of its rollouts and tokens: by the run's estimator, then by plug-ins."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import torch

from lit_grpo.budgets.history import PromptHistory
from lit_grpo.plugins import GroupBatch, Plugin, ask
from lit_grpo.update.advantages.estimator import GroupRewards
from lit_grpo.update.batches.layout import OF_CANDIDATES
from lit_grpo.update.passes import PolicyPasses
from lit_grpo.update.plugin import LearningBatch
from lit_grpo.update.step import log_baseline_weights


def assign_advantages(batch: LearningBatch, passes: PolicyPasses, history: PromptHistory) -> None:
    """Give each rollout of a batch its advantage, and tokens theirs where a plug-in credits them.

    This is the only place that writes advantages: ``Rollout.advantage`` is NaN if the rollout is not trained on, and
    ``Rollout.token_advantages`` is None if all of its tokens have that of their rollout.

    Args:
        batch: Its ``rewards`` are what is compared.
        passes: Sends tokens through the policy, with the estimator and plug-ins of its settings. All ranks of the run
            call this together, unless settings and plug-ins need no ``all_ranks``.
        history: Earlier visits of prompts.

    Raises:
        ValueError: A plug-in does not return one finite number for each rollout, turn or token.
    """
    settings, ranks, rewards, rollouts = passes.settings, passes.ranks, batch.rewards, batch.rollouts
    estimator = settings.advantages
    chooser = settings.plugin("choose_rollouts")
    chosen = ~rewards.rewards_R.isnan() if chooser is None else ask(chooser, "choose_rollouts", batch)
    counted, chosen_R = (chosen, ~chosen.rewards_R.isnan()) if isinstance(chosen, GroupRewards) else (rewards, chosen)
    if estimator.by_scores:
        scores = passes.measure(rollouts, "scores")
        counted = replace(counted, log_weights_R=log_baseline_weights(rollouts, scores))
    weights_K = torch.tensor(list(settings.weights.values()), dtype=torch.float64)
    if "all_ranks" in estimator.needs:
        everyone = ranks.gather(counted)
        batch_R = estimator.compute(GroupRewards.concatenate(everyone), weights_K, history)
        advantages_R = batch_R.split([len(rank.rewards_R) for rank in everyone])[ranks.rank]
    else:
        advantages_R = estimator.compute(counted, weights_K, history)
    advantages_R = advantages_R.masked_fill(~chosen_R, math.nan)
    if settings.learns_unrewarded:
        learnt_R = torch.tensor([settings.learns_without_reward(rollout.prompt) for rollout in rollouts])
        advantages_R = advantages_R.masked_fill(rewards.rewards_R.isnan() & learnt_R.bool(), 0.0)
    shaper, chooser = settings.plugin("shape_advantages"), settings.plugin("choose_from_batch")
    if shaper is not None:
        advantages_R = shaped(shaper, batch, advantages_R)
    if chooser is not None:
        parts, counts = zip(*ranks.gather((advantages_R, len(batch.groups))), strict=True)
        kept_R = ask(chooser, "choose_from_batch", batch, torch.cat(parts), sum(counts))
        advantages_R = advantages_R.masked_fill(~kept_R.split([len(part) for part in parts])[ranks.rank], math.nan)
    for rollout, advantage in zip(rollouts, advantages_R.tolist(), strict=True):
        rollout.advantage, rollout.token_advantages, rollout.ce_weights = advantage, None, None
    crediting = settings.plugin("credit")
    if crediting is not None:
        give_credit(crediting, batch)
    for source, plugin in enumerate(settings.ce_sources):
        ranks.together(partial(give_ce_weights, plugin, batch, source))


def give_ce_weights(plugin: Plugin, batch: LearningBatch, source: int) -> None:
    """Give tokens of rollouts the weights in the channel ``ce`` that a plug-in has for them.

    Args:
        plugin: One that may give weights.
        batch: The rollouts on this rank.
        source: Its number among the plug-ins that may.

    Raises:
        ValueError: The plug-in does not return one finite number for each token.
    """
    for rollout, weights_T in zip(batch.rollouts, ask(plugin, "ce_weights", batch) or (), strict=False):
        if weights_T is None:
            continue
        completion = rollout.completion
        if completion.contexts:
            outside_T = torch.ones(completion.num_tokens, dtype=torch.bool)
            for begin, end in completion.places_of_turns:
                outside_T[begin:end] = False
            if weights_T[outside_T].any():
                raise ValueError(
                    f"{type(plugin).__name__}.ce_weights gives sample {completion.request.path} of prompt "
                    f"{rollout.prompt.prompt_id!r} weights of observed tokens, but its earlier turns were rendered "
                    "again, so that those tokens are in no row of the update; give observed tokens the weight 0."
                )
        rollout.ce_weights, rollout.ce_source = weights_T, source


def give_candidates(plugin: Plugin, batch: LearningBatch, num_ids: int) -> tuple[str, ...]:
    """Give the tokens of all rollouts their candidates; return the names of the columns, none if there are none.

    Args:
        plugin: Names them.
        batch: Of this rank.
        num_ids: Size of the policy's vocabulary.

    Raises:
        ValueError: The plug-in does not return as many ids and values for each token that is trained on.
    """
    named, name = ask(plugin, "candidate_tokens", batch), type(plugin).__name__
    if named is None:
        return ()
    widths = [(ids_TK.shape[1], values_TL.shape[1]) for ids_TK, values_TL in named.values()]
    width, num_values = max((each for of_rank in batch.all_gather(widths) for each in of_rank), default=(0, 0))
    for rollout in batch.rollouts if width else ():
        completion, number = rollout.completion, rollout.completion.num_trained
        shape, shape_of_values = (number, width), (number, width + (num_values == width + 1))
        none = torch.zeros(shape, dtype=torch.int64), torch.full(shape_of_values, math.nan)
        ids_TK, values_TL = named.get(completion.request.key, none)
        of = f"{name}.candidate_tokens gives sample {completion.request.path} of prompt {rollout.prompt.prompt_id!r}"
        if (ids_TK.shape, values_TL.shape) != (shape, shape_of_values):
            raise ValueError(
                f"{of} ids of shape {tuple(ids_TK.shape)} and values of shape {tuple(values_TL.shape)}; on all ranks "
                f"give the shapes {shape} and {shape_of_values}."
            )
        if ids_TK.numel() and ids_TK.max() >= num_ids:
            raise ValueError(f"{of} the id {int(ids_TK.max())}; the policy has ids from 0 to {num_ids - 1}.")
        rollout.columns |= dict(zip(OF_CANDIDATES, (ids_TK, values_TL), strict=True))
    return OF_CANDIDATES if width else ()


def shaped(plugin: Plugin, batch: GroupBatch, advantages_R: torch.Tensor) -> torch.Tensor:
    """Return the advantages of all rollouts of a batch, shape R, as a plug-in shapes them; NaN stays NaN.

    Raises:
        ValueError: The plug-in does not return one finite number for each rollout that is trained on.
    """
    estimated = [part.tolist() for part in advantages_R.split([len(group.rollouts) for group in batch.groups])]
    flat = [advantage for group in ask(plugin, "shape_advantages", batch, estimated) for advantage in group]
    return torch.tensor(flat, dtype=advantages_R.dtype)


def give_credit(plugin: Plugin, batch: LearningBatch) -> None:
    """Give the tokens of all rollouts their advantages, once the rollouts have theirs.

    Raises:
        ValueError: The plug-in does not return one finite number for each turn, or for each token.
    """
    for rollout, advantages_T in zip(batch.rollouts, ask(plugin, "credit", batch) or (), strict=False):
        rollout.token_advantages = advantages_T
