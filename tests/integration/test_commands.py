"""Commands that the pages tell, run from their text: in the pages' order, in one folder, on small policies.

``make test`` runs one of each name that has no tests of its own, ``make nightly`` one of each set of options;
``test_docs.py`` parses all of them. A command may need what one before has left, so a single one cannot be run alone.
"""

from __future__ import annotations

import gc
import re
import shutil
import sys
import webbrowser
from collections.abc import Callable, Iterator, Sequence
from contextlib import chdir
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import read_metrics, save_policy, table_rows
from test_docs import PAGES, ROOT, commands
from test_from_trl import PLAIN
from test_readme import block

from lit_grpo.__main__ import start

STANDS_FOR = {
    "Qwen/Qwen3-0.6B": "own_model",  # no network
    "NAME": "arithmetic",
    "CONFIG.yaml": "trl.yaml",
    "benchmarks/traces/": f"{ROOT}/benchmarks/traces/",
    "FOLDER": "folder_of_a_checkpoint",
    "...": "own_task",
}
"""What stands in the pages for something of the reader's, and what it is here."""
SHORT = "--trainer.max_steps 1 --trainer.val_check_interval 1 --data.batch_size 1"
SHORT += " --data.validation.init_args.num_rows 8"
FIRST = "--validate_first false"
FEW_ROWS = " ".join(f"--data.validation.init_args.sources.{name}.init_args.num_rows=8" for name in ("exact", "rough"))
CONFIGS = {
    "own_task": ("own-task", "--trainer.max_steps 1 --data.batch_size 2 --rollout_timeline.every_n_updates 0"),
    **{
        name: (name, f"{SHORT} {FIRST}")
        for name in ("arithmetic", "knights", "calculator", "catch", "budget", "shapes")
    },
    "warm_start": ("warm_start", f"{SHORT} --trainer.max_steps 9"),
    "mixture": ("mixture", f"--trainer.max_steps 1 --data.batch_size 2 {FIRST} {FEW_ROWS}"),
    "runs/arithmetic/config": ("arithmetic", "--trainer.max_steps 2"),
}
"""The run of a config, and what is added so that it takes a second or two."""
NOT_RUN = (
    *("generators/vllm", "serve ", "--trainer.devices ", "reasoning_gym"),  # need vLLM, a second rank or a chat model
    *("smollm2", "word_problems", "dashboard --wandb"),  # need a network
    "gsm8k_qwen3_1.7b",  # needs a GPU; test_your_gpu checks the settings and the memory of these
    "--model.policy runs/warm/policy",  # needs the run of the command before it
    "finish runs/grpo",  # needs the run of the README's lines in Python
)
"""What commands hold that are not run here; tests of their own run their like."""
NO_ARGUMENTS = {"lit_grpo fit-check", "lit_grpo doctor"}  # without the reader's arguments


def told() -> dict[str, list[str]]:
    """Each command of the pages as they write it, with what it is told."""
    found = [(module, arguments) for page in PAGES for module, arguments in commands(page)]
    return {" ".join([module, *arguments]): arguments for module, arguments in found}


def ours(arguments: Sequence[str]) -> list[str]:
    """The arguments with what stands for something put in, and what keeps a run short."""
    names = re.compile("|".join(map(re.escape, STANDS_FOR)))
    here = [names.sub(lambda match: STANDS_FOR[match[0]], each) for each in arguments]
    if here[0] in ("fit", "sft", "doctor") and "--config" in here:
        here += CONFIGS[plain(here[here.index("--config") + 1])][1].split()
    return here


def plain(config: str) -> str:
    """The name of a config, which may be given by its path."""
    return config.removeprefix("configs/").removesuffix(".yaml")


def to_run() -> list[list[str]]:
    """What can run here, each once."""
    left = [command for command in told() if command.startswith("lit_grpo ") and command not in NO_ARGUMENTS]
    here = [ours(told()[command]) for command in left if not any(each in command for each in NOT_RUN)]
    return list({tuple(arguments): arguments for arguments in here}.values())


def kind(told: list[str]) -> tuple[Any, ...]:
    """The name of a command, its config and the names of its options."""
    return told[0], *(plain(word) for word in told if word in CONFIGS), *sorted(word for word in told if "--" in word)


def first_of(kind: Callable[[list[str]], Any]) -> list[list[str]]:
    """The first command of each kind, in the pages' order."""
    first: dict[Any, list[str]] = {}
    for told in to_run():
        first.setdefault(kind(told), told)
    return list(first.values())


def name_and_config(told: list[str]) -> tuple[str, str]:
    """The name of a command; of ``fit`` its config too, unless another command or test runs the like of it."""
    config = plain(told[told.index("--config") + 1]) if told[0] == "fit" and "--config" in told else ""
    return told[0], "" if config in ("warm_start", "catch", "calculator", "knights", "mixture") else config


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where the reader stands: a checkout, with a task and a model of their own."""
    place = tmp_path_factory.mktemp("reader")
    shutil.copytree(ROOT / "configs", place / "configs")
    for name in ("my_prompts.jsonl", "my_rewards.py"):
        (place / name).write_text(block(name))
    shutil.copy(place / "my_prompts.jsonl", place / "my_heldout.jsonl")
    (place / "trl.yaml").write_text(yaml.safe_dump({**PLAIN, "max_steps": 3}))
    save_policy(place / "own_model", max_position_embeddings=2048)
    gc.collect()  # what other tests left must not be told as a command's warning
    with chdir(place):
        yield place


OF_OTHER_TESTS = ("doctor", "evaluate")
"""Commands that ``make test`` runs in files of their own."""
QUICK = [told for told in first_of(name_and_config) if told[0] not in OF_OTHER_TESTS]


@pytest.mark.parametrize("told", table_rows(first_of(kind), QUICK), ids=lambda told: " ".join(told)[:80])
def test_a_command_of_each_kind_does_what_its_page_says(
    told: list[str],
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    recwarn: pytest.WarningsRecorder,
) -> None:
    """It ends well, without a warning, and with what it is for."""
    opened: list[str] = []
    monkeypatch.setattr(webbrowser, "open", opened.append)
    monkeypatch.setattr(sys, "argv", ["lit_grpo", *told])
    code = exit_code()
    said = capsys.readouterr()
    assert (code, said.err) == (0, ""), said.out
    assert len(opened) == ("--open" in told)
    # the second is said of a run of one batch
    expected = ("DeprecationWarning", "needs prompts that are sampled more than once")
    assert [each for each in map(str, recwarn) if not any(text in each for text in expected)] == []
    check(*told, said=said.out)


def exit_code() -> Any:
    try:
        start()
    except SystemExit as end:
        return end.code or 0
    return 0


def check(name: str, *told: str, said: str) -> None:
    """Look for what the command is for."""
    values = dict(zip(told, [*told[1:], ""], strict=True))
    match name:
        case "fit" if "--help" in told:
            assert "--model.num_generations" in said and "--trainer.max_steps" in said
        case "fit" if "--help-all" in told:
            assert said.startswith("  --model.objective.loss ") and "--model.num_generations" not in said
        case "fit":
            run = Path("runs", values.get("--run.name", CONFIGS[plain(values["--config"])][0]))
            (*_, last) = read_metrics(run / "metrics.csv")
            assert int(last["step"]) >= int(values["--trainer.max_steps"]) and last["loss"]
            assert is_policy(run / "policy") and str(run) in said
            spent = "plugins balanced:rounds=3,passed=2,failed=2, greso, pods:keep=4,statistics=group"
            assert (spent in " ".join(said.split())) == (plain(values["--config"]) == "budget")
        case "sft":
            (*_, last) = read_metrics(Path("runs", values["--run.name"], "metrics.csv"))
            assert last["ce/loss"] and "reward" not in last
            assert is_policy(Path("runs", values["--run.name"], "policy"))
        case "doctor":
            assert "pass checkpoint" in said and "\nfail" not in said
        case "fit-check":
            assert f"it fits into {values['--memory'].removesuffix('GiB')} GiB" in said
        case "evaluate":
            folder = Path(values.get("--output", f"{told[1]}/evaluation"))  # after the base, a run
            assert (folder / "evaluation.json").is_file() and f"Written to {folder}: " in said
            assert f"{told[1]} compared with {told[0]}, greedy: " in said
        case "predict":
            rows = Path(re.findall(r"\S+\.jsonl", said)[-1]).read_text().splitlines()
            assert len(rows) == len(Path(values["--data.predict"]).read_text().splitlines()) == 8
        case "export":
            assert is_policy(Path(told[1]))
        case "report" if "--text" in told:
            assert "Curves, updates " in said and "What to try next" in said
        case "report":
            page = Path(values.get("--output", f"{told[0]}/report.html"))
            assert page.read_text().rstrip().endswith("</html>") and str(page) in said
        case "finish":
            folder = Path(told[0], "finished")
            assert is_policy(folder) and (folder / "arithmetic-q8_0.gguf").exists() and str(folder) in said
        case "simulate":
            assert all(plan in said for plan in ("fcfs", "short_last"))
            assert "--output" not in told or Path(values["--output"]).stat().st_size > 10_000
        case "from-trl":
            assert yaml.safe_load(said)["model"]["policy"] == PLAIN["model_name_or_path"]
        case other:
            pytest.fail(f"nothing is known of {other}")


def is_policy(folder: Path) -> bool:
    return {"config.json", "model.safetensors", "tokenizer.json"} <= {path.name for path in folder.iterdir()}
