"""Groups of rollouts become one optimizer step after another."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lit_grpo.budgets.history import PromptHistory
from lit_grpo.faults import SkippedUpdates
from lit_grpo.plugins import ask
from lit_grpo.plugins.columns import LATE
from lit_grpo.policy.sharding import as_shards, full_tensor
from lit_grpo.types import OBSERVED, Completion, Rollout, RolloutGroup
from lit_grpo.update.advantages.estimator import GroupRewards
from lit_grpo.update.assigning import fill_batch
from lit_grpo.update.learner_settings import LearnerSettings, Optimization
from lit_grpo.update.logprobs.reference import AdapterFreeReference, InitialAdapterReference, Reference
from lit_grpo.update.metrics import GapLimits, LogprobGapError, TokenMetrics, advantage_metrics
from lit_grpo.update.micro_batch_size import MicroBatchSize
from lit_grpo.update.objective.kl import KL_ESTIMATORS
from lit_grpo.update.objective.tokens import StepTotals
from lit_grpo.update.passes import PolicyPasses
from lit_grpo.update.plugin import Batch, SquaredNorm
from lit_grpo.update.step import PROVISIONAL, Step, thinned, with_ce

if TYPE_CHECKING:
    from transformers import PreTrainedModel

DENOMINATORS = ("old_logprob", "proximal_logprob")
"""Columns that probability ratios are taken to."""


class Learner:
    """Turns groups of rollouts into one optimizer step after another.

    Args:
        policy: Model to train, whose weights are updated in place.
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
        self.beta, self.history = settings.objective.kl.beta, PromptHistory()
        self.passes = PolicyPasses(policy, optimization, settings)
        self.gap_limits = GapLimits()
        self._told_of_gap = False
        self._broken = SkippedUpdates(folder, settings.max_skipped_updates)

    def learn(
        self, groups: Sequence[RolloutGroup] | Iterator[Sequence[RolloutGroup]], rewards: GroupRewards | None = None
    ) -> dict[str, float]:
        """Take optimizer steps on a batch; return what to log of them.

        On groups that are there already it takes ``num_iterations x num_minibatches`` steps. On groups that become
        complete one after another it takes one: the step on all of them, but for rounding, since gradients add up over
        a provisional denominator and are divided by the true one in the end. The settings have to allow that
        (:func:`lit_grpo.update.learner_settings.check_arriving`).

        Each rollout is given its advantage. What is remembered of prompts and coefficients changes once all steps have
        been taken.

        Args:
            groups: A sequence of groups, or an iterator over the groups that have become complete meanwhile.
            rewards: Of the groups of a sequence, where they have been gathered already.

        Raises:
            ValueError: A token that is to be trained on has no sampled log-prob, or two completions have the same key.
            LogprobGapError: The generator did not sample with the policy's weights; none has changed.
            FloatingPointError: Losses or gradients of several updates in a row are not finite; the weights stay as
                they are.
        """
        settings, ranks, passes = self.settings, self.passes.ranks, self.passes
        metrics = TokenMetrics(self.gap_limits)
        num_parts = max((ask(plugin, "numbers").num_parts for plugin in settings.plugins), default=1)
        rollouts, parts = list[Rollout](), list[Step]()  # of the batch; of the next step
        norms: Sequence[SquaredNorm] = ()
        is_whole = isinstance(groups, Sequence)
        num_minibatches, num_iterations = (settings.num_minibatches, settings.num_iterations) if is_whole else (1, 1)
        for some in [groups] if is_whole else filter(None, groups):
            batch = self._prepare(some, rewards, metrics, is_whole)
            rollouts += batch.rollouts
            for numbers in torch.arange(len(some)).tensor_split(num_minibatches) * num_iterations:
                minibatch = [rollout for number in numbers.tolist() for rollout in some[number].rollouts]
                parts.append(self.make_step(minibatch, is_whole))
                with as_shards(self.policy):
                    if num_parts == 1 or not is_whole:
                        passes.gradient(parts, metrics, is_whole)
                    else:
                        members = [*minibatch, *parts[0].rollouts]  # the step may have examples too
                        prompts = list(dict.fromkeys(rollout.completion.request.group for rollout in members))
                        norms = passes.measured_gradient(parts[0], prompts, num_parts, metrics)
                    if is_whole:
                        self._take_step(parts.pop(), metrics, norms=norms)
        if parts:
            step, scale = self._together(parts, metrics)
            self._take_step(step, metrics, scale)
        advantages_R2 = torch.empty((len(rollouts), 2), dtype=torch.float32)
        passes.laid_out.clear()
        for row, rollout in enumerate(rollouts):
            of_tokens, rollout.columns = rollout.columns.get("token_advantage"), {}
            largest = rollout.advantage if of_tokens is None or not len(of_tokens) else float(of_tokens.abs().max())
            advantages_R2[row, 0], advantages_R2[row, 1] = rollout.advantage, largest
        logs = metrics.compute(ranks.sum, ranks.max)
        if settings.objective.kl.target is not None:
            num_sequences = int(ranks.sum(len(rollouts)))
            self.beta = settings.objective.kl.next_beta(self.beta, logs.get("kl", math.nan), num_sequences)
            logs["kl_beta"] = self.beta
        self.history.commit(ranks.gather)
        return logs | advantage_metrics(torch.cat(ranks.gather(advantages_R2)))

    def learn_examples(self) -> dict[str, float]:
        """Take the optimizer steps of a batch without rollouts, on the examples of a plug-in; return what to log."""
        metrics, passes = TokenMetrics(self.gap_limits), self.passes
        for _ in range(self.settings.updates_per_batch):
            step = self.make_step((), is_whole=True)
            with as_shards(self.policy):
                passes.gradient([step], metrics)
                self._take_step(step, metrics)
        passes.laid_out.clear()
        logs = metrics.compute(passes.ranks.sum, passes.ranks.max)
        return {name: logs[name] for name in logs if name.startswith(("loss", "ce/", "grad_norm", "lr", "update/"))}

    @property
    def progress(self) -> float:
        """The fraction of the run's updates that has been made; 0 if it is not known how many there are."""
        total = self.settings.total_updates
        return 0.0 if total is None else min(self.optimization.policy_version / max(total, 1), 1.0)

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a checkpoint needs."""
        budget = self.passes.budget
        own: dict[str, Any] = {
            "beta": self.beta,
            "history": self.history.state_dict(),
            "skipped": self._broken.num_skipped,
            "budget": None if budget is None else budget.tokens,
        }
        return {"learner": own}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint; a beta that does not adapt stays as it is configured."""
        own = state["learner"]
        if self.settings.objective.kl.target is not None:
            self.beta = own["beta"]
        self.history.load_state_dict(own["history"])
        self._broken.num_skipped, tokens = own["skipped"], own["budget"]
        self.passes.budget = None if tokens is None else MicroBatchSize(tokens)

    # ---- before the first step ----------------------------------------------------------------------

    def _prepare(
        self, groups: Sequence[RolloutGroup], rewards: GroupRewards | None, metrics: TokenMetrics, is_whole: bool
    ) -> Batch:
        """Check rollouts, and fill the columns that all steps on them need: their advantages among them.

        The reference is computed here and not beside the policy, so that it need not be on the device in a backward
        pass, and once for all updates; a reference that moves between them counts from the next batch.
        """
        settings, passes, objective = self.settings, self.passes, self.settings.objective
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        for rollout in rollouts:
            rollout.columns = {}  # of an update that failed
        replayed = [rollout for rollout in rollouts if rollout.recompute]
        told = (_problem_of(rollouts), bool(replayed))
        everyone = passes.ranks.gather(told) if is_whole else [told]
        for problem in filter(None, (each for each, _ in everyone)):
            raise ValueError(problem)  # on every rank, so that none waits for another
        if any(recomputes for _, recomputes in everyone):
            self._recompute(replayed)
        version, several_updates = self.optimization.policy_version, settings.updates_per_batch > 1
        rewards = rewards or GroupRewards.of(groups, list(settings.weights))
        if self.reference is not None:
            measured = passes.measure(rollouts, "logprobs", self.reference.lend)
            for rollout, its in zip(rollouts, measured, strict=True):
                rollout.columns["reference_logprob"] = its
        if objective.kl.place == "reward" and self.reference is not None:
            estimator, none = KL_ESTIMATORS[objective.kl.estimator], torch.empty(0, dtype=torch.float32)
            kl = [
                estimator(each.completion.logprobs_T[each.completion.trained_T], each.columns.pop("reference_logprob"))
                for each in rollouts
            ]
            metrics.add_kl(torch.cat([none, *kl]))
            penalties_R = torch.tensor([float(kl_T.sum()) * self.beta for kl_T in kl], dtype=torch.float32)
            rewards = replace(rewards, rewards_R=rewards.rewards_R - penalties_R)
        if objective.proximal_policy == "recomputed" and several_updates and settings.written.isdisjoint(DENOMINATORS):
            for rollout, its in zip(rollouts, passes.measure(rollouts, "logprobs"), strict=True):
                rollout.columns["old_logprob"] = its
        batch = Batch(
            groups,
            version,
            settings.pass_rule,
            passes.ranks.gather,
            rewards,
            self.progress,
            passes.by_completion,
            several_updates,
            self.policy.config.get_text_config().vocab_size,
            passes.ranks.rank,
        )
        fill_batch(batch, passes, self.history, is_whole)
        return batch

    def _recompute(self, rollouts: Sequence[Rollout]) -> None:
        """Let rollouts be as if the policy had sampled them now; what is remembered of them stays as it was."""
        version, logprobs = self.optimization.policy_version, self.passes.measure(rollouts, "logprobs")
        for rollout, own in zip(rollouts, logprobs, strict=True):
            was = rollout.completion
            trained_T, logprobs_T = was.trained_T, was.logprobs_T.clone()
            logprobs_T[trained_T] = own.to(logprobs_T.dtype)
            rollout.completion = Completion(
                was.request,
                was.token_ids_T,
                logprobs_T,
                torch.where(was.versions_T == OBSERVED, OBSERVED, version),
                was.finish_reason,
                was.text,
                was.entropy,
                trained_T,
                pictures=was.pictures,
            )

    # ---- a step -------------------------------------------------------------------------------------

    def make_step(self, rollouts: Sequence[Rollout], is_whole: bool) -> Step:
        """Choose what goes through the policy in a step, and count what its loss is divided by.

        Without rollouts the step has examples alone. Those without an advantage (NaN) or a token to learn from, and
        those that are not kept, count in nothing. Those that ended at the limit on their length count as completions,
        but their tokens do not, where ``mask_truncated`` (DAPO's overlong filtering; as in TRL). One whose advantage,
        and that of all of its tokens, is 0 has gradient 0 unless the objective has another term, so it does not go
        through the policy; it counts in the denominator all the same.

        Args:
            rollouts: Rollouts of the step on this rank; a completion may have several rows.
            is_whole: Whether these are all rollouts of the step; else the denominator is provisional.
        """
        settings, passes, ranks = self.settings, self.passes, self.passes.ranks
        objective, num_tokens, num_sequences, trained = settings.objective, 0, 0, list[Rollout]()
        for rollout in rollouts:
            if not math.isnan(rollout.advantage) and rollout.kept and rollout.completion.num_trained:
                num_sequences += 1
                if not objective.mask_truncated or rollout.completion.finish_reason != "length":
                    trained += rollout.rows
        for row in trained:
            num_tokens += row.completion.num_trained
            for name in ("mask", "weight", "chunks"):
                row.columns.pop(name, None)  # of an earlier step
        own = StepTotals(num_tokens, num_sequences, settings.max_tokens)
        step = Step(
            rollouts=trained,
            version=self.optimization.policy_version,
            progress=self.progress,
            ranks=ranks,
            policy=self.policy,
            optimizer=self.optimization.optimizer,
            measure=passes.by_completion,
            visit=lambda visitor: passes.visit(step.rollouts, visitor),
            beta=self.beta,
            own=own,
            totals=StepTotals(PROVISIONAL, PROVISIONAL, settings.max_tokens, PROVISIONAL),
            values={"entropy_coefficient": objective.entropy.coefficient},
        )
        self._call(step, "on_minibatch", late=False)
        rows = [*rollouts, *step.values.get("examples", ())]
        if is_whole:
            is_masked = any("mask" in row.columns for row in trained)
            if objective.top_entropy_quantile < 1 and not ranks.max(float(is_masked)):
                entropies = passes.measure(trained, "entropy")
                for row, mask_N in zip(trained, step.highest(entropies, objective.top_entropy_quantile), strict=True):
                    row.columns["mask"] = mask_N
            step = replace(step, totals=self._totals(own, trained, rows))
        all_learn = "entropy_coefficient" in settings.written or objective.uses_every_completion
        through = list[Rollout]()
        for row in trained:
            of_tokens, candidates = row.columns.get("token_advantage"), row.columns.get("candidate_values")
            learns = all_learn or row.advantage != 0 or (of_tokens is not None and bool(of_tokens.any()))
            if learns or (candidates is not None and not candidates.isnan().all()):
                weights_N = row.columns.get("weight")
                through.append(row if weights_N is None else thinned(row, weights_N != 0, row.completion.num_trained))
        if any(step.totals.num_ce_tokens):
            through = with_ce(rows, through)
        step = replace(step, rollouts=through)
        self._call(step, "on_minibatch", late=True)
        return step

    def _totals(self, own: StepTotals, trained: Sequence[Rollout], rows: Sequence[Rollout]) -> StepTotals:
        """Count what the loss of a step is divided by, over all ranks."""
        num_kept, num_masked, num_ce = own.num_tokens, 0, [0] * len(self.settings.ce_sources)
        for row in trained:
            if (mask_N := row.columns.get("mask")) is not None:
                num_kept, num_masked = num_kept - int((~mask_N).sum()), num_masked + 1
        for rollout in rows:
            if (weights_T := rollout.columns.get("ce_weight")) is not None:
                num_ce[rollout.ce_source] += int(weights_T.count_nonzero())
        counts = [own.num_tokens, own.num_sequences, num_kept, num_masked, *num_ce]
        sums = self.passes.ranks.sum(torch.tensor(counts, dtype=torch.float64)).tolist()
        num_tokens, num_sequences, num_kept, num_masked, *num_ce = map(int, sums)
        return StepTotals(num_tokens, num_sequences, own.max_tokens, num_kept, tuple(num_ce), bool(num_masked))

    def _call(self, step: Step, hook: str, late: bool | None = None) -> None:
        """Let plug-ins act on a step, each on its part.

        Args:
            step: The step.
            hook: Name of the hook.
            late: Whether only those act that write late columns, or only the others; by default all do.
        """
        for plugin in self.settings.hooked[hook]:
            if late is None or late == bool(plugin.writes.intersection(LATE)):
                ask(plugin, hook, step.of(plugin, hook, self.settings.source_of(plugin)))

    def _together(self, parts: Sequence[Step], metrics: TokenMetrics) -> tuple[Step, float]:
        """Divide the gradient of all parts of a step by the true totals instead of the provisional ones.

        Returns:
            The step, and the factor of what was divided by provisional totals.
        """
        ranks, last = self.passes.ranks, parts[-1]
        self.passes.exchange(last, metrics)
        counts = torch.tensor([(part.own.num_tokens, part.own.num_sequences) for part in parts], dtype=torch.float64)
        num_tokens, num_sequences = map(int, ranks.sum(counts.sum(0)).tolist())
        totals = StepTotals(num_tokens, num_sequences, last.totals.max_tokens, num_tokens)
        by_token = self.settings.objective.normalized_by == "token"
        scale = PROVISIONAL / max(num_tokens if by_token else num_sequences, 1)
        for parameter in self.policy.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(scale)
        return replace(last, rollouts=[each for part in parts for each in part.rollouts], totals=totals), scale

    def _take_step(
        self, step: Step, metrics: TokenMetrics, loss_scale: float = 1.0, norms: Sequence[SquaredNorm] = ()
    ) -> None:
        """Take the optimizer's step with the gradient that there is.

        Args:
            step: What the gradient is of.
            metrics: Metrics of the batch, to which loss and gradient norm are added.
            loss_scale: Factor of the loss that micro-batches have added to the metrics.
            norms: Squared norms of the gradient as it was added up, if a plug-in has them measured.
        """
        norm = torch.nn.utils.clip_grad_norm_(self.policy.parameters(), self.settings.max_grad_norm or torch.inf)
        ranks, grad_norm, loss = self.passes.ranks, metrics.read(full_tensor(norm), loss_scale), metrics.loss
        if metrics.num_updates == 0 and (problem := metrics.gap_problem(ranks.sum, ranks.max)):
            self._refuse_gap(problem, step)
        skipped = bool(ranks.max(float(not math.isfinite(grad_norm + loss))))
        if skipped:
            self.policy.zero_grad()
            self._broken.count(step.version, ranks.rank, step.rollouts, grad_norm, loss)
        else:
            self._broken.num_skipped = 0
        scaling = bool(self.settings.hooked["on_gradient"])
        if scaling and not skipped:
            self._call(replace(step, log_weights_C=metrics.log_weights_C), "on_gradient")
        scale = step.values.get("scale", 1.0)
        lr = self.optimization.take_step(scale)
        self.policy.zero_grad()  # neither a rollout nor a measurement needs gradients beside it
        values = {"grad_norm": grad_norm, "lr": lr, "update/skipped": float(skipped)}
        if step["term"] is not None:
            values |= step["term"].metrics
        if num_ce_tokens := sum(step.totals.num_ce_tokens):
            values["ce/tokens"] = float(num_ce_tokens)
        if step.totals.has_mask:
            values["update/kept_share"] = step.totals.num_entropy_tokens / max(step.totals.num_tokens, 1)
        metrics.finish_update(values | {"update/step_scale": scale} if scaling else values)
        if self.settings.hooked["on_optimizer_step"]:
            num_tokens = 0 if skipped else step.totals.num_entropy_tokens
            entropy = float(ranks.sum(metrics.entropy)) / num_tokens if num_tokens else math.nan
            self._call(replace(step, entropy=entropy, norms=norms), "on_optimizer_step")

    def _refuse_gap(self, problem: str, step: Step) -> None:
        """Refuse a batch that was not sampled with the policy that learns; where a correction is set, warn once.

        Raises:
            LogprobGapError: Nothing corrects for that.
        """
        corrects = self.settings.objective.correction.mode != "none"
        if corrects and self._told_of_gap:
            return
        self._told_of_gap = True
        sentence = f"The log-probs that a batch was sampled with differ from the policy's {problem}"
        farthest = max(self.passes.ranks.gather(self._farthest(step)))[1]
        if corrects:
            self.passes.ranks.warn(f"{sentence}{farthest}; model.objective.correction weighs what is learned from it.")
            return
        raise LogprobGapError(
            f"{sentence}{farthest}, so it is not trained on: something in the policy is random (router jitter, "
            "dropout), a reward or a callback changes its weights, the generator samples at another temperature, in "
            "another precision or with other weights, or tells other tokens than it has sampled; mend that, set "
            "model.objective.correction, or raise the limit."
        )

    def _farthest(self, step: Step) -> tuple[float, str]:
        """Return the largest gap of a step's fresh tokens on this rank, and where it is, measured once more."""
        largest, place = 0.0, ""
        for rollout, own_N in zip(step.rollouts, self.passes.measure(step.rollouts, "logprobs"), strict=True):
            completion = rollout.completion
            trained_T = completion.trained_T
            gap_N = (own_N - completion.logprobs_T[trained_T]).abs()
            is_fresh = bool((completion.versions_T[trained_T] == step.version).all())
            if not (is_fresh and len(gap_N) and float(gap_N.max()) > largest):
                continue
            largest, token = float(gap_N.max()), int(trained_T.nonzero()[gap_N.argmax()])
            names = [name for first, name in completion.engines if first <= token]
            prompt_id, visit, path = completion.request.key
            place = (
                f" (the farthest is token {token} of sample {path} of prompt {prompt_id!r}, visit {visit}, which "
                f"{names[-1] if names else 'the generator'} has sampled)"
            )
        return largest, place


def _problem_of(rollouts: Sequence[Rollout]) -> str | None:
    """Say why rollouts cannot be trained on; None where they can.

    A token that is to be trained on has no log-prob of the generator's, or two completions have the same key, by which
    their values are looked up.
    """
    for rollout in rollouts:
        logprobs_T, (prompt_id, visit, path) = rollout.completion.logprobs_T, rollout.completion.request.key
        missing_T = logprobs_T.isnan()
        if missing_T.any() and (missing_T := missing_T & rollout.completion.trained_T).any():
            return (
                f"Sample {path} of prompt {prompt_id!r}, visit {visit}, has no sampled log-prob (NaN) for token "
                f"{int(missing_T.int().argmax())}; the generator must give one for every token that it samples."
            )
    counts = Counter(rollout.completion.request.key for rollout in rollouts)
    for (prompt_id, visit, path), count in counts.items():
        if count > 1:
            return (
                f"{count} completions are sample {path} of prompt {prompt_id!r}, visit {visit}, and would be taken for "
                "one another; give each request a path of its own, such as (sample, segment)."
            )
    return None
