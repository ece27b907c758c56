"""What the table of samples prints."""

from types import SimpleNamespace
from typing import Any

import pytest

from lit_grpo.callbacks import SampleLogger

ROW: dict[str, Any] = {"prompt": "[bold]1[/bold]", "tokens": 3, "finish": "stop", "reward": 1.0}


def printed(completion: str, capsys: pytest.CaptureFixture[str]) -> str:
    trainer: Any = SimpleNamespace(progress_bar_callback=None)
    SampleLogger()._print(trainer, 0, [ROW | {"completion": completion}])
    return capsys.readouterr().out


@pytest.mark.parametrize(
    ("completion", "shown"),
    [
        ("\x1b[2Jgone", r"\x1b[2Jgone"),
        ("\x1b]52;c;aGk=\x07", r"\x1b]52;c;aGk=\x07"),
        ("\x1b]8;;http://a\x1b\\x", r"\x1b]8;;http://a\x1b\x"),
        ("\x9b31m", r"\x9b31m"),
        ("a\rb\x08", r"a\x0db\x08"),
        ("\u202eabc", r"\x202eabc"),
    ],
)
def test_control_sequences_of_a_completion_are_shown_and_not_obeyed(
    completion: str, shown: str, capsys: pytest.CaptureFixture[str]
) -> None:
    out = printed(completion, capsys)
    assert shown in out
    assert not any(character < " " and character != "\n" for character in out) and "\x9b" not in out


def test_markup_is_text(capsys: pytest.CaptureFixture[str]) -> None:
    out = printed("[red]a[/red] [/x]", capsys)
    assert "[red]a[/red] [/x]" in out and "[bold]1[/bold]" in out
