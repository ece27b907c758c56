"""How long completions are going to be."""

from lit_grpo.scheduling.lengths.model import spearman
from lit_grpo.scheduling.lengths.predictor import LengthPredictor

__all__ = ["LengthPredictor", "spearman"]
