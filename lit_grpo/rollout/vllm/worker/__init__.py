"""What runs in vLLM's workers: they take weights, prove what they hold, and draw random numbers by position."""

from lit_grpo.rollout.vllm.worker.extension import WorkerExtension

__all__ = ["WorkerExtension"]
