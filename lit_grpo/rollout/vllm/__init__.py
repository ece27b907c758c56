"""vLLM as a generator, in this process or as servers."""

from lit_grpo.rollout.vllm.engine import VLLMGenerator
from lit_grpo.rollout.vllm.server import VLLMServerGenerator

__all__ = ["VLLMGenerator", "VLLMServerGenerator"]
