"""What reward functions are given: TRL's names, and some of our own."""

from __future__ import annotations

import functools
import math
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from lit_grpo.types import Prompt, Rollout, RolloutGroup

OF_THE_RUN = ("trainer_state", "log_metric", "log_extra")
ROLLOUT_INPUTS = (
    *("prompt", "completion", "completion_ids", "num_tokens", "finish_reason", "max_tokens"),
    *OF_THE_RUN,
)
GROUP_INPUTS = (
    *("prompts", "completions", "completion_ids", "num_tokens", "finish_reasons", "max_tokens"),
    *OF_THE_RUN,
)
TRL_INPUTS = frozenset({"prompts", "completions", "completion_ids", *OF_THE_RUN})
"""What TRL hands to every reward function, and so to ``**kwargs``."""
NOT_IN_TRL = frozenset({"prompt", "completion", "completion_ids"})
"""Columns that TRL hands to no reward function."""


@dataclass(frozen=True)
class TrainerState:
    """How far training is, under the names of transformers' TrainerState.

    ``global_step`` counts optimizer steps, ``max_steps`` is -1 where nothing limits them, and ``epoch`` has a fraction.
    """

    global_step: int = 0
    max_steps: int = -1
    epoch: float = 0.0


class LoggedMetrics:
    """The metrics that reward functions log, from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: dict[str, list[float]] = defaultdict(list)

    def log(self, name: str, value: float) -> None:
        """Add a value to the metric ``name``."""
        with self._lock:
            self._values[name].append(float(value))

    def take(self) -> dict[str, float]:
        """Return the mean of what was logged under each name since the last call."""
        with self._lock:
            values, self._values = self._values, defaultdict(list)
        return {name: math.fsum(numbers) / len(numbers) for name, numbers in values.items()}


@dataclass(frozen=True)
class Surroundings:
    """What is the same for all calls: how far training is, and where metrics go."""

    state: TrainerState
    log_metric: Callable[[str, float], None]


def rollout_inputs(rollout: Rollout, surroundings: Surroundings) -> dict[str, Any]:
    """The values of one rollout by the names in ``ROLLOUT_INPUTS``.

    Where the beginning of the answer was given as a hint, the completion's text has it in front, and the prompt not.
    """
    completion = rollout.completion
    return {
        "prompt": _asked(rollout.prompt),
        "completion": rollout.prompt.given + completion.text,
        "completion_ids": completion.token_ids_T.tolist(),
        "num_tokens": completion.num_tokens,
        "finish_reason": completion.finish_reason,
        "max_tokens": completion.request.sampling.max_tokens,
        "trainer_state": surroundings.state,
        "log_metric": surroundings.log_metric,
        "log_extra": rollout.extra.__setitem__,
    }


def group_inputs(group: RolloutGroup, surroundings: Surroundings) -> dict[str, Any]:
    """The values of a group by the names in ``GROUP_INPUTS``, likewise; of a conversation messages."""
    rollouts, messages = group.rollouts, group.prompt.messages
    texts = [group.prompt.given + rollout.completion.text for rollout in rollouts]
    return {
        "prompts": [_asked(group.prompt) if messages is None else list(messages) for _ in rollouts],
        "completions": texts if messages is None else [[{"role": "assistant", "content": text}] for text in texts],
        "completion_ids": [rollout.completion.token_ids_T.tolist() for rollout in rollouts],
        "num_tokens": [rollout.completion.num_tokens for rollout in rollouts],
        "finish_reasons": [rollout.completion.finish_reason for rollout in rollouts],
        "max_tokens": [rollout.completion.request.sampling.max_tokens for rollout in rollouts],
        "trainer_state": surroundings.state,
        "log_metric": surroundings.log_metric,
        "log_extra": functools.partial(_log_extra, rollouts),
    }


def _asked(prompt: Prompt) -> str:
    """The prompt's text without what is given of the answer."""
    return prompt.text.removesuffix(prompt.given)


def _log_extra(rollouts: Sequence[Rollout], column: str, values: Sequence[Any]) -> None:
    """Keep a value of ``column`` with each rollout.

    Raises:
        ValueError: There is another number of values.
    """
    if len(values) != len(rollouts):
        raise ValueError(
            f"log_extra({column!r}) was given {len(values)} values for {len(rollouts)} completions; give one each"
        )
    for rollout, value in zip(rollouts, values, strict=True):
        rollout.extra[column] = value
