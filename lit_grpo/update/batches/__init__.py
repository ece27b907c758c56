"""Micro-batches: rows of tokens that go through the policy together."""

from lit_grpo.update.batches.layout import PackedRow
from lit_grpo.update.batches.microbatch import make_micro_batches

__all__ = ["PackedRow", "make_micro_batches"]
