"""Reward functions: how they are loaded, how they run during the rollout, and the ones that come with the project.

A reward function is any callable. A config names it by import path or by file. It scores one rollout if it has a
parameter ``completion``, and the whole group of a prompt, as TRL's do, if it has a parameter ``completions``.
"""

from lit_grpo.rewards.builtin import ExactMatch, FormatMatch, SoftOverlongPenalty, exact_match
from lit_grpo.rewards.function import RewardError, RewardFunction, RewardSpec, load_rewards
from lit_grpo.rewards.http_judge import HTTPJudge
from lit_grpo.rewards.maths import MathEquivalence
from lit_grpo.rewards.runner import RewardRunner, TrainerState

__all__ = [
    "ExactMatch",
    "FormatMatch",
    "HTTPJudge",
    "MathEquivalence",
    "RewardError",
    "RewardFunction",
    "RewardRunner",
    "RewardSpec",
    "SoftOverlongPenalty",
    "TrainerState",
    "exact_match",
    "load_rewards",
]
