# For type checkers: where the callbacks of a checkout stand.
from callbacks import CompletionWriter as CompletionWriter
from callbacks import GRPOProgressBar as GRPOProgressBar
from callbacks import MemoryMonitor as MemoryMonitor
from callbacks import PolicyExporter as PolicyExporter
from callbacks import RolloutScheduler as RolloutScheduler
from callbacks import RolloutTimeline as RolloutTimeline
from callbacks import RunCheckpoint as RunCheckpoint
from callbacks import RunSummary as RunSummary
from callbacks import SampleLogger as SampleLogger
from callbacks import SavedByRun as SavedByRun
from callbacks import ThroughputMonitor as ThroughputMonitor
from callbacks import WeightSync as WeightSync
