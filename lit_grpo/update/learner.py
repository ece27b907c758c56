"""Groups of rollouts become one optimizer step after another."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from lit_grpo.faults import BrokenBatches
from lit_grpo.memory import free_bytes, is_out_of_memory, return_freed_memory
from lit_grpo.policy.sharding import compute, is_scattered, rest, scatter, whole
from lit_grpo.ranks import Ranks
from lit_grpo.types import Key, Rollout, RolloutGroup
from lit_grpo.update.advantages.estimator import GroupRewards
from lit_grpo.update.arriving import Arriving
from lit_grpo.update.averaged import AveragedPolicy
from lit_grpo.update.batches.layout import MicroBatch
from lit_grpo.update.batches.microbatch import MicroBatches, least_tokens, make_micro_batches
from lit_grpo.update.batches.step import (
    Before,
    Step,
    log_baseline_weights,
    measure,
    minibatches,
    missing_logprob,
    taking_part_and_learnt,
)
from lit_grpo.update.budget import TokenBudget, estimate_tokens
from lit_grpo.update.logprobs.checkpointing import check_mode
from lit_grpo.update.logprobs.forward import micro_batch_logprobs
from lit_grpo.update.logprobs.measurements import measured
from lit_grpo.update.logprobs.reference import AdapterFreeReference, InitialAdapterReference, Reference
from lit_grpo.update.metrics import GapLimits, LogprobGapError, TokenMetrics, advantage_metrics
from lit_grpo.update.normalization import StepTotals
from lit_grpo.update.objective.controllers import ObjectiveState
from lit_grpo.update.objective.kl import KL_ESTIMATORS
from lit_grpo.update.objective.policy_loss import policy_loss
from lit_grpo.update.objective.proximal import interpolated_logprobs
from lit_grpo.update.objective.tokens import Tokens, completion_sums, highest, spread
from lit_grpo.update.prefix.sequence_parallel import SequenceParallel
from lit_grpo.update.prefix.sharing import shared_prefixes
from lit_grpo.update.selection import token_scores
from lit_grpo.update.settings import Optimization, Settings
from lit_grpo.update.snapshots import Snapshots, factor_metrics

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
        settings: Settings,
        reference: Reference | AdapterFreeReference | InitialAdapterReference | None = None,
        folder: Path | None = None,
    ) -> None:
        self.policy, self.optimization, self.settings, self.reference = policy, optimization, settings, reference
        self.state = ObjectiveState(settings.objective.kl, settings.objective.entropy)
        decay = settings.objective.proximal_decay
        self.averaged = None if decay is None else AveragedPolicy(policy, decay)
        self.snapshots = Snapshots(policy) if settings.objective.proximal == "snapshots" else None
        self.budget: TokenBudget | None = None
        self.gap_limits = GapLimits()
        self._told_of_gap = False
        self._broken = BrokenBatches(folder, settings.max_skipped_updates)
        self._rows = SequenceParallel.of(policy, settings.sequence_parallel_size, settings.shares_prefix)

    @property
    def device(self) -> torch.device:
        """Where the policy is."""
        return self.policy.device

    @property
    def ranks(self) -> Ranks:
        """Reductions over the ranks of the run."""
        return Ranks(self.device)

    def rewards(self, groups: Sequence[RolloutGroup]) -> GroupRewards:
        """Take the rewards of groups."""
        return GroupRewards.of(groups, list(self.settings.weights))

    def learn(self, groups: Sequence[RolloutGroup]) -> dict[str, float]:
        """Take ``num_iterations x num_minibatches`` steps on groups; return what to log of them.

        Each rollout is given its advantage. What is remembered of prompts and coefficients changes once all steps have
        been taken.

        Raises:
            ValueError: A token that is to be learnt from has no sampled log-prob.
            LogprobGapError: The generator did not sample with the policy's weights; none has changed.
            FloatingPointError: Losses or gradients of several updates in a row are not finite; the weights stay as
                they are.
        """
        settings, metrics = self.settings, TokenMetrics(self.gap_limits)
        problems = self.ranks.gather(missing_logprob([rollout for group in groups for rollout in group.rollouts]))
        for problem in filter(None, problems):
            raise ValueError(problem)  # on every rank, so that none waits for another
        advantages_R, before = self.prepare(groups, metrics)
        for some, places in minibatches(groups, settings.num_iterations, settings.num_minibatches):
            self._update(self._step_on(some, advantages_R[places].tolist(), before), metrics)
        return self._end(metrics, advantages_R)

    def learn_as_they_come(self, arriving: Iterable[Sequence[RolloutGroup]]) -> dict[str, float]:
        """Take one step on groups that become whole one after another; return what to log of them.

        It is the step that :meth:`learn` takes on all of them, but for rounding: gradients add up over a provisional
        denominator, and are divided by the true one in the end. The settings have to allow it
        (:func:`lit_grpo.update.arriving.check_arriving`). Raises what :meth:`learn` does.
        """
        metrics = TokenMetrics(self.gap_limits)
        step, advantages_R = Arriving(self, metrics).sum(arriving)
        self._take_step(step, metrics)
        return self._end(metrics, advantages_R)

    def _end(self, metrics: TokenMetrics, advantages_R: torch.Tensor) -> dict[str, float]:
        """Remember what a batch has shown; return what to log."""
        logs = metrics.compute(self.ranks.sum, self.ranks.max)
        self.state.kl.update(logs.get("kl", math.nan), int(self.ranks.sum(len(advantages_R))))
        self.state.history.commit(self.ranks.gather)
        return logs | advantage_metrics(torch.cat(self.ranks.gather(advantages_R))) | self.state.coefficients()

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps: what the objective remembers, a reference that has moved, and what was found out."""
        reference = self.reference.state_dict() if isinstance(self.reference, Reference) else {}
        counts = {"skipped": self._broken.num_skipped, "budget": None if self.budget is None else self.budget.tokens}
        counts["averaged"] = {} if self.averaged is None else self.averaged.state_dict()
        counts["snapshots"] = {} if self.snapshots is None else self.snapshots.state_dict()
        return {"objective_state": self.state.state_dict(), "reference": reference, "learner": counts}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint."""
        self.state.load_state_dict(state["objective_state"])
        self._broken.num_skipped, tokens = state["learner"]["skipped"], state["learner"]["budget"]
        self.budget = None if tokens is None else TokenBudget(tokens)
        if isinstance(self.reference, Reference):
            self.reference.load_state_dict(state["reference"])
        if self.averaged is not None:
            self.averaged.load_state_dict(state["learner"]["averaged"])
        if self.snapshots is not None:
            self.snapshots.load_state_dict(state["learner"]["snapshots"])

    # ---- before the first step ----------------------------------------------------------------------

    def prepare(self, groups: Sequence[RolloutGroup], metrics: TokenMetrics) -> tuple[torch.Tensor, Before]:
        """Give each rollout its advantage; return them, and what the updates on the rollouts compare with."""
        rest(self.policy)
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        before = self._before(rollouts)
        rewards, version = self.rewards(groups), self.optimization.policy_version
        rewards = self._less_kl(rewards, rollouts, before, metrics)
        compute, measure = partial(self._advantages, rollouts), partial(self._measure, what="entropy")
        of = rewards, rollouts, compute, self.ranks, measure, self.settings.progress(version)
        advantages_R = self.settings.selection.advantages(*of)
        seen = rewards.visits(groups, self.settings.pass_rule, version)
        self.state.history.note(seen)
        for rollout, advantage in zip(rollouts, advantages_R.tolist(), strict=True):
            rollout.advantage = advantage
        return advantages_R, before

    def _before(self, rollouts: Sequence[Rollout]) -> Before:
        """Measure what all updates on the rollouts compare with, before the first of them.

        The reference is computed here and not beside the policy, so that it need not be on the device in a backward
        pass, and once for all updates; a reference that moves between them counts from the next batch (as in TRL), and
        so does the average of the policy's weights.
        """
        old, lent, objective = None, self.reference, self.settings.objective
        reference = None if lent is None else self._measure(rollouts, "logprobs", lent.lend)
        if self.averaged is not None:
            old = self._measure(rollouts, "logprobs", self.averaged.lend)
        elif self.snapshots is not None:
            old = self.snapshots.logprobs(
                rollouts,
                self.optimization.policy_version,
                measure=partial(self._measure, what="logprobs"),
                ranks=self.ranks,
                measures_now=self.settings.updates_per_batch > 1,
            )
        elif objective.proximal_policy == "recomputed" and self.settings.updates_per_batch > 1:
            old = self._measure(rollouts, "logprobs")
        return Before(old, reference)

    def _less_kl(
        self, rewards: GroupRewards, rollouts: Sequence[Rollout], before: Before, metrics: TokenMetrics
    ) -> GroupRewards:
        """Take the KL term out of the rewards, where its place is there; of the log-probs that were sampled with."""
        term = self.settings.objective.kl
        if term.place == "loss" or before.reference is None:
            return rewards
        estimator, none = KL_ESTIMATORS[term.estimator], torch.empty(0, dtype=torch.float32)
        sampled = [(c.logprobs_T[c.trained_T], c.request.key) for c in (rollout.completion for rollout in rollouts)]
        kl = [estimator(logprobs_T, before.reference.get(key, none)) for logprobs_T, key in sampled]
        metrics.add_kl(torch.cat([none, *kl]))
        return rewards.less([float(kl_T.sum()) * self.state.kl.beta for kl_T in kl])

    def _advantages(self, rollouts: Sequence[Rollout], rewards: GroupRewards) -> torch.Tensor:
        """Advantages of this rank's rollouts; from all ranks' rewards where the estimator needs them."""
        estimator, history = self.settings.advantages, self.state.history
        if estimator.weighs_members:
            rewards = replace(rewards, log_weights_R=log_baseline_weights(rollouts, self._measure(rollouts, "scores")))
        weights_K = torch.tensor(list(self.settings.weights.values()), dtype=torch.float64)
        if not estimator.needs_all_ranks:
            return estimator.compute(rewards, weights_K, history)
        ranks = self.ranks.gather(rewards)
        advantages_R = estimator.compute(GroupRewards.concatenate(ranks), weights_K, history)
        return advantages_R.split([len(rank.rewards_R) for rank in ranks])[self.ranks.own]

    def _measure(
        self,
        rollouts: Sequence[Rollout],
        what: Literal["logprobs", "entropy", "scores"],
        lend: Callable[[], AbstractContextManager[PreTrainedModel]] | None = None,
    ) -> dict[Key, torch.Tensor]:
        """Measure every token that is learnt from under the policy, or under a model that is lent for it.

        Where the budget is open and the memory of a rank runs out, all of them begin anew with half of it.
        """
        with_tokens = [rollout for rollout in rollouts if rollout.completion.num_trained]
        nothing = [0.0] * len(with_tokens)
        while True:
            values: dict[Key, torch.Tensor] | None = None
            micro_batches = self._micro_batches(with_tokens, nothing, is_scattered(self.policy) or self._rows.size > 1)
            try:
                with nullcontext(self.policy) if lend is None else lend() as model:
                    measurement = partial(measured, what, model, self.settings.temperature, self._rows)
                    values = measure(with_tokens, micro_batches, measurement, self.device, self._rows)
            except (RuntimeError, MemoryError) as error:
                if self.budget is None or not is_out_of_memory(error):
                    raise
            short = self.budget is not None and bool(self.ranks.max(float(values is None)))
            if values is not None and not short:
                return values
            self.halve_budget(with_tokens)

    def halve_budget(self, rollouts: Sequence[Rollout]) -> None:
        """Go on with half of the budget, on all ranks, which have run out of memory on these rollouts."""
        assert self.budget is not None
        self.ranks.warn(self.budget.halve(int(self.ranks.max(least_tokens(rollouts, self.settings.shares_prefix)))))
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    # ---- a step -------------------------------------------------------------------------------------

    def _step_on(self, rollouts: Sequence[Rollout], advantages: Sequence[float], before: Before) -> Step:
        """Count what the step is normalised by, on all ranks, and choose what goes through the policy.

        A rollout without an advantage (NaN), or that is not kept, counts in nothing. One with advantage 0 has gradient
        0 unless the objective has another term, so it is left out; it counts in the denominator all the same.
        """
        objective = self.settings.objective
        taking_part, learnt = taking_part_and_learnt(rollouts, advantages, objective.mask_truncated)
        num_tokens = int(self.ranks.sum(sum(rollout.completion.num_trained for rollout, _ in learnt)))
        kept = self._kept(learnt)
        num_kept = num_tokens if kept is None else int(self.ranks.sum(sum(int(part.sum()) for part in kept.values())))
        totals = StepTotals(num_tokens, int(self.ranks.sum(len(taking_part))), self.settings.max_tokens, num_kept)
        if not objective.uses_every_completion:
            learnt = [(rollout, advantage) for rollout, advantage in learnt if advantage != 0]
        return Step([r for r, _ in learnt], [advantage for _, advantage in learnt], totals, before, kept)

    def _kept(self, learnt: Sequence[tuple[Rollout, float]]) -> dict[Key, torch.Tensor] | None:
        """Which tokens of the whole step are learnt from, by entropy or absolute advantage x entropy; None for all."""
        selection, share = self.settings.selection, self.settings.objective.top_entropy_quantile
        if selection.takes_tokens:
            share = selection.tokens_at(self.settings.progress(self.optimization.policy_version))
        if share == 1:
            return None
        rest(self.policy)
        measure = partial(self._measure, what="entropy")
        scores = token_scores(learnt, measure) if selection.takes_tokens else measure([r for r, _ in learnt])
        return highest(scores, share, self.ranks)

    def _update(self, step: Step, metrics: TokenMetrics) -> None:
        """Take one optimizer step. Without a gradient (nothing to learn) it counts, and changes no weight."""
        before = copy.deepcopy(vars(metrics))
        while not self.accumulate(self._micro_batches(step.rollouts, step.advantages), step, metrics):
            self.halve_budget(step.rollouts)
            vars(metrics).update(copy.deepcopy(before))
            step.forget()
        self._take_step(step, metrics)

    def _take_step(self, step: Step, metrics: TokenMetrics) -> None:
        """Take the optimizer's step with the gradient that there is."""
        if metrics.num_updates == 0:
            self._check_gap(metrics)
        version = self.optimization.policy_version
        norm = torch.nn.utils.clip_grad_norm_(self.policy.parameters(), self.settings.max_grad_norm or torch.inf)
        grad_norm, loss = float(whole(norm)), float(step.loss_sum)
        skipped = bool(self.ranks.max(float(not math.isfinite(grad_norm + loss))))
        if skipped:
            self.policy.zero_grad()
        self._broken.count(skipped, version, self.ranks.own, step.rollouts, step.advantages, grad_norm, loss)
        size, scale = self.settings.objective.step_size, 1.0
        if size.rule != "fixed" and not skipped:
            scale = size.scale(torch.cat(self.ranks.gather(torch.cat([torch.empty(0), *step.log_weights]).cpu())))
        lr = self.optimization.take_step(scale)
        self.policy.zero_grad()  # neither a rollout nor a measurement needs gradients beside it
        if isinstance(self.reference, Reference):
            self.reference.follow(self.policy, version + 1)
        if self.averaged is not None and not skipped:
            self.averaged.follow()
        scales = {} if size.rule == "fixed" else {"update/step_scale": scale}
        metrics.finish_update(**{"grad_norm": grad_norm, "lr": lr, "update/skipped": float(skipped)} | scales)
        if not skipped and self.settings.objective.entropy.target is not None and step.totals.num_entropy_tokens:
            entropy = float(self.ranks.sum(step.entropy_sum)) / step.totals.num_entropy_tokens
            self.state.entropy.update(entropy)

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

    def accumulate(
        self, micro_batches: MicroBatches, step: Step, metrics: TokenMetrics, first: bool = True, last: bool = True
    ) -> bool:
        """Gather the step's gradient; return whether the memory of all ranks sufficed, where the budget is open.

        The gradient begins anew with the ``first`` micro-batches of a step, and ranks exchange it in the ``last``. A
        rank whose memory runs out cannot take part in the exchange of gradients, so with an open budget ranks agree
        beforehand, and exchange in the backward pass of an empty micro-batch.
        """
        scatter(self.policy)
        if first:
            self.policy.zero_grad()
        is_open, short = self.budget is not None, False
        if is_open and micro_batches and self.ranks.size > 1:
            micro_batches = micro_batches.and_empty(1)
        with shared_prefixes(self.policy) if self.settings.shares_prefix else nullcontext():
            for index, (owner, micro_batch) in enumerate(self._rows.in_turn(micro_batches)):
                is_last = last and index == len(micro_batches) * self._rows.size - 1
                if is_open and is_last and self.ranks.max(float(short)):
                    return False
                try:
                    if not short:
                        compute_loss = partial(self._loss, micro_batch.to(self.device), owner, step, metrics)
                        self.optimization.add_gradient(compute_loss, is_last)
                except (RuntimeError, MemoryError) as error:
                    if not is_open or not is_out_of_memory(error):
                        raise
                    short = True
                if self.device.type == "cpu":
                    return_freed_memory()
        return not short

    def _micro_batches(
        self, rollouts: Sequence[Rollout], advantages: Sequence[float], equally_many: bool = True
    ) -> MicroBatches:
        """Cut into micro-batches, equally many on every rank; none where no rank has anything to learn."""
        own = make_micro_batches(rollouts, advantages, self.max_tokens(rollouts), self.settings.shares_prefix)
        return own.and_empty(int(self.ranks.max(len(own))) - len(own)) if equally_many else own

    def max_tokens(self, rollouts: Sequence[Rollout]) -> int:
        """The token budget of micro-batches; where it is open, estimated the first time, the same on every rank."""
        settings = self.settings
        if settings.max_tokens_per_micro_batch != "auto":
            return settings.max_tokens_per_micro_batch
        if self.budget is None:
            is_selective = settings.gradient_checkpointing == "selective"
            tokens = estimate_tokens(self.policy, free_bytes(self.device), settings.shares_prefix, is_selective)
            self.budget = TokenBudget(int(-self.ranks.max(-tokens)))
        return max(self.budget.tokens, least_tokens(rollouts, settings.shares_prefix))

    # ---- a micro-batch ------------------------------------------------------------------------------

    def _loss(self, micro_batch: MicroBatch, owner: int, step: Step, metrics: TokenMetrics) -> torch.Tensor:
        """The micro-batch's share of the step's loss; of another rank's nothing, but its gradient passes."""
        check_mode(self.policy, bool(self.settings.gradient_checkpointing))
        objective = self.settings.objective
        of = self.policy, micro_batch, self.settings.temperature, objective.entropy.active, self._rows, owner
        logprobs_N, entropy_N = compute(self.policy, partial(micro_batch_logprobs, *of))
        if owner != self._rows.own:
            return logprobs_N.sum() * 0.0
        tokens = self._tokens(logprobs_N, entropy_N, micro_batch, step)
        kept_N = None if step.kept is None else step.of(step.kept, micro_batch)
        of = tokens, step.totals, self.state.kl.beta, self.state.entropy.applied, kept_N
        loss, token_metrics = policy_loss(objective, *of)
        if self.snapshots is not None:
            token_metrics |= factor_metrics(tokens)
        entropy_N, step.loss_sum = entropy_N.detach(), step.loss_sum + loss.detach()
        step.entropy_sum += (entropy_N if kept_N is None else entropy_N * kept_N).sum()
        metrics.add(loss.detach(), entropy=entropy_N, **token_metrics)
        gap_N = tokens.logprobs_N.detach() - tokens.sampled_logprobs_N
        step.log_weights.append(completion_sums(gap_N, tokens.lengths_C))
        if metrics.num_updates == 0:  # the weights are still those that sampled
            is_fresh_N = micro_batch.versions_N == self.optimization.policy_version
            stale_C = completion_sums((~is_fresh_N).to(gap_N.dtype), tokens.lengths_C)  # keys may be of old weights
            metrics.add_gap(gap_N, tokens.lengths_C, spread(stale_C, tokens.lengths_C) == 0)
        return loss

    def _tokens(self, logprobs_N: torch.Tensor, entropy_N: torch.Tensor, micro_batch: MicroBatch, step: Step) -> Tokens:
        """What the objective sees of a micro-batch that has gone through the policy."""
        objective = self.settings.objective
        old_logprobs_N, sampled_logprobs_N = logprobs_N.detach(), micro_batch.sampled_logprobs_N
        if objective.proximal_policy == "sampled":
            old_logprobs_N = sampled_logprobs_N
        elif objective.proximal_policy == "interpolated":
            of = sampled_logprobs_N, micro_batch.versions_N, self.optimization.policy_version
            old_logprobs_N = interpolated_logprobs(logprobs_N, *of)
        elif step.before.old is not None:  # else this is the only update on these rollouts
            measured_N = step.of(step.before.old, micro_batch)
            from_this_pass_N = measured_N.isnan() & (micro_batch.versions_N == self.optimization.policy_version)
            old_logprobs_N = torch.where(from_this_pass_N, old_logprobs_N, measured_N.to(old_logprobs_N.dtype))
        reference = step.before.reference if objective.kl_in_loss else None
        reference_logprobs_N = None if reference is None else step.of(reference, micro_batch)
        completions = micro_batch.advantages_C, micro_batch.lengths_C, reference_logprobs_N, micro_batch.versions_N
        return Tokens(logprobs_N, sampled_logprobs_N, old_logprobs_N, entropy_N, *completions)
