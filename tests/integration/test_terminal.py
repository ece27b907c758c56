"""What a user sees of a run, read from the screen of a terminal, and from a file."""

import json
import re
import signal
import sys
from pathlib import Path
from typing import Any

import forks
import pytest
from conftest import save_policy, table_rows
from terminals import run_on_terminal

TEMPLATE = "{% for turn in messages %}#{{ turn.content }}#{% endfor %}{% if add_generation_prompt %}a={% endif %}"
REWARDS = """
import logging, sys, warnings

handler = logging.StreamHandler(sys.stderr)
logging.getLogger("theirs").addHandler(handler)
NOISE = {noise}

def digits(completion, answer):
    global NOISE
    if NOISE:
        NOISE = False
        print("printed by a reward function, " + "x" * 30)
        warnings.warn("a reward function warns")
        logging.getLogger("theirs").warning("logged by a reward function")
    return sum(c.isdigit() for c in completion) / max(len(completion), 1)

def short(completion):
    return 1.0 if len(completion) < 20 else 0.0
"""

SLOW = """
import time
from lit_grpo.rollout.generator import StepEvents
from lit_grpo.rollout.slots import SlotGenerator

class Slow(SlotGenerator):
    def step(self) -> StepEvents:
        time.sleep(0.004)  # so that rollouts are seen, however fast the machine
        return super().step()
"""


@pytest.fixture
def chat_folder(tmp_path: Path) -> Path:
    """A random policy whose tokenizer has a chat template."""
    folder = tmp_path / "chat"
    save_policy(folder, template=TEMPLATE)
    return folder


def set_up(folder: Path, policy: Path, chat: bool = False, noise: bool = False, **trainer: Any) -> list[str]:
    """Write a task; return the arguments of its run."""
    asks = [f"{'please add ' * (12 if chat else 0)}{n}+{n + 1}=" for n in range(8)]
    allowed = set("0123456789+-*=# abcdefghijklmnop?")
    asks = ["".join(character for character in ask if character in allowed) for ask in asks]
    prompts: list[Any] = [[{"role": "user", "content": ask}] for ask in asks] if chat else asks
    rows = [{"prompt": prompt, "answer": str(2 * n + 1), "level": n} for n, prompt in enumerate(prompts)]
    held_out = [
        row | {"prompt": [{"role": "user", "content": f"{row['level']}-"}] if chat else f"{row['level']}-"}
        for row in rows
    ]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "held_out.jsonl").write_text("".join(json.dumps(row) + "\n" for row in held_out))
    (folder / "rewards.py").write_text(REWARDS.format(noise=noise))
    (folder / "slow.py").write_text(SLOW)
    config = {
        "run": {"name": "task"},
        "trainer": {"accelerator": "cpu", "max_steps": 3, "val_check_interval": 2, **trainer},
        "model": {
            "policy": str(policy),
            "generator": {
                "class_path": "slow.Slow",
                "init_args": {"num_slots": 8, "kv_memory": "64MiB"},
            },
            "rewards": [{"function": "rewards.py:digits"}, {"function": "rewards.py:short"}],
            "num_generations": 8,
            "sampling": {"max_tokens": 120},
        },
        "data": {"train": "prompts.jsonl", "validation": "held_out.jsonl", "batch_size": 4},
        "sample_logger": {"every_n_updates": 2},
        "checkpoint": {"every_n_updates": 1},
    }
    (folder / "config.yaml").write_text(json.dumps(config))
    return ["-m", "lit_grpo", "fit", "--config", "config.yaml"]


def check_texts(lines: list[str], columns: int, chat: bool, folder: Path) -> None:
    """What holds on a screen and in a file: a banner, the samples' ends, scores, and a card."""
    text = "\n".join(lines)
    assert lines[0].startswith("lit_grpo ") and "4 prompts x 8 completions, 8 slots, Slow, 3 updates" in text
    assert "warn" not in text.lower() and not re.search(r"\.py:\d+: ", text), text
    assert not [line for line in lines if len(line) > columns]
    assert re.search(r"^samples at update 1$", text, re.M) and re.search(r"^samples at update 2$", text, re.M)
    rows = [json.loads(line) for line in (folder / "runs/task/samples.jsonl").read_text().splitlines()]
    assert len(rows) == 8
    for row in rows:
        end = re.sub(r"\s", "", row["completion"])[-8:] or "(empty)"
        assert end in re.sub(r"\s", "", text)  # it may be folded
        assert f"digits {row['rewards/digits']:.3g}  short {row['rewards/short']:.3g}" in text
        assert f"advantage {row['advantage']:.3g}  {row['tokens']} tokens  {row['finish']}" in text
        assert re.search(rf"^  answer +{row['columns/answer']}$", text, re.M)
        assert re.search(rf"[^#]{re.escape(row['prompt'].split('#')[-2 if chat else 0][-4:])}$", text, re.M)
    assert [text.count(f"validation at update {update}") for update in range(4)] == [1, 0, 1, 1]
    assert re.search(r"^held-out samples at update 3, best and worst$", text, re.M)
    card = text[text.index("task: done") :]
    assert re.search(r"^pass@1 \(digits >= 1\) +\d.*% at update 0, \d.*% at update 3 \(best .*\)$", card, re.M)
    for part in ("by function, held out", "runs/task", "lit_grpo predict", "lit_grpo report runs/task", "lit_grpo fit"):
        assert part in card


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("columns", "lines", "chat"), table_rows([(80, 24, True), (120, 40, False)], [(80, 24, True)]), ids=["chat", "text"]
)
def test_a_terminal_shows_the_run_and_what_it_is_at(
    tmp_path: Path, policy_folder: Path, chat_folder: Path, columns: int, lines: int, chat: bool
) -> None:
    arguments = set_up(tmp_path, chat_folder if chat else policy_folder, chat)
    seen = run_on_terminal(arguments, columns, lines, tmp_path)
    assert seen.code == 0, seen.raw[-3000:]
    assert seen.longest <= columns
    check_texts(seen.final, columns, chat, tmp_path)
    updates = seen.lines(r"^updates [123]/3 .*━.*─  reward -?\d\S*  pass@1 \d.*% at update \d  .*s left$")
    assert updates, seen.lines("^updates")
    assert seen.lines(r"^rewards  digits \d\S*  short \d\S*$"), seen.lines("^rewards")
    rollouts = seen.lines(r"^rollout \d+/32 completions .* [1-8]/8 slots  \S+ tokens/s  \d+ s to go  [\d.]+ GiB$")
    assert rollouts, seen.lines("^rollout")
    assert seen.lines(r"^validation \d+/8 completions .* [1-8]/8 slots")
    assert seen.lines(r"^(learning|getting ready|sending weights) \d+ s  \S+ tokens/s  [\d.]+ GiB$")
    assert not [line for line in seen.final if line.startswith(("updates 1", "rollout", "learning"))]  # they are gone


@pytest.mark.parametrize("chat", table_rows([False, True], [False]), ids=["text", "chat"])
def test_a_file_has_a_line_an_update_and_no_control_sequences(
    tmp_path: Path, policy_folder: Path, chat_folder: Path, chat: bool
) -> None:
    arguments = set_up(tmp_path, chat_folder if chat else policy_folder, chat)
    with (tmp_path / "out.txt").open("w") as file:
        assert forks.Forked([sys.executable, *arguments], stdout=file, stderr=file, cwd=tmp_path).wait(300) == 0
    text = (tmp_path / "out.txt").read_text()
    assert not re.search(r"[\r\x1b\x07]", text)
    lines = text.splitlines()
    assert lines == [line.rstrip() for line in lines]
    check_texts(lines, 122, chat, tmp_path)  # the time left of a busy machine may be long
    updates = [line for line in lines if line.startswith("update ")]
    reward = r"reward -?[\d.e-]+ \(digits [\d.e-]+, short [\d.e-]+\)"
    pattern = rf"update {{}}/3  {reward}  pass@1 [\d.]+% at update {{}}  \S+ tokens/s  [\d.]+ GiB{{}}"
    for number, (line, left) in enumerate(zip(updates, (r"  \d+ s left", r"  \d+ s left", ""), strict=True), start=1):
        validated = 0 if number < 3 else 2  # the newest by then: that of update 2 follows its line
        assert re.fullmatch(pattern.format(number, validated, left), line), line


@pytest.mark.nightly
def test_what_others_print_comes_out_whole_and_a_stopped_run_has_its_card(tmp_path: Path, policy_folder: Path) -> None:
    arguments = set_up(tmp_path, policy_folder, noise=True, max_steps=200, val_check_interval=200)
    seen = run_on_terminal(arguments, 80, 24, tmp_path, "updates 2/200", signal.SIGINT)
    assert seen.code == 130, seen.raw[-3000:]
    assert seen.longest <= 80
    text = "\n".join(seen.final)
    for whole in ("printed by a reward function, " + "x" * 30, "logged by a reward function"):
        assert whole in seen.final, text
    assert "warning: a reward function warns" in seen.final
    card = text.index("task: stopped")
    assert re.search(r"^updates +[23] in \d+ s", text[card:], re.M)
    said = "goes on"
    assert text.count(said) == 1 and text.index(said) < card
    assert "lit_grpo fit" not in text[card:] and "lit_grpo report runs/" in text[card:]


@pytest.mark.nightly
def test_without_a_progress_bar_banner_samples_and_card_stay(tmp_path: Path, policy_folder: Path) -> None:
    arguments = [*set_up(tmp_path, policy_folder), "--trainer.enable_progress_bar", "false"]
    done = forks.run([sys.executable, *arguments], 300, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "policy  " in done.stdout and "samples at update 2" in done.stdout and "task: done" in done.stdout
    assert "update 1/3" not in done.stdout and "validation at" not in done.stdout
