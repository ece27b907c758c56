"""How long completions are going to be."""

from lit_grpo.scheduling.lengths.model import spearman
from lit_grpo.scheduling.lengths.predictor import LengthPredictor, Outcome

__all__ = ["LengthPredictor", "Outcome", "spearman"]
