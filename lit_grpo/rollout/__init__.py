"""Generation: from prompts to whole, rewarded rollout groups."""
