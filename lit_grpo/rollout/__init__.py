"""Sampling of completions: from prompts to complete, rewarded groups."""

from importlib import import_module
from typing import Any

from lit_grpo.plugins import Answer, Listener
from lit_grpo.rollout.buffer import RolloutBuffer
from lit_grpo.rollout.generator import Capacity, GenerationError, Generator, Observation, StepEvents
from lit_grpo.rollout.loop import RolloutLoop
from lit_grpo.rollout.rules import SYNCHRONOUS, ReleaseRule

_GENERATORS = {"SlotGenerator": "slots", "VLLMGenerator": "vllm", "VLLMServerGenerator": "vllm"}
"""In which of the rooms below each generator is."""

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


def __getattr__(name: str) -> Any:
    """Import a generator once it is asked for; each brings what it decodes with."""
    if name not in _GENERATORS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_GENERATORS[name]}"), name)
