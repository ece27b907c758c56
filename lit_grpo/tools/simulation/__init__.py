"""Simulation of scheduling policies on recorded or synthetic lengths."""

from lit_grpo.rollout.slots.drafts.price import StepCost
from lit_grpo.tools.simulation.simulator import Engine, Schedule, simulate
from lit_grpo.tools.simulation.traces import Trace, load_trace

__all__ = ["Engine", "Schedule", "StepCost", "Trace", "load_trace", "simulate"]
