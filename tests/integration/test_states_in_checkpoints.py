"""What users' callbacks put into checkpoints: refused before the first batch, or before a checkpoint is replaced."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
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


def train(policy: Path, callback: pl.Callback, **options: Any) -> Any:
    return lit_grpo.train(
        str(policy),
        ROWS,
        digits,
        batch_size=2,
        num_generations=2,
        sampling={"max_tokens": 4},
        trainer={"accelerator": "cpu", "enable_progress_bar": False, "callbacks": [callback]},
        callbacks={"checkpoint": {"every_n_updates": 1}},
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
