"""How long completions are going to be."""

from lit_grpo.scheduling.lengths.predictor import LengthPredictor, Outcome
from lit_grpo.scheduling.lengths.quality import spearman, within_correlation

__all__ = ["LengthPredictor", "Outcome", "spearman", "within_correlation"]
