"""Reward functions: what they are, how they run beside the rollout, and the ones that come with the project.

A reward function is any callable named by import path or by file. It scores one rollout when it takes
``completion``, or the whole group of a prompt when it takes ``completions``, as TRL's do; see :mod:`.function`.
"""

from lit_grpo.rewards.builtin import ExactMatch, FormatMatch, SoftOverlongPenalty, exact_match
from lit_grpo.rewards.function import RewardFunction, RewardSpec, load_rewards
from lit_grpo.rewards.http_judge import HTTPJudge
from lit_grpo.rewards.inputs import TrainerState
from lit_grpo.rewards.maths import MathEquivalence
from lit_grpo.rewards.runner import RewardError, RewardRunner, RewardWatch

__all__ = [
    "ExactMatch",
    "FormatMatch",
    "HTTPJudge",
    "MathEquivalence",
    "RewardError",
    "RewardFunction",
    "RewardRunner",
    "RewardSpec",
    "RewardWatch",
    "SoftOverlongPenalty",
    "TrainerState",
    "exact_match",
    "load_rewards",
]
