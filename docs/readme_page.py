"""A hook of mkdocs: the README is the site's page ``reference.md``, and links of the docs to it lead there."""

from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

README = Path(__file__).parents[1] / "README.md"


def on_files(files: Files, config: Any) -> Files:
    """Add the page, its links as seen from ``docs``."""
    text = README.read_text(encoding="utf-8").replace("](docs/", "](").replace("[examples/](examples)", "`examples/`")
    files.append(File.generated(config, "reference.md", content=text))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Point links to the README at the page."""
    return markdown.replace("](../README.md", "](reference.md")
