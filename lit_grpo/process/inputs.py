"""Files that this program did not write itself: read if they are files, bounded, and typed before they are used."""

from __future__ import annotations

import functools
import json
import os
import re
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, ClassVar, TypeVar

import yaml

from lit_grpo.process.terminal import counted, visible

if TYPE_CHECKING:
    from pydantic import TypeAdapter, ValidationError

MOST_BYTES = 64 * 2**20
"""The size in bytes up to which a file is read as a whole, unless its reader says otherwise."""
MOST_LINE = 16 * 2**20
"""The size in bytes up to which a line is read."""
MOST_DEPTH, MOST_VALUES = 64, 1_000_000
"""The depth of the values of a YAML file, and their number with all aliases written out, at most."""
UNREADABLE_YAML = (yaml.YAMLError, ValueError, OverflowError, AttributeError, RecursionError)
"""The errors that PyYAML raises about a text: its own, and those of numbers, dates and nesting that it lets pass."""
Form = TypeVar("Form")


def open_input(path: Path) -> IO[bytes]:
    """Open a file to read.

    Raises:
        ValueError: It is no regular file: a pipe would be waited for, and a device has no end.
        OSError: It is not there, or may not be read.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a pipe that nobody writes to opens too
    kind = os.fstat(descriptor).st_mode
    if stat.S_ISREG(kind):
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    raise ValueError(f"{path} is {kind_of(kind)}, and not a file; give the path of a file.")


def read_input(path: Path, most: int = MOST_BYTES) -> bytes:
    """Read a whole file.

    Args:
        path: Path of the file to read.
        most: The number of bytes that it may have.

    Raises:
        ValueError: It is no regular file, or has more bytes.
        OSError: It is not there, or may not be read.
    """
    with open_input(path) as file:
        data = file.read(most + 1)
    if len(data) > most:
        size = path.stat().st_size / 2**20
        raise ValueError(
            f"{path} has {size:,.0f} MiB, and at most {most / 2**20:,.0f} MiB are read; give another file."
        )
    return data


def read_text(path: Path, most: int = MOST_BYTES) -> str:
    """Read a whole file as UTF-8, like ``read_input``; what is no UTF-8 raises a ValueError that names the place."""
    data = read_input(path, most)
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ValueError(
            f"Line {line} of {path} is not UTF-8 (byte 0x{data[error.start]:02x}); save the file as UTF-8."
        ) from None


def read_lines(path: Path, begin: int = 0) -> Iterator[bytes]:
    """Yield the lines of a file with their ends; the last one may lack its end. No more than a line is in memory.

    Args:
        path: Path of the file to read line by line.
        begin: The byte to begin at.

    Raises:
        ValueError: It is no regular file, or a line has more than ``MOST_LINE`` bytes.
        OSError: It is not there, or may not be read.
    """
    with open_input(path) as file:
        file.seek(begin)
        number = 0
        while line := file.readline(MOST_LINE + 1):
            number += 1
            if len(line) > MOST_LINE:
                place = f"Line {number} of {path}" if begin == 0 else f"A line of {path}"
                raise ValueError(f"{place} has more than {MOST_LINE / 2**20:.0f} MiB; mend the file, or copy it again.")
            yield line


def read_json(path: Path, most: int = MOST_BYTES) -> Any:
    """Read a JSON file, like ``read_text``; what is no JSON raises a ValueError that names the line."""
    text = read_text(path, most)
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"Line {error.lineno} of {path} is not JSON: {error.msg}; mend the file, or copy it again."
        ) from None
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, or thousands of brackets
        why = "it is nested too deeply" if isinstance(error, RecursionError) else "a number has too many digits"
        raise ValueError(f"{path} is not read as JSON: {why}; mend the file, or copy it again.") from None


def read_yaml(path: Path, most: int = MOST_BYTES) -> Any:
    """Read a YAML file of plain values, like ``read_text``.

    Raises:
        ValueError: It is no YAML, its values contain themselves or are nested too deeply, or its aliases stand for more
            values than memory should hold.
    """
    text = read_text(path, most)
    with _told(path):
        node = _composed(text, path, yaml.CSafeLoader, MOST_VALUES)
        return None if node is None else yaml.CSafeLoader("").construct_document(node)


class _WithoutDates(yaml.CSafeLoader):
    """Reads a date as text, as jsonargparse does."""

    yaml_implicit_resolvers: ClassVar = {  # pyrefly: ignore[bad-override]
        first: [(tag, pattern) for tag, pattern in resolvers if not tag.endswith("timestamp")]
        for first, resolvers in yaml.CSafeLoader.yaml_implicit_resolvers.items()
    }


def compose_config(path: Path, most_values: int) -> yaml.Node | None:
    """Return the nodes of a YAML file whose values can be read, dates as text, and None of an empty one.

    Args:
        path: Path of the YAML file to read.
        most_values: The number of values up to which it is read, with all aliases written out.
    """
    text = read_text(path)
    with _told(path):
        node = _composed(text, path, _WithoutDates, most_values)
        if node is not None:
            _WithoutDates("").construct_document(node)
            return yaml.compose(text, Loader=yaml.CSafeLoader)  # merging has changed the first one
    return None


class _Bounds(ValueError):
    """A file has more than memory should hold."""


@contextmanager
def _told(path: Path) -> Iterator[None]:
    """Raise a ValueError that names the file and line of what PyYAML cannot read."""
    try:
        yield
    except _Bounds:
        raise
    except UNREADABLE_YAML as error:
        mark = getattr(error, "problem_mark", None)
        place = f"Line {mark.line + 1} of {path}" if mark is not None else str(path)
        said = "a value does not fit its tag" if isinstance(error, AttributeError) else getattr(error, "problem", error)
        raise ValueError(f"{place} is not YAML: {str(said).splitlines()[0]:.100}; mend the file.") from None


def _composed(text: str, path: Path, loader: type[Any], most_values: int) -> yaml.Node | None:
    """Return the nodes of a YAML text that is neither nested too deeply nor has too many values."""
    depth = number = 0
    for event in yaml.parse(text, Loader=yaml.CSafeLoader):  # the loader itself calls itself for each level
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        number += isinstance(event, yaml.NodeEvent)
        if depth > MOST_DEPTH or number > most_values:
            why = f"is nested more than {MOST_DEPTH} deep" if depth > MOST_DEPTH else "has too many values"
            raise _Bounds(f"Line {event.start_mark.line + 1} of {path} {why}; mend the file.")
    node = yaml.compose(text, Loader=loader)
    depth, number = (0, 0) if node is None else _extent(node, {}, set())
    if depth > MOST_DEPTH or number > most_values:
        why = "contains itself or is nested too deeply" if depth > MOST_DEPTH else "stands for too many values"
        raise _Bounds(f"{path} has an alias (*) whose value {why}; write the values out.")
    return node


def _extent(node: yaml.Node, known: dict[int, tuple[int, int]], above: set[int]) -> tuple[int, int]:
    """Return the depth and the number of values of a node with its aliases replaced; no end if it contains itself."""
    if isinstance(node, yaml.ScalarNode):
        return 0, 1
    if id(node) in above:
        return MOST_DEPTH + 1, 1
    if id(node) not in known:
        above.add(id(node))
        inner = [one for each in node.value for one in (each if isinstance(each, tuple) else (each,))]
        extents = [_extent(one, known, above) for one in inner]
        deepest = 1 + max((depth for depth, _ in extents), default=0)
        known[id(node)] = deepest, 1 + sum(number for _, number in extents)
        above.remove(id(node))
    return known[id(node)]


def typed(value: Any, form: type[Form], place: str, remedy: str) -> Form:
    """Return a value that was read from a file in the form that its user expects.

    Args:
        value: Plain values: dicts, lists, text and numbers.
        form: A TypedDict of ``typing_extensions``, a dataclass or another type that pydantic knows. A text does not
            stand for a number, nor a number for a text; ``pydantic.FiniteFloat`` also refuses NaN and infinity.
        place: What the value is, such as the path of its file.
        remedy: What the user can do, without the full stop.

    Returns:
        The value; unknown keys of a TypedDict are dropped.

    Raises:
        ValueError: A field is missing or has another type; named are the first such field, its value, and how many
            there are.
    """
    import pydantic

    try:
        return reader_of(form).validate_python(value, strict=True)
    except pydantic.ValidationError as error:
        raise ValueError(f"{place} is not as expected: {_first_wrong(error)}; {remedy}.") from None


@functools.cache
def reader_of(form: Any) -> TypeAdapter[Any]:
    """Return pydantic's reader of a form, the same one each time, because it takes milliseconds to make."""
    import pydantic  # takes a tenth of a second

    return pydantic.TypeAdapter(form)


def row_reader(form: Any) -> Callable[[bytes], Any]:
    """Return a function that reads a line of JSON in a form, in half the time that ``json.loads`` takes for any.

    Args:
        form: As for ``typed``, or an annotated form, whose validators may refuse a row with a ValueError.

    Returns:
        A function of the line that returns the row, half a surrogate pair in it as ``visible`` writes it. The function
        raises a ValueError that says what is wrong, as a part of a sentence without the place.
    """
    import pydantic

    adapter = pydantic.TypeAdapter(form)

    def read(line: bytes) -> Any:
        try:
            return adapter.validate_json(line, strict=True)
        except pydantic.ValidationError as error:
            wrong = error
        if wrong.errors(include_url=False)[0]["type"] != "json_invalid":
            raise ValueError(_first_wrong(wrong))
        try:  # half of a surrogate pair, which JSON allows, and which our own rows have
            told = json.loads(line) if b"\\ud" in line.lower() else None
            text = re.sub("[\ud800-\udfff]", lambda half: f"\\{visible(half[0])}", json.dumps(told, ensure_ascii=False))
            return adapter.validate_json(text, strict=True)
        except (ValueError, RecursionError):
            why = wrong.errors(include_url=False)[0]["msg"].removeprefix("Invalid JSON: ")
            raise ValueError(f"it is not JSON, {why.replace(' at line 1 column', ' at column')}") from None

    return read


def _first_wrong(error: ValidationError) -> str:
    """Name the first field that is wrong, its value, and how many there are."""
    first, *others = error.errors(include_url=False)
    field = ".".join(map(str, first["loc"])) or "its value"
    what = first["msg"][0].lower() + first["msg"][1:]
    shown = "" if first["type"] == "missing" else f" (it is {first['input']!r:.60})"
    more = f", and {counted(len(others), 'more field')} likewise" if others else ""
    return f"{field}: {what}{shown}{more}"


def check_replaceable(path: Path) -> None:
    """Refuse to write a file in the place of what is no regular file."""
    try:
        kind = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISREG(kind):
        raise ValueError(f"{path} is {kind_of(kind)}, which is not replaced; give the path of a file or a new one.")


def kind_of(mode: int) -> str:
    """Name the kind of a file, as ``os.stat`` tells it."""
    names = {
        stat.S_ISREG: "a file",
        stat.S_ISDIR: "a folder",
        stat.S_ISLNK: "a symbolic link",
        stat.S_ISFIFO: "a pipe",
        stat.S_ISSOCK: "a socket",
    }
    return next((name for holds, name in names.items() if holds(mode)), "a device")
