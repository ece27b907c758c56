# /// script
# requires-python = ">=3.11"
# dependencies = ["lit_grpo", "torch>=2.11"]
# [tool.uv.sources]
# lit_grpo = { path = "..", editable = true }
# ///
"""Your own reward and your own loss. ``python examples/own_loss.py``.

An objective is a row of ``RECIPES``: a function of the log-ratio and the facts of each token, and the way in which
losses are averaged. ``objective.loss`` can be set to the name of the row.
"""

import torch

import lit_grpo
from lit_grpo.tasks import ArithmeticRows
from lit_grpo.update.objective.recipes import RECIPES, Recipe, Surrogate
from lit_grpo.update.objective.tokens import Tokens


def short_and_right(completions: list[str], answer: str) -> list[float]:
    """Score a whole group at once, as TRL's reward functions do: the shortest right completion gets a little more."""
    right = [text.split("=")[-1] == answer for text in completions]
    shortest = min((len(text) for text, one in zip(completions, right, strict=True) if one), default=0)
    return [one + 0.1 * (one and len(text) == shortest) for text, one in zip(completions, right, strict=True)]


def squared(log_ratio_N: torch.Tensor, tokens: Tokens, *, epsilon: float) -> Surrogate:
    """Return ``-r A + (log r)^2 / (2 epsilon)``: a penalty in place of a clip. One number for each of N tokens.

    The second return value has metrics, one number for each token; their means are logged under these names.
    """
    loss_N = -log_ratio_N.exp() * tokens.advantages_N + log_ratio_N.square() / (2 * epsilon)
    return loss_N, {"ratio/mean": log_ratio_N.detach().exp()}


RECIPES["squared"] = Recipe(squared, "token", {"epsilon": 0.2}, "examples/own_loss.py")

if __name__ == "__main__":
    run = lit_grpo.train(
        "tiny",
        ArithmeticRows(num_rows=64),
        [short_and_right],
        max_steps=2,
        batch_size=4,
        num_generations=8,
        sampling={"max_tokens": 64},
        objective={"loss": "squared", "epsilon": 0.1},
        name="own-loss",
    )
    print("Rewards, the loss and its metrics are in", run.folder / "metrics.csv")
