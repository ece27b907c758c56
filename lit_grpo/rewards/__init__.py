"""Reward functions: how they are loaded, how they run during the rollout, and the ones that come with the project.

A reward function is any callable. A config names it by import path or by file. It scores one rollout if it has a
parameter ``completion``, and the whole group of a prompt, as TRL's do, if it has a parameter ``completions``.
"""

from lit_grpo.rewards.builtin import ExactMatch, FormatMatch, SoftOverlongPenalty, exact_match
from lit_grpo.rewards.function import RewardError, RewardFunction, RewardSpec, StatefulReward, load_rewards
from lit_grpo.rewards.judge_client import Judge, JudgeError
from lit_grpo.rewards.judges import HTTPJudge, RelativeJudge, RubricJudge
from lit_grpo.rewards.maths import MathEquivalence
from lit_grpo.rewards.reward_model import RewardModel
from lit_grpo.rewards.runner import RewardRunner, TrainerState

__all__ = [
    "ExactMatch",
    "FormatMatch",
    "HTTPJudge",
    "Judge",
    "JudgeError",
    "MathEquivalence",
    "RelativeJudge",
    "RewardError",
    "RewardFunction",
    "RewardModel",
    "RewardRunner",
    "RewardSpec",
    "RubricJudge",
    "SoftOverlongPenalty",
    "StatefulReward",
    "TrainerState",
    "exact_match",
    "load_rewards",
]
