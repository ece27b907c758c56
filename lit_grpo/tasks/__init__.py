"""Which tasks ship: rows that are drawn, for the demo, for examples and for benchmarks."""

from lit_grpo.tasks.arithmetic import ArithmeticRows
from lit_grpo.tasks.drawn import DrawnRows
from lit_grpo.tasks.knights import KnightsRows

__all__ = ["ArithmeticRows", "DrawnRows", "KnightsRows"]
