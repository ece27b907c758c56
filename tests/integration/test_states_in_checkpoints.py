"""What users' callbacks put into checkpoints: refused before the first batch, or before a checkpoint is replaced."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
from lightning.pytorch.callbacks import LambdaCallback
from test_python import ROWS, digits

import lit_grpo
from lit_grpo.checkpoints import read


class Keeps(pl.Callback):
    """Keeps a value of each update.

    Args:
        odd_from: The update from which on that is one that no checkpoint can hold.
    """

    def __init__(self, odd_from: int = 99) -> None:
        self.odd_from, self.num_updates, self.best = odd_from, 0, np.float64(0.5)

    def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
        self.num_updates += 1

    def state_dict(self) -> dict[str, Any]:
        kept: Any = datetime.date(2020, 1, 1) if self.num_updates >= self.odd_from else self.num_updates
        return {"best": self.best, "kept": [kept]}


class Adds(pl.Callback):
    """Adds to checkpoints, and fails from an update on."""

    def __init__(self, fails_from: int) -> None:
        self.fails_from = fails_from

    def on_save_checkpoint(self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: Any) -> None:
        if trainer.global_step >= self.fails_from:
            raise KeyError("no such average")
        checkpoint["averages"] = len(checkpoint["state_dict"])


def adds_by_function(fails_from: int) -> pl.Callback:
    return LambdaCallback(on_save_checkpoint=Adds(fails_from).on_save_checkpoint)


def train(policy: Path, callback: pl.Callback, every: int = 1, **options: Any) -> Any:
    return lit_grpo.train(
        str(policy),
        ROWS,
        digits,
        batch_size=2,
        num_generations=2,
        sampling={"max_tokens": 4},
        trainer={"accelerator": "cpu", "enable_progress_bar": False, "callbacks": [callback]},
        callbacks={"checkpoint": {"every_n_updates": every}},
        **options,
    )


def test_callbacks_keep_what_can_be_read_back_and_what_cannot_is_refused_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, policy_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        ValueError, match=r"Keeps\.state_dict\(\)\['kept'\]\[0\] is a datetime\.date .*; have it return"
    ):
        train(policy_folder, Keeps(odd_from=0), max_steps=1, name="refused")
    assert not list(Path("runs/refused/checkpoints").glob("*"))
    sentence = r"last\.ckpt could not be read back, because callbacks\['Keeps'\]\['kept'\]\[0\] is a datetime\.date"
    with pytest.raises(ValueError, match=sentence):
        train(policy_folder, Keeps(odd_from=2), max_steps=3, name="late")
    assert "Update 1 is saved" in capsys.readouterr().out
    saved = read(Path("runs/late/checkpoints/last.ckpt"))
    assert saved["policy_version"] == 1 and saved["callbacks"]["Keeps"] == {"best": 0.5, "kept": [1]}
    assert type(saved["callbacks"]["Keeps"]["best"]) is np.float64


@pytest.mark.parametrize(
    ("made", "kind"), [(Adds, "Adds"), pytest.param(adds_by_function, "LambdaCallback", marks=pytest.mark.nightly)]
)
def test_a_callback_that_fails_as_a_checkpoint_is_made_is_named_at_once_and_the_run_is_saved_without_it(
    made: Callable[[int], pl.Callback],
    kind: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    policy_folder: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    failed = rf"{kind}\.on_save_checkpoint failed \(KeyError: 'no such average'\)"
    with pytest.raises(ValueError, match=f"{failed}, so no checkpoint can be written; mend it, or leave it out"):
        train(policy_folder, made(0), max_steps=3, name="first", every=50)
    assert not Path("runs/first/metrics.csv").exists()
    with pytest.raises(ValueError, match=failed):
        train(policy_folder, made(2), max_steps=3, name="late", every=50)
    said = capsys.readouterr().out
    assert f"{kind}.on_save_checkpoint failed" in said and "the checkpoint is without what it keeps" in said
    assert "Update 3 is saved" in said
    saved = read(Path("runs/late/checkpoints/last.ckpt"))
    assert saved["policy_version"] == 3 and "averages" not in saved
    run = train(policy_folder, made(99), max_steps=1, name="good")
    assert read(run.folder / "checkpoints/last.ckpt")["averages"] == len(saved["state_dict"])
