"""Commands of the page "what you have, what you type": each parses, and fit-check's estimate for it fits the GPU."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lit_grpo.tools.commands import fit_check
from scripts.what_fits import GIB, MODELS, SPARE, sizes_of
from scripts.your_gpu import MEMORIES_GB, sections
from scripts.your_gpu import MODELS as IDS

PAGE = (Path(__file__).parents[1] / "docs" / "your_gpu.md").read_text()
COMMAND = re.compile(r"# .*: (?P<model>.*), (?P<slots>\d+) slots, (?P<gib>[\d.]+) GiB\n(?P<command>(.*\\\n)*.*)\n")


def commands(memory_gb: int) -> Iterator[tuple[str, float, list[str]]]:
    """Model, GiB of the comment, and arguments of each command in the section of a GPU."""
    section = PAGE.split(f"## {memory_gb} GB\n")[1].split("\n## ")[0]
    for found in COMMAND.finditer(section):
        python, flag, module, command, *arguments = shlex.split(found["command"].replace("\\\n", " "))
        assert (python, flag, module, command) == ("python", "-m", "lit_grpo", "fit")
        assert arguments[arguments.index("--model.generator.num_slots") + 1] == found["slots"]
        yield found["model"], float(found["gib"]), arguments


@pytest.mark.parametrize(
    "memory_gb",
    [pytest.param(each, marks=[] if each == MEMORIES_GB[0] else pytest.mark.nightly) for each in MEMORIES_GB],
)
def test_each_command_parses_and_fits_by_fit_check(memory_gb: int, monkeypatch: pytest.MonkeyPatch) -> None:
    names, peaks = {hub_id: name for name, hub_id in IDS.items()}, list[float]()

    class Measured:
        """Sizes of models without numbers; the hub is not asked."""

        @staticmethod
        def of(name: str, mixed: bool, weight_bytes: int) -> Any:
            return sizes_of(name, mixed, weight_bytes)

    monkeypatch.setattr(fit_check, "load_config", names.__getitem__)
    monkeypatch.setattr(fit_check, "Sizes", Measured)
    monkeypatch.setattr(fit_check, "_show", lambda sizes, demand, taken, limit: peaks.append(taken.peak / GIB))
    its = [*commands(memory_gb)]
    assert len(its) >= 2
    for model, gib, arguments in its:
        assert model in MODELS and IDS[model] in arguments
        with pytest.raises(SystemExit) as exit_:
            fit_check.main([*arguments, "--memory", f"{int(SPARE * memory_gb * 1e9 / 2**20)}MiB"])
        assert exit_.value.code == 0, arguments
        assert peaks[-1] == pytest.approx(gib, abs=0.05001)


@pytest.mark.nightly
def test_the_page_has_what_the_script_prints() -> None:
    assert "\n".join(sections()) in PAGE, "put what python -m scripts.your_gpu prints into docs/your_gpu.md"
