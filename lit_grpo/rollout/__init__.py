"""How completions are sampled: from prompts to whole, rewarded groups."""

from lit_grpo.rollout.buffer import RolloutBuffer
from lit_grpo.rollout.generator import Capacity, GenerationError, Generator, Observation, StepEvents
from lit_grpo.rollout.listeners import Answer, Listener
from lit_grpo.rollout.loop import RolloutLoop
from lit_grpo.rollout.rules import SYNCHRONOUS, ReleaseRule

__all__ = [
    "SYNCHRONOUS",
    "Answer",
    "Capacity",
    "GenerationError",
    "Generator",
    "Listener",
    "Observation",
    "ReleaseRule",
    "RolloutBuffer",
    "RolloutLoop",
    "StepEvents",
]
