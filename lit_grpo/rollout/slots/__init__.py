"""The embedded generator: decodes on the policy itself, in a fixed number of slots."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lit_grpo.rollout.slots.generator import SlotGenerator

__all__ = ["SlotGenerator"]


def __getattr__(name: str) -> Any:
    """Import the generator when it is asked for: ``simulate`` uses the drafts beside it, and no torch."""
    if name != "SlotGenerator":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from lit_grpo.rollout.slots.generator import SlotGenerator

    return SlotGenerator
