"""Replay of successes: RLEP (arXiv 2507.07451) and RePO (arXiv 2506.09340) let earlier ones join a prompt's group.

RLEP recomputes the log-probs of the whole batch once replayed completions have joined (``compute_log_prob`` in
Kwai-Klear/RLEP at c15e5b4), so that their ratios begin at 1. RePO keeps those that they were sampled with
(``old_per_token_logps`` in SihengLi99/RePO at 119fef6).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from lit_grpo.budgets.history import all_equal
from lit_grpo.budgets.memory import CompletionMemory, Remembered
from lit_grpo.compatibility import Requirement
from lit_grpo.limits import Count, Limit
from lit_grpo.plugins import AllGather, GroupBatch, Plugin
from lit_grpo.types import PassRule, Request, Rollout, RolloutGroup


@dataclass
class Replay(Plugin):
    """Correct completions of earlier visits that are replayed in a prompt's group.

    What a batch brings is remembered once it has been trained on, so that a batch that is broken off and sampled again
    ends the same; the memory is the same on every rank. Of completions with the same tokens the last is remembered
    alone. What has been replayed is not remembered again. A rule of your own is a dataclass that derives from it, with
    a ``choose`` of its own.
    """

    role: ClassVar[str] = "which earlier completions join a group"
    needs: ClassVar[frozenset[str]] = frozenset({"whole_groups", "one_row", "revisits"})
    changes: ClassVar[Mapping[str, str]] = {"fresh_members": "lets completions of earlier visits join groups"}
    traits: ClassVar[frozenset[str]] = frozenset({"common"})

    members: Count = 2
    """Max replayed completions in a group."""
    share: Annotated[float, Limit(ge=0, lt=1, remedy="some of a group has to be newly sampled")] = 0.5
    """Max fraction of replayed completions among those of a group that have a reward."""
    max_age: Count = 256
    """Max policy updates between the version that sampled the oldest token of a completion and the version that trains
    on it again.
    """
    only_failed: bool = False
    """Let completions join only groups in which none has passed, as in DART (arXiv 2509.23866)."""
    choice: Literal["random", "recent", "reward"] = "random"
    """Choice among too many remembered completions: ``random`` ones, by a hash; the most ``recent``; or those of the
    highest ``reward``, of equals the most recent.
    """
    kept: Count = 8
    """Number of completions per prompt that are remembered; the oldest is forgotten first."""
    logprobs: Literal["recomputed", "sampled"] = "recomputed"
    """Log-probs in the denominator of the ratios of replayed tokens: ``recomputed`` by a forward pass of the policy
    before the update over the replayed completions, or those of the policy that ``sampled`` them.
    """

    def requirement(self, name: str) -> Requirement:
        """An older policy may have ``sampled`` what is replayed; recomputed log-probs go with every proximal policy."""
        if self.logprobs == "recomputed":
            return super().requirement(name)
        needs = self.needs | {"ratios_to_sampler"}
        return Requirement(name, needs, self.changes, remedy="set logprobs of it to recomputed")

    def setup(self) -> None:
        self._memory = CompletionMemory(self.kept, self.max_age)
        self._clear()

    def most(self, num_fresh: int) -> int:
        """Return how many may join so many members that have been newly sampled."""
        return min(self.members, math.floor(self.share * num_fresh / (1 - self.share) + 1e-9))

    def choose(self, known: Sequence[Remembered], number: int, request: Request) -> Sequence[Remembered]:
        """Return ``number`` of those that are known.

        Args:
            known: In the order in which they have been trained on, at least so many.
            number: Number of rollouts to choose.
            request: Of a member of the group that they are to join, for draws that can be repeated.
        """
        if self.choice == "random":
            return sorted(known, key=lambda each: _draw(each, request))[:number]
        newest_first = list(reversed(known))
        if self.choice == "reward":
            newest_first.sort(key=lambda each: -each.reward)
        return newest_first[:number]

    def add_members(self, batch: GroupBatch) -> None:
        """Let successes of earlier visits join groups, which have their rewards, as members.

        Nothing joins a group that is not trained on, or that has no difference even then.
        """
        version = batch.version
        for group in batch.groups:
            rewarded = [rollout for rollout in group.rollouts if not math.isnan(rollout.reward)]
            eligible = [rollout for rollout in rewarded if rollout.kept]
            rewards = [rollout.reward for rollout in rewarded]
            self._num_groups += 1
            self._num_fresh += len(eligible)
            spared = self.only_failed and any(batch.pass_rule.passes(each.rewards) for each in rewarded)
            chosen = self._chosen(group, len(rewarded), version) if eligible and not spared else []
            if not chosen or all_equal([*rewards, *(each.reward for each in chosen)]):
                continue
            self._num_revived += all_equal(rewards)
            self._ages += [each.age(version) for each in chosen]
            recompute = self.logprobs == "recomputed"
            group.rollouts += [each.as_member(group, place, recompute) for place, each in enumerate(chosen)]

    def _chosen(self, group: RolloutGroup, num_fresh: int, version: int) -> Sequence[Remembered]:
        request = group.rollouts[0].completion.request
        known = self._memory.fitting(group.prompt, request, version)
        number = min(self.most(num_fresh), len(known))
        return self.choose(known, number, request)[:number] if number else []

    def metrics(self, all_gather: AllGather) -> dict[str, float]:
        own = len(self._ages), sum(self._ages), self._num_fresh, self._num_revived, self._num_groups
        every = zip(*all_gather(own), strict=True)
        num_replayed, ages, num_fresh, num_revived, num_groups = (sum(each) for each in every)
        return {
            "replay/members": num_replayed / max(num_fresh + num_replayed, 1),
            "replay/age": ages / num_replayed if num_replayed else math.nan,
            "replay/frac_revived": num_revived / max(num_groups, 1),
            "replay/prompts": float(len(self._memory)),
        }

    def on_update_end(self, batch: GroupBatch) -> dict[str, float]:
        """Remember the successes of a batch that has been trained on, of all ranks, and forget what is too old."""
        self._clear()
        own: list[Remembered] = []
        for group in batch.groups:
            own += self._memory.latest(rollout for rollout in group.fresh if _passed(rollout, batch.pass_rule))
        self._memory.add(success for part in batch.all_gather(own) for success in part)
        self._memory.forget_old(batch.version)
        return {}

    def _clear(self) -> None:
        self._ages: list[int] = []
        self._num_fresh = self._num_groups = self._num_revived = 0

    def state_dict(self) -> dict[str, Any]:
        return self._memory.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint; what this rule would not keep is forgotten."""
        self._memory.load_state_dict(state)


def _passed(rollout: Rollout, pass_rule: PassRule) -> bool:
    """Return whether there is anything to learn from a rollout again."""
    completion = rollout.completion
    whole = completion.finish_reason != "abort" and completion.num_trained > 0
    return whole and pass_rule.passes(rollout.rewards) and not math.isnan(rollout.reward)


def _draw(success: Remembered, request: Request) -> bytes:
    text = repr((request.seed, "replay", *request.group, success.visit, success.path))
    return hashlib.blake2b(text.encode(), digest_size=8).digest()


PLUGINS = {
    "rlep": Replay(members=2, choice="random"),
    "repo": Replay(members=8, choice="reward", kept=16, logprobs="sampled"),
}
