"""Groups between their prompts and the update: the one owner of what has been sampled and not yet learnt from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from lit_grpo.rollout.rules import SYNCHRONOUS, ReleaseRule
from lit_grpo.types import (
    EMPTY,
    Completion,
    GroupKey,
    Key,
    Prompt,
    Request,
    Rollout,
    RolloutGroup,
    SamplePath,
    SamplingParams,
    Trajectory,
)


@dataclass
class _Open:
    """A group in the making: what is still asked for, with what it has come to, and what has ended."""

    prompt: Prompt
    unfinished: dict[SamplePath, Request] = field(default_factory=dict)
    completions: dict[SamplePath, Completion] = field(default_factory=dict)
    released: RolloutGroup | None = None  # whole, and waiting for its release


class RolloutBuffer:
    """Groups of a run, from their opening to their release.

    It lives as long as the run and goes into its checkpoints: completions that have ended, and the prefixes of those
    that have not. A group is whole when nothing is asked for any more; whole groups leave in the order of arrival, as
    the rule says.

    Args:
        rule: When groups are released.
    """

    def __init__(self, rule: ReleaseRule = SYNCHRONOUS) -> None:
        self.rule = rule
        self._groups: dict[GroupKey, _Open] = {}  # in the order of arrival
        self._num_whole = 0

    def __len__(self) -> int:
        """Return the number of groups that are open."""
        return len(self._groups)

    # ---- in -----------------------------------------------------------------------------------------

    def open(self, requests: Sequence[Request]) -> None:
        """Open the groups of these requests, in the order of arrival.

        Raises:
            ValueError: A group is open already, or a request comes twice.
        """
        groups: dict[GroupKey, _Open] = {}
        for request in requests:
            group = groups.setdefault(request.group, _Open(request.prompt))
            if request.path in group.unfinished or request.group in self._groups:
                raise ValueError("A batch holds the same visit of a prompt twice; give its rows distinct prompt ids.")
            group.unfinished[request.path] = request
        self._groups |= groups

    def ask(self, request: Request) -> None:
        """Ask for a further sample of an open group, or for one that goes on from another prefix.

        Raises:
            ValueError: Its group is not open.
        """
        if request.group not in self._groups:
            raise ValueError(f"No group of {request.group} is open; open it with its prompt first.")
        self._groups[request.group].unfinished[request.path] = request

    # ---- what happens to requests -------------------------------------------------------------------

    @property
    def unfinished(self) -> list[Request]:
        """What is asked for, in the order of arrival."""
        return [request for group in self._groups.values() for request in group.unfinished.values()]

    def finish(self, completion: Completion) -> RolloutGroup | None:
        """Take a completion; return its group if it is whole now."""
        group = self._groups[completion.request.group]
        del group.unfinished[completion.request.path]
        group.completions[completion.request.path] = completion
        return self._whole(group)

    def drop(self, key: Key) -> RolloutGroup | None:
        """A request is wanted no more, and its group does without; return the group if it is whole now."""
        group = self._groups[key[:2]]
        del group.unfinished[key[2]]
        return self._whole(group)

    def _whole(self, group: _Open) -> RolloutGroup | None:
        if group.unfinished:
            return None
        rollouts = [Rollout(group.prompt, group.completions[path]) for path in sorted(group.completions)]
        group.released = RolloutGroup(group.prompt, rollouts)
        group.completions = {}
        self._num_whole += 1
        return group.released

    def renew(self, version: int) -> int:
        """Let unfinished requests go on as the rule says, before the policy of ``version`` samples; count the renewed.

        Those with tokens that would be too old begin anew.

        Raises:
            ValueError: A prefix was sampled by a version that is yet to come.
        """
        num_renewed = 0
        for request in self.unfinished:
            oldest, newest = request.prefix.oldest_version, request.prefix.newest_version
            if newest is not None and newest > version:
                raise ValueError(
                    f"The prefix of sample {request.path} of prompt {request.prompt.prompt_id!r} is of policy version "
                    f"{newest}, which this run, at version {version}, does not know; begin with an empty buffer."
                )
            if oldest is not None and (self.rule.leftovers != "keep" or version - oldest > self.rule.max_age):
                self.ask(request.after(EMPTY))
                num_renewed += 1
        return num_renewed

    # ---- out ----------------------------------------------------------------------------------------

    def ready(self) -> bool:
        """Whether there is enough for a release."""
        return self._num_whole >= (len(self._groups) if self.rule.num_groups is None else self.rule.num_groups)

    def take(self) -> list[RolloutGroup]:
        """Release whole groups, in the order of arrival."""
        whole = [(key, group.released) for key, group in self._groups.items() if group.released is not None]
        for key, _ in whole[: self.rule.num_groups]:
            del self._groups[key]
            self._num_whole -= 1
        return [group for _, group in whole[: self.rule.num_groups]]

    def clear(self) -> None:
        """Forget everything."""
        self._groups.clear()
        self._num_whole = 0

    # ---- checkpoints --------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """All open groups, as plain values and tensors."""
        return {
            "groups": [
                {
                    "prompt": vars(group.prompt) | {"token_ids": list(group.prompt.token_ids)},
                    "unfinished": [_request_state(request) for request in group.unfinished.values()],
                    "completions": [
                        _completion_state(completion)
                        for completion in (
                            group.completions.values()
                            if group.released is None
                            else (rollout.completion for rollout in group.released.rollouts)
                        )
                    ],
                    "rewards": None
                    if group.released is None
                    else [(rollout.rewards, rollout.reward, rollout.kept) for rollout in group.released.rollouts],
                }
                for group in self._groups.values()
            ]
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with what had been kept."""
        self.clear()
        for saved in state["groups"]:
            prompt = Prompt(**(saved["prompt"] | {"token_ids": tuple(saved["prompt"]["token_ids"])}))
            group = self._groups[prompt.prompt_id, prompt.visit] = _Open(prompt)
            for request in (_request(prompt, each) for each in saved["unfinished"]):
                group.unfinished[request.path] = request
            for completion in (_completion(prompt, each) for each in saved["completions"]):
                group.completions[completion.request.path] = completion
            released = None if saved["rewards"] is None else self._whole(group)
            if released is not None:
                for rollout, earned in zip(released.rollouts, saved["rewards"], strict=True):
                    rollout.rewards, rollout.reward, rollout.kept = earned


def group_requests(prompts: Sequence[Prompt], num_samples: int, sampling: SamplingParams, seed: int) -> list[Request]:
    """Return requests for so many samples of each prompt.

    Raises:
        ValueError: A group would have no member.
    """
    if num_samples < 1:
        raise ValueError(f"A group of {num_samples} samples has no member; give num_generations of 1 or more.")
    return [Request(prompt, (sample,), sampling, seed) for prompt in prompts for sample in range(num_samples)]


def _trajectory_state(trajectory: Trajectory) -> dict[str, Any]:
    names = ("token_ids_T", "logprobs_T", "versions_T", "trained_T", "entropy")
    return {name: getattr(trajectory, name) for name in names}


def _request_state(request: Request) -> dict[str, Any]:
    sampling = vars(request.sampling) | {"stop": list(request.sampling.stop)}
    prefix = _trajectory_state(request.prefix)
    return {"path": list(request.path), "sampling": sampling, "seed": request.seed, "prefix": prefix}


def _completion_state(completion: Completion) -> dict[str, Any]:
    own = {"finish_reason": completion.finish_reason, "text": completion.text}
    return {"request": _request_state(completion.request), **own, **_trajectory_state(completion)}


def _request(prompt: Prompt, state: dict[str, Any]) -> Request:
    sampling = SamplingParams(**(state["sampling"] | {"stop": tuple(state["sampling"]["stop"])}))
    return Request(prompt, tuple(state["path"]), sampling, state["seed"], Trajectory(**state["prefix"]))


def _completion(prompt: Prompt, state: dict[str, Any]) -> Completion:
    own = {name: value for name, value in state.items() if name != "request"}
    return Completion(_request(prompt, state["request"]), **own)
