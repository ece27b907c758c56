"""The notebooks run from top to bottom. `jupyter execute --inplace notebooks/NAME.ipynb` stores their outputs anew."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
from conftest import table_rows
from forks import Forked
from test_finished_gguf import made

nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
pytest.importorskip("matplotlib", reason="the pictures need matplotlib")
pytest.importorskip("ipykernel")
NOTEBOOKS = sorted((Path(__file__).parents[2] / "notebooks").glob("*.ipynb"))


def pictures(notebook: Any) -> list[str]:
    """The pictures that cells have made, in base64."""
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    return [output["data"]["image/png"] for output in outputs if "image/png" in output.get("data", {})]


def kernel_of(command: list[str], **options: Any) -> Forked:
    """Start a kernel as a fork of a process that has torch and transformers imported."""
    words = [word for word in command if not word.startswith("-X")]
    kernel = Forked([*words, "--matplotlib=inline"], **options)  # matplotlib is imported, and reads no variable again
    while os.getpgid(kernel.pid) != kernel.pid:  # before the client reads the group that it will end
        time.sleep(0.001)
    return kernel


@pytest.mark.parametrize("path", table_rows(NOTEBOOKS, NOTEBOOKS[:1]), ids=lambda path: path.stem)
def test_a_notebook_is_kept_with_its_outputs_and_runs(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(NOTEBOOKS[0].parents[1]))  # of benchmarks.baseline_plans
    monkeypatch.setattr("jupyter_client.launcher.Popen", kernel_of)
    if "POLICY" in path.read_text():  # in place of a chat model from the network, and many updates
        template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
        monkeypatch.setenv("POLICY", str(made("llama", tmp_path / "policy", chat_template=template)))
        monkeypatch.setenv("STEPS", "2")
    notebook = nbformat.read(path, as_version=4)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == [*range(1, len(cells) + 1)]  # in order, in one go
    stored = pictures(notebook)
    assert stored
    waits = {"timeout": 300, "startup_timeout": 300}  # seconds, on a machine that does much else
    done = nbclient.NotebookClient(notebook, **waits, resources={"metadata": {"path": tmp_path}}).execute()
    assert len(pictures(done)) == len(stored)


def test_no_output_names_a_place_on_the_machine_that_it_was_made_on() -> None:
    for path in NOTEBOOKS:
        for cell in nbformat.read(path, as_version=4).cells:
            assert not any(root in str(cell.get("outputs", "")) for root in ("/root/", "/home/", "/work/", "/tmp/"))
