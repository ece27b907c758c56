"""What goes through the policy together."""

from lit_grpo.update.batches.layout import MicroBatch
from lit_grpo.update.batches.microbatch import make_micro_batches

__all__ = ["MicroBatch", "make_micro_batches"]
