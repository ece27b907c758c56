"""What the policy and its reference think of the tokens."""

from lit_grpo.update.logprobs.forward import micro_batch_logprobs
from lit_grpo.update.logprobs.reference import AdapterFreeReference, Reference, ReferenceSettings

__all__ = ["AdapterFreeReference", "Reference", "ReferenceSettings", "micro_batch_logprobs"]
