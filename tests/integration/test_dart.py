"""The curation of DART as a config of plug-ins: each part acts."""

from __future__ import annotations

import csv
import math
from pathlib import Path

import pytest

from lit_grpo.cli.command_line import run

CONFIG = Path(__file__).parents[2] / "configs" / "dart.yaml"
FEW = {
    "trainer.max_steps": 12,
    "trainer.limit_val_batches": 0,
    "data.batch_size": 4,
    "data.train.init_args.num_rows": 12,
    "model.num_generations": 4,
    "model.optimizer.init_args.lr": 0.0001,  # so that prompts stay hard
    "trainer.enable_progress_bar": "false",
}


@pytest.mark.nightly
def test_each_part_of_its_curation_acts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run(["fit", "--config", str(CONFIG), *(word for name, value in FEW.items() for word in (f"--{name}", str(value)))])
    with Path("runs/dart/metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))

    def logged(name: str) -> list[float]:
        return [float(row.get(name) or "nan") for row in rows]

    def largest(name: str) -> float:
        return max(value for value in logged(name) if not math.isnan(value))

    assert largest("replay/members") > 0 and largest("replay/frac_revived") > 0  # kept successes
    sizes = zip(logged("budget/smallest_group"), logged("budget/largest_group"), strict=True)
    assert any(most > least for least, most in sizes)  # completions by difficulty
    kept = [share for share in logged("update/kept_share") if not math.isnan(share)]
    chosen = [share for share in kept if share != 1]  # where fewer tokens have an advantage, all of these are kept
    assert chosen and chosen == pytest.approx([0.8] * len(chosen), abs=0.02)  # tokens of high entropy
    assert largest("staleness/mean") > 0 and any(
        0 < weight != 1 for weight in logged("correction/weight")
    )  # importance weights
