"""The notebooks run from top to bottom. `jupyter execute --inplace notebooks/NAME.ipynb` stores their outputs anew."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
pytest.importorskip("matplotlib", reason="the pictures need matplotlib")
pytest.importorskip("ipykernel")
pytestmark = pytest.mark.integration

NOTEBOOKS = sorted((Path(__file__).parents[2] / "notebooks").glob("*.ipynb"))


def pictures(notebook: Any) -> list[str]:
    """The pictures that cells have made, in base64."""
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    return [output["data"]["image/png"] for output in outputs if "image/png" in output.get("data", {})]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_kept_with_small_outputs_and_runs(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(NOTEBOOKS[0].parents[1]))  # of benchmarks.baseline_plans
    notebook = nbformat.read(path, as_version=4)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == [*range(1, len(cells) + 1)]  # in order, in one go
    stored = pictures(notebook)
    assert stored and sum(map(len, stored)) * 3 / 4 < 150 * 1024
    done = nbclient.NotebookClient(notebook, timeout=120, resources={"metadata": {"path": tmp_path}}).execute()
    assert len(pictures(done)) == len(stored)


def test_no_output_names_a_place_on_the_machine_that_it_was_made_on() -> None:
    for path in NOTEBOOKS:
        for cell in nbformat.read(path, as_version=4).cells:
            assert not any(root in str(cell.get("outputs", "")) for root in ("/root/", "/home/", "/work/", "/tmp/"))
