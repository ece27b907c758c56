"""Makes one HTML file of a template, a style, scripts and content."""

from __future__ import annotations

import html
import json
import re
from importlib import resources
from pathlib import Path
from typing import Any

from lit_grpo.process.files import replace_file
from lit_grpo.tools.dashboard.report.content import report_content
from lit_grpo.tools.dashboard.report.folder import read_folder

SCRIPTS = ("scales.js", "charts.js", "timeline.js", "completions.js", "page.js")


def write_report(folder: Path, output: Path | None = None) -> Path:
    """Write the report of a run, and return its path.

    Args:
        folder: Folder of the run.
        output: The file; by default ``report.html`` in the folder.

    Raises:
        ValueError: The folder has no run.
        OSError: The file cannot be written.
    """
    page = make_page(report_content(read_folder(folder)))
    path = output or folder / "report.html"
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, page.encode())
    return path


def make_page(content: dict[str, Any]) -> str:
    """Return the page; the content cannot end the element that holds it, because ``<`` is escaped in it."""
    data = json.dumps(content, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    data = data.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
    parts = {
        "TITLE": html.escape(content["name"]),
        "STYLE": _asset("report.css"),
        "SCRIPT": "\n".join(map(_asset, SCRIPTS)),
        "CONTENT": data,
    }
    return re.sub("@([A-Z]+)@", lambda place: parts[place[1]], _asset("report.html"))


def _asset(name: str) -> str:
    return resources.files("lit_grpo.tools.dashboard.report").joinpath("assets", name).read_text(encoding="utf-8")
