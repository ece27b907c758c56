"""`evaluate` on runs: its figures are those of `validate`, and its input is checked before anything is loaded."""

from __future__ import annotations

import json
import re
import shutil
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
from conftest import save_policy

from lit_grpo.__main__ import start
from lit_grpo.cli.command_line import GRPOCLI, cli_arguments, run
from lit_grpo.policy import load_policy
from lit_grpo.policy.named import NAMED
from lit_grpo.tools.dashboard.report.folder import read_folder
from lit_grpo.tools.evaluation.command import main
from lit_grpo.training.run_folder import RunFolder
from tests.task_folders import write_task

DEMO = ("--config", "arithmetic", "--data.validation.init_args.num_rows", "24", "--data.eval_batch_size", "16")


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def evaluated(folder: Path) -> dict[str, dict[str, dict[str, float]]]:
    """The values of ``evaluation.json`` by policy and way of decoding."""
    content = json.loads((folder / "evaluation.json").read_text())
    return {
        one["name"]: {
            how: {name: figure["value"] for name, figure in figures.items()} for how, figures in one["figures"].items()
        }
        for one in content["policies"]
    }


def lines_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "completions.jsonl").read_text().splitlines()]


def validated(command: str, *arguments: str) -> dict[str, float]:
    """What ``validate`` or ``test`` logs."""
    cli = GRPOCLI(RunFolder(), **cli_arguments([command, *arguments, "--trainer.enable_progress_bar", "false"]))
    return {name: float(value) for name, value in cli.trainer.callback_metrics.items()}


def test_the_figures_are_those_of_validate(tmp_path: Path) -> None:
    main(["tiny", *DEMO, "--samples", "4", "--k", "1", "2", "4", "--output", "out"])
    found = evaluated(tmp_path / "out")["tiny"]
    greedy = validated("validate", *DEMO)
    sampled = validated(
        "validate", *DEMO, "--model.eval_sampling.temperature", "1", "--model.eval_num_generations", "4",
        "--model.pass_at_k", "[1, 2, 4]",
    )  # fmt: skip
    names = {"reward": "reward", "length": "completion_length", "truncated": "truncated"}
    for how, values in (("greedy", greedy), ("sampled", sampled)):
        for ours, theirs in names.items():
            assert found[how][ours] == pytest.approx(values[f"val/{theirs}"], abs=1e-6), (how, ours)
    assert found["greedy"]["accuracy"] == pytest.approx(greedy["val/pass@1"], abs=1e-6)
    for k in (1, 2, 4):
        assert found["sampled"][f"pass@{k}"] == pytest.approx(sampled[f"val/pass@{k}"], abs=1e-6)
    assert 0.2 < found["greedy"]["accuracy"] < 0.8 and found["sampled"]["pass@1"] < found["sampled"]["pass@4"]


def test_a_run_is_compared_with_its_base(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The run's config is taken; a checkpoint samples what the policy saved from it does."""
    fit = ["fit", *DEMO, "--trainer.max_steps", "2", "--trainer.enable_progress_bar", "false", "--data.batch_size", "4"]
    run([*fit, "--model.num_generations", "4", "--run.name", "short", "--validate_first", "false"])
    main(["tiny", "runs/short/checkpoints/last.ckpt", "runs/short", "--samples", "2"])
    folder = tmp_path / "runs" / "short" / "evaluation"
    assert {path.name for path in folder.iterdir()} == {
        "completions.jsonl", "evaluation.json", "evaluation.svg", "side_by_side.html",
    }  # fmt: skip
    lines = lines_of(folder)
    assert len(lines) == 3 * 24 * 3
    by_policy: dict[str, list[Any]] = {}
    for line in lines:
        by_policy.setdefault(line.pop("policy"), []).append(line)
    base, checkpoint, policy = by_policy.values()
    assert checkpoint == policy and base != policy
    assert {line["prompt_id"] for line in base} == {f"validation/{number}" for number in range(24)}
    content = json.loads((folder / "evaluation.json").read_text())
    assert [one["policy"] for one in content["comparisons"]] == ["runs/short/checkpoints/last.ckpt", "runs/short"]
    said = capsys.readouterr().out
    assert "Settings: runs/short/config.yaml" in said
    assert re.search(r"runs/short compared with tiny, greedy: [+-].* points .* p = .*McNemar's exact test", said)
    assert (tmp_path / "runs" / "short" / "metrics.csv").exists()  # the run's folder stays as it is
    assert not (tmp_path / "runs" / "short-1").exists()
    shown = read_folder(tmp_path / "runs" / "short").evaluated  # by the report
    assert {row["policy"] for row in shown} == {"tiny", "runs/short/checkpoints/last.ckpt", "runs/short"}


@pytest.mark.nightly
def test_a_checkpoint_of_adapters_samples_what_the_merged_policy_does(tmp_path: Path) -> None:
    pytest.importorskip("peft", reason="peft is not installed")
    lora = ["--model.lora", "{r: 2, alpha: 64}", "--model.optimizer.init_args.lr", "0.01"]
    fit = ["fit", *DEMO, "--trainer.max_steps", "1", "--trainer.enable_progress_bar", "false", "--data.batch_size", "8"]
    run([*fit, *lora, "--run.name", "adapters", "--validate_first", "false"])
    policies = ["tiny", "runs/adapters/checkpoints/last.ckpt", "runs/adapters/policy/adapter", "runs/adapters"]
    main([*policies, "--samples", "0"])
    base, *trained = evaluated(tmp_path / "runs" / "adapters" / "evaluation").values()
    by_policy = [
        [
            line["completion"]
            for line in lines_of(tmp_path / "runs" / "adapters" / "evaluation")
            if line["policy"] == name
        ]
        for name in policies
    ]
    assert by_policy[0] != by_policy[1] == by_policy[2] == by_policy[3]
    assert base and trained[0] == trained[1] == trained[2]


def test_a_gguf_file_is_a_policy(tmp_path: Path) -> None:
    pytest.importorskip("gguf", reason="gguf is not installed")
    from tiny_gguf import write_gguf

    write_gguf(tmp_path / "policy.gguf")
    write_task(tmp_path, "policy.gguf", "def score(completion):\n    return float('1' in completion)\n")
    main(
        ["policy.gguf", "--config", "config.yaml", "--data.test", "prompts.jsonl", "--samples", "2", "--output", "out"]
    )
    content = json.loads((tmp_path / "out" / "evaluation.json").read_text())
    assert content["conditions"]["split"] == "test" and not content["conditions"]["has_answers"]
    assert len(lines_of(tmp_path / "out")) == 6 * 3


@pytest.mark.nightly
def test_a_policy_is_freed_before_the_next_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(NAMED["tiny"].folder, tmp_path / "copy")
    loaded: list[weakref.ref[Any]] = []
    alive: list[int] = []

    def load(*args: Any) -> Any:
        alive.append(sum(one() is not None for one in loaded))
        policy = load_policy(*args)
        loaded.append(weakref.ref(policy))
        return policy

    monkeypatch.setattr("lit_grpo.module.load_policy", load)
    main(["tiny", "copy", "tiny_hybrid", *DEMO, "--samples", "0"])
    assert alive == [0, 0, 0]


def test_policies_share_their_random_numbers(tmp_path: Path) -> None:
    """A copy of a policy samples the same completions, so that a difference is the policies' and not of chance."""
    shutil.copytree(NAMED["tiny"].folder, tmp_path / "copy")
    main(["tiny", "copy", *DEMO, "--data.validation.init_args.num_rows", "8", "--samples", "2", "--output", "out"])
    lines = lines_of(tmp_path / "out")
    ours, theirs = ([{**line, "policy": ""} for line in lines if line["policy"] == name] for name in ("tiny", "copy"))
    assert ours == theirs and len({line["completion"] for line in ours}) > 8
    (comparison,) = json.loads((tmp_path / "out" / "evaluation.json").read_text())["comparisons"]
    assert comparison["sampled"]["p"] == 1.0 and comparison["sampled"]["better"] == comparison["sampled"]["worse"] == 0


@pytest.mark.nightly
def test_tools_are_called_as_in_validate(tmp_path: Path) -> None:
    told = ("--config", "calculator", "--data.validation.init_args.num_rows", "12")
    main([*told, "--samples", "2", "--output", "out"])
    found = evaluated(tmp_path / "out")["tiny_calculator"]
    greedy = '{"temperature": 0, "max_tokens": 48, "max_observed": 48}'
    values = validated("validate", *told, "--model.eval_sampling", greedy)
    assert found["greedy"]["accuracy"] == pytest.approx(values["val/pass@1"], abs=1e-6)
    assert any(len(line["messages"]) > 2 for line in lines_of(tmp_path / "out"))


@pytest.mark.nightly
def test_figures_of_several_data_sets_are_those_of_validate(tmp_path: Path) -> None:
    """Rows of one have tools and answers, those of the other have neither."""
    rows = [f"--data.validation.init_args.sources.{name}.init_args.num_rows=8" for name in ("exact", "rough")]
    main(["--config", "mixture", *rows, "--samples", "2", "--output", "out"])
    found = evaluated(tmp_path / "out")["tiny_calculator"]
    sampled = validated("validate", "--config", "mixture", *rows, "--model.eval_num_generations", "2")
    for name in ("exact", "rough"):
        assert found["sampled"][f"pass@1 {name}"] == pytest.approx(sampled[f"val/datasets/{name}/pass@1"], abs=1e-6)
    assert {(line["dataset"], line["answer"] is None) for line in lines_of(tmp_path / "out")} == {
        ("exact", False),
        ("rough", True),
    }


@pytest.mark.nightly
def test_rows_that_a_policy_cannot_be_asked_are_left_out_for_all(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of two vocabularies one has a token for up to four characters: it reads a long prompt in fewer tokens."""
    rows = [{"prompt": "1+1="}, {"prompt": "1+1=" * 9}]
    for name in ("narrow", "wide"):
        save_policy(tmp_path / name)
    file = tmp_path / "wide" / "tokenizer.json"
    written = json.loads(file.read_text())
    written["pre_tokenizer"]["pattern"] = {"Regex": ".{1,4}"}
    file.write_text(json.dumps(written))
    write_task(tmp_path, "narrow", "def score(completion):\n    return 1.0\n", rows)
    told = ["--config", "config.yaml", "--data.validation", "prompts.jsonl", "--samples", "0", "--output", "out"]
    told += ["--data.max_prompt_tokens", "20", "--data.unusable_rows", "drop"]
    with pytest.warns(UserWarning, match="unusable"):
        main(["narrow", "wide", *told])
    lines = lines_of(tmp_path / "out")
    assert [(line["policy"], line["prompt_id"]) for line in lines] == [
        ("narrow", "validation/0"),
        ("wide", "validation/0"),
    ]
    assert "1 row left out, because a policy cannot be asked it." in capsys.readouterr().out


REFUSED = {
    "an unknown policy": (["tiny", "not/here/at/all", *DEMO], "There is no policy folder 'not/here/at/all'"),
    "the same policy": (["tiny", "tiny", *DEMO], "'tiny' is given twice"),
    "too large a k": (["tiny", *DEMO, "--k", "9"], "--k is 9"),
    "no rows": (["tiny", *DEMO, "--data.validation", "null"], "neither data.test nor data.validation is set"),
    "no place": (["tiny", *DEMO, "--lm-eval", "/dev/null/task"], "The folder '/dev/null/task' cannot be made"),
    "no such split": (["tiny", *DEMO, "--split", "test"], "data.test is not set, and test needs it"),
    "no rewards": (["tiny", *DEMO, "--model.rewards", "[]"], "model.rewards is empty"),
    "no group": (["tiny", *DEMO, "--answer", "x"], "--answer 'x' has no group"),
    "no samples": (
        ["tiny", *DEMO, "--model.sampling.temperature", "0"],
        "The temperature is 0 in model.sampling and in model.eval_sampling",
    ),
    "tools in a task": (
        ["--config", "calculator", "--lm-eval", "task"],
        "--lm-eval writes no tasks of several turns",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_input_is_refused_before_anything_is_loaded_or_written(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def loaded(*_: Any, **__: Any) -> Any:
        pytest.fail("a policy was loaded")

    monkeypatch.setattr("lit_grpo.module.load_policy", loaded)
    arguments, sentence = REFUSED[case]
    with pytest.raises(SystemExit, match="2"):
        main([*arguments, "--output", "out"])
    said = capsys.readouterr().err
    assert sentence in said and said.count("error: ") == 1, said
    assert list(tmp_path.iterdir()) == []


def test_the_command_and_its_help(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Without a policy it is the config's; nothing is written unless a folder is given."""
    monkeypatch.setattr(sys, "argv", ["lit_grpo", "evaluate", *DEMO, "--samples", "0"])
    start()
    said = capsys.readouterr().out
    assert "tiny: 24 completions in" in said and "Nothing was written; --output FOLDER keeps" in said
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(sys, "argv", ["lit_grpo", "evaluate", "--help"])
    with pytest.raises(SystemExit) as exit_:
        start()
    assert not exit_.value.code and "--samples N" in capsys.readouterr().out
