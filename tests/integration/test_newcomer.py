"""The path of a newcomer: what README.md says, run word for word in a fresh clone, with a fresh home."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import read_metrics
from test_docs import FENCE, ROOT

SNIPPET = "train_smollm2.py"
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    """The blocks of README.md in a language, in order."""
    return [code for kind, code in FENCE.findall(README) if kind == language]


def greedy(run: Path) -> list[float]:
    """The held-out pass@1 of a run, at each validation."""
    return [float(row["val/pass@1"]) for row in read_metrics(run / "metrics.csv") if row["val/pass@1"]]


@pytest.mark.nightly
@pytest.mark.timeout(5400)
def test_the_readme_is_followed_word_for_word_in_a_fresh_clone_and_a_fresh_home(tmp_path: Path) -> None:
    if shutil.which("make") is None or not (ROOT / ".git").exists():
        pytest.skip("needs make, and a checkout")
    clone, home = tmp_path / "lit_grpo", tmp_path / "home"
    home.mkdir()
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)  # what is committed
    own = ("PYTHON", "VIRTUAL_ENV", "CONDA", "XDG_", "HF_", "OMP_", "LIT_GRPO")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(own)}
    # An index of one's own is the only setting that the README takes as given; so is a Python that is new enough.
    environment |= {"HOME": str(home), "PYTHON": getattr(sys, "_base_executable", sys.executable)}
    (clone / SNIPPET).write_text(blocks("python")[0])
    steps = [f"python {SNIPPET}" if kind == "python" else code for kind, code in FENCE.findall(README) if kind]
    script = "\n".join(["set -euo pipefail", *steps])
    done = subprocess.run(["bash", "-c", script], cwd=clone, env=environment, capture_output=True, text=True)
    said = done.stdout
    assert done.returncode == 0, said[-3000:] + done.stderr[-3000:]
    # The demo.
    assert "Installing 3 of 3" in said
    asked = subprocess.run(
        [clone / ".venv" / "bin" / "python", "-c", "import torch; print(torch.version.cuda)"],
        env=environment, capture_output=True, text=True, check=True,
    )  # fmt: skip
    if "torch from https://download.pytorch.org/whl/cpu" in said and "gave no torch" not in said:
        assert asked.stdout == "None\n"
    start, *_, end = greedy(clone / "runs" / "arithmetic")
    assert start < 0.6 and end > 0.9
    # The chat model.
    before, *_, after = greedy(clone / "runs" / "grpo")
    told = [float(each) for each in re.findall(r"from (\d+\.\d)% to between (\d+\.\d)%", README)[1]]
    assert told[0] - 5 < 100 * before < told[0] + 5 and 100 * after > told[1] - 15
    assert (home / ".cache" / "lit_grpo").is_dir()
    assert (clone / "runs" / "grpo" / "evaluation" / "evaluation.json").is_file()
    assert list((clone / "runs" / "grpo" / "finished").glob("*-q8_0.gguf"))
    resume = re.search(r"^resume  (python -m lit_grpo fit .*)--trainer\.max_steps 20$", said, re.MULTILINE)
    assert resume is not None
    resumed = ["bash", "-c", f". .venv/bin/activate && {resume[1]} --trainer.max_steps 11"]
    done = subprocess.run(resumed, cwd=clone, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert len(greedy(clone / "runs" / "grpo")) > 3
