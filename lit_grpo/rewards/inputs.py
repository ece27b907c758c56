"""The names of the arguments of reward functions: those of TRL by TRL's names, and some of our own."""

from __future__ import annotations

import re

OF_THE_RUN = ("trainer_state", "log_metric", "log_extra")
"""Arguments that TRL has too, and that are no data."""
OWN = "log_feedback"
"""An argument that TRL has not: a function gets it only if it names it."""
SHARED = frozenset({*OF_THE_RUN, OWN, "environments"})
"""Arguments that are given as they are; calls get copies of all others."""
ROLLOUT_INPUTS = (
    *("prompt", "completion", "completion_ids", "num_tokens", "finish_reason", "max_tokens", "episode"),
    *OF_THE_RUN,
    OWN,
)
GROUP_INPUTS = (
    *("prompts", "completions", "completion_ids", "num_tokens", "finish_reasons", "max_tokens"),
    *("episodes", "environments"),
    *OF_THE_RUN,
    OWN,
)
OF_EPISODES = (frozenset({"episode"}), frozenset({"episodes", "environments"}))
"""Arguments of a completion, and of a group, that an environment has taken part in; None where none has."""
TRL_INPUTS = frozenset({"prompts", "completions", "completion_ids", "environments", *OF_THE_RUN})
"""Arguments that TRL gives to every reward function, and so to its ``**kwargs``."""
NOT_IN_TRL = frozenset({"prompt", "completion", "completion_ids"})
"""Columns of the data that TRL gives to no reward function."""

_LONGEST_TAGS = 200
_TAGS = re.compile(r"(?:<[A-Za-z_][\w-]*>\s*)+\Z")


def begun(prompt: str) -> str:
    """Return the tags that a prompt begins the answer with: ``<think>`` and a line end where it ends in these.

    Some chat templates put ``<think>`` at the end of the prompt, so no completion holds it.
    """
    found = _TAGS.search(prompt[-_LONGEST_TAGS:])
    return "" if found is None else found[0]
