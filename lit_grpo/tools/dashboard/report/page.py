"""Makes one HTML file of a template, a style, scripts and content."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from datetime import datetime
from importlib import resources
from pathlib import Path
from typing import Any

from lit_grpo.process.files import replace_file
from lit_grpo.process.inputs import check_replaceable
from lit_grpo.process.terminal import html_text, say, visible
from lit_grpo.tools.dashboard.report.comparison import comparison, labels
from lit_grpo.tools.dashboard.report.content import report_content
from lit_grpo.tools.dashboard.report.folder import RunRecords, read_folder

SCRIPTS = ("scales.js", "charts.js", "timeline.js", "completions.js", "memory.js", "comparison.js", "page.js")


def write_report(runs: Path | Sequence[Path], output: Path | None = None) -> Path:
    """Write the report of one run, or of several, and return its path; print what could not be read.

    Args:
        runs: Folder of the run, or the folders of several runs, which are compared.
        output: The file. By default it is ``report.html`` in the run's folder; for several runs, in the folder that
            holds the first one.

    Raises:
        ValueError: A folder has no run, or is given twice, or ``output`` is no file.
        OSError: The file cannot be written.
    """
    folders = [runs] if isinstance(runs, Path) else list(runs)
    if output is not None:
        check_replaceable(output)
    records = read_folders(folders)
    page = make_page(page_content(records))
    path = output or default_path(folders)
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, page.encode("utf-8", "replace"))
    for run in records:
        for sentence in run.problems.values():
            say(sentence)
    return path


def read_folders(folders: Sequence[Path]) -> list[RunRecords]:
    """Read the records of the runs of a report.

    Raises:
        ValueError: A folder has no run, or is given twice.
    """
    places = [os.path.realpath(each) for each in folders]  # a loop of links is a place too
    for number, each in enumerate(folders):
        if places[number] in places[:number]:
            raise ValueError(f"The run {str(each)!r} is given twice; give each run once.")
    return [read_folder(each, may_be_new=len(folders) > 1) for each in folders]


def default_path(folders: Sequence[Path]) -> Path:
    return (folders[0].resolve().parent if len(folders) > 1 else folders[0]) / "report.html"


def page_content(runs: Sequence[RunRecords]) -> dict[str, Any]:
    """Return everything that the page of one run or of several shows."""
    names, several = labels(runs), len(runs) > 1
    return {
        "title": f"{len(runs)} runs: {', '.join(names)}" if several else names[0],
        "written": f"{datetime.now():%Y-%m-%d %H:%M}",
        "runs": [report_content(run, name, len(runs)) for run, name in zip(runs, names, strict=True)],
        "comparison": comparison(runs) if several else None,
    }


def make_page(content: dict[str, Any]) -> str:
    """Return the page; the content cannot end the element that holds it, because ``<`` is escaped in it.

    The page's script writes all of it as text, never as HTML; control characters in it are made visible.
    """
    data = json.dumps(_visible(content), separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    data = data.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
    parts = {
        "TITLE": html_text(content["title"]),
        "STYLE": _asset("report.css"),
        "SCRIPT": "\n".join(map(_asset, SCRIPTS)),
        "CONTENT": data,
    }
    return re.sub("@([A-Z]+)@", lambda place: parts[place[1]], _asset("report.html"))


def _visible(value: Any) -> Any:
    """Return plain values with all of their texts made visible."""
    if isinstance(value, dict):
        return {visible(name): _visible(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_visible(each) for each in value]
    return visible(value) if isinstance(value, str) else value


def _asset(name: str) -> str:
    return resources.files("lit_grpo.tools.dashboard.report").joinpath("assets", name).read_text(encoding="utf-8")
