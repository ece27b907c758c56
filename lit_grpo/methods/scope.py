"""SCOPE (arXiv 2602.24110): a teacher corrects wrong completions from their first wrong step on.

A judge names the first wrong step of a completion that has not passed. What the policy wrote before that step stays,
and the teacher (``model.teacher``) goes on from there::

    wrong       265%47=218%47= 170%47=030        the third step is wrong
    corrected   265%47=218%47= 171%47=124%47=077%47=030

A corrected completion that passes joins its group with its own reward, beside the wrong one. So the steps that both
share are not blamed for what came after them. It is trained on with its advantage and with ratios to the policy before
the update (``Rollout.recompute``), except the teacher's tokens that are hardly ever the policy's::

    mask_t = 1 if y_t is the policy's own or pi(y_t | x, y_<t) >= least_likelihood, else 0

with the policy that takes the optimizer step. What is left out stays in the denominator of the loss.

Implemented from the abstract, which has a process reward model as the judge, the first wrong step, and its correction;
no code was found. Decided here: a corrected completion joins and does not replace the wrong one, of a group those with
the longest right beginnings are corrected, and the form of the mask.

Evidence: tokens, advantages and gradients beside the formulas, in ``tests/test_scope.py``; accuracy beside GRPO at
equal tokens, the teacher's among them, in ``docs/methods.md``.

Example:
    ``model: {teacher: {policy: path/to/a/larger/model}}`` and
    ``rollout.plugins: [{scope: {judge: my_judge.py:first_wrong_step}}]``
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar

from lit_grpo.limits import Count, Limit, Text
from lit_grpo.methods.shared.teaching import TeacherPlugin
from lit_grpo.plugins import GroupBatch, RunFacts
from lit_grpo.rewards import RewardFunction, load_rewards
from lit_grpo.trajectory import Trajectory
from lit_grpo.types import Part, Rollout, RolloutGroup, over_ranks
from lit_grpo.update.plugin import TrainingRun
from lit_grpo.update.step import Step


@dataclass
class Scope(TeacherPlugin):
    """Lets a teacher correct wrong completions from their first wrong step on."""

    writes: ClassVar[frozenset[str]] = frozenset({"mask"})
    role: ClassVar[str] = "which earlier completions join a group"  # replay's: both have members with paths below 0
    needs: ClassVar[frozenset[str]] = TeacherPlugin.needs | {
        *("whole_groups", "whole_rollouts", "one_row", "unsharded_weights")
    }
    changes: ClassVar[Mapping[str, str]] = {"fresh_members": "lets corrected completions join groups"}
    traits: ClassVar[frozenset[str]] = TeacherPlugin.traits - {"learns_unrewarded"}

    judge: str | dict[str, Any] = ""
    """The judge, as an entry of ``model.rewards``: its value is the number of a completion's first wrong step, from 1,
    or None if there is none. It is called for every completion and is only logged.
    """
    separator: Text = "\n\n"
    """Text between two steps."""
    members: Count = 1
    """Max corrected completions in a group."""
    least_likelihood: Annotated[float, Limit(ge=0, lt=1)] = 0.01
    """Smallest probability under the policy with which a token of the teacher is trained on."""

    def check(self, run: RunFacts) -> None:
        if not self.judge or not self.separator:
            raise ValueError("judge or separator is empty; give a function that names the first wrong step, and both.")
        if run.max_observed:
            raise ValueError("its teacher goes on without environments; set model.sampling.max_observed to 0.")

    def setup(self) -> None:
        super().setup()
        spec = {"function": self.judge} if isinstance(self.judge, str) else self.judge
        self._judges = load_rewards([{"name": "first_wrong_step", "weight": 0.0} | spec] if self.judge else [])
        self._parts: dict[str, Part] = {}

    @property
    def rewards(self) -> Sequence[RewardFunction]:
        return self._judges

    def on_train_start(self, run: TrainingRun) -> None:
        super().on_train_start(run)
        self._spec = run.spec

    def add_members(self, batch: GroupBatch) -> None:
        """Let the teacher correct wrong completions; those that pass then join their groups."""
        assert self.teacher is not None and self._spec is not None and batch.score is not None
        requests = []
        for group in batch.groups:
            wrong = [each for each in group.rollouts if each.kept and not math.isnan(each.reward)]
            wrong = [each for each in wrong if not batch.pass_rule.passes(each.rewards)]
            begun = [begin for begin in map(self.right_beginning, wrong) if begin is not None]
            for place, begin in enumerate(sorted(begun, key=lambda each: -each.num_tokens)[: self.members]):
                requests.append(replace(wrong[0].completion.request, path=(-1 - place,), prefix=begin))
        begins = {request.key: request.prefix.num_tokens for request in requests}
        made = {group.key: RolloutGroup(group.prompt, []) for group in batch.groups}
        num_joined = num_tokens = 0
        completions = self.teacher.complete(requests, self._spec, batch.version, batch.all_gather)
        for key, its in completions.items():
            new = Rollout(its.request.prompt, its, replayed=True, recompute=True, extra={"right_tokens": begins[key]})
            made[its.request.group].rollouts.append(new)
            num_tokens += its.num_sampled - begins[key]
        batch.score(*made.values())
        for group in batch.groups:
            right = [each for each in made[group.key].rollouts if batch.pass_rule.passes(each.rewards)]
            group.rollouts += right
            num_joined += len(right)
        self._parts = {
            "scope/corrected": Part(num_joined, "mean", len(requests)),
            "scope/teacher_tokens": Part(num_tokens),
        }

    def right_beginning(self, rollout: Rollout) -> Trajectory | None:
        """Return the tokens before a completion's first wrong step; None if the judge names no step that it has."""
        completion, given, spec = rollout.completion, rollout.prompt.given, self._spec
        number, steps = rollout.rewards.get(self._judges[0].name), (given + completion.text).split(self.separator)
        if number is None or not 1 <= number <= len(steps) or spec is None:
            return None
        before = self.separator.join([*steps[: int(number) - 1], ""])[len(given) :]

        def text_of(num_tokens: int) -> str:
            return spec.text_of(completion.token_ids_T[:num_tokens].tolist(), rollout.prompt)

        end = bisect_right(range(completion.num_tokens), len(before), key=lambda number: len(text_of(number))) - 1
        while end > 0 and not before.startswith(text_of(end)):  # in the middle of a character
            end -= 1
        return completion.until(max(end, 0))

    def on_minibatch(self, step: Step) -> None:
        """Leave out the teacher's tokens that the policy would hardly ever sample."""
        corrected = [each for each in step.rollouts if "right_tokens" in each.extra]
        measured = step.measure(corrected, "logprobs")
        for rollout in corrected:
            mask_N = measured[rollout.completion.request.key].exp() >= self.least_likelihood
            mask_N[: rollout.extra["right_tokens"]] = True
            step.set("mask", rollout, mask_N)

    def on_update_end(self, batch: GroupBatch) -> Mapping[str, float]:
        return over_ranks(self._parts, batch.all_gather)


PLUGINS = {"scope": Scope()}
