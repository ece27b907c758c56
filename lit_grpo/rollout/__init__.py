"""How completions are sampled: from prompts to whole, rewarded groups."""
