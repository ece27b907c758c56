"""The help of a field: its type in short, and its first sentence."""

import ast
from argparse import SUPPRESS
from dataclasses import dataclass, field

import pytest
from test_docs import parsers

from lit_grpo.cli.parsing.declared import declared, type_name, written
from lit_grpo.cli.parsing.errors import InputParser
from lit_grpo.cli.parsing.help import OPTIONS, shortened, whole
from lit_grpo.cli.parsing.names import FIELDS


@pytest.mark.parametrize(
    ("hint", "name"),
    [
        ("int", "int"),
        ("bool | None", "true|false|null"),
        ("int | Literal['auto']", "int|auto"),
        ("Optional[Union[int, bool]]", "int|true|false|null"),
        ("list[int] | None", "[int,...]|null"),
        ("tuple[str, ...]", "[str,...]"),
        ("dict[str, Any]", "{NAME: VALUE}"),
        ("Callable[[Any], Any]", "CLASS"),
        ("Annotated[float, Limit(ge=2)]", "float"),
        ("Count | float", "int|float"),  # an alias of the module
        ("Path", "Path"),
    ],
)
def test_a_type_is_written_in_short(hint: str, name: str) -> None:
    assert type_name("lit_grpo.limits", ast.parse(hint, mode="eval").body) == name


def test_settings_in_the_help_are_those_of_the_parser_with_their_defaults() -> None:
    actions = {action.dest: action for action in parsers()["fit"]._actions if action.option_strings}
    hidden = {name for name in actions if name.endswith(".help")}
    hidden |= {name for name, action in actions.items() if type(action).__name__ in ("_ActionConfigLoad", "ActionLink")}
    shown = {setting.name: setting for group in declared() for setting in group.settings}
    shown |= {option.name: option for option in OPTIONS if option.name != "help-all"}
    assert actions.keys() - hidden - {SUPPRESS, "weights_only"} == shown.keys()
    for name, setting in shown.items():
        if setting.default and name not in FIELDS:
            assert setting.default == written(actions[name].default), name


LONG = (
    "Prompts of one batch (those of all ranks; see :class:`lit_grpo.data.Rows`), at most ``many``; a second clause "
    "that is long enough to be left out of the short help. A third one."
)


def test_a_long_help_ends_after_its_first_sentence() -> None:
    assert shortened(LONG) == (
        "Prompts of one batch (those of all ranks; see Rows), at most many; a second clause that is long enough to be "
        "left out of the short help. ..."
    )
    assert shortened("Short. And whole.") == "Short. And whole."
    assert whole(LONG).endswith("left out of the short help. A third one.")
    assert shortened("") == ""


@pytest.mark.parametrize(
    ("asked", "shown"),
    [
        ("--model.objective.help", "  --model.objective.loss str = dapo\n"),
        ("--rollout.help", "  --rollout.plan str = short_last\n"),
        ("--model.sampling.top_p.help", "  --model.sampling.top_p float = 1.0\n"),
        ("--trainer.help", "  --trainer.max_epochs "),
    ],
)
def test_the_help_of_a_group_or_a_field_is_asked_for_as_that_of_a_class(
    asked: str, shown: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="0"):
        parsers()["fit"].parse_args([asked])
    said = capsys.readouterr().out
    assert shown in said and "usage" not in said


def test_every_field_has_a_help() -> None:
    fields = [one for one in parsers()["fit"]._actions if one.option_strings and not one.dest.endswith(".help")]
    assert len(fields) > 150 and not [one.dest for one in fields if not (one.help or "").strip()]


@dataclass
class Inner:
    """A group within a group."""

    size: int = 1
    """Number of rows."""


@dataclass
class Outer:
    """Settings with their sentences under them."""

    name: str = "a"
    """Name of the table."""
    inner: Inner = field(default_factory=Inner)


@dataclass
class Listed:
    """Settings with their sentences above them.

    Args:
        width: Number of columns.
    """

    width: int = 1


class Judge:
    """A class that is no dataclass.

    Args:
        weight: Factor of the score.
    """

    def __init__(self, weight: float = 1.0) -> None:
        self.weight = weight


def test_a_fields_help_is_the_sentence_under_it_or_its_line_of_the_docstring() -> None:
    parser = InputParser()
    for name, kind in {"outer": Outer, "judge": Judge, "listed": Listed}.items():
        parser.add_class_arguments(kind, name)
    shown = {action.dest: action.help for action in parser._actions}
    assert shown["outer.name"] == "Name of the table."
    assert shown["outer.inner.size"] == "Number of rows."
    assert shown["judge.weight"] == "Factor of the score."
    assert shown["listed.width"] == "Number of columns."
