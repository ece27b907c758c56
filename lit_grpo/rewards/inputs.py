"""The arguments of reward functions: those of TRL by TRL's names, and some of our own."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from lit_grpo.types import Completion, Prompt, Rollout, RolloutGroup

OF_THE_RUN = ("trainer_state", "log_metric", "log_extra")
"""Arguments that are the same for all rollouts."""
SHARED = frozenset({*OF_THE_RUN, "environments"})
"""Arguments that are given as they are; calls get copies of all others."""
ROLLOUT_INPUTS = (
    *("prompt", "completion", "completion_ids", "num_tokens", "finish_reason", "max_tokens", "episode"),
    *OF_THE_RUN,
)
GROUP_INPUTS = (
    *("prompts", "completions", "completion_ids", "num_tokens", "finish_reasons", "max_tokens"),
    *("episodes", "environments"),
    *OF_THE_RUN,
)
OF_EPISODES = (frozenset({"episode"}), frozenset({"episodes", "environments"}))
"""Arguments of a completion, and of a group, that an environment has taken part in; None where none has."""
TRL_INPUTS = frozenset({"prompts", "completions", "completion_ids", "environments", *OF_THE_RUN})
"""Arguments that TRL gives to every reward function, and so to its ``**kwargs``."""
NOT_IN_TRL = frozenset({"prompt", "completion", "completion_ids"})
"""Columns of the data that TRL gives to no reward function."""


_LONGEST_TAGS = 200


@dataclass(frozen=True)
class TrainerState:
    """Progress of training, with the field names of transformers' ``TrainerState``.

    Args:
        global_step: Optimizer steps that have been made.
        max_steps: Optimizer steps of the whole run; -1 means no limit.
        epoch: Passes over the data, with a fraction: 1.5 is in the middle of the second pass.
    """

    global_step: int = 0
    max_steps: int = -1
    epoch: float = 0.0


@dataclass(frozen=True)
class Surroundings:
    """The arguments that all calls share: the state of training, and the function that logs a metric."""

    state: TrainerState
    log_metric: Callable[[str, float], None]


def rollout_inputs(rollout: Rollout, surroundings: Surroundings) -> dict[str, Any]:
    """Return the values of one rollout by the names in ``ROLLOUT_INPUTS``.

    Where the prompt gave the beginning of the answer, it belongs to the text of the completion, and not to the prompt.
    """
    completion = rollout.completion
    return {
        **({} if completion.episode is None else {"episode": completion.episode}),
        "prompt": _asked(rollout),
        "completion": rollout.prompt.given + completion.text,
        "completion_ids": completion.token_ids_T.tolist(),
        "num_tokens": completion.num_sampled,
        "finish_reason": completion.finish_reason,
        "max_tokens": completion.request.sampling.max_tokens,
        "trainer_state": surroundings.state,
        "log_metric": surroundings.log_metric,
        "log_extra": rollout.extra.__setitem__,
    }


def group_inputs(group: RolloutGroup, surroundings: Surroundings) -> dict[str, Any]:
    """Return the values of a group by the names in ``GROUP_INPUTS``; a conversation's texts are messages."""
    rollouts, is_chat = group.rollouts, group.prompt.messages is not None
    episodes = [rollout.completion.episode for rollout in rollouts]
    environments = [None if episode is None else episode.environment for episode in episodes]
    return {
        **({"episodes": episodes, "environments": environments} if any(episodes) else {}),
        "prompts": [rollout.asked_messages if is_chat else _asked(rollout) for rollout in rollouts],
        "completions": [_answered(group.prompt, rollout.completion) for rollout in rollouts],
        "completion_ids": [rollout.completion.token_ids_T.tolist() for rollout in rollouts],
        "num_tokens": [rollout.completion.num_sampled for rollout in rollouts],
        "finish_reasons": [rollout.completion.finish_reason for rollout in rollouts],
        "max_tokens": [rollout.completion.request.sampling.max_tokens for rollout in rollouts],
        "trainer_state": surroundings.state,
        "log_metric": surroundings.log_metric,
        "log_extra": functools.partial(_log_extra, rollouts),
    }


def _answered(prompt: Prompt, completion: Completion) -> str | list[dict[str, Any]]:
    """Return what followed a prompt: a text, or messages where the prompt is a conversation."""
    if completion.episode is not None:
        return completion.episode.messages
    text = prompt.given + completion.text
    return text if prompt.messages is None else [{"role": "assistant", "content": text}]


_TAGS = re.compile(r"(?:<[A-Za-z_][\w-]*>\s*)+\Z")


def begun(prompt: str) -> str:
    """Return the tags that a prompt begins the answer with: ``<think>`` and a line end where it ends in these.

    Some chat templates put ``<think>`` at the end of the prompt, so no completion holds it.
    """
    found = _TAGS.search(prompt[-_LONGEST_TAGS:])
    return "" if found is None else found[0]


def _asked(rollout: Rollout) -> str:
    """Return the prompt's text without the given beginning of the answer, and with what ``reset`` added to it."""
    return rollout.asked.removesuffix(rollout.prompt.given)


def _log_extra(rollouts: Sequence[Rollout], column: str, values: Sequence[Any]) -> None:
    """Store one value of ``column`` with each rollout.

    Raises:
        ValueError: The number of values is not the number of rollouts.
    """
    if len(values) != len(rollouts):
        raise ValueError(
            f"log_extra({column!r}) was given {len(values)} values for {len(rollouts)} completions; give one each"
        )
    for rollout, value in zip(rollouts, values, strict=True):
        rollout.extra[column] = value
