"""APRIL (arXiv 2509.18521): more prompts than a batch are in work, and the longest completions go on next time.

An update learns from the first batch of groups that become whole; the unfinished keep their tokens and log-probs, up to
``max_staleness`` updates. It is off-policy by that much, and docs/modes.md has its evidence. What is released, and what
goes on, is as in the paper's code (RLsys-Foundation/APRIL at a72b585), whose runs also begin twice as many groups.
"""

from lit_grpo.rollout.rules import RolloutMode

PLUGINS = {
    "april": RolloutMode(batches_in_work=2, leftovers="keep", max_staleness=8),
}
