"""In which order completions are decoded."""

from lit_grpo.scheduling.plans.plan import PLANS, ByLength, Plan, make_plan
from lit_grpo.scheduling.queue import Queue

__all__ = ["PLANS", "ByLength", "Plan", "Queue", "make_plan"]
