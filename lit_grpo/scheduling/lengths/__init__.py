"""How long completions are going to be."""

from lit_grpo.scheduling.lengths.predictor import PREDICTION_POINTS, LengthPredictor, make_predictor
from lit_grpo.scheduling.lengths.quality import spearman, within_correlation

__all__ = ["PREDICTION_POINTS", "LengthPredictor", "make_predictor", "spearman", "within_correlation"]
