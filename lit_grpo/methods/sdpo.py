r"""Self-distillation policy optimization (SDPO, arXiv 2601.20802): the policy that knows a right answer teaches.

The teacher of a rollout is the policy (``model.teacher.policy``: ``live``, ``average`` or ``base``) with more in its
prompt: a right completion of the same group, and what a reward function said of this completion by ``log_feedback``. A
rollout that has neither is trained on with ``(1 - weight) A`` alone. The advantage of a token is that of
:mod:`lit_grpo.methods.shared.self_teaching`, and the signal is one of each token where a reward is one of a completion.

Which completion: the first of the group, in the order of samples, that passes by the run's rule (``model.pass_reward``,
``model.pass_threshold``) and is not the rollout itself, as in TRL 1.16; so one teacher's prompt, computed once, serves
all rollouts of the group but one. Its text is what was sampled, without special tokens; several turns are joined by an
empty line, without what an environment answered. A completion that an environment asked something else is not taken.

A teacher's prompt is never truncated (TRL cuts its beginning at 10,240 tokens). It has to fit with the completion into
the policy's context, and into ``model.max_tokens_per_micro_batch``. If it does not, or if the tokenizer does not know a
character of it, the next right completion is taken, then none and the feedback alone, then the same without feedback;
``teacher/misfit_share`` counts rollouts to which that happened.

Deviations from TRL: the pass rule in place of a threshold of the summed reward, other default templates, feedback that
is shown by default, and the ratio on later steps on a batch (:mod:`lit_grpo.methods.shared.self_teaching`).

Evidence: prompts, siblings and gradients equal those of TRL 1.16's functions, in
``tests/integration/test_self_teaching_beside_trl.py``. The paper has gains over GRPO at 7B, about none at 8B, and
losses at 1.5B; beside GRPO on word problems with 135M, in ``docs/measurements.md``.

Example:
    ``model: {teacher: {policy: live}, objective: {normalization: sequence}}`` and
    ``rollout.plugins: [{sdpo: {weight: 0.5}}]``
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from lit_grpo.budgets.rewriting import check_template
from lit_grpo.limits import Text
from lit_grpo.methods.shared.self_teaching import Hint, SelfTeacher
from lit_grpo.plugins import GroupBatch
from lit_grpo.types import Completion, Prompt, Rollout, RolloutGroup

_THINKING = re.compile(r"\A(?:(?!<think>).)*</think>|<think>.*?</think>", re.DOTALL)


@dataclass
class SDPO(SelfTeacher):
    """The policy learns from itself where it sees a right answer of its group, or feedback on its own answer."""

    needs: ClassVar[frozenset[str]] = SelfTeacher.needs | {"whole_groups"}
    traits: ClassVar[frozenset[str]] = SelfTeacher.traits - {"learns_unrewarded"}

    template: Text = "{prompt}{solution}{feedback}\n\nAnswer the question above correctly."
    """Question that the teacher gets: the last user message, or the whole prompt if it is a text, in place of
    ``{prompt}``, and the next two texts or nothing.
    """
    solution_template: Text = "\n\nA right answer:\n\n{solution}"
    """Text that holds a right completion."""
    feedback_template: Text = "\n\nFeedback on an earlier answer:\n\n{feedback}"
    """Text that holds what reward functions said of the completion."""
    feedback: Literal["always", "without_solution", "never"] = "always"
    """When the teacher sees the feedback: ``without_solution`` only if there is no right completion that fits."""
    own_solution: bool = False
    """Let a right completion see itself, if it is the first of its group."""
    keep_thinking: bool = True
    """Keep what stands in ``<think>...</think>`` in the text of a right completion."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_template(self.template, "template", ("prompt", "solution", "feedback"))
        check_template(self.solution_template, "solution_template", ("solution",))
        check_template(self.feedback_template, "feedback_template", ("feedback",))

    def check_prompts(self, prompts: Sequence[Prompt]) -> None:
        try:
            solution, feedback = self.solution_template.format(solution=""), self.feedback_template.format(feedback="")
            self.write(prompts[0], {"solution": solution, "feedback": feedback})
        except ValueError as error:
            row = prompts[0].prompt_id.rpartition("/")[2]
            raise ValueError(
                f"the teacher's prompt cannot be made of row {row}, which then {error}; write template, "
                "solution_template and feedback_template otherwise."
            ) from None

    def hints(self, group: RolloutGroup, batch: GroupBatch) -> Sequence[Iterator[Hint]]:
        """Return for each rollout its right siblings and its feedback."""
        right = [each for each in group.rollouts if batch.pass_rule.passes(each.rewards)]
        return [self._hints(rollout, right) for rollout in group.rollouts]

    def _hints(self, rollout: Rollout, right: Sequence[Rollout]) -> Iterator[Hint]:
        feedback = "" if self.feedback == "never" else rollout.feedback
        beside = feedback if self.feedback == "always" else ""
        for said in dict.fromkeys([beside, ""]):
            for sibling in right:
                is_other = sibling is not rollout or self.own_solution
                if is_other and sibling.asked == rollout.asked and (solution := self._text(sibling.completion)):
                    yield self._hint(solution, said)
            if said:
                yield self._hint("", said)
        if feedback and not beside:
            yield self._hint("", feedback)

    def _hint(self, solution: str, feedback: str) -> Hint:
        return {
            "solution": solution and self.solution_template.format(solution=solution),
            "feedback": feedback and self.feedback_template.format(feedback=feedback),
        }

    def _text(self, completion: Completion) -> str:
        assert self._writer is not None
        text = "\n\n".join(map(self._writer.decoded, completion.turns))
        return text if self.keep_thinking else _THINKING.sub("", text).strip()

    def on_update_end(self, batch: GroupBatch) -> Mapping[str, float]:
        groups, rollouts = batch.groups, batch.rollouts
        solved = sum(any(batch.pass_rule.passes(each.rewards) for each in group.rollouts) for group in groups)
        told = sum(bool(rollout.feedback) for rollout in rollouts)
        counts = batch.all_gather((solved, len(groups), told, len(rollouts)))
        solved, num_groups, told, num_rollouts = (sum(each) for each in zip(*counts, strict=True))
        return {
            **super().on_update_end(batch),
            "teacher/solved_share": solved / num_groups if num_groups else math.nan,
            "teacher/feedback_share": told / num_rollouts if num_rollouts else math.nan,
        }


PLUGINS = {"sdpo": SDPO()}
