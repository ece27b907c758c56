"""The help of a field: its type in short, and its first clauses."""

from collections.abc import Callable
from typing import Any, Literal

import pytest

from lit_grpo.cli.parsing.early import HELP
from lit_grpo.cli.parsing.help import WIDTH, shortened, type_name, whole


@pytest.mark.parametrize(
    ("hint", "name"),
    [
        (int, "int"),
        (bool | None, "true|false|null"),
        (int | Literal["auto"], "int|auto"),
        (list[int] | None, "[int,...]|null"),
        (tuple[str, ...], "[str,...]"),
        (dict[str, Any], "{NAME: VALUE}"),
        (Callable[[Any], Any], "CLASS"),
    ],
)
def test_a_type_is_written_in_short(hint: Any, name: str) -> None:
    assert type_name(hint) == name


LONG = (
    "Prompts of one batch (those of all ranks; see :class:`lit_grpo.data.Rows`), at most ``many``; a second clause "
    "that is long enough to be left out of the short help. A third one."
)


def test_a_long_help_ends_after_its_first_clauses() -> None:
    assert shortened(LONG) == "Prompts of one batch (those of all ranks; see Rows), at most many ..."
    assert shortened("Short. And whole.") == "Short. And whole."
    assert whole(LONG).endswith("left out of the short help. A third one.")
    assert shortened("") == ""


def test_the_help_of_fit_is_short_and_fits_a_terminal() -> None:
    lines = HELP.read_text().splitlines()
    assert len(lines) <= 350
    assert not [line for line in lines if len(line) > WIDTH and "|" not in line]
