"""The tasks that come with the package: rows that are drawn at random, for the demo, examples and benchmarks."""

from lit_grpo.tasks.arithmetic import ArithmeticRows
from lit_grpo.tasks.calculator import CalculatorRows, EstimateRows
from lit_grpo.tasks.catch import Catch, CatchRows
from lit_grpo.tasks.drawn import DrawnRows
from lit_grpo.tasks.knights import KnightsRows
from lit_grpo.tasks.reasoning_gym import ReasoningGymRows, ReasoningGymScore
from lit_grpo.tasks.shapes import ShapesRows
from lit_grpo.tasks.word_problems import WordProblemRows

__all__ = [
    "ArithmeticRows",
    "CalculatorRows",
    "Catch",
    "CatchRows",
    "DrawnRows",
    "EstimateRows",
    "KnightsRows",
    "ReasoningGymRows",
    "ReasoningGymScore",
    "ShapesRows",
    "WordProblemRows",
]
