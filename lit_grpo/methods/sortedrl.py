"""SortedRL (arXiv 2603.23414): an update learns from the first completions that end, of several batches of prompts.

A group leaves the buffer in parts, the short completions first; new prompts come once all open ones have been trained
on. ``sortedrl`` samples unfinished completions again from the start, ``sortedrl_partial`` lets them go on.
"""

from lit_grpo.rollout.rules import RolloutMode

PLUGINS = {
    "sortedrl": RolloutMode(batches_in_work=4, refill="when_empty", unit="completion", leftovers="discard"),
    "sortedrl_partial": RolloutMode(
        batches_in_work=4, refill="when_empty", unit="completion", leftovers="keep", max_staleness=16
    ),
}
