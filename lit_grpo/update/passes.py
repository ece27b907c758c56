"""Rollouts through the policy, micro-batch by micro-batch: to measure their tokens, or for a gradient."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING

import torch

from lit_grpo.memory import free_bytes, is_out_of_memory, return_freed_memory
from lit_grpo.plugins import ask, writing
from lit_grpo.plugins.columns import LATE, OF_CANDIDATES
from lit_grpo.policy.architecture.states import CHUNK, FOUND
from lit_grpo.policy.sharding import compute, is_scattered
from lit_grpo.ranks import Ranks
from lit_grpo.types import Completion, GroupKey, Key, Prompt, Rollout
from lit_grpo.update.batches.layout import PackedRow, empty_row, in_order
from lit_grpo.update.batches.microbatch import least_tokens, make_micro_batches
from lit_grpo.update.learner_settings import LearnerSettings, Optimization
from lit_grpo.update.logprobs.forward import micro_batch_logprobs, predecessors
from lit_grpo.update.logprobs.measurements import Measurement, measure
from lit_grpo.update.metrics import TokenMetrics
from lit_grpo.update.micro_batch_size import MicroBatchSize, estimate_tokens, image_share
from lit_grpo.update.objective.policy_loss import policy_loss
from lit_grpo.update.objective.tokens import Tokens
from lit_grpo.update.plugin import Chunk, SquaredNorm, Term
from lit_grpo.update.prefix.sequence_parallel import SequenceParallel
from lit_grpo.update.prefix.sharing import shared_prefixes
from lit_grpo.update.step import Step

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class PolicyPasses:
    """Sends rollouts through the policy in micro-batches, and owns how many tokens these may have.

    Args:
        policy: Model that is trained, and that computes log-probs.
        optimization: Receives the gradient of each micro-batch.
        settings: What is learned, and how it is cut.

    Attributes:
        laid_out: Micro-batches that have been laid out, by what is in them; cleared after the last step.
        budget: The number of tokens, where ``max_tokens_per_micro_batch`` is ``auto`` and it has been estimated.
    """

    def __init__(self, policy: PreTrainedModel, optimization: Optimization, settings: LearnerSettings) -> None:
        self.policy, self.optimization, self.settings = policy, optimization, settings
        self.budget: MicroBatchSize | None = None
        # The key has the ids of completions and prompts, which are kept beside their rows so that no others get these.
        self.laid_out: dict[Hashable, tuple[list[Completion | Prompt], list[PackedRow]]] = {}
        for plugin in writing(settings.plugins, *LATE):
            if "own_rows" in plugin.needs and not settings.shares_prefix:
                name = f"rollout.plugins: {type(plugin).__name__}"
                raise ValueError(f"{name} needs packed rows, which this policy cannot have; leave it out.")
        self._rows = SequenceParallel.of(policy, settings.sequence_parallel_size, settings.shares_prefix)

    @property
    def ranks(self) -> Ranks:
        return Ranks(self.policy.device)

    def measure(
        self,
        rollouts: Sequence[Rollout],
        what: Measurement,
        lend: Callable[[], AbstractContextManager[PreTrainedModel]] | None = None,
    ) -> list[torch.Tensor]:
        """Measure every token that is trained on under the policy, or under a model that is lent for it.

        Where the budget is open and the memory of a rank runs out, all of them start again with half of it.

        Returns:
            For each rollout the values of its tokens, shape (num_trained, ...), on the host.
        """
        rows = [[row for row in rollout.rows if row.completion.num_trained] for rollout in rollouts]
        with_tokens = [row for its in rows for row in its]
        while True:
            values: list[torch.Tensor] | None = None
            equally_many = is_scattered(self.policy) or self._rows.size > 1
            micro_batches = self.micro_batches(with_tokens, equally_many)
            if callable(what):  # it may look at advantages
                micro_batches = [row.filled(with_tokens) for row in micro_batches]
            try:
                with nullcontext(self.policy) if lend is None else lend() as model:
                    values = measure(
                        what,
                        micro_batches,
                        model,
                        self.settings.temperature,
                        self.policy.device,
                        self._rows,
                    )
            except (RuntimeError, MemoryError) as error:
                if self.budget is None or not is_out_of_memory(error):
                    raise
            short = self.budget is not None and bool(self.ranks.max(float(values is None)))
            if values is not None and not short:
                of_rows, none = iter(values), torch.empty(0)
                parts = [[next(of_rows) for _ in its] for its in rows]
                return [torch.cat(its) if len(its) > 1 else its[0] if its else none for its in parts]
            self.halve_budget(with_tokens)

    def by_completion(
        self,
        rollouts: Sequence[Rollout],
        what: Measurement,
        lend: Callable[[], AbstractContextManager[PreTrainedModel]] | None = None,
    ) -> dict[Key, torch.Tensor]:
        """Return by completion what :meth:`measure` returns, for completions with a token that is trained on."""
        measured = zip(rollouts, self.measure(rollouts, what, lend), strict=True)
        return {each.completion.request.key: values for each, values in measured if each.completion.num_trained}

    def gradient(self, parts: Sequence[Step], metrics: TokenMetrics, is_whole: bool = True) -> None:
        """Add the gradient of the last of a step's parts to that of the others, and its sums to the metrics.

        Where the budget is open and memory runs out on a rank, all parts start again with smaller micro-batches.
        Without anything to learn from there is no gradient.

        Args:
            parts: Parts of the step that have come so far; the gradient of the last one is added.
            metrics: Metrics of the batch, to which the sums of the micro-batches are added.
            is_whole: Whether the one part is all of the step. Ranks then exchange the gradient with its last
                micro-batch; else :meth:`exchange` has to follow after the last part.

        Raises:
            RuntimeError: A callback has put the policy into evaluation, or switched gradient checkpointing.
        """
        checkpointing = self.policy.is_gradient_checkpointing
        if not self.policy.training or checkpointing != bool(self.settings.gradient_checkpointing):
            mode = "training" if self.policy.training else "evaluation"
            raise RuntimeError(
                f"The policy is in {mode} mode with gradient checkpointing {checkpointing}; "
                "a callback has changed it and must put it back."
            )
        if len(parts) == 1:
            self.policy.zero_grad()
        sent = parts[-1:]
        while not all(
            self._send(self.micro_batches(part.rollouts, is_whole, in_chunks=True), part, metrics, is_whole)
            for part in sent
        ):
            self.halve_budget([rollout for part in parts for rollout in part.rollouts])
            self.policy.zero_grad()
            metrics.forget_step()
            sent = parts

    def exchange(self, part: Step, metrics: TokenMetrics) -> None:
        """Let ranks exchange what parts of a step have added up to, in the backward pass of an empty micro-batch.

        None of the ranks knew which part was its last. Where none has a gradient there is nothing to exchange.
        """
        has_gradient = any(parameter.grad is not None for parameter in self.policy.parameters())
        if self.ranks.size > 1 and self.ranks.max(float(has_gradient)):
            self._send([empty_row(self.settings.shares_prefix)], part.of_prompts(()), metrics, True)

    def _send(self, micro_batches: Sequence[PackedRow], step: Step, metrics: TokenMetrics, exchange: bool) -> bool:
        """Add the gradient of micro-batches of a step; return False where memory ran out on a rank.

        A rank whose memory runs out cannot take part in the exchange of gradients, so with an open budget ranks agree
        beforehand, and exchange in the backward pass of an empty micro-batch.
        """
        is_open, short = self.budget is not None, False
        if is_open and micro_batches and self.ranks.size > 1:
            micro_batches = [*micro_batches, empty_row(self.settings.shares_prefix)]
        rows = [row.filled(step.rollouts, step.totals.num_ce_tokens) for row in micro_batches]
        with shared_prefixes(self.policy) if self.settings.shares_prefix else nullcontext():
            turns = zip(itertools.repeat(0), in_order(rows)) if self._rows.size == 1 else self._rows.in_turn(rows)
            for index, (owner, micro_batch) in enumerate(turns):
                is_last = exchange and index == len(rows) * self._rows.size - 1
                if is_open and is_last and self.ranks.max(float(short)):
                    return False
                try:
                    if not short:
                        on_device = micro_batch.to(self.policy.device)
                        loss = partial(self._loss, micro_batch=on_device, owner=owner, step=step, metrics=metrics)
                        self.optimization.add_gradient(loss, is_last)
                except (RuntimeError, MemoryError) as error:
                    if not is_open or not is_out_of_memory(error):
                        raise
                    short = True
                if self.policy.device.type == "cpu":
                    return_freed_memory()
        return not short

    def _loss(self, micro_batch: PackedRow, owner: int, step: Step, metrics: TokenMetrics) -> torch.Tensor:
        """Return a micro-batch's share of the step's loss; of another rank's micro-batch 0. Both have a gradient.

        Args:
            micro_batch: On the policy's device.
            owner: The rank that has it, of those that share its tokens.
            step: The step that it is part of.
            metrics: Gets the loss and the micro-batch's sums.
        """
        settings, objective = self.settings, self.settings.objective
        forward = partial(
            micro_batch_logprobs,
            self.policy,
            micro_batch,
            settings.temperature,
            entropy_gradient=step["entropy_coefficient"] != 0,
            ranks=self._rows,
            owner=owner,
        )
        term: Term | None = step["term"]
        with nullcontext() if term is None else term.watching():
            logprobs_N, entropy_N = compute(self.policy, forward)
        if owner != self._rows.rank:
            return logprobs_N.sum() * 0.0
        columns = dict(micro_batch.columns)  # a copy: what has a gradient goes with this pass
        if OF_CANDIDATES[0] in columns:
            of_tokens_NX, logprobs_N = logprobs_N[: len(columns["source"])], logprobs_N[:, 0]
            columns["candidate_logprobs"], columns["rest_logprob"] = of_tokens_NX[:, 1:-1], of_tokens_NX[:, -1]
        if "ce_weight" in columns:
            counts = [len(columns["source"]), len(columns["ce_source"])]
            logprobs_N, columns["ce_logprob"] = logprobs_N.split(counts)
            entropy_N = entropy_N[: counts[0]]
        columns |= {"logprob": logprobs_N, "entropy": entropy_N, "age": step.version - columns["version"]}
        if objective.proximal_policy == "sampled" and "old_logprob" not in settings.written:
            columns["old_logprob"] = columns["sampled_logprob"]
        elif (measured_N := columns.get("old_logprob")) is None:  # this is the only update on these rollouts
            columns["old_logprob"] = logprobs_N.detach()
        else:
            is_own_N = measured_N.isnan() & (columns["age"] == 0)
            columns["old_logprob"] = torch.where(is_own_N, logprobs_N.detach(), measured_N.to(logprobs_N.dtype))
        tokens = Tokens(columns)
        for plugin in settings.hooked["loss"]:
            ask(plugin, "loss", tokens.of(plugin))
        outputs = policy_loss(tokens, objective, step.totals, step.beta, step["entropy_coefficient"])
        outputs.metrics.update(tokens.figures)
        metrics.add(tokens, outputs, step.version)
        return outputs.loss if term is None else term.added_to(outputs.loss, micro_batch.weight)

    def measured_gradient(
        self, step: Step, prompts: Sequence[GroupKey], num_parts: int, metrics: TokenMetrics
    ) -> list[SquaredNorm]:
        """Add up the step's gradient part after part of its prompts; return its squared norms on the way.

        It is the gradient that :meth:`gradient` adds up, but for rounding. The budget may not be open.

        Args:
            step: The whole optimizer step on this rank, with all of its prompts.
            prompts: Prompts of the step on this rank, those without a gradient among them.
            num_parts: How many parts, about equally large; the last norm is that of the whole.
            metrics: Metrics of the batch, to which the sums of the micro-batches are added.
        """
        ranks, parts, norms = self.ranks, list[Step](), list[SquaredNorm]()
        num_prompts = int(ranks.sum(len(prompts)))
        ends = [len(prompts) * number // num_parts for number in range(num_parts + 1)]
        for begin, end in itertools.pairwise(ends):
            parts.append(step.of_prompts(prompts[begin:end]))
            self.gradient(parts, metrics, is_whole=False)
            if end < len(prompts) or ranks.size > 1:
                square = float(ranks.sum(self._squared_norm())) / ranks.size**2  # ranks' mean comes later
                signal, noise = (float(ranks.sum(end**power)) / max(num_prompts, 1) ** 2 for power in (2, 1))
                norms.append(SquaredNorm(square, signal, noise))
        self.exchange(step, metrics)
        return [*norms, SquaredNorm(self._squared_norm(), 1.0, 1 / max(num_prompts, 1))]

    def _squared_norm(self) -> float:
        gradients = [parameter.grad for parameter in self.policy.parameters() if parameter.grad is not None]
        return float(torch.nn.utils.get_total_norm(gradients)) ** 2 if gradients else 0.0

    @torch.no_grad()
    def visit(
        self,
        rollouts: Sequence[Rollout],
        visitor: Callable[[Callable[[], object], float], None],
    ) -> None:
        """Show what sends each micro-batch through the policy's layers, without gradient, and what its tokens count."""
        with shared_prefixes(self.policy) if self.settings.shares_prefix else nullcontext():
            for micro_batch in in_order(self.micro_batches(rollouts)):
                on_device = micro_batch.to(self.policy.device)
                forward = partial(predecessors, self.policy, on_device)
                visitor(partial(compute, self.policy, forward), on_device.weight)

    def micro_batches(
        self,
        rollouts: Sequence[Rollout],
        equally_many: bool = True,
        in_chunks: bool = False,
    ) -> list[PackedRow]:
        """Cut into micro-batches, equally many on every rank; none where no rank has anything to learn.

        The same completions under the same budget are cut and laid out once, as long as ``laid_out`` has them.

        Their columns are not filled. Only ``in_chunks`` do completions that a plug-in has cut go through in
        parts: with no gradient they take little memory, so that one may have more tokens than the budget where a chunk
        has not.
        """
        settings, shares_prefix = self.settings, self.settings.shares_prefix
        max_tokens = settings.max_tokens_per_micro_batch
        if max_tokens == "auto":
            if self.budget is None:  # estimated the first time, the same on every rank
                free, is_selective = free_bytes(self.policy.device), settings.gradient_checkpointing == "selective"
                shares = (image_share(self.policy, each.prompt, each.completion.num_tokens) for each in rollouts)
                estimate = estimate_tokens(self.policy, free, shares_prefix, is_selective, max(shares, default=0.0))
                self.budget = MicroBatchSize(int(-self.ranks.max(-estimate)))
            max_tokens = max(self.budget.tokens, least_tokens(rollouts, shares_prefix))
        chunks = dict[int, Sequence[Chunk]]()
        if in_chunks:
            cut = enumerate(rollout.columns.get("chunks", ()) for rollout in rollouts)
            chunks = {place: its for place, its in cut if len(its) > 1}
        elif "chunks" in settings.written:
            max_tokens = max(max_tokens, least_tokens(rollouts, shares_prefix))
        laid_out = [each for rollout in rollouts for each in (rollout.completion, rollout.prompt)]
        key = tuple(map(id, laid_out)), max_tokens, tuple((row, tuple(its)) for row, its in chunks.items())
        if key not in self.laid_out:
            least = CHUNK if shares_prefix and vars(self.policy).get(FOUND) else 0
            rows = make_micro_batches(rollouts, max_tokens, shares_prefix, chunks, least_counted=least)
            self.laid_out[key] = laid_out, rows
        own = self.laid_out[key][1]
        missing = int(self.ranks.max(len(own))) - len(own) if equally_many else 0
        return [*own, *(empty_row(shares_prefix) for _ in range(missing))]

    def halve_budget(self, rollouts: Sequence[Rollout]) -> None:
        """Go on with half of the budget, on all ranks, which have run out of memory on these rollouts."""
        assert self.budget is not None
        self.laid_out.clear()
        self.ranks.warn(self.budget.halve(int(self.ranks.max(least_tokens(rollouts, self.settings.shares_prefix)))))
        if self.policy.device.type == "cuda":
            torch.cuda.empty_cache()
