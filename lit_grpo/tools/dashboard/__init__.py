"""What a run's metrics mean, and the boards that show them: W&B, TensorBoard, and a report of its own."""

from lit_grpo.tools.dashboard.specification import Metric, Panel, Section, explain, sections

__all__ = ["Metric", "Panel", "Section", "explain", "sections"]
