"""Code that runs in vLLM's workers: loading weights, digests of weights, and random numbers by position."""

from lit_grpo.rollout.vllm.worker.extension import WorkerExtension

__all__ = ["WorkerExtension"]
