"""Completions of earlier visits that are kept for later ones, the same on every rank, with what a checkpoint has."""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from lit_grpo.types import (
    EMPTY,
    Completion,
    FinishReason,
    Prompt,
    Request,
    Rollout,
    RolloutGroup,
    SamplePath,
    Trajectory,
)


@dataclass(frozen=True, slots=True)
class Remembered:
    """A completion as it is kept.

    Args:
        prompt_id: Id of the prompt.
        visit: Number of the visit at which the completion was sampled.
        path: Place of the completion among the samples of the visit.
        prompt: A checksum of the prompt's tokens, by which other data under the same id are told apart.
        trajectory: Tokens of the completion, with the log-probs and versions that they were sampled with.
        finish_reason: Reason for the end of the completion.
        text: The tokens as text.
        rewards: Rewards by reward function.
        reward: Weighted sum of the rewards.
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

    @classmethod
    def of(cls, rollout: Rollout) -> Remembered:
        """Return what is kept of a rollout whose completion has sampled tokens; not the request, nor the data's row."""
        completion, trajectory = rollout.completion, Trajectory()
        trajectory.take(completion)
        prompt_id, visit, path = completion.request.key
        assert trajectory.oldest_version is not None
        return cls(
            prompt_id=prompt_id,
            visit=visit,
            path=path,
            prompt=checksum(rollout.prompt),
            trajectory=trajectory,
            finish_reason=completion.finish_reason,
            text=completion.text,
            rewards=dict(rollout.rewards),
            reward=rollout.reward,
            oldest=trajectory.oldest_version,
        )

    @property
    def tokens(self) -> bytes:
        """Contents that equal completions share."""
        return self.trajectory.contents.tobytes()

    def age(self, version: int) -> int:
        """Return the policy updates since its oldest token was sampled."""
        return version - self.oldest

    def as_member(self, group: RolloutGroup, place: int, recompute: bool = False) -> Rollout:
        """Return it as a member of a group, with a path that nothing sampled has: -1 for the first place.

        With ``recompute`` it is trained on as if the policy had sampled it.
        """
        request = replace(group.rollouts[0].completion.request, path=(-1 - place,), prefix=EMPTY)
        completion = Completion.of(request, self.trajectory, self.finish_reason, self.text)
        return Rollout(group.prompt, completion, dict(self.rewards), self.reward, replayed=True, recompute=recompute)


class CompletionMemory:
    """Completions by prompt, the oldest first; of those with the same tokens the last alone.

    Args:
        kept: Number of completions per prompt that are kept; the oldest is forgotten first.
        max_age: Policy updates that the oldest token of a completion may lie back.
    """

    def __init__(self, kept: int, max_age: int) -> None:
        self.kept, self.max_age = kept, max_age
        self._known: dict[str, list[Remembered]] = {}

    def __len__(self) -> int:
        """Return how many prompts have completions."""
        return len(self._known)

    def latest(self, rollouts: Iterable[Rollout]) -> list[Remembered]:
        """Return what would be kept of a prompt's rollouts, which :meth:`add` takes; none that has observed images."""
        each = (Remembered.of(rollout) for rollout in rollouts if not rollout.completion.pictures)
        return list({one.tokens: one for one in each}.values())[-self.kept :]

    def add(self, completions: Iterable[Remembered]) -> None:
        """Keep completions of any prompts."""
        for new in completions:
            before = [each for each in self._known.get(new.prompt_id, ()) if each.tokens != new.tokens]
            self._known[new.prompt_id] = [*before, new][-self.kept :]

    def forget_old(self, version: int) -> None:
        """Forget what is too old for the policy of ``version``."""
        young = {
            prompt_id: [each for each in known if each.age(version) <= self.max_age]
            for prompt_id, known in self._known.items()
        }
        self._known = {prompt_id: known for prompt_id, known in young.items() if known}

    def fitting(self, prompt: Prompt, request: Request, version: int) -> list[Remembered]:
        """Return what is known of a prompt and may join a group, with a member ``request``, at ``version``."""
        own = checksum(prompt)
        return [
            each
            for each in self._known.get(prompt.prompt_id, ())
            if each.age(version) <= self.max_age
            and each.prompt == own
            and each.trajectory.num_sampled <= request.sampling.max_tokens
        ]

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a checkpoint needs: lists by completion, and all tokens in a row, 13 bytes each."""
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
        """Go on from a checkpoint; what is more than ``kept`` is forgotten."""
        self._known = {}
        parts = [state[name].split(state["num_tokens"]) for name in ("token_ids", "logprobs", "versions", "trained")]
        rows = zip(*parts, state["entropy"], strict=True)
        plain = zip(*(state[name] for name in PLAIN), strict=True)
        for row, path, values in zip(rows, state["path"], plain, strict=True):
            named = dict(zip(PLAIN, values, strict=True))
            completion = Remembered(path=tuple(path), trajectory=Trajectory(*row), **named)
            self._known.setdefault(completion.prompt_id, []).append(completion)
        self._known = {prompt_id: known[-self.kept :] for prompt_id, known in self._known.items()}


PLAIN = ("prompt_id", "visit", "prompt", "finish_reason", "text", "rewards", "reward", "oldest")


def checksum(prompt: Prompt) -> int:
    """Return a checksum of a prompt's tokens and pixels."""
    pixels = b"" if prompt.pictures is None else prompt.pictures.digest
    return zlib.crc32(pixels, zlib.crc32(array("q", prompt.token_ids).tobytes()))
