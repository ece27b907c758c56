"""Faults of a run: updates that are not finite, ranks that are lost, and phases in which nothing moves."""

from lit_grpo.faults.lost_ranks import RankWatch, lost_rank
from lit_grpo.faults.phases import Phases, StallWatch
from lit_grpo.faults.rows import forget_after, json_line, writable
from lit_grpo.faults.skipped_updates import SkippedUpdates

__all__ = ["Phases", "RankWatch", "SkippedUpdates", "StallWatch", "forget_after", "json_line", "lost_rank", "writable"]
