"""What is certainly wrong is told without torch, and nothing else is refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from jsonargparse import Namespace

from lit_grpo.__main__ import main
from lit_grpo.cli.parsing.early import check_early
from lit_grpo.cli.parsing.names import fields_after_classes, with_class_paths
from lit_grpo.cli.parsing.refusals import check_values

ROOT = Path(__file__).parents[1]


EARLY: list[tuple[list[str], int, str]] = [
    (["fit", "--model.nun_generations", "4"], 2, "did you mean --model.num_generations or"),
    (["doctor", "--config", "arithmetic", "--data.trian=x"], 2, "did you mean --data.train"),
    (["fit", "--model.sampling.max_token", "4"], 2, "did you mean --model.sampling.max_tokens"),
    (["--help"], 0, "usage: python -m lit_grpo"),
    ([], 0, "usage: python -m lit_grpo COMMAND"),
    (["doctor", "--help"], 0, "usage: python -m lit_grpo doctor"),
    (["fit-check", "-h"], 0, "  --memory AMOUNT"),
    (["fit", "--help"], 0, "--model.num_generations"),
    (["test", "-h"], 0, "--verbose true|false = true"),
    (["fit", "--help-all", "model.lora"], 0, "needs peft"),
    (["predict", "--help-all", "--trainer.max_epochs"], 0, "  --trainer.max_epochs int|null = -1"),
    (["fit", "--data.accumulate_grad_batches", "2"], 2, "did you mean --trainer.accumulate_grad_batches"),
    (["from-trl", "--help"], 0, "usage: python -m lit_grpo from-trl"),
]
SCRIPT = """
import contextlib, io, json, sys
from lit_grpo.__main__ import start
for arguments in json.loads(sys.argv[1]):
    sys.argv, said, code = ["lit_grpo", *arguments], io.StringIO(), None
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            start()
    except SystemExit as ended:
        code = ended.code or 0
    heavy = {"torch", "lightning", "transformers", "jsonargparse"} & sys.modules.keys()
    print(json.dumps([code, said.getvalue(), sorted(heavy)]))
"""


def test_mistakes_and_help_are_told_before_torch_is_imported() -> None:
    command = [sys.executable, "-c", SCRIPT, json.dumps([arguments for arguments, _, _ in EARLY])]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    for line, (arguments, code, said) in zip(done.stdout.splitlines(), EARLY, strict=True):
        ended, told, heavy = json.loads(line)
        assert (ended, heavy) == (code, []) and said in told, (arguments, told)


def test_all_names_that_no_field_has_are_told_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.yaml").write_text("model:\n  nun_generations: 4\n  sampling: {max_token: 4}\ndata: {tain: x}\n")
    (tmp_path / "b.yaml").write_text("model: [\n")
    with pytest.raises(SystemExit):
        configs = ["--config", str(tmp_path / "a.yaml"), f"--config={tmp_path / 'b.yaml'}"]
        check_early(["doctor", *configs, "--data.batchsize", "4", "--rollout.plam=x"])
    errors = capsys.readouterr().err.splitlines()
    wrong = ["model.nun_generations", "model.sampling.max_token", "data.tain", "b.yaml is not YAML", "--data.batchsize"]
    assert len(errors) == 6
    assert all(line.startswith("error: ") and name in line for line, name in zip(errors, [*wrong, "plam"], strict=True))


WRONG = {
    "a field": ("model:\n  policy: tiny\n  nun_generations: 4\n", "field model.nun_generations (c.yaml, line 3); did"),
    "a field of a group": ("model: {sampling: {max_token: 4}}\n", "model.sampling.max_token (c.yaml, line 1); did"),
    "no YAML": ("model:\n  policy: [tiny\n", "Line 3 of c.yaml is not YAML"),
    "aliases": (
        "a: &a [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]\n"
        + "".join(f"{x}: &{x} [{', '.join([f'*{y}'] * 10)}]\n" for x, y in zip("bcdef", "abcde", strict=True)),
        "c.yaml has an alias (*) whose value stands for too many values",
    ),
    "merged aliases": (
        "a0: &a0 {x: 1}\n" + "".join(f"a{n}: &a{n} {{<<: [*a{n - 1}, *a{n - 1}]}}\n" for n in range(1, 25)),
        "c.yaml has an alias (*) whose value stands for too many values",
    ),
    "a text for a group": ("model: tiny\n", "model is tiny, but it is a group of fields (c.yaml, line 1)"),
    "nothing for a group": (
        "run: {}\ntrainer: null\n",
        "trainer is null, but it is a group of fields (c.yaml, line 2)",
    ),
    "an unknown group": ("modle: {policy: tiny}\n", "There is no field modle (c.yaml, line 1); did you mean"),
    "nothing": ("# to be written\n", "c.yaml holds no fields"),
    "brackets": ("[" * 100_000, "Line 1 of c.yaml is nested more than 64 deep"),
    "an object": ("run: !!python/object/apply:os.system [ls]\n", "Line 1 of c.yaml is not YAML: could not determine"),
    "a tag that does not fit": ("run: {name: !!timestamp x}\n", "c.yaml is not YAML: a value does not fit its tag"),
    "a long number": ("trainer: {max_steps: 1" + "0" * 5000 + "}\n", "c.yaml is not YAML: Exceeds the limit"),
    "an alias of itself": ("a: &a [*a]\n", "c.yaml has an alias (*) whose value contains itself"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_configuration_is_named_with_its_line(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    text, sentence = WRONG[case]
    Path("c.yaml").write_text(text)
    with pytest.raises(SystemExit, match="2"):
        check_early(["fit", "--config", "c.yaml"])
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        ["--model.generator", "vllm", "--model.generator.num_slots", "8", "--model.optimizer.anything", "1"],
        ["--model.lora.r", "4", "--model.lora.mine=1", "--model.rewards+", "x", "--data.train.init_args.split", "x"],
        ["--trainer.anything", "1", "--own.callback", "2", "--model", "{}", "--model.generator.help", "slots"],
        ["--model.objective.help", "--model.sampling.top_p.help", "--rollout.help", "--model.lora.help"],
        ["--model.objective", '{"kl": {"beta": 1}}', "--model.policy=--model.x", "--verbose", "true"],
        *(["--config", str(path)] for path in sorted((ROOT / "configs").rglob("*.yaml"))),
    ],
)
def test_what_may_be_right_is_left_to_the_parser(arguments: list[str]) -> None:
    check_early(["fit", *arguments])


def test_a_field_that_is_set_twice_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "c.yaml").write_text("model:\n  policy: a\n  policy: b\n")
    check_early(["fit", "--config", str(tmp_path / "c.yaml")])
    assert "sets model.policy twice; that of line 3 is taken" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("field", "class_path", "said"),
    [
        ("model.optimizer", "os.system", "which is no Optimizer class"),
        ("model.optimizer", "pathlib.Path", "which is no Optimizer class"),
        ("model.lr_scheduler", "torch.optim.AdamW", "which is no LRScheduler or ReduceLROnPlateau class"),
        ("trainer.callbacks", "os.system", "which is no class"),
    ],
)
def test_what_is_no_class_of_its_kind_is_refused_before_it_is_called(field: str, class_path: str, said: str) -> None:
    group, name = field.split(".")
    settings = Namespace(**{group: Namespace(**{name: Namespace(class_path=class_path, init_args=Namespace())})})
    with pytest.raises(ValueError, match=f"{field} names '{class_path}', {said}"):
        check_values(settings, {})  # pyrefly: ignore[bad-argument-type]
    right = {"class_path": "torch.optim.AdamW", "init_args": {"lr": 0.1}}
    check_values(json.loads(json.dumps({"model": {"optimizer": right}})), {})


def test_settings_in_the_environment_are_said_to_have_no_effect(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PL_FIT__MODEL__POLICY", "mine")
    check_early(["fit"])
    assert capsys.readouterr().err.startswith("PL_FIT__MODEL__POLICY has no effect; give settings as --FIELD VALUE")


def test_an_interrupt_before_a_run_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("lit_grpo.__main__.start", interrupt)
    with pytest.raises(SystemExit, match="130"):
        main()
    assert capsys.readouterr().err == "Interrupted.\n"


def test_fields_of_a_class_may_stand_before_the_class_on_the_command_line() -> None:
    for given, taken in (
        ("--g.adapters alone --g vllm --a 1", "--g vllm --g.adapters alone --a 1"),
        ("fit -c x --g.adapters alone -c y --g vllm", "fit -c x -c y --g vllm --g.adapters alone"),
        ("--g.a=1 --g.b 2 --g=vllm --g.c 3", "--g=vllm --g.a=1 --g.b 2 --g.c 3"),
        ("--g.a 1 --g vllm --g.b 2 --g slots", "--g vllm --g slots --g.a 1 --g.b 2"),
        ("--g vllm --g.a 1", "--g vllm --g.a 1"),
        ("--lora.r 8 --lora null", "--lora.r 8 --lora null"),
        ("--sampling.n 5 --sampling {temperature:1}", "--sampling.n 5 --sampling {temperature:1}"),
        ("--g.help vllm --g vllm", "--g.help vllm --g vllm"),
        ("--generators.a 1 --g vllm", "--generators.a 1 --g vllm"),
    ):
        assert fields_after_classes(given.split()) == taken.split(), given


def test_the_help_of_a_class_is_asked_for_by_its_short_name() -> None:
    slots, adamw = "lit_grpo.rollout.slots.SlotGenerator", "torch.optim.AdamW"
    for given, taken in (
        (["--model.generator.help", "slots"], ["--model.generator.help", slots]),
        (["--model.optimizer.help=AdamW"], [f"--model.optimizer.help={adamw}"]),
        (["--model.generator", "slots", "--run.name=slots"], ["--model.generator", "slots", "--run.name=slots"]),
        (["--help", "slots", "--model.generator.help"], ["--help", "slots", "--model.generator.help"]),
    ):
        assert list(with_class_paths(given)) == taken


def test_of_thousands_of_mistakes_the_first_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "c.yaml"
    config.write_text("".join(f"field_{number}: 1\n" for number in range(3000)))
    with pytest.raises(SystemExit, match="2"):
        check_early(["fit", "--config", str(config)])
    assert 2 <= capsys.readouterr().err.count("error: There is no field field_") <= 20


def test_only_a_file_is_read_as_a_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path, kind in ((tmp_path / "pipe", "a pipe"), (tmp_path, "a folder"), (Path("/dev/zero"), "a device")):
        with pytest.raises(SystemExit, match="2"):
            check_early(["fit", "--config", str(path)])
        assert capsys.readouterr().err == f"error: {path} is {kind}, and not a file; give the path of a file.\n"
