"""Base of methods whose teacher is the policy itself with more in its prompt (self-distillation).

With ``weight`` w the loss of a step is ``(1 - w) policy loss + w distillation loss``, so the advantage of a token is::

    A_t = (1 - w) A + w (log p_teacher(y_t) - log p_policy(y_t))

with ``A`` the advantage of its rollout, and without the second term for a rollout that has no teacher. On the first
step on a batch the ratio is 1, and the gradient is that of TRL 1.16's loss of sampled tokens,
``(log p_policy - log p_teacher).detach() log p_policy``, with ``objective.normalization: sequence`` as the mean over
sequences of their means over tokens. The value of the loss is another: ours has the mean of
``log p_policy - log p_teacher``, an estimate of the reverse KL, and TRL's that times ``log p_policy``. On later steps
TRL multiplies its loss by the ratio, at most 2, with the policy's present log-prob in the difference; here the run's
objective clips the ratio, and the difference is that of sampling.

The log-prob of the policy is that of sampling. Set ``model.teacher.temperature`` to the temperature of sampling, which
TRL uses for both.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from lit_grpo.budgets.rewriting import TextWriter
from lit_grpo.limits import Share, Text
from lit_grpo.methods.shared.teaching import TeacherPlugin, sampled
from lit_grpo.plugins import GroupBatch, RunFacts
from lit_grpo.policy.architecture.decoder import context_length
from lit_grpo.types import Prompt, Rollout, RolloutGroup
from lit_grpo.update.plugin import Batch, TrainingRun

Hint = Mapping[str, str]
"""What the teacher sees beside the question: texts by their names in the plug-in's ``template``."""


@dataclass
class SelfTeacher(TeacherPlugin):
    """Base class of self-distillation: a subclass says by :meth:`hints` what the teacher sees."""

    writes: ClassVar[frozenset[str]] = frozenset({"token_advantage"})
    needs: ClassVar[frozenset[str]] = frozenset({"all_ranks", "prompt_stream"})
    role: ClassVar[str] = "what prompts are asked with"  # the teacher's are made of rows as they are

    weight: Share = 1.0
    """Weight w of the teacher's part in the advantage of a token; the rollout's own advantage has the weight 1 - w."""
    template: Text = "{prompt}"
    """Question that the teacher gets."""

    def setup(self) -> None:
        super().setup()
        self._writer: TextWriter | None = None
        self._context, self._limit, self._shares_prefix = 0, math.inf, True
        self._counts = (0, 0, 0)  # rollouts, those that are taught, and those with a prompt that could not be used

    def check(self, run: RunFacts) -> None:
        """Check that the teacher is the policy, and note how its prompts are written and how long they may be."""
        if run.teacher not in ("", "base", "live", "average"):
            raise ValueError(
                f"its teacher is the policy with another prompt, and model.teacher.policy is {run.teacher!r}; set that "
                "to live, average or base, or take the plug-in distill."
            )
        self._limit = math.inf if run.micro_batch_tokens is None else run.micro_batch_tokens
        self._shares_prefix = run.shares_prefix
        if run.data is not None:
            self._writer = run.data.writer
            self.check_prompts([prompt for prompt in run.data.prompts["train"] if prompt.is_of(self.datasets)])

    def check_prompts(self, prompts: Sequence[Prompt]) -> None:
        """Check that the teacher's prompt can be made of training prompts."""

    def on_train_start(self, run: TrainingRun) -> None:
        super().on_train_start(run)
        self._context = context_length(run.policy)

    def hints(self, group: RolloutGroup, batch: GroupBatch) -> Sequence[Iterable[Hint]]:
        """Return for each rollout of a group what the teacher may see, the best first; none if it is not taught."""
        return [() for _ in group.rollouts]

    def write(self, prompt: Prompt, hint: Hint) -> Prompt:
        """Return the teacher's prompt.

        Raises:
            ValueError: It cannot be made; the message goes on after the row's number.
        """
        assert self._writer is not None
        return self._writer.reworded(prompt, self.template, hint)

    def on_batch(self, batch: Batch) -> None:
        """Give each token its advantage; all ranks call it together."""
        taught, num_rollouts, misfits = list[Rollout](), 0, 0
        for group in batch.groups:
            written = dict[tuple[str, ...], Prompt | None]()
            for rollout, hints in zip(group.rollouts, self.hints(group, batch), strict=True):
                if math.isnan(rollout.advantage) or not rollout.completion.num_trained:
                    continue
                prompt, has_misfit = self._fitting(rollout, hints, written)
                taught += [] if prompt is None else [replace(rollout, prompt=prompt)]
                num_rollouts, misfits = num_rollouts + 1, misfits + has_misfit
        self._counts = num_rollouts, len(taught), misfits
        scores = self.scores(batch, taught)
        for rollout in batch.rollouts:
            its, own = scores.get(rollout.completion.request.key), (1 - self.weight) * rollout.advantage
            if not math.isnan(own):
                advantages_N = torch.full((rollout.completion.num_trained,), own)
                if its is not None:
                    advantages_N = own + self.weight * (its.logprobs_T - sampled(rollout.completion))
                batch.set("token_advantage", rollout, advantages_N)

    def _fitting(
        self, rollout: Rollout, hints: Iterable[Hint], written: dict[tuple[str, ...], Prompt | None]
    ) -> tuple[Prompt | None, bool]:
        """Return the first prompt that can be made and fits, None if none does; and whether another one did not."""
        longest, has_misfit = max(row.num_tokens for row in rollout.completion.rows), False
        for hint in hints:
            key = tuple(hint.values())
            if key not in written:
                try:
                    written[key] = self.write(rollout.prompt, hint)
                except ValueError:  # such as a character of the hint that the tokenizer does not know
                    written[key] = None
            if (prompt := written[key]) is not None:
                num_tokens, row = len(prompt.token_ids), len(prompt.token_ids) + longest
                if row <= self._context and (num_tokens if self._shares_prefix else row) <= self._limit:
                    return prompt, has_misfit
            has_misfit = True
        return None, has_misfit

    def on_update_end(self, batch: GroupBatch) -> Mapping[str, float]:
        num_rollouts, taught, misfits = (sum(each) for each in zip(*batch.all_gather(self._counts), strict=True))
        shares = {"teacher/taught_share": taught, "teacher/misfit_share": misfits}
        own = {name: number / num_rollouts if num_rollouts else math.nan for name, number in shares.items()}
        return {**super().on_update_end(batch), **own}
