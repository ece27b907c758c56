"""Lightning callbacks: thin adapters between the trainer and ``lit_grpo``."""

from callbacks.completion_writer import CompletionWriter
from callbacks.interrupt_checkpoint import InterruptCheckpoint
from callbacks.memory_monitor import MemoryMonitor
from callbacks.policy_exporter import PolicyExporter
from callbacks.progress_bar import GRPOProgressBar
from callbacks.rollout_scheduler import RolloutScheduler
from callbacks.rollout_timeline import RolloutTimeline
from callbacks.sample_logger import SampleLogger
from callbacks.throughput_monitor import ThroughputMonitor
from callbacks.weight_sync import WeightSync

__all__ = [
    "CompletionWriter",
    "GRPOProgressBar",
    "InterruptCheckpoint",
    "MemoryMonitor",
    "PolicyExporter",
    "RolloutScheduler",
    "RolloutTimeline",
    "SampleLogger",
    "ThroughputMonitor",
    "WeightSync",
]
