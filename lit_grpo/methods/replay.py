"""Replay of successes: RLEP (arXiv 2507.07451) and RePO (arXiv 2506.09340) let earlier ones join a prompt's group."""

from __future__ import annotations

import hashlib
import math
import zlib
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, get_args

from lit_grpo.budgets.history import is_flat, moments
from lit_grpo.plugins import Plugin, Worker
from lit_grpo.settings import check_number
from lit_grpo.types import (
    EMPTY,
    Completion,
    FinishReason,
    PassRule,
    Prompt,
    Request,
    Rollout,
    RolloutGroup,
    SamplePath,
    Trajectory,
)

Choice = Literal["random", "recent", "reward"]


@dataclass(frozen=True, slots=True)
class Success:
    """A completion that passed, as it is remembered.

    Args:
        prompt_id: Of which prompt.
        visit: At which of its visits it was sampled.
        path: As which sample of that.
        prompt: A checksum of the prompt's tokens, by which other data under the same id are told apart.
        trajectory: Its tokens, with the log-probs and versions that they were sampled with.
        finish_reason: Why it ended.
        text: The tokens as text.
        rewards: What it earned, by reward function.
        reward: Their weighted sum.
        oldest: The version of its oldest token.
    """

    prompt_id: str
    visit: int
    path: SamplePath
    prompt: int
    trajectory: Trajectory
    finish_reason: FinishReason
    text: str
    rewards: dict[str, float | None]
    reward: float
    oldest: int

    def age(self, version: int) -> int:
        """Return the policy updates since its oldest token was sampled."""
        return version - self.oldest


@dataclass(frozen=True)
class Replay(Plugin):
    """Which successes of earlier visits take part in a prompt's group, and how many.

    A rule of your own is a dataclass that derives from it, with a ``choose`` of its own.

    Args:
        members: The most of them in a group.
        share: The most of a group that they may be, of the members that have a reward.
        max_age: Policy updates that may lie between the version that sampled the oldest token of a completion and the
            one that learns from it again.
        choice: Which ones, where there are more: ``random`` ones, by a hash; the most ``recent``; or those of the
            highest ``reward``, of equals the most recent.
        kept: How many of a prompt are remembered; the oldest is forgotten first.
    """

    role: ClassVar[str] = "which earlier completions join a group"

    members: int = 2
    share: float = 0.5
    max_age: int = 256
    choice: Choice = "random"
    kept: int = 8

    def __post_init__(self) -> None:
        for name in ("members", "max_age", "kept"):
            check_number(name, getattr(self, name), 1, int)
        check_number("share", self.share, 0, int | float)
        if not self.share < 1:
            raise ValueError(f"share must be below 1, not {self.share}: some of a group has to be newly sampled.")
        if self.choice not in get_args(Choice):
            raise ValueError(f"choice must be one of {', '.join(get_args(Choice))}, not {self.choice!r}.")

    @property
    def needs(self) -> frozenset[str]:
        """Members join whole groups, and older policies sampled their tokens."""
        return frozenset({"whole_groups", "ratios_to_sampler"})

    @property
    def changes(self) -> Mapping[str, str]:
        """Groups get members of earlier visits."""
        return {
            "fresh_members": "lets completions of earlier visits join groups",
            "kept_versions": "learns from tokens of policies whose weights are not kept",
        }

    def worker(self) -> ReplayMemory:
        """Return what remembers successes."""
        return ReplayMemory(self)

    def most(self, num_fresh: int) -> int:
        """Return how many may join so many members that have been newly sampled."""
        return min(self.members, math.floor(self.share * num_fresh / (1 - self.share) + 1e-9))

    def choose(self, known: Sequence[Success], number: int, request: Request) -> Sequence[Success]:
        """Return ``number`` of those that are known.

        Args:
            known: In the order in which they have been learnt from, at least so many.
            number: How many.
            request: Of a member of the group that they are to join, for draws that can be repeated.
        """
        if self.choice == "random":
            return sorted(known, key=lambda each: _draw(each, request))[:number]
        newest_first = list(reversed(known))
        if self.choice == "reward":
            newest_first.sort(key=lambda each: -each.reward)
        return newest_first[:number]


class ReplayMemory(Worker):
    """Successes by prompt, the same on every rank, and what of them has joined a batch.

    What a batch brings is remembered once it has been learnt from, so that a batch that is broken off and sampled again
    ends the same. Of completions with the same tokens the last is remembered alone. What has been replayed is not
    remembered again.

    Args:
        rule: Which successes join.
    """

    common = True

    def __init__(self, rule: Replay) -> None:
        self.rule = rule
        self._known: dict[str, list[Success]] = {}
        self._clear()

    # ---- into a batch -------------------------------------------------------------------------------

    def join(self, groups: Sequence[RolloutGroup], version: int) -> None:
        """Let successes of earlier visits join groups, which have their rewards, as members.

        Nothing joins a group that is not learnt from, or that has no difference even then.

        Args:
            groups: Whole ones.
            version: Of the policy that learns from them.
        """
        for group in groups:
            rewarded = [rollout for rollout in group.rollouts if not math.isnan(rollout.reward)]
            learnt = [rollout for rollout in rewarded if rollout.kept]
            self._num_groups += 1
            self._num_fresh += len(learnt)
            chosen = self._chosen(group, len(rewarded), version) if learnt else []
            if not chosen or _are_equal([*(each.reward for each in rewarded), *(each.reward for each in chosen)]):
                continue
            self._num_revived += _are_equal([rollout.reward for rollout in rewarded])
            self._ages += [each.age(version) for each in chosen]
            group.rollouts += _members(group, chosen)

    def _chosen(self, group: RolloutGroup, num_fresh: int, version: int) -> Sequence[Success]:
        """Those that may join a group."""
        request, checksum = group.rollouts[0].completion.request, _checksum(group.prompt)
        known = [
            each
            for each in self._known.get(group.prompt.prompt_id, ())
            if each.age(version) <= self.rule.max_age
            and each.prompt == checksum
            and each.trajectory.num_sampled <= request.sampling.max_tokens
        ]
        number = min(self.rule.most(num_fresh), len(known))
        return self.rule.choose(known, number, request)[:number] if number else []

    def metrics(self) -> dict[str, float]:
        """Return what to log of a batch."""
        num_replayed = len(self._ages)
        return {
            "replay/members": num_replayed / max(self._num_fresh + num_replayed, 1),
            "replay/age": sum(self._ages) / num_replayed if num_replayed else math.nan,
            "replay/frac_revived": self._num_revived / max(self._num_groups, 1),
            "replay/prompts": float(len(self._known)),
        }

    # ---- out of a batch -----------------------------------------------------------------------------

    def learnt(
        self,
        groups: Sequence[RolloutGroup],
        pass_rule: PassRule,
        version: int,
        gather: Callable[[Any], list[Any]],
    ) -> dict[str, float]:
        """Remember the successes of a batch that has been learnt from, of all ranks, and forget what is too old."""
        self._clear()
        own: list[Success] = []
        for group in groups:
            passed = [_success(rollout) for rollout in group.fresh if _passed(rollout, pass_rule)]
            own += list({_tokens(each.trajectory): each for each in passed}.values())[-self.rule.kept :]
        for success in (success for part in gather(own) for success in part):
            tokens = _tokens(success.trajectory)
            before = [each for each in self._known.get(success.prompt_id, ()) if _tokens(each.trajectory) != tokens]
            self._known[success.prompt_id] = [*before, success][-self.rule.kept :]
        self._forget(version)
        return {}

    def _forget(self, version: int) -> None:
        young = {
            prompt_id: [each for each in known if each.age(version) <= self.rule.max_age]
            for prompt_id, known in self._known.items()
        }
        self._known = {prompt_id: known for prompt_id, known in young.items() if known}

    def _clear(self) -> None:
        self._ages: list[int] = []
        self._num_fresh = self._num_groups = self._num_revived = 0

    # ---- checkpoints --------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps: lists by completion, and the tokens of all one after another, 13 bytes each."""
        import torch

        known = [each for some in self._known.values() for each in some]
        trajectories = [Trajectory(), *(each.trajectory for each in known)]  # so that there is always one
        return {
            **{name: [getattr(each, name) for each in known] for name in PLAIN},
            "path": [list(each.path) for each in known],
            "num_tokens": [each.trajectory.num_tokens for each in known],
            "entropy": [each.trajectory.entropy for each in known],
            "token_ids": torch.cat([each.token_ids_T.int() for each in trajectories]),
            "logprobs": torch.cat([each.logprobs_T for each in trajectories]),
            "versions": torch.cat([each.versions_T.int() for each in trajectories]),
            "trained": torch.cat([each.trained_T for each in trajectories]),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint; what this rule would not keep is forgotten."""
        self._known = {}
        parts = [state[name].split(state["num_tokens"]) for name in ("token_ids", "logprobs", "versions", "trained")]
        rows = zip(*parts, state["entropy"], strict=True)
        plain = zip(*(state[name] for name in PLAIN), strict=True)
        for row, path, values in zip(rows, state["path"], plain, strict=True):
            success = Success(path=tuple(path), trajectory=Trajectory(*row), **dict(zip(PLAIN, values, strict=True)))
            self._known.setdefault(success.prompt_id, []).append(success)
        self._known = {prompt_id: known[-self.rule.kept :] for prompt_id, known in self._known.items()}


PLAIN = ("prompt_id", "visit", "prompt", "finish_reason", "text", "rewards", "reward", "oldest")


def _passed(rollout: Rollout, pass_rule: PassRule) -> bool:
    """Whether there is anything to learn from a rollout again."""
    completion = rollout.completion
    whole = completion.finish_reason != "abort" and completion.num_trained > 0
    return whole and pass_rule.passes(rollout.rewards) and not math.isnan(rollout.reward)


def _success(rollout: Rollout) -> Success:
    completion, trajectory = rollout.completion, Trajectory()
    trajectory.take(completion)  # what holds the request would hold the row of the data
    (prompt_id, visit, path), oldest = completion.request.key, trajectory.oldest_version
    assert oldest is not None  # it has tokens to learn from
    own = completion.finish_reason, completion.text, dict(rollout.rewards), rollout.reward, oldest
    return Success(prompt_id, visit, path, _checksum(rollout.prompt), trajectory, *own)


def _members(group: RolloutGroup, chosen: Sequence[Success]) -> list[Rollout]:
    """As rollouts, with paths that nothing sampled has."""
    request = group.rollouts[0].completion.request
    requests = [replace(request, path=(-1 - place,), prefix=EMPTY) for place in range(len(chosen))]
    return [
        Rollout(
            group.prompt,
            Completion.of(request, each.trajectory, each.finish_reason, each.text),
            dict(each.rewards),
            each.reward,
            replayed=True,
        )
        for request, each in zip(requests, chosen, strict=True)
    ]


def _are_equal(rewards: Sequence[float]) -> bool:
    return is_flat(*moments(rewards))


def _tokens(trajectory: Trajectory) -> bytes:
    return trajectory.token_ids_T.numpy().tobytes()


def _checksum(prompt: Prompt) -> int:
    return zlib.crc32(array("q", prompt.token_ids).tobytes())


def _draw(success: Success, request: Request) -> bytes:
    text = repr((request.seed, "replay", *request.group, success.visit, success.path))
    return hashlib.blake2b(text.encode(), digest_size=8).digest()


PLUGINS = {"rlep": Replay(members=2, choice="random"), "repo": Replay(members=8, choice="reward", kept=16)}
