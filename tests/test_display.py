"""Lines that fit the screen, and what they count."""

import io
import logging
import math
import time
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from lightning.pytorch.loggers import WandbLogger
from lit_grpo.callbacks.progress_bar import (  # pyrefly: ignore[missing-import]
    VALIDATED_AT,
    RolloutCount,
    UpdateCount,
    function_fields,
    pass_text,
    reward_text,
    run_fields,
    update_fields,
)
from lit_grpo.callbacks.run_summary import _commands  # pyrefly: ignore[missing-import]
from packaging.version import Version
from rich.cells import cell_len
from rich.console import Console

from lit_grpo.display import screen
from lit_grpo.display.cards import folded
from lit_grpo.display.lines import as_plain, as_text, count, duration
from lit_grpo.display.samples import transcript
from lit_grpo.policy import load_policy
from lit_grpo.process.packages import MISSING_KERNELS
from lit_grpo.training.quiet import quiet

METRICS = {"reward": 0.8123, "val/pass@1": 0.941, "tokens/s": 2312.4, "peak_GiB": 0.5123, "mine": 3.0}


def at_work(done: int) -> RolloutCount:
    flight: Any = SimpleNamespace(
        decoding=range(64), num_queued=100, awaiting_env=(), num_slots=64, longest_env_wait_s=3.2
    )
    rollout = RolloutCount(flight, math.nan, began=time.monotonic() - 10)
    rollout.tokens = 10_000
    rollout.done, rollout.done_tokens = done, 50 * done
    return rollout


@pytest.mark.parametrize("width", range(1, 130))
def test_no_line_is_longer_than_the_screen(width: int) -> None:
    updates = UpdateCount(12, 60)
    updates.done = 20
    for fields in (run_fields("updates", updates, METRICS), at_work(92).fields("rollout", "0.51 GiB")):
        assert cell_len(as_text(fields, width).plain) <= width


def test_lines_have_the_reward_of_each_function_where_there_are_several() -> None:
    functions = {"correct": 0.046875, "short\x1b[2J": math.nan, "form": 0.99}
    text = r"reward 0.812 (correct 0.0469, short\x1b[2J none, form 0.99)"
    assert reward_text(METRICS, functions) == text
    assert reward_text(METRICS, {"correct": 0.5}) == "reward 0.812" and reward_text({}, functions) == ""
    assert as_plain(update_fields(UpdateCount(0, 60), METRICS, functions)).startswith(f"update 0/60  {text}  pass@1")
    live = function_fields({"correct": 0.046875, "short": math.nan, "form": 0.99})
    assert as_text(live, 80).plain == "rewards  correct 0.0469  short none  form 0.99"
    assert as_text(live, 40).plain == "rewards  correct 0.0469  short none"
    assert all(cell_len(as_text(live, width).plain) <= width for width in range(1, 60))


def test_pass_at_1_beside_the_reward_of_a_later_update_has_its_own_update() -> None:
    later = METRICS | {VALIDATED_AT: 10.0}
    assert pass_text(METRICS, "digits >= 1") == "pass@1 (digits >= 1) 94.1%"
    assert "reward 0.812  pass@1 94.1% at update 10  2.31k tokens/s" in as_plain(
        update_fields(UpdateCount(0, 60), later)
    )
    line = as_text(run_fields("updates", UpdateCount(12, 60), later), 120).plain
    assert "pass@1 94.1% at update 10" in line and "update of" not in line


def test_a_rollout_counts_what_ends_and_estimates_the_rest() -> None:
    assert math.isnan(at_work(0).seconds_left)  # nothing is known of lengths
    rollout = at_work(92)
    assert (rollout.done, rollout.total) == (92, 256)
    seconds = 10_000 / rollout.tokens_per_s
    assert rollout.seconds_left == pytest.approx(seconds * (256 * 50 - 10_000) / 10_000, rel=0.5)
    assert rollout.fields("rollout")[0].text == "rollout 92/256 completions"


def test_a_line_says_how_many_wait_for_their_environment() -> None:
    rollout = at_work(36)
    assert "wait" not in as_plain(rollout.fields("rollout"))
    waiting: Any = SimpleNamespace(
        decoding=range(4), num_queued=12, awaiting_env=range(12), num_slots=8, longest_env_wait_s=3.2
    )
    rollout = RolloutCount(waiting, math.nan)
    assert rollout.total == 28
    assert "12 of 28 wait for their environment, longest 3 s" in as_plain(rollout.fields("rollout"))


def test_a_conversation_is_shown_message_by_message() -> None:
    call = {"type": "function", "function": {"name": "move", "arguments": {"direction": "left", "steps": 2}}}
    messages = [
        {"role": "assistant", "content": "", "reasoning_content": "Hm.", "tool_calls": [call, call]},
        {"role": "tool", "name": "move", "content": "done"},
        {"role": "assistant", "content": "I won."},
    ]
    assert transcript(messages) == (
        "assistant: Hm. move(direction='left', steps=2) move(direction='left', steps=2)\ntool: done\nassistant: I won."
    )


def test_numbers_are_short() -> None:
    assert [duration(seconds) for seconds in (0.2, 59, 61, 3600, 7805)] == [
        *("0 s", "59 s", "1 min 01 s", "1 h 00 min", "2 h 10 min")
    ]
    assert [count(number) for number in (7, 812, 2312, 691_000, 1.7e9)] == ["7", "812", "2.31k", "691k", "1.7G"]


def test_a_command_is_folded_so_that_a_shell_takes_it() -> None:
    lines = folded(["python -m lit_grpo predict", "--model.policy runs/a/policy", "--data.predict P.jsonl"], 60)
    assert lines == ["  python -m lit_grpo predict --model.policy runs/a/policy \\", "    --data.predict P.jsonl"]


def test_a_warning_is_one_line_without_a_place_in_the_code_and_told_once() -> None:
    before = warnings.formatwarning
    with quiet():
        told = [
            warnings.formatwarning(text, UserWarning, "x.py", line, "warn(")
            for line, text in enumerate(["too few", "too many", "too few"])  # of a tokenizer that is loaded twice
        ]
        assert told == ["warning: too few\n", "warning: too many\n", ""]
    assert warnings.formatwarning is before


def test_a_run_without_four_bits_is_not_told_of_a_kernel_for_them(caplog: pytest.LogCaptureFixture) -> None:
    theirs = logging.getLogger("bitsandbytes.backends.cpu.ops")
    theirs.setLevel(logging.WARNING)  # workers of the tests have silenced it
    with quiet():
        theirs.warning("Failed to load CPU gemm_4bit_forward")
        theirs.error("broken")
    theirs.warning("later")
    assert [record.message for record in caplog.records] == ["broken", "later"]


def test_kernels_that_are_missing_are_named_once_on_a_gpu_and_are_not_spoken_of_on_a_cpu(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(MISSING_KERNELS, "packages", {})
    warning_once: Any = logging.Logger.warning_once  # pyrefly: ignore[missing-attribute]
    warning_once.cache_clear()
    with quiet():
        policy: Any = load_policy("tiny_hybrid")
        policy.generate(torch.tensor([[3, 4]]), max_new_tokens=2, do_sample=False)
    assert "falling back" not in caplog.text
    name = type(policy).__name__
    assert MISSING_KERNELS.sentence(name, "cpu") is None
    said = MISSING_KERNELS.sentence(name, "cuda")
    assert said is not None and said.startswith("Some layers of Qwen3_5ForCausalLM are computed in plain PyTorch")
    assert said.endswith("pip install causal_conv1d flash-linear-attention.")
    warning_once.cache_clear()
    policy(torch.tensor([[3, 4]]))
    older = Version(transformers.__version__) < Version("5.19")  # which do not say it again
    assert older or "falling back" in caplog.text  # not in this project's care any more


def test_a_run_is_not_told_of_the_default_config_of_idefics3(caplog: pytest.LogCaptureFixture) -> None:
    """transformers makes one whenever it prints the config of a policy of this family."""
    warning_once: Any = logging.Logger.warning_once  # pyrefly: ignore[missing-attribute]
    warning_once.cache_clear()
    with quiet():
        transformers.Idefics3Config()
        transformers.LlamaConfig(vocab_size=8, pad_token_id=9)
    assert "128002" not in caplog.text and "got 9" in caplog.text


def test_the_command_of_an_offline_run_names_the_folders_of_all_its_parts_in_order(tmp_path: Path) -> None:
    class Offline(WandbLogger):
        def __init__(self) -> None:
            settings = SimpleNamespace(sync_dir=str(tmp_path / "offline-run-20261126_120000-abc"))
            self._run = SimpleNamespace(offline=True, id="abc", settings=settings)

        @property
        def experiment(self) -> Any:
            return self._run

    names = ["offline-run-20261126_120000-abc", "offline-run-20261125_090000-abc", "offline-run-20261126_110000-other"]
    for name in names:
        (tmp_path / name).mkdir()
    trainer: Any = SimpleNamespace(loggers=[Offline()], max_steps=1)
    command = next(each for each in _commands(trainer, tmp_path, done=False) if each[0] == "wandb sync")
    assert command[1:] == [str(tmp_path / names[1]), str(tmp_path / names[0])]


@pytest.mark.parametrize(("is_terminal", "lines"), [(True, 3), (False, 1)])
def test_a_sentence_ends_its_lines_between_words_on_a_terminal_alone(
    is_terminal: bool, lines: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = io.StringIO()
    console = Console(file=file, width=120, force_terminal=is_terminal, color_system=None)
    monkeypatch.setattr(screen, "the_console", lambda: console)
    sentence = " ".join(f"word{number}" for number in range(40)) + "."
    screen.tell(sentence)
    said = file.getvalue()
    assert (
        said.split() == sentence.split()
        and said.count("\n") == lines
        and max(map(len, said.split("\n"))) <= (120 if is_terminal else len(sentence))
    )
