"""Log-probs of the policy, its reference and a teacher."""

from lit_grpo.update.logprobs.forward import micro_batch_logprobs
from lit_grpo.update.logprobs.reference import AdapterFreeReference, Reference, ReferenceSettings

__all__ = ["AdapterFreeReference", "Reference", "ReferenceSettings", "micro_batch_logprobs"]
