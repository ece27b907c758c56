"""Plans of papers, one file each, built on the seam of :mod:`lit_grpo.scheduling.plans` alone.

A file has a ``PLANS`` table of its plans by name. Deleting the file removes them, and nothing else changes.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from pkgutil import iter_modules

from lit_grpo.scheduling.plans.plan import PLANS, Plan
from lit_grpo.scheduling.plans.plan import find_plan as find_among


@cache
def shipped_plans() -> dict[str, Plan]:
    """Return all plans that ship, by name: the core's, and those of papers."""
    modules = [import_module(f"{__name__}.{module.name}") for module in iter_modules(__path__)]
    return PLANS | {name: plan for module in modules for name, plan in module.PLANS.items()}


def find_plan(spec: str | Plan, setting: str = "plan") -> Plan:
    """Return one of :func:`shipped_plans`, or a user's own; see :func:`lit_grpo.scheduling.plans.plan.find_plan`."""
    return find_among(spec, setting, shipped_plans())
