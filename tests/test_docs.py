"""What the pages say can be followed: links, pictures, commands, settings and metrics are there."""

from __future__ import annotations

import itertools
import pydoc
import re
import shlex
import sys
from collections.abc import Callable, Iterator
from dataclasses import fields
from fnmatch import fnmatchcase
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

import pytest
import yaml

from lit_grpo.cli.command_line import GRPOCLI, cli_arguments
from lit_grpo.cli.parsing.sentences import shipped_config
from lit_grpo.policy.adapters import LoraSettings
from lit_grpo.tools.commands import TOOLS, simulate
from lit_grpo.tools.dashboard import explain, sections
from lit_grpo.tools.dashboard.page import metrics_page
from lit_grpo.tools.evaluation.command import read_options
from lit_grpo.tools.migration.metrics import METRICS
from lit_grpo.tools.migration.page import migration_page
from lit_grpo.training.run_folder import RunFolder
from lit_grpo.update.logprobs.teacher import TeacherSettings
from scripts.architectures_page import architectures_page, newest_with_vllm
from scripts.architectures_page import newest as newest_architectures
from scripts.methods_page import methods_page
from scripts.methods_page import newest as newest_methods
from scripts.models_page import models_page

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
AGENTS = [ROOT / "AGENTS.md", ROOT / "docs" / "skill" / "SKILL.md"]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)
COMMAND = re.compile(r"\bpython -m (lit_grpo|(?:benchmarks|scripts)\.\w+)(?: (.*))?", re.DOTALL)
OWN = {
    "doctor",
    "export",
    "finish",
    "report",
    "dashboard",
    "simulate",
    "serve",
    "fit-check",
    "from-trl",
    "smollm2",
    "sft",
    "evaluate",
}  # subcommands that Lightning has not
LIKE_FIT = {"doctor", "fit-check", "sft", "evaluate"}  # take the same arguments
every_page = pytest.mark.parametrize("page", [*PAGES, *AGENTS], ids=lambda page: page.stem)
LINKED = [*PAGES, *AGENTS, ROOT / "CONTRIBUTING.md"]


def text_of(page: Path) -> str:
    """A page without its blocks of code."""
    return FENCE.sub("", page.read_text(encoding="utf-8"))


def anchors(page: Path) -> set[str]:
    """What links can name in a page, as GitHub and mkdocs make it of headings."""
    headings = re.findall(r"^#+ (.*)$", text_of(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", LINKED, ids=lambda page: page.stem)
def test_every_link_and_picture_leads_to_a_file_and_a_heading(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", text_of(page)):
        path, _, anchor = target.partition("#")
        if "://" in path:
            continue
        there = (page.parent / path).resolve() if path else page
        assert there.exists(), target
        assert not anchor or anchor in anchors(there), target


def test_the_site_has_every_page_and_no_other() -> None:
    def files(entries: Any) -> Iterator[str]:
        for entry in entries:
            for value in entry.values():
                yield from [value] if isinstance(value, str) else files(value)

    named = list(files(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]))
    assert sorted(named) == [page.name for page in PAGES[1:]]


@pytest.mark.parametrize(
    ("page", "make", "module"),
    [
        (
            "architectures",
            lambda: architectures_page(newest_architectures(), newest_with_vllm()),
            "scripts.architectures_page",
        ),
        ("models", lambda: models_page(newest_architectures(), newest_with_vllm()), "scripts.models_page"),
        ("methods", lambda: methods_page(newest_methods()), "scripts.methods_page"),
        ("metrics", metrics_page, "lit_grpo.tools.dashboard.page"),
        ("migration", migration_page, "lit_grpo.tools.migration.page"),
    ],
)
def test_a_generated_page_is_the_one_in_docs(page: str, make: Callable[[], str], module: str) -> None:
    assert (ROOT / "docs" / f"{page}.md").read_text() == make(), f"run python -m {module} > docs/{page}.md"


def test_each_hop_of_the_walk_is_there() -> None:
    """Every function that the walk from a row to a step names can be found under its name."""
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    walk = text.split("## From one row")[1].split("\n## ")[0]
    names = re.findall(r"\| `(lit_grpo[.\w]+)` \|", walk)
    assert len(names) > 15
    for name in names:
        assert callable(pydoc.locate(name)), name


# ---- commands -----------------------------------------------------------------------------------------


class Built(Exception):
    """All parsers are there."""


class Parsers(GRPOCLI):
    """The command line up to where it would parse."""

    def parse_arguments(self, parser: Any, args: Any) -> NoReturn:
        raise Built(self._subcommand_parsers)


@cache
def parsers() -> dict[str, Any]:
    """Those of fit, validate, test and predict."""
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Built) as built:
        patch.setattr(sys, "argv", ["lit_grpo"])
        Parsers(RunFolder(), **cli_arguments([]))
    return built.value.args[0]


def commands(page: Path) -> Iterator[tuple[str, list[str]]]:
    """The module of each command of a page, and what it is told."""
    blocks = [code for language, code in FENCE.findall(page.read_text(encoding="utf-8")) if language == "bash"]
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    lines += [" ".join(code.split()) for code in re.findall(r"`([^`]*)`", text_of(page))]
    for line in lines:
        if match := COMMAND.search(line):
            yield match[1], shlex.split(match[2] or "", comments=True)


@every_page
def test_every_command_is_understood(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for module, arguments in commands(page):
        if module != "lit_grpo":
            assert module == "benchmarks.NAME" or find_spec(module), module
        elif arguments and not arguments[0].startswith("--"):
            check(*arguments, capsys=capsys)


def check(name: str, *arguments: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Parse a command's arguments, or at least look up its options, without doing anything."""
    if "--help-all" in arguments:  # it shows the help of a field, and parses nothing else
        arguments = arguments[: arguments.index("--help-all")]
    told = [each for each in arguments if each != "--help"]
    try:
        if name == "simulate":
            simulate._make_parser().parse_args(told)
        elif name in OWN - LIKE_FIT:
            with pytest.raises(SystemExit, match="0"):
                import_module(TOOLS[name].module).main(["--help"])
            said = capsys.readouterr().out
            assert all(re.search(rf"{each}\b", said) for each in told if each.startswith("--")), (name, told)
        else:
            if name == "fit-check" and "--memory" in told:  # its own
                del told[told.index("--memory") : told.index("--memory") + 2]
            if name == "evaluate":  # its own come first, and policies before them
                _, told = read_options(list(itertools.dropwhile(lambda one: not one.startswith("-"), told)))
            parsers()["fit" if name in LIKE_FIT else name].parse_args(list(with_configs_that_exist(told)))
    except SystemExit as error:
        pytest.fail(f"{name} {' '.join(arguments)}: {capsys.readouterr().err or error}")


def with_configs_that_exist(told: list[str]) -> Iterator[str]:
    """Leave out what stands for a config: ``...``, or one of a run's."""
    configs = {number + 1 for number, each in enumerate(told) if each == "--config"}
    missing = {number for number in configs if not Path(shipped_config(told[number])).is_file()}
    for number, each in enumerate(told):
        if number not in missing and number + 1 not in missing:
            yield each


# ---- names --------------------------------------------------------------------------------------------


FREE = {"optimizer", "generator", "lr_scheduler", "parameters", "engine_args"}  # take what a class or package takes
NO_SETTING = {"csv", "yaml", "json", "jsonl", "ckpt", "safetensors"}


def unknown_settings(text: str) -> list[str]:
    """The settings in a text's code, whole (``model.objective.loss``) or in part (``kl.beta``), that fit has not."""
    options = {option.removeprefix("--") for action in parsers()["fit"]._actions for option in action.option_strings}
    for name, kind in (("model.lora", LoraSettings), ("model.teacher", TeacherSettings)):  # by default there is none
        options |= {f"{name}.{field.name}" for field in fields(kind)}
    parts = [option.split(".") for option in options]
    groups = {part for option in parts for part in option[:-1]}
    known = {".".join(option[start:end]) for option in parts for end in range(len(option) + 1) for start in range(end)}
    named = re.findall(r"`(?:--)?([a-z_]\w*(?:\.[a-z_]\w*)+)(?:[.=: ][^`]*)?`", text)
    named += re.findall(r"(?<!\S)--([a-z_]\w*(?:\.[a-z_]\w*)+)", text)
    checked = {name for name in named if name.split(".")[0] in groups and name.split(".")[-1] not in NO_SETTING}
    checked = {name.partition(".init_args.")[0].removesuffix(".class_path") for name in checked}
    return sorted(name for name in checked - known if not FREE & set(name.split(".")[:-1]))


@pytest.mark.parametrize("page", [page for page in LINKED if page.stem != "migration"], ids=lambda page: page.stem)
def test_every_setting_that_a_page_names_exists(page: Path) -> None:
    assert unknown_settings(page.read_text(encoding="utf-8")) == []


@every_page
def test_every_metric_that_a_page_names_is_explained(page: Path) -> None:
    known = [metric.name for section in sections() for metric in section.metrics]
    families = {name.split("/")[0] for name in known if "/" in name}
    for name in re.findall(r"`(\w+/[\w@*/]+)`", text_of(page)):
        if name.split("/")[0] in families and name.split("/")[-1] != "*":
            assert explain(name) or name in METRICS or any(fnmatchcase(one, name) for one in known), name
