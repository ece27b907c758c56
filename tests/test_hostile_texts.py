"""Texts of others, in every place that shows them: shown as they stand, and never obeyed."""

from __future__ import annotations

import html
import io
import json
import re
import subprocess
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from conftest import table_rows
from lit_grpo.callbacks.sample_logger import _markdown as table_of_a_logger  # pyrefly: ignore[missing-import]
from made_runs import make_run
from markdown_it import MarkdownIt
from rich.console import Console

from lit_grpo.display.cards import Card, near
from lit_grpo.display.samples import Sample, Samples
from lit_grpo.process.terminal import code_span, fenced, markdown, one_line, say, shell, visible
from lit_grpo.tools.dashboard.report import write_report
from lit_grpo.tools.evaluation.figures import Figure
from lit_grpo.tools.evaluation.held_out import Scored
from lit_grpo.tools.evaluation.picture import draw
from lit_grpo.tools.evaluation.side_by_side import side_by_side
from lit_grpo.tools.finishing.picture import draw_curves

TEXTS = {
    "formula": r"a$\frac$b",
    "one dollar": r"cost $5 \$ {x}",
    "element": "<img src=x onerror=alert(1)>",
    "end of a script": "</script><script>alert(1)</script>",
    "link": "[x](javascript:alert(1)) ![y](z) https://a.b www.a.b @owner",
    "back-ticks": "`a` ``b`` ```c\n```\n# d",
    "table": "a | b\n|---|---|\n| c",
    "entity": "&lt;b&gt; &#60; & \"q\" 'r'",
    "emphasis": "*a* _b_ __c__ ~~d~~ a_b #e",
    "shell": "x;touch PWNED",
    "substitution": "$(touch PWNED) `touch PWNED` ${HOME} 'a' \"b\" !! \\",
    "option": "-rf --help",
    "lines": "a\nb\r\nc\u2028d\x0be\tf",
    "escapes": "\x1b[2J\x1b]52;c;aGk=\x07\x9b31m\x1b]8;;http://a\x1b\\x\x00",
    "direction": "\u202eabc\u2066d\u2069\u200f\u061c",
    "no text": "\ud800 \ufffe\uffff",
    "underscore": "_hidden",
    "empty": "",
    "blank": "  two  blanks ",
    "wide": "答案" * 3,
    "long": "y" * 300,
    "rich": "[bold]a[/bold] [link=x]b :smile:",
}
QUICK = ("formula", "element", "link", "back-ticks", "escapes", "direction", "lines")
OBEYED = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""The characters that a terminal obeys, line ends and tabs aside."""
texts = pytest.mark.parametrize("name", table_rows(TEXTS, QUICK))


def shown(markup: str) -> str:
    """The text that a reader of a page sees; an element in it is an error."""
    return html.unescape(re.sub(r"</?(?:p|h1|pre|code|table|thead|tbody|tr|th|td|em|strong)\b[^>]*>", "", markup))


def rendered(text: str) -> str:
    return MarkdownIt("gfm-like", {"html": True, "linkify": False}).render(text)


@texts
@pytest.mark.parametrize("place", ["# {}", "| {} | b |\n|---|---|\n| c | {} |", "The name is {}."])
def test_markdown_shows_a_text_as_it_stands(place: str, name: str) -> None:
    text = markdown(TEXTS[name])
    page = rendered(place.replace("{}", text))
    tags = set(re.findall(r"<(\w+)", page))
    assert tags <= {"p", "h1", "table", "thead", "tbody", "tr", "th", "td"}, page
    assert one_line(TEXTS[name]) in shown(page) and not OBEYED.search(text)


@texts
def test_code_of_markdown_shows_a_text_as_it_stands(name: str) -> None:
    block = rendered(fenced(TEXTS[name]))
    assert re.findall(r"<(\w+)", block) == ["pre", "code"]
    assert shown(block).removesuffix("\n\n") == visible(TEXTS[name]).replace("\r\n", "\n").replace("\x00", "\ufffd")
    page = rendered(f"| a | {code_span(TEXTS[name])} |\n|---|---|\n")
    assert page.count("<th>") == 2 and not re.search(r"<(?:img|a|script)\b", page)


@texts
def test_a_shell_reads_a_text_as_one_word(name: str, tmp_path: Path) -> None:
    word = shell(TEXTS[name])
    assert "\n" not in word and not OBEYED.search(word)
    if name == "no text" or "\x00" in TEXTS[name]:
        return  # no path can have these
    said = subprocess.run(["bash", "-c", f"printf '%s|' {word} end"], cwd=tmp_path, capture_output=True, check=True)
    assert said.stdout.decode() == f"{TEXTS[name]}|end|" and not list(tmp_path.iterdir())


def on_a_terminal(show: Callable[[Console], None], width: int = 80) -> str:
    file = io.StringIO()
    show(
        Console(
            file=file, width=width, markup=False, highlight=False, emoji=False, force_terminal=True, color_system=None
        )
    )
    return file.getvalue()


@texts
def test_a_terminal_obeys_no_text(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = TEXTS[name]
    say(f"Settings: {text}")
    card = Card(f"{text}: done", {"updates": text, text or "x": "1"}, [["report", near(text or "x")]])
    sample = Sample(text, text, 3, "stop", 1.0, 0.5, {text: 1.0, "b": None}, {text: text})
    said = capsys.readouterr().out + on_a_terminal(lambda it: it.print(card, Samples(text, [sample])))
    assert not OBEYED.search(said.replace("\x1b[0m", "")), repr(said)


FIGURES = {"greedy": {"accuracy": Figure(0.5, 0.2, 0.8)}}


@texts
def test_pictures_show_a_text_as_it_stands(name: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    told = one_line(TEXTS[name])
    picture = ElementTree.fromstring(draw({TEXTS[name]: FIGURES, "other": FIGURES}))
    found = ["".join(each.itertext()) for each in picture.iter("{http://www.w3.org/2000/svg}text")]
    assert told in [each.strip() for each in found] or not told
    run = make_run(tmp_path / "run", updates=3, names=["reward", "val/pass@1"])
    table = (run / "metrics.csv").read_text()
    (run / "metrics.csv").write_text(table.replace("val/pass@1", "val/pass@$\\frac$"))
    from lit_grpo.tools.dashboard.report import read_folder

    assert draw_curves(read_folder(run), tmp_path / "curves.png", 3)


class Elements(HTMLParser):
    """The elements of a page, and its text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.add(tag)

    def handle_data(self, data: str) -> None:
        self.text += data


@texts
def test_pages_show_a_text_as_it_stands(name: str, tmp_path: Path) -> None:
    text = TEXTS[name]
    one = Scored(text, text, text, True, 0, text, 1.0, True, text, 3, False, {text: text})
    page = Elements(side_by_side({text: [one], f"{text} ": [one]}, text))
    allowed = "html head meta title style body h1 h2 p table thead tbody tr th td small pre br span"
    assert page.tags <= set(allowed.split()) and visible(text) in page.text
    run = make_run(tmp_path / "run", updates=2, names=["reward"])
    (run / "metrics.csv").write_text(
        f'step,reward,"mine/{text.replace(chr(34), "")}"\n1,1,2\n2,1,3\n', errors="replace"
    )
    row = {"step": 1, "prompt_id": text, "prompt": text, "completion": text, "reward": 1e308, f"rewards/{text}": 1.0}
    for file in ("samples.jsonl", "val_samples.jsonl"):
        (run / file).write_text(json.dumps(row) + "\n")
    (run / "config.yaml").write_text(json.dumps({"model": {"policy": text, "rewards": [{"function": text}]}}))
    written = write_report(run).read_text()
    report = Elements(written)
    assert report.tags == {"html", "head", "meta", "link", "title", "style", "body", "noscript", "script"}
    assert written.count("</script>") == 2 and not OBEYED.search(written)
    (content,) = re.findall(r'<script type="application/json" id="content">(.*?)</script>', written, re.DOTALL)
    assert json.loads(content)["runs"][0]["samples"][0]["completion"] == visible(text)


@texts
def test_the_table_of_a_logger_has_one_row_for_each_sample(name: str) -> None:
    page = rendered(table_of_a_logger([{"a": TEXTS[name], "b": 1.0}, {"a": "x", "b": 2.0}]))
    assert page.count("<tr>") == 3 and not re.search(r"<(?:img|a|script|em|code)\b", page)
