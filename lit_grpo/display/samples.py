"""Sampled completions, folded to the width of the terminal."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from lit_grpo.process.terminal import counted, visible

LINES = {"prompt": (3, 0), "completion": (6, 2), "reference": (2, 1)}
"""For each text the most lines, and how many of them show the beginning of a longer text; its end is always shown."""
LEAST_WIDTH = 10


class Sample(NamedTuple):
    """A completion with its rewards.

    ``rewards`` has the value of each function, and ``reference`` the columns of the data that functions compare with.
    """

    prompt: str
    completion: str
    tokens: int
    finish: str
    reward: float
    advantage: float
    rewards: Mapping[str, float | None]
    reference: Mapping[str, Any]


class Samples:
    """A block of lines for each sample, folded to the width of the terminal.

    Args:
        title: Title, printed on the first line.
        samples: The samples to show.
    """

    def __init__(self, title: str, samples: Sequence[Sample]) -> None:
        self.title, self.samples = title, samples

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the lines."""
        yield Text(visible(self.title), "bold")
        for sample in self.samples:
            yield Text(_head(sample), "cyan")
            texts = {"prompt": sample.prompt, "completion": sample.completion}
            texts |= {name: _line(value) for name, value in sample.reference.items()}
            label = min(max(len(name) for name in texts), options.max_width // 3)
            width = max(options.max_width - label - 4, LEAST_WIDTH)
            for name, text in texts.items():
                lines = ends(console, text, width, *LINES.get(name, LINES["reference"]))
                for number, line in enumerate(lines):
                    margin = visible(name)[:label] if number == 0 else ""
                    yield Text(no_wrap=True, overflow="crop").append(f"  {margin:{label}}  ", "dim").append_text(line)


def transcript(messages: Sequence[Mapping[str, Any]]) -> str:
    """Return a conversation as text: each message after its role, and calls as ``name(argument=value)``."""
    lines: list[str] = []
    for message in messages:
        calls = [call["function"] for call in message.get("tool_calls", ())]
        called = (
            f"{call['name']}({', '.join(f'{name}={value!r}' for name, value in call['arguments'].items())})"
            for call in calls
        )
        said = " ".join(filter(None, (message.get("reasoning_content"), as_text(message["content"]), *called)))
        lines.append(f"{message['role']}: {said}")
    return "\n".join(lines)


def as_text(content: str | Sequence[Mapping[str, Any]] | None) -> str:
    """Return the content of a message, in which an image is written ``(image)``."""
    return content or "" if isinstance(content, str | None) else "".join(_.get("text", "(image)") for _ in content)


def ends(console: Console, text: str, width: int, most: int, head: int) -> list[Text]:
    """Fold a text; if it has more than ``most`` lines, keep ``head`` lines of its beginning, and its end.

    Args:
        console: The console that will print the text.
        text: The text; control characters in it are made visible, and empty lines left out.
        width: The most columns of a line.
        most: Max number of lines.
        head: Number of lines from the beginning. The line after them has the number of characters that are left out.
    """
    reach = 2 * width * most  # so many characters are enough to fill all lines from either end
    if len(text) > 2 * reach:
        first, last = _fold(console, text[:reach], width), _fold(console, text[-reach:], width)
    else:
        first = last = _fold(console, text, width)
        if len(first) <= most:
            return first
    kept = [*first[:head], *last[len(last) - (most - head - 1) :]]
    left_out = len(text) - sum(len(line) for line in kept)
    return [*kept[:head], Text(f"... {left_out} characters ..."[:width], "dim"), *kept[head:]]


def _fold(console: Console, text: str, width: int) -> list[Text]:
    lines = [Text(line) for line in visible(text.expandtabs(4)).split("\n") if line.strip()]
    folded = [part for line in lines for part in line.wrap(console, width, overflow="fold")]
    for part in folded:
        part.rstrip()
    return folded or [Text("(empty)", "dim")]


def _head(sample: Sample) -> str:
    advantage = "" if math.isnan(sample.advantage) else f"  advantage {sample.advantage:.3g}"
    each = "".join(f"  {visible(name)} {_number(value)}" for name, value in sample.rewards.items())
    each = each if len(sample.rewards) > 1 else ""
    return f"reward {sample.reward:.3g}{each}{advantage}  {counted(sample.tokens, 'token')}  {sample.finish}"


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.3g}"


def _line(value: Any) -> str:
    return value if isinstance(value, str) else repr(value)
