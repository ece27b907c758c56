"""In which order completions are decoded."""

from lit_grpo.scheduling.plans.plan import PLANS, ByLength, Plan, Queue, make_plan

__all__ = ["PLANS", "ByLength", "Plan", "Queue", "make_plan"]
