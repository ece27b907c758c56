"""The meaning of a run's metrics, and the boards that show them: W&B, TensorBoard and our report."""

from lit_grpo.tools.dashboard.specification import Metric, Panel, Section, explain, sections

__all__ = ["Metric", "Panel", "Section", "explain", "sections"]
