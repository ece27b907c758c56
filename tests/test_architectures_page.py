"""The page of architectures says what the newest result says, and no family is wrong in it."""

from __future__ import annotations

from pathlib import Path

from scripts.architectures_page import architectures_page, newest, newest_with_vllm

PAGE = Path(__file__).parents[1] / "docs" / "architectures.md"


def test_the_page_is_made_of_the_newest_results() -> None:
    assert PAGE.read_text() == architectures_page(newest(), newest_with_vllm()), (
        "run python -m scripts.architectures_page > docs/architectures.md"
    )
