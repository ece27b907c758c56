"""What runs in vLLM's workers: they take weights, prove what they hold, and draw random numbers by position.

vLLM loads :func:`register` in each of its processes, by the entry point ``vllm.general_plugins``, and mixes
:class:`WorkerExtension` into its workers.
"""

from lit_grpo.rollout.vllm.worker.extension import WorkerExtension
from lit_grpo.rollout.vllm.worker.transfer import DigestingTransfer, register

__all__ = ["DigestingTransfer", "WorkerExtension", "register"]
