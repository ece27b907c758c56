"""Lightning callbacks: thin adapters between the trainer and ``lit_grpo``."""

if __name__ == "callbacks":  # else each class would exist twice
    raise ImportError("Import lit_grpo.callbacks: the checkout's folder callbacks has this name only.")

from .completion_writer import CompletionWriter
from .monitors import MemoryMonitor, ThroughputMonitor
from .policy_exporter import PolicyExporter
from .progress_bar import GRPOProgressBar
from .rollout_scheduler import RolloutScheduler
from .rollout_timeline import RolloutTimeline
from .run_checkpoint import RunCheckpoint, SavedByRun
from .run_summary import RunSummary
from .sample_logger import SampleLogger
from .weight_sync import WeightSync

__all__ = [
    "CompletionWriter",
    "GRPOProgressBar",
    "MemoryMonitor",
    "PolicyExporter",
    "RolloutScheduler",
    "RolloutTimeline",
    "RunCheckpoint",
    "RunSummary",
    "SampleLogger",
    "SavedByRun",
    "ThroughputMonitor",
    "WeightSync",
]
