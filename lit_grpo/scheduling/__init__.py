"""Scheduling of completions. Pure: no torch, no lightning, no transformers."""

from lit_grpo.scheduling.jobs import Job, Lengths
from lit_grpo.scheduling.layouts import Blocks, KVLayout, Pieces
from lit_grpo.scheduling.ledger import RequestLedger

__all__ = ["Blocks", "Job", "KVLayout", "Lengths", "Pieces", "RequestLedger"]
