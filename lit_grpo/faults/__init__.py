"""What a run does about what goes wrong: it says where it stands, and keeps what it could not learn from."""

from lit_grpo.faults.phases import Phases, StallWatch

__all__ = ["Phases", "StallWatch"]
