"""What every rollout, and every group, has to offer a reward function beside its columns."""

from __future__ import annotations

from typing import Any

from lit_grpo.types import Rollout, RolloutGroup

ROLLOUT_INPUTS = ("prompt", "completion", "num_tokens", "finish_reason", "max_tokens")
GROUP_INPUTS = ("prompts", "completions", "num_tokens", "finish_reasons", "max_tokens")


def rollout_inputs(rollout: Rollout) -> dict[str, Any]:
    """The values of one rollout by the names in ``ROLLOUT_INPUTS``."""
    completion = rollout.completion
    return {
        "prompt": rollout.prompt.text,
        "completion": completion.text,
        "num_tokens": completion.num_tokens,
        "finish_reason": completion.finish_reason,
        "max_tokens": completion.request.sampling.max_tokens,
    }


def group_inputs(group: RolloutGroup) -> dict[str, list[Any]]:
    """The values of a group by the names in ``GROUP_INPUTS``, one a rollout."""
    rows = [rollout_inputs(rollout).values() for rollout in group.rollouts]
    return {name: list(values) for name, values in zip(GROUP_INPUTS, zip(*rows, strict=True), strict=True)}
