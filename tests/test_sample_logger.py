"""What is shown of samples in the terminal, and what is kept of them."""

import io
import json
import re
from array import array
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hand_made import make_rollout
from lightning.pytorch.loggers import WandbLogger
from rich.cells import cell_len
from rich.console import Console

from lit_grpo.callbacks import RolloutTimeline, SampleLogger
from lit_grpo.display.due import is_due
from lit_grpo.display.samples import Sample, Samples
from lit_grpo.module import GRPOModule
from lit_grpo.types import Clock, Prompt, PromptBatch, Rollout, RolloutGroup, Span

SHORT = Sample("[bold]1[/bold]", "2", 3, "stop", 1.0, 0.5, {"right": 1.0}, {"answer": "2"})


def shown(sample: Sample, width: int = 80) -> str:
    file = io.StringIO()
    Console(file=file, width=width, markup=False, highlight=False).print(Samples("samples at update 1", [sample]))
    return file.getvalue()


@pytest.mark.parametrize(
    ("completion", "visible"),
    [
        ("\x1b[2Jgone", r"\x1b[2Jgone"),
        ("\x1b]52;c;aGk=\x07", r"\x1b]52;c;aGk=\x07"),
        ("\x1b]8;;http://a\x1b\\x", r"\x1b]8;;http://a\x1b\x"),
        ("\x9b31m", r"\x9b31m"),
        ("a\rb\x08", r"a\x0db\x08"),
        ("\u202eabc", r"\x202eabc"),
    ],
)
def test_control_sequences_of_a_completion_are_shown_and_not_obeyed(completion: str, visible: str) -> None:
    out = shown(SHORT._replace(completion=completion))
    assert visible in out
    assert not any(character < " " and character != "\n" for character in out) and "\x9b" not in out


LONG = {
    "words": "so then " * 400 + "the answer is 42",
    "without spaces": "x" * 3000 + "#42",
    "lines": "step\n\n" * 300 + "answer: 42",
    "wide characters": "答" * 900 + "42",
    "enormous": "word " * 100_000 + "42",
}


@pytest.mark.parametrize("width", [30, 80, 120])
@pytest.mark.parametrize("text", LONG.values(), ids=LONG)
def test_a_long_completion_shows_its_end_in_six_lines_of_the_terminals_width(text: str, width: int) -> None:
    prompt = "<|im_start|>system" + "be brief " * 500 + "what is six times seven?"
    out = shown(SHORT._replace(prompt=prompt, completion=text), width).splitlines()
    begin = next(number for number, line in enumerate(out) if line.startswith("  completion"))
    end = next(number for number, line in enumerate(out) if line.startswith("  answer"))
    assert end - begin == 6
    assert out[end - 1].endswith("42")
    assert re.search(r"\.\.\. \d+ char", out[begin + 2])
    assert text.startswith(out[begin].split("  ")[2].strip())
    assert out[begin - 1].endswith("seven?") and begin <= 6
    assert max(map(cell_len, out)) <= width


def right(completion: str, answer: str) -> float:
    return 1.0


def form(completion: str, **columns: Any) -> float:
    return 0.5


def a_batch(prompt: Prompt) -> PromptBatch:
    made = make_rollout([3], [4, 5], 1.5)
    rollout = Rollout(prompt, made.completion, {"right": 1.0, "form": 0.5}, 1.5, extra={"note": "n"}, advantage=0.25)
    batch = PromptBatch([prompt])
    batch.groups = [RolloutGroup(prompt, [rollout])]
    return batch


@pytest.mark.parametrize(
    ("num_prompts", "num_samples", "picked"),
    [
        (1, 4, [3, 0, 2, 1]),
        (1, 9, [3, 0, 2, 1]),
        (2, 4, [3, 4, 0, 7]),
        (3, 4, [3, 4, 11, 0]),
        (3, 2, [3, 4]),
    ],
)
def test_best_and_worst_are_shown_and_none_twice(
    num_prompts: int, num_samples: int, picked: list[int], tmp_path: Path
) -> None:
    batch = PromptBatch([Prompt(f"train/{number}", (3,), "1") for number in range(num_prompts)])
    rewards = [[4.0 * number + place for place in (2, 0, 3, 1)] for number in range(num_prompts)]
    batch.groups = [
        RolloutGroup(prompt, [make_rollout([3], [4], reward, sample_id=place) for place, reward in enumerate(of_group)])
        for prompt, of_group in zip(batch.prompts, rewards, strict=True)
    ]
    logger = SampleLogger(num_samples=num_samples)
    logger.on_train_batch_end(a_trainer(1, tmp_path, []), module(), None, batch, 0)
    rows = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert [row["reward"] for row in rows] == picked


def module() -> GRPOModule:
    return GRPOModule("tiny", rewards=[right, form])  # pyrefly: ignore[bad-argument-type]


def a_trainer(version: int, folder: Path, loggers: list[Any]) -> Any:
    return SimpleNamespace(
        global_step=version,
        is_global_zero=True,
        default_root_dir=str(folder),
        loggers=loggers,
        datamodule=None,
        callback_metrics={},
        sanity_checking=False,
        state=SimpleNamespace(fn="validate"),
    )


def log(callback: SampleLogger, prompt: Prompt, version: int, folder: Path, loggers: list[Any] | None = None) -> None:
    callback.on_train_batch_end(a_trainer(version, folder, loggers or []), module(), None, a_batch(prompt), 0)


def test_rewards_advantage_and_the_datas_columns_are_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    columns = {"prompt": "1+1=", "answer": "2", "level": 3}
    text = "<|user|>1+1=<|assistant|>"
    log(SampleLogger(num_samples=1), Prompt("train/0", (3,), text, columns), 1, tmp_path)
    (row,) = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert row == {
        "step": 1,
        "prompt_id": "train/0",
        "prompt": text,
        "completion": "",
        "tokens": 2,
        "finish": "stop",
        "reward": 1.5,
        "advantage": 0.25,
        "rewards/right": 1.0,
        "rewards/form": 0.5,
        "columns/prompt": "1+1=",
        "columns/answer": "2",
        "columns/level": 3,
        "note": "n",
    }
    out = capsys.readouterr().out
    assert "reward 1.5  right 1  form 0.5  advantage 0.25  2 tokens  stop" in out
    assert "  prompt      1+1=\n" in out  # what was asked, without the template
    assert "  answer      2\n" in out and "level" not in out


def test_of_a_conversation_the_last_turn_of_the_user_is_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    messages = [{"role": role, "content": content} for role, content in (("user", "a"), ("assistant", "b"))]
    messages.append({"role": "user", "content": "and now?"})
    prompt = Prompt("train/0", (3,), "<u>a<a>b<u>and now?<a>", {"prompt": messages}, messages=messages)
    log(SampleLogger(num_samples=1), prompt, 1, tmp_path)
    assert "  prompt      and now?\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("n", "before", "after", "due"),
    [(0, 0, 1, False), (20, 0, 1, True), (20, 1, 2, False), (20, 18, 22, True), (20, 20, 21, False), (5, 0, 0, False)],
)
def test_it_is_due_when_a_multiple_is_reached_or_passed(n: int, before: int, after: int, due: bool) -> None:
    assert is_due(n, before, after) is due


class Heard(WandbLogger):
    """W&B's logger without its run: it remembers what the run would be told."""

    def __init__(self) -> None:
        self._prefix, self._wandb_init = "", {}
        self.said: list[dict[str, Any]] = []

    @property
    def experiment(self) -> Any:
        return SimpleNamespace(log=self.said.append)


def test_tables_and_pictures_reach_wandb_with_the_update_that_they_belong_to(tmp_path: Path) -> None:
    logger = Heard()
    prompt = Prompt("train/0", (3,), "1", {"answer": "2", "mixed": [1]})
    log(SampleLogger(num_samples=2), prompt, 7, tmp_path, [logger])
    batch, timeline = a_batch(prompt), RolloutTimeline(every_n_updates=1)
    batch.metrics = {"rollout/steps": 2.0, "rollout/steps_over_bound": 1.0}
    batch.metrics |= {"time/rollout_s": 1.0, "time/reward_wait_s": 0.0}
    batch.spans = [(("train/0", 0, (0,)), Span(0, 0, 2, 0))]
    batch.predicted = {("train/0", 0, (0,)): 2.0}
    seconds = array("d", [0.0]), array("d", [1.0])
    batch.clock = Clock(1, None, array("q", [2]), *seconds, kv_tokens=array("q", [3]), prefilled=array("q", [1]))
    timeline.on_train_batch_end(a_trainer(7, tmp_path, [logger]), module(), None, batch, 0)
    assert [(set(said) - {"trainer/global_step"}, said["trainer/global_step"]) for said in logger.said] == [
        *(({"samples"}, 7), ({"timeline"}, 7))
    ]
    assert "columns/mixed" in logger.said[0]["samples"].columns


def test_a_validation_adds_completions_of_the_first_prompts_of_each_data_set(tmp_path: Path) -> None:
    table, logger = Heard(), SampleLogger(num_validation_samples=3)
    for version in (0, 5):
        trainer = a_trainer(version, tmp_path, [table])
        logger.on_validation_epoch_start(trainer, module())
        for dataset in (0, 1):
            for number in range(5):
                batch = a_batch(Prompt(f"validation/{dataset}/{number}", (3,), "1"))
                logger.on_validation_batch_end(trainer, module(), None, batch, number, dataset)
        logger.on_validation_epoch_end(trainer, module())
    rows = [json.loads(line) for line in (tmp_path / "val_samples.jsonl").read_text().splitlines()]
    assert [(row["step"], row["prompt_id"]) for row in rows] == [
        (version, f"validation/{dataset}/{number}") for version in (0, 5) for dataset in (0, 1) for number in range(3)
    ]
    assert rows[0]["rewards/right"] == 1.0 and "advantage" not in rows[0]
    assert [said["trainer/global_step"] for said in table.said] == [0, 5] and "val_samples" in table.said[0]
    logger.on_train_start(SimpleNamespace(global_step=3, is_global_zero=True, default_root_dir=tmp_path), module())  # pyrefly: ignore[bad-argument-type]
    assert len((tmp_path / "val_samples.jsonl").read_text().splitlines()) == 6


@pytest.mark.parametrize(("every", "validated", "shown"), [(20, True, True), (20, False, False), (0, True, False)])
def test_the_end_of_a_run_shows_the_best_and_the_worst_of_the_last_validation(
    every: int, validated: bool, shown: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    logger = SampleLogger(every_n_updates=every)
    for version in (0, 7) if validated else ():
        trainer = a_trainer(version, tmp_path, [])
        logger.on_validation_epoch_start(trainer, module())
        batch = a_batch(Prompt("validation/0", (3,), "1"))
        for reward in (0.25, 0.5, 0.75):
            prompt = Prompt(f"validation/{reward}", (3,), f"asked at {version}: {reward}")
            made = make_rollout([3], [4, 5], reward)
            batch.groups.append(RolloutGroup(prompt, [Rollout(prompt, made.completion, {"right": reward}, reward)]))
        logger.on_validation_batch_end(trainer, module(), None, batch, 0)
        logger.on_validation_epoch_end(trainer, module())
    logger.on_train_end(a_trainer(7, tmp_path, []), module())
    out = capsys.readouterr().out
    assert ("held-out samples at update 7, best and worst" in out) == shown
    assert re.findall(r"^reward (\S+)", out, re.MULTILINE) == (["1.5", "0.25"] if shown else [])
    assert ("asked at 7: 0.25" in out) == shown and "asked at 0" not in out


def test_no_completion_of_a_validation_is_kept_where_none_is_asked_for(tmp_path: Path) -> None:
    logger, trainer = SampleLogger(num_validation_samples=0), a_trainer(0, tmp_path, [])
    logger.on_validation_epoch_start(trainer, module())
    logger.on_validation_batch_end(trainer, module(), None, a_batch(Prompt("a", (3,), "1")), 0)
    logger.on_validation_epoch_end(trainer, module())
    assert not (tmp_path / "val_samples.jsonl").exists()
