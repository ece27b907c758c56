"""What is decoded next. Pure: no torch, no lightning, no transformers."""

from lit_grpo.scheduling.flight import Flight
from lit_grpo.scheduling.jobs import Job, Lengths
from lit_grpo.scheduling.layouts import Blocks, KVLayout, Pieces

__all__ = ["Blocks", "Flight", "Job", "KVLayout", "Lengths", "Pieces"]
