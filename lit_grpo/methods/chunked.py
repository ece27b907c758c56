"""Chunked rollouts: each rollout takes so many decode steps, and the unfinished go on in the next one."""

from lit_grpo.rollout.rules import RolloutMode

PLUGINS = {
    "chunked": RolloutMode(
        batches_in_work=2, unit="completion", leftovers="keep", max_staleness=16, tokens_per_update=1024
    ),
}
