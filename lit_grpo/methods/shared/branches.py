"""Base classes of plug-ins whose completions branch from others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from lit_grpo.limits import Count
from lit_grpo.plugins import AllGather, Plugin, RunFacts
from lit_grpo.scheduling.ledger import RequestLedger
from lit_grpo.types import EMPTY, Key, Request, RolloutGroup, SamplePath, Trajectory


class Branching(Plugin):
    """A plug-in that lets completions begin within others, and so is the only one of its kind in a run.

    It names them, and counts them and the tokens that they share. A branch has the path of its parent and one number
    more, counted for each parent.
    """

    needs: ClassVar[frozenset[str]] = frozenset(
        {"whole_groups", "whole_rollouts", "separate_completions", "restorable_environments"}
    )
    changes: ClassVar[Mapping[str, str]] = {"separate_completions": "lets completions begin within others"}
    traits: ClassVar[frozenset[str]] = frozenset({"forks"})

    def setup(self) -> None:
        self._count_from_zero()

    def on_rollout_start(self, ledger: RequestLedger) -> None:
        self._count_from_zero()
        self._ledger = ledger

    def _count_from_zero(self) -> None:
        self._numbers: Counter[Key] = Counter()
        self._num_members = self._num_branches = self._num_saved = 0

    def next_path(self, parent: Key, num_saved: int) -> SamplePath:
        """Return the path of a further branch, which begins with so many tokens that its parent has sampled."""
        number = self._numbers[parent]
        self._numbers[parent] += 1
        self._num_branches += num_saved > 0
        self._num_saved += num_saved
        return (*parent[2], number)

    def branch(self, request: Request, prefix: Trajectory = EMPTY) -> Request:
        """Return a request that goes on from ``prefix``, a part of what ``request`` has come to; or a fresh one."""
        return replace(request, path=self.next_path(request.key, prefix.num_sampled), prefix=prefix)

    def on_group(self, group: RolloutGroup) -> None:
        self._num_members += len(group.rollouts)

    def metrics(self, all_gather: AllGather) -> dict[str, float]:
        own = self._num_branches, self._num_members, self._num_saved
        num_branches, num_members, num_saved = (sum(each) for each in zip(*all_gather(own), strict=True))
        return {
            "rollout/branched_share": num_branches / max(num_members, 1),
            "rollout/branched_tokens_saved": float(num_saved),
        }


@dataclass
class Widening(Branching):
    """A group begins with ``model.num_generations`` members, and branches make ``width`` of them."""

    width: Count = 16
    """Number of completions of a group."""

    def check(self, run: RunFacts) -> None:
        """Check that groups have room for branches, or none by intention: a width of as many as begin."""
        if self.width < run.num_generations:
            raise ValueError(
                f"width is {self.width}, and model.num_generations is {run.num_generations}, which is how many paths "
                "begin; give a width of as many or more, such as 16 for 8 paths."
            )
