"""The seam for methods: what a plug-in may decide in a run, where it is asked, and what its hooks may return."""

from lit_grpo.plugins.hooks import ask, check_decisions, check_overrides, fresh, read, requirement_of, restricted
from lit_grpo.plugins.plugin import (
    ROLLOUT_HOOKS,
    ROUNDS,
    TRAITS,
    UPDATE_HOOKS,
    Answer,
    CannotGoOn,
    CoreListener,
    Listener,
    ObservationPoint,
    Plugin,
    Resume,
    RunFacts,
    RunNumbers,
    overriding,
    writing,
)
from lit_grpo.types import AllGather, GroupBatch

__all__ = [
    "ROLLOUT_HOOKS",
    "ROUNDS",
    "TRAITS",
    "UPDATE_HOOKS",
    "AllGather",
    "Answer",
    "CannotGoOn",
    "CoreListener",
    "GroupBatch",
    "Listener",
    "ObservationPoint",
    "Plugin",
    "Resume",
    "RunFacts",
    "RunNumbers",
    "ask",
    "check_decisions",
    "check_overrides",
    "fresh",
    "overriding",
    "read",
    "requirement_of",
    "restricted",
    "writing",
]
