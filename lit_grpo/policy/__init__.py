"""The policy: how it is loaded, adapted, sharded and saved, and the small policies that come with the package."""

from lit_grpo.policy.adapters import LoraSettings
from lit_grpo.policy.loading import load_policy, load_tokenizer
from lit_grpo.policy.spec import PolicySpec
from lit_grpo.policy.weights import PolicyWeights

__all__ = ["LoraSettings", "PolicySpec", "PolicyWeights", "load_policy", "load_tokenizer"]
