"""Groups of rollouts become one optimizer step after another."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lit_grpo.faults import BrokenBatches
from lit_grpo.plugins import GroupBatch
from lit_grpo.policy.sharding import rest, whole
from lit_grpo.ranks import Ranks
from lit_grpo.types import OBSERVED, Completion, GroupKey, Key, Rollout, RolloutGroup
from lit_grpo.update.advantages.estimator import GroupRewards
from lit_grpo.update.advantages.shaping import Shaping, shaped
from lit_grpo.update.arriving import PROVISIONAL, ArrivingGradient
from lit_grpo.update.batches.step import (
    FixedLogprobs,
    Gathered,
    Step,
    log_baseline_weights,
    minibatches,
    problem_of,
    taking_part_and_learnt,
    thinned,
)
from lit_grpo.update.chunking import Chunk, Chunking
from lit_grpo.update.credit import Credit, give_credit
from lit_grpo.update.learner_settings import LearnerSettings, Optimization
from lit_grpo.update.logprobs.reference import AdapterFreeReference, InitialAdapterReference, Reference
from lit_grpo.update.metrics import GapLimits, LogprobGapError, TokenMetrics, advantage_metrics
from lit_grpo.update.micro_batch_size import MicroBatchSize
from lit_grpo.update.normalization import StepTotals
from lit_grpo.update.objective.controllers import ObjectiveState
from lit_grpo.update.objective.kl import KL_ESTIMATORS
from lit_grpo.update.objective.snapshots import Snapshots
from lit_grpo.update.objective.tokens import highest
from lit_grpo.update.passes import PolicyPasses
from lit_grpo.update.selection import Selection

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Learner:
    """Turns groups of rollouts into one optimizer step after another.

    Args:
        policy: Trained in place.
        optimization: Takes gradients and steps.
        settings: What to learn, and how.
        reference: What a KL term holds on to, where there is one.
        folder: Where a batch is written whose loss or gradient is not finite; by default nowhere.
    """

    def __init__(
        self,
        policy: PreTrainedModel,
        optimization: Optimization,
        settings: LearnerSettings,
        reference: Reference | AdapterFreeReference | InitialAdapterReference | None = None,
        folder: Path | None = None,
    ) -> None:
        self.policy, self.optimization, self.settings, self.reference = policy, optimization, settings, reference
        self.state = ObjectiveState(settings.objective.kl, settings.objective.entropy)
        self.snapshots = Snapshots(policy) if settings.objective.proximal == "snapshots" else None
        self.passes = PolicyPasses(policy, optimization, settings)
        self.gap_limits = GapLimits()
        self._told_of_gap = False
        self._broken = BrokenBatches(folder, settings.max_skipped_updates)

    @property
    def ranks(self) -> Ranks:
        """Reductions over the ranks of the run."""
        return self.passes.ranks

    def learn(self, groups: Sequence[RolloutGroup]) -> dict[str, float]:
        """Take ``num_iterations x num_minibatches`` steps on groups; return what to log of them.

        Each rollout is given its advantage. What is remembered of prompts and coefficients changes once all steps have
        been taken.

        Raises:
            ValueError: A token that is to be learnt from has no sampled log-prob, or two completions have the same key.
            LogprobGapError: The generator did not sample with the policy's weights; none has changed.
            FloatingPointError: Losses or gradients of several updates in a row are not finite; the weights stay as
                they are.
        """
        settings, metrics = self.settings, TokenMetrics(self.gap_limits)
        all_rollouts = [rollout for group in groups for rollout in group.rollouts]
        replayed = [rollout for rollout in all_rollouts if rollout.recompute]
        told = self.ranks.gather((problem_of(all_rollouts), bool(replayed)))
        for problem in filter(None, (each for each, _ in told)):
            raise ValueError(problem)  # on every rank, so that none waits for another
        if any(recomputes for _, recomputes in told):
            self._recompute(replayed)
        advantages_R, fixed = self.assess(groups, metrics)
        for rollouts, places in minibatches(groups, settings.num_iterations, settings.num_minibatches):
            step = self._step_on(rollouts, advantages_R[places].tolist(), fixed, is_first=metrics.num_updates == 0)
            prompts = list(dict.fromkeys(rollout.completion.request.group for rollout in rollouts))
            self._take_step(step, self._gradient(step, prompts), metrics)
        return self._end(metrics, advantages_R)

    def learn_as_they_come(self, arriving: Iterable[Sequence[RolloutGroup]]) -> dict[str, float]:
        """Take one step on groups that become whole one after another; return what to log of them.

        It is the step that :meth:`learn` takes on all of them, but for rounding: gradients add up over a provisional
        denominator, and are divided by the true one in the end. The settings have to allow it
        (:func:`lit_grpo.update.arriving.check_arriving`). Raises what :meth:`learn` does.
        """
        settings, metrics, gradient = self.settings, TokenMetrics(self.gap_limits), ArrivingGradient(self.passes)
        provisional = StepTotals(PROVISIONAL, PROVISIONAL, settings.max_tokens, PROVISIONAL)
        all_learnt: list[tuple[Rollout, float]] = []
        advantages, num_sequences, num_tokens = [torch.empty(0)], 0, 0
        for groups in arriving:
            rollouts = [rollout for group in groups for rollout in group.rollouts]
            if problem := problem_of(rollouts):
                raise ValueError(problem)
            if not rollouts:
                continue
            if replayed := [rollout for rollout in rollouts if rollout.recompute]:
                self._recompute(replayed)
            advantages_R, fixed = self.assess(groups, metrics)
            advantages.append(advantages_R)
            taking_part, learnt = taking_part_and_learnt(
                rollouts, advantages_R.tolist(), settings.objective.mask_truncated
            )
            num_sequences += len(taking_part)
            num_tokens += _num_trained(learnt)
            all_learnt += learnt
            gradient.add(self._step(learnt, provisional, fixed, is_first=True))
        if self.ranks.size > 1:
            gradient.exchange(self._step([], provisional, FixedLogprobs(), is_first=True))
        total_tokens = int(self.ranks.sum(num_tokens))
        totals = StepTotals(total_tokens, int(self.ranks.sum(num_sequences)), settings.max_tokens, total_tokens)
        scale = gradient.divide(totals)
        step = self._step(all_learnt, totals, FixedLogprobs(), is_first=True)
        self._take_step(step, gradient.gathered(scale), metrics)
        metrics.scale_loss(scale)
        return self._end(metrics, torch.cat(advantages))

    def _end(self, metrics: TokenMetrics, advantages_R: torch.Tensor) -> dict[str, float]:
        """Remember what a batch has shown; return what to log."""
        self.passes.forget_rows()
        logs = metrics.compute(self.ranks.sum, self.ranks.max)
        self.state.kl.update(logs.get("kl", math.nan), int(self.ranks.sum(len(advantages_R))))
        self.state.history.commit(self.ranks.gather)
        return logs | advantage_metrics(torch.cat(self.ranks.gather(advantages_R))) | self.state.coefficients()

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps: what the objective remembers, a reference that has moved, and what was found out."""
        reference = self.reference.state_dict() if isinstance(self.reference, Reference) else {}
        budget = self.passes.budget
        found_out: dict[str, Any] = {
            "skipped": self._broken.num_skipped,
            "budget": None if budget is None else budget.tokens,
            "snapshots": {} if self.snapshots is None else self.snapshots.state_dict(),
        }
        return {"objective_state": self.state.state_dict(), "reference": reference, "learner": found_out}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint."""
        self.state.load_state_dict(state["objective_state"])
        self._broken.num_skipped, tokens = state["learner"]["skipped"], state["learner"]["budget"]
        self.passes.budget = None if tokens is None else MicroBatchSize(tokens)
        if isinstance(self.reference, Reference):
            self.reference.load_state_dict(state["reference"])
        if self.snapshots is not None:
            self.snapshots.load_state_dict(state["learner"]["snapshots"])

    # ---- before the first step ----------------------------------------------------------------------

    def assess(self, groups: Sequence[RolloutGroup], metrics: TokenMetrics) -> tuple[torch.Tensor, FixedLogprobs]:
        """Give each rollout its advantage; return them, and what all updates on the rollouts compare with.

        An advantage is NaN where a rollout is not learnt from.
        """
        rest(self.policy)
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        version = self.optimization.policy_version
        fixed = self._fixed_logprobs(rollouts)
        rewards = GroupRewards.of(groups, list(self.settings.weights))
        rewards = self._less_kl(rewards, rollouts, fixed, metrics)
        chosen_R = self._chosen(rewards, rollouts)
        advantages_R = self._advantages(rewards, groups, chosen_R)
        self.state.history.note(rewards.visits(groups, self.settings.pass_rule, version))
        for rollout, advantage in zip(rollouts, advantages_R.tolist(), strict=True):
            rollout.advantage, rollout.token_advantages = advantage, None
        if type(self.settings.credit) is not Credit:
            give_credit(self.settings.credit, groups, self.ranks.gather)
        return advantages_R, fixed

    def _recompute(self, rollouts: Sequence[Rollout]) -> None:
        """Let rollouts be as if the policy had sampled them now; what is remembered of them stays as it was."""
        rest(self.policy)
        version, logprobs = self.optimization.policy_version, self.passes.measure(rollouts, "logprobs")
        for rollout in rollouts:
            was = rollout.completion
            trained_T, logprobs_T = was.trained_T, was.logprobs_T.clone()
            logprobs_T[trained_T] = logprobs[was.request.key].to(logprobs_T.dtype)
            rollout.completion = Completion(
                was.request,
                was.token_ids_T,
                logprobs_T,
                torch.where(was.versions_T == OBSERVED, OBSERVED, version),
                was.finish_reason,
                was.text,
                was.entropy,
                trained_T,
            )

    def _fixed_logprobs(self, rollouts: Sequence[Rollout]) -> FixedLogprobs:
        """Measure what all updates on the rollouts compare with, before the first of them.

        The reference is computed here and not beside the policy, so that it need not be on the device in a backward
        pass, and once for all updates; a reference that moves between them counts from the next batch (as in TRL).
        """
        old, proximal = None, self.settings.objective.proximal_policy
        several_updates = self.settings.updates_per_batch > 1
        reference = None
        if self.reference is not None:
            reference = self.passes.measure(rollouts, "logprobs", self.reference.lend)
        if self.snapshots is not None:
            version = self.optimization.policy_version
            old = self.snapshots.logprobs(rollouts, version, self.passes.measure, self.ranks, several_updates)
        elif proximal == "recomputed" and several_updates:
            old = self.passes.measure(rollouts, "logprobs")
        return FixedLogprobs(old, reference)

    def _less_kl(
        self, rewards: GroupRewards, rollouts: Sequence[Rollout], fixed: FixedLogprobs, metrics: TokenMetrics
    ) -> GroupRewards:
        """Take the KL term out of the rewards, where its place is there; of the log-probs that were sampled with."""
        term = self.settings.objective.kl
        if term.place == "loss" or fixed.reference is None:
            return rewards
        estimator, none = KL_ESTIMATORS[term.estimator], torch.empty(0, dtype=torch.float32)
        sampled = [(c.logprobs_T[c.trained_T], c.request.key) for c in (rollout.completion for rollout in rollouts)]
        kl = [estimator(logprobs_T, fixed.reference.get(key, none)) for logprobs_T, key in sampled]
        metrics.add_kl(torch.cat([none, *kl]))
        return rewards.less([float(kl_T.sum()) * self.state.kl.beta for kl_T in kl])

    def _chosen(self, rewards: GroupRewards, rollouts: Sequence[Rollout]) -> torch.Tensor:
        """Which rollouts are learnt from by comparison within their groups, shape R."""
        progress = self.settings.progress(self.optimization.policy_version)
        return self.settings.selection.choose(rewards, rollouts, self._entropies, progress)

    def _entropies(self, rollouts: Sequence[Rollout]) -> dict[Key, torch.Tensor]:
        """Return the entropy of each token that is learnt from, under the policy, by completion."""
        rest(self.policy)
        return self.passes.measure(rollouts, "entropy")

    def _advantages(
        self, rewards: GroupRewards, groups: Sequence[RolloutGroup], chosen_R: torch.Tensor
    ) -> torch.Tensor:
        """Advantages of this rank's rollouts, shape R; NaN for those that are not learnt from."""
        estimator, selection = self.settings.advantages, self.settings.selection
        counted = rewards if selection.counts == "group" else rewards.only(chosen_R)
        if estimator.by_scores:
            rollouts = [rollout for group in groups for rollout in group.rollouts]
            scores = self.passes.measure(rollouts, "scores")
            counted = replace(counted, log_weights_R=log_baseline_weights(rollouts, scores))
        weights_K = torch.tensor(list(self.settings.weights.values()), dtype=torch.float64)
        if "all_ranks" in estimator.needs:
            everyone = self.ranks.gather(counted)
            batch_R = estimator.compute(GroupRewards.concatenate(everyone), weights_K, self.state.history)
            advantages_R = batch_R.split([len(rank.rewards_R) for rank in everyone])[self.ranks.own]
        else:
            advantages_R = estimator.compute(counted, weights_K, self.state.history)
        advantages_R = advantages_R.masked_fill(~chosen_R, math.nan)
        if type(self.settings.shaping).shape is not Shaping.shape:
            version = self.optimization.policy_version
            batch = GroupBatch(groups, version, self.settings.pass_rule, self.ranks.gather)
            advantages_R = shaped(self.settings.shaping, batch, advantages_R)
        if type(selection).choose_from_batch is Selection.choose_from_batch:
            return advantages_R
        parts, counts = zip(*self.ranks.gather((advantages_R, len(rewards.prompt_ids))), strict=True)
        progress = self.settings.progress(self.optimization.policy_version)
        kept = selection.choose_from_batch(torch.cat(parts), sum(counts), progress)
        return advantages_R.masked_fill(~kept.split([len(part) for part in parts])[self.ranks.own], math.nan)

    # ---- a step -------------------------------------------------------------------------------------

    def _step_on(
        self, rollouts: Sequence[Rollout], advantages: Sequence[float], fixed: FixedLogprobs, is_first: bool
    ) -> Step:
        """Count what the step is normalised by, on all ranks, and choose what goes through the policy.

        A rollout without an advantage (NaN), or that is not kept, counts in nothing.
        """
        objective = self.settings.objective
        taking_part, learnt = taking_part_and_learnt(rollouts, advantages, objective.mask_truncated)
        num_tokens = int(self.ranks.sum(_num_trained(learnt)))
        kept = self._kept(learnt)
        num_kept = num_tokens if kept is None else int(self.ranks.sum(sum(int(part.sum()) for part in kept.values())))
        totals = StepTotals(num_tokens, int(self.ranks.sum(len(taking_part))), self.settings.max_tokens, num_kept)
        step = self._step(learnt, totals, fixed, is_first, kept)
        visit = partial(self.passes.visit, step.rollouts, step.credits)
        return replace(step, term=self.settings.auxiliary.term(self.policy, visit, self.ranks))

    def _step(
        self,
        learnt: Sequence[tuple[Rollout, float]],
        totals: StepTotals,
        fixed: FixedLogprobs,
        is_first: bool,
        kept: Mapping[Key, torch.Tensor] | None = None,
    ) -> Step:
        """Put a step together.

        A rollout with advantage 0 has gradient 0 unless the objective has another term, so it does not go through the
        policy; it counts in the denominator all the same.
        """
        if not self.settings.objective.uses_every_completion:
            learnt = [(each, advantage) for each, advantage in learnt if advantage != 0 or _has_credit(each)]
        rollouts, version = [rollout for rollout, _ in learnt], self.optimization.policy_version
        weights = self.settings.selection.token_weights(rollouts, version)
        rollouts = rollouts if weights is None else thinned(rollouts, weights)
        chunks: dict[int, Sequence[Chunk]] = {}
        if type(self.settings.chunking).chunks is not Chunking.chunks:
            chunks = {row: self.settings.chunking.chunks(each.completion, version) for row, each in enumerate(rollouts)}
        return Step(
            rollouts=rollouts,
            advantages=[advantage for _, advantage in learnt],
            totals=totals,
            fixed=fixed,
            policy_version=version,
            beta=self.state.kl.beta,
            entropy_coefficient=self.state.entropy.applied,
            kept=kept,
            chunks={row: its for row, its in chunks.items() if len(its) > 1},
            weights=weights,
            token_gap_limit=self.gap_limits.token if is_first else None,
        )

    def _kept(self, learnt: Sequence[tuple[Rollout, float]]) -> Mapping[Key, torch.Tensor] | None:
        """Which tokens of the whole step are learnt from, by the selection or by entropy; None for all."""
        selection, highest_entropies = self.settings.selection, self.settings.objective.top_entropy_quantile
        share = selection.token_share(self.settings.progress(self.optimization.policy_version))
        if share < 1:
            return highest(selection.token_scores(learnt, self._entropies), share, self.ranks)
        if highest_entropies < 1:
            return highest(self._entropies([rollout for rollout, _ in learnt]), highest_entropies, self.ranks)
        rest(self.policy)
        return selection.token_mask(learnt, self.passes.measure, self.optimization)

    def _gradient(self, step: Step, prompts: Sequence[GroupKey]) -> Gathered:
        """Add up the gradient of a step; where memory runs out on a rank, all start again with smaller micro-batches.

        Without anything to learn from there is no gradient, and the step counts and changes no weight.
        """
        sizer = self.settings.sizer
        if sizer is not None:
            gathered, norms = self.passes.gradient_by_parts(step, prompts, sizer.num_parts)
            sizer.measured(norms)
            return gathered
        while True:
            gathered = self.passes.gradient(
                self.passes.micro_batches(step.rollouts, step.credits, chunks=step.chunks), step
            )
            if gathered is not None:
                return gathered
            self.passes.halve_budget(step.rollouts)

    def _take_step(self, step: Step, gathered: Gathered, metrics: TokenMetrics) -> None:
        """Take the optimizer's step with the gradient that there is."""
        norm = torch.nn.utils.clip_grad_norm_(self.policy.parameters(), self.settings.max_grad_norm or torch.inf)
        gathered, grad_norm = gathered.read(whole(norm))
        for micro_batch in gathered.micro_batches:
            metrics.add(micro_batch)
        if metrics.num_updates == 0:
            self._check_gap(metrics)
        loss = float(gathered.loss)
        skipped = bool(self.ranks.max(float(not math.isfinite(grad_norm + loss))))
        if skipped:
            self.policy.zero_grad()
        self._broken.count(
            skipped, step.policy_version, self.ranks.own, step.rollouts, step.advantages, grad_norm, loss
        )
        size, scale = self.settings.objective.step_size, 1.0
        if size.rule != "fixed" and not skipped:
            log_weights_C = torch.cat([torch.empty(0), *gathered.log_weights])
            scale = size.scale(torch.cat(self.ranks.gather(log_weights_C)))
        sizer = self.settings.sizer
        lr = self.optimization.take_step(scale if sizer is None else scale * sizer.step_scale)
        self.policy.zero_grad()  # neither a rollout nor a measurement needs gradients beside it
        if isinstance(self.reference, Reference):
            self.reference.follow(self.policy, step.policy_version + 1)
        values = {"grad_norm": grad_norm, "lr": lr, "update/skipped": float(skipped), **step.term.metrics}
        if step.kept is not None:
            values["update/kept_share"] = step.totals.num_entropy_tokens / max(step.totals.num_tokens, 1)
        metrics.finish_update(values if size.rule == "fixed" else values | {"update/step_scale": scale})
        if not skipped and self.settings.objective.entropy.target is not None and step.totals.num_entropy_tokens:
            self.state.entropy.update(float(self.ranks.sum(gathered.entropy)) / step.totals.num_entropy_tokens)

    def _check_gap(self, metrics: TokenMetrics) -> None:
        """Refuse a batch that was not sampled with the policy that learns; where a correction is set, warn once.

        Raises:
            LogprobGapError: It was not, and nothing corrects for that.
        """
        problem = metrics.gap_problem(self.ranks.sum, self.ranks.max)
        if not problem:
            return
        sentence = f"The log-probs that a batch was sampled with differ from the policy's {problem}"
        if self.settings.objective.correction.active:
            if not self._told_of_gap:
                self.ranks.warn(f"{sentence}; model.objective.correction weighs what is learnt from it.")
            self._told_of_gap = True
            return
        raise LogprobGapError(
            f"{sentence}, so it is not learnt from: something in the policy is random (router jitter, dropout), a "
            "reward or a callback changes its weights, the generator samples at another temperature, in another "
            "precision or with other weights; mend that, set model.objective.correction, or raise the limit."
        )


def _has_credit(rollout: Rollout) -> bool:
    """Whether tokens of a rollout have advantages of their own."""
    return rollout.token_advantages is not None and bool(rollout.token_advantages.any())


def _num_trained(learnt: Sequence[tuple[Rollout, float]]) -> int:
    """How many tokens of rollouts are learnt from."""
    return sum(rollout.completion.num_trained for rollout, _ in learnt)
