"""The policy: loading it, its adapters, and the embedded one."""

from lit_grpo.policy.loading import load_policy, load_tokenizer

__all__ = ["load_policy", "load_tokenizer"]
