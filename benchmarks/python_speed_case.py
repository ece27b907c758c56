"""A run whose speed ``benchmarks.python_speed`` compares: ``python -m benchmarks.python_speed_case WAY N``."""

import sys

WAY, NUM_UPDATES = sys.argv[1], int(sys.argv[2])
if WAY == "torch first":
    import numpy  # noqa: F401
    import torch  # noqa: F401

import lit_grpo  # noqa: E402
from lit_grpo.data import PromptDataModule  # noqa: E402
from lit_grpo.tasks import ArithmeticRows  # noqa: E402

SETTINGS = {"num_generations": 8, "rewards": ["exact_match"]}


def own_trainer() -> None:
    """As ``examples/own_trainer.py``: a Trainer of one's own, which writes the table of metrics."""
    from pathlib import Path

    import lightning.pytorch as pl
    import torch

    from lit_grpo.module import GRPOModule
    from lit_grpo.training import TRAINER_DEFAULTS, default_callbacks
    from lit_grpo.training.loggers import MetricsCSV

    pl.seed_everything(0)
    module = GRPOModule(
        "tiny",
        sampling={"max_tokens": 64},  # pyright: ignore[reportArgumentType]
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-6),
        **SETTINGS,
    )
    trainer = pl.Trainer(
        max_steps=NUM_UPDATES,
        accelerator="cpu",
        logger=MetricsCSV(Path("runs/run/metrics.csv")),
        callbacks=default_callbacks(),
        default_root_dir="runs/run",
        enable_progress_bar=False,
        **TRAINER_DEFAULTS,
    )
    trainer.fit(module, PromptDataModule("tiny", train=ArithmeticRows(num_rows=64), batch_size=4))


if __name__ == "__main__":
    if WAY == "own Trainer":
        own_trainer()
    else:
        lit_grpo.train(
            "tiny",
            ArithmeticRows(num_rows=64),
            max_steps=NUM_UPDATES,
            batch_size=4,
            sampling={"max_tokens": 64},
            name="run",
            trainer={"accelerator": "cpu", "enable_progress_bar": False},
            **SETTINGS,
        )
