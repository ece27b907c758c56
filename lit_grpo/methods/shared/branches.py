"""Base classes of plug-ins whose completions branch from others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from lit_grpo.limits import Count
from lit_grpo.plugins import AllGather, Answer, Plugin, RunFacts
from lit_grpo.rollout.generator import Likeliest, StepEvents
from lit_grpo.scheduling.ledger import RequestLedger
from lit_grpo.types import EMPTY, Completion, GroupKey, Key, Request, RolloutGroup, SamplePath, Trajectory


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


@dataclass
class OtherTokens(Widening):
    """Branches begin with another likely token in the place of the one that their parent has drawn.

    Where a token is drawn, :meth:`branches` may name others of the distribution, as long as the group has less than
    ``width`` members. Such a token is taken, not drawn; its log-prob is that of the distribution. An end-of-sequence
    token is never taken, and a stop string that a taken token completes does not end the branch. A branch that
    :meth:`pruned` names leaves its group, with those that began within it and still decode. Once no path of a group is
    left, fresh ones fill the width. Of more branches than have room, those are made that come first, so with fewer
    slots than paths a group may have others.
    """

    def setup(self) -> None:
        super().setup()
        self._eos_ids: frozenset[int] = frozenset()

    def check(self, run: RunFacts) -> None:
        super().check(run)
        if run.abilities is not None and "likeliest" not in run.abilities:
            raise ValueError(
                f"it needs the distributions that tokens are drawn from, which model.generator {run.generator} does "
                "not report; take model.generator slots, or leave it out."
            )

    def on_policy_start(self, eos_ids: Sequence[int]) -> None:
        self._eos_ids = frozenset(eos_ids)

    def on_rollout_start(self, ledger: RequestLedger) -> None:
        super().on_rollout_start(ledger)
        self._members: dict[GroupKey, set[SamplePath]] = {}
        self._births: dict[Key, int] = {}  # of branches: how many sampled tokens of the parent each begins with
        self._ended: dict[Key, Completion] = {}  # paths of open groups, and those between two turns
        self._num_pruned = 0

    def on_requests(self, requests: Sequence[Request]) -> Sequence[Request]:
        for request in requests:
            self._members.setdefault(request.group, set()).add(request.path)
        return ()

    def branches(self, drawn: Likeliest) -> Iterable[tuple[int, Sequence[tuple[int, float]]]]:
        """Yield rows of a step that are to branch, with the tokens that may begin branches, and their log-probs."""
        raise NotImplementedError

    def pruned(self, drawn: Likeliest) -> Collection[Key]:
        """Return the branches, of those that decode, that are to leave their groups."""
        raise NotImplementedError

    def on_step(self, events: StepEvents) -> Answer | None:
        """Prune and branch."""
        if (drawn := events.likeliest) is None:
            return None
        for key in drawn.keys:
            self._ended.pop(key, None)  # it had sampled a turn, and goes on
        self._ended |= {completion.request.key: completion for completion in events.finished}
        dropped: set[Key] = set()
        for key in self.pruned(drawn):
            unfinished = self._ledger.groups[key[:2]]
            dropped |= {(*key[:2], path) for path in unfinished if path[: len(key[2])] == key[2]} - self._ended.keys()
        for key in dropped:
            self._members[key[:2]].discard(key[2])
            self._births.pop(key, None)
        self._num_pruned += len(dropped)
        submit: list[Request] = []
        for row, others in sorted(self.branches(drawn), key=lambda each: drawn.keys[each[0]]):
            key, token_id = drawn.keys[row], drawn.token_ids_B[row]
            members, usable = self._members[key[:2]], key not in self._ended and key not in dropped
            for other, logprob in others if usable else ():
                if len(members) < self.width and other != token_id and other not in self._eos_ids:
                    before = (had := drawn.come_to(key)).until(had.num_tokens - 1)
                    begun = before.followed_by([other], [logprob], had.newest_version)
                    submit.append(self.branch(self._ledger.request(key), begun))
                    members.add(submit[-1].path)
                    self._births[submit[-1].key] = before.num_sampled
        for key in {key[:2]: key for key in dropped}.values():
            submit += self._fresh(self._ledger.request(key), dropped | self._ended.keys())
        return Answer(submit=submit, drop=[*dropped]) if submit or dropped else None

    def on_completion(self, completion: Completion) -> Answer | None:
        self._births.pop(completion.request.key, None)
        submit = self._fresh(completion.request)
        return Answer(submit=submit) if submit else None

    def _fresh(self, request: Request, leaving: Collection[Key] = ()) -> list[Request]:
        """Return what fills the width of a group, if none of its paths is left but those that are ``leaving``."""
        group, members = request.group, self._members[request.group]
        if any((*group, path) not in leaving for path in self._ledger.groups.get(group, ())):
            return []
        root = replace(request, path=request.path[:1])
        fresh = [self.branch(root) for _ in range(self.width - len(members))]
        members |= {each.path for each in fresh}
        return fresh

    def on_group(self, group: RolloutGroup) -> None:
        super().on_group(group)
        for rollout in group.rollouts:
            self._ended.pop(rollout.completion.request.key, None)

    def metrics(self, all_gather: AllGather) -> dict[str, float]:
        return super().metrics(all_gather) | {"rollout/pruned_completions": float(sum(all_gather(self._num_pruned)))}
