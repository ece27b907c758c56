r"""Self-distillation from a column of the data: the policy that sees a demonstration teaches the policy that does not.

The teacher is the policy (``model.teacher.policy``: ``live``, ``average`` or ``base``) whose prompt also holds the text
of a column. It scores the policy's own samples, with the advantage of
:mod:`lit_grpo.methods.shared.self_teaching`. With an example of an answer in the column this is self-distillation
fine-tuning (SDFT), which keeps what the policy knew better than fine-tuning on the example does, because only the
policy's own samples are trained on. With the final answer in the column it is on-policy self-distillation (OPSD,
``opsd`` of prime-rl): only ``column`` and ``template`` differ.
It needs no reward: ``model.rewards`` may be empty.

A row whose value is null is not taught from. A teacher's prompt is never truncated; a rollout whose teacher's prompt
does not fit, or holds a character that the tokenizer does not know, is not taught, and ``teacher/misfit_share`` counts
it. All completions of a prompt share the teacher's prompt, which is computed once.

Deviations from TRL 1.16's ``SDFTTrainer``: no samples of the teacher's own (``generate_from_teacher``), and no first
tokens of a completion are left out (``num_loss_tokens_to_skip``).

Evidence: prompts and gradients equal those of TRL 1.16's functions, in
``tests/integration/test_self_teaching_beside_trl.py``. What it gives has not been measured here.

Example:
    ``model: {teacher: {policy: live}, rewards: []}`` and ``rollout.plugins: [{sdft: {column: solution}}]``
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lit_grpo.budgets.rewriting import check_template
from lit_grpo.limits import Text
from lit_grpo.methods.shared.self_teaching import Hint, SelfTeacher
from lit_grpo.plugins import GroupBatch
from lit_grpo.types import Prompt, RolloutGroup


@dataclass
class SDFT(SelfTeacher):
    """The policy learns from itself where it sees a demonstration, or the answer."""

    column: str = "solution"
    """Column of ``data.train`` with what the teacher sees: a text, a number, or a list of chat messages, whose contents
    are joined by line breaks.
    """
    template: Text = "{prompt}\n\nAn example of an answer:\n\n{demonstration}\n\nAnswer the question yourself."
    """Question that the teacher gets: the last user message, or the whole prompt if it is a text, in place of
    ``{prompt}``, and the column's text in place of ``{demonstration}``.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        check_template(self.template, "template", ("prompt", "demonstration"))

    def check_prompts(self, prompts: Sequence[Prompt]) -> None:
        for prompt in prompts:
            try:
                text = self._text(prompt)
                if prompt is prompts[0]:
                    self.write(prompt, {"demonstration": text})
            except ValueError as error:
                row = prompt.prompt_id.rpartition("/")[2]
                raise ValueError(
                    f"the teacher's prompt cannot be made of row {row}, which {error}; mend the row, or set column or "
                    "template otherwise."
                ) from None

    def hints(self, group: RolloutGroup, batch: GroupBatch) -> Sequence[Sequence[Hint]]:
        text = self._text(group.prompt)
        return [[{"demonstration": text}] if text else [] for _ in group.rollouts]

    def _text(self, prompt: Prompt) -> str:
        """Return the text of the column, empty for null; a ``ValueError`` says how the row's sentence goes on."""
        columns = prompt.columns
        if self.column not in columns:
            raise ValueError(f"has no column {self.column!r} (it has {', '.join(map(repr, columns)) or 'none'})")
        value: Any = columns[self.column]
        if isinstance(value, list) and value and all(isinstance(each, dict) for each in value):
            texts = [each.get("content") for each in value]
            if all(isinstance(text, str) for text in texts):
                return "\n".join(filter(None, texts))
        elif value is None or (isinstance(value, str | int | float) and not isinstance(value, bool)):
            return "" if value is None else str(value)
        raise ValueError(f"has neither text, number nor chat messages in column {self.column!r}, but {value!r:.80}")


PLUGINS = {"sdft": SDFT()}
