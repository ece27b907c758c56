"""Files from outside: only files are read, no more than is bounded, and fields have the types that are expected."""

import math
import os
import re
from pathlib import Path

import pytest
from typing_extensions import TypedDict

from lit_grpo.process.files import replace_file
from lit_grpo.process.inputs import (
    check_replaceable,
    read_input,
    read_json,
    read_lines,
    read_text,
    read_yaml,
    row_reader,
    typed,
)

CONTENTS = {  # content of a file, its reader, and what the sentence says
    "no JSON": (b'{"a": 1,\n "b": }', read_json, "Line 2 of {}.*is not JSON"),
    "deep JSON": (b"[" * 100_000, read_json, "nested too deeply"),
    "a long number": (b"9" * 10_000, read_json, "too many digits"),
    "no UTF-8": (b"abc\n\xff", read_text, "Line 2 of {} is not UTF-8"),
    "too long": (b"x" * 1001, lambda path: read_input(path, 1000), "MiB are read"),
    "no YAML": (b"a: 1\nb: ]\n", read_yaml, "Line 2 of {} is not YAML"),
    "deep YAML": (b"[" * 100_000, read_yaml, "Line 1 of {} is nested more than 64 deep"),
    "itself": (b"a: &a [*a]", read_yaml, "contains itself"),
    "laughs": (
        b"a0: &a0 [1, 1]\n" + b"".join(b"a%d: &a%d [*a%d, *a%d]\n" % (n, n, n - 1, n - 1) for n in range(1, 40)),
        read_yaml,
        "too many values",
    ),
    "a month": (b"a: 2026-13-01", read_yaml, "{} is not YAML: month must be in 1..12"),
    "an object": (b"a: !!python/object/apply:os.system [ls]", read_yaml, "Line 1 of {} is not YAML"),
}


@pytest.mark.parametrize("name", CONTENTS)
def test_content_that_cannot_be_read_is_refused(name: str, tmp_path: Path) -> None:
    content, read, sentence = CONTENTS[name]
    path = tmp_path / "given"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=sentence.format(re.escape(str(path)))):
        read(path)


def test_only_files_are_read_and_replaced(tmp_path: Path) -> None:
    pipe, link, folder, dangling = (tmp_path / name for name in ("pipe", "link", "folder", "dangling"))
    (tmp_path / "file").write_text("text")
    os.mkfifo(pipe)
    link.symlink_to("file")
    dangling.symlink_to("nowhere")
    folder.mkdir()
    for path, kind in ((pipe, "a pipe"), (folder, "a folder"), (Path("/dev/zero"), "a device")):
        with pytest.raises(ValueError, match=f"is {kind}, and not a file"):
            read_input(path)
    for path, kind in (
        (pipe, "a pipe"),
        (folder, "a folder"),
        (link, "a symbolic link"),
        (dangling, "a symbolic link"),
    ):
        with pytest.raises(ValueError, match=f"is {kind}, which is not replaced"):
            check_replaceable(path)
        with pytest.raises(ValueError, match="is not replaced"):
            replace_file(path, b"new")
    assert read_text(link) == "text"
    replace_file(tmp_path / "file", b"new")
    assert read_text(tmp_path / "file") == "new"


class Written(TypedDict):
    step: int
    reward: float
    names: list[str]


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        ([], "its value: input should be a valid dictionary"),
        ({"step": 1, "names": []}, "reward: field required; copy it again"),
        ({"step": "1", "reward": 1.0, "names": []}, r"step: input should be a valid integer \(it is '1'\)"),
        ({"step": True, "reward": 1.0, "names": []}, "step: input should be a valid integer"),
        ({"step": 1, "reward": "x", "names": [1]}, "reward: .*, and 1 more field likewise"),
        ({"step": 1, "reward": 1.0, "names": ["a", None]}, "names.1: input should be a valid string"),
    ],
)
def test_a_field_of_another_type_is_named(value: object, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        typed(value, Written, "rows.json", "copy it again")


def test_a_typed_value_is_the_value() -> None:
    given = {"step": 1, "reward": 2, "names": ["a"], "more": None}
    assert typed(given, Written, "rows.json", "copy it again") == {"step": 1, "reward": 2.0, "names": ["a"]}
    assert math.isnan(typed(math.nan, float, "a value", "copy it again"))


LINES = {  # a line, and the row or what is said of it
    "a row": (b'{"step": 1, "reward": 2, "names": []}\n', {"step": 1, "reward": 2.0, "names": []}),
    "half a surrogate pair": (
        b'{"step": 1, "reward": 2, "names": ["\\ud83d"]}',
        {"step": 1, "reward": 2, "names": ["\\xd83d"]},
    ),
    "a wrong type": (
        b'{"step": "1", "reward": 2, "names": []}',
        r"step: input should be a valid integer \(it is '1'\)",
    ),
    "half a row": (b'{"step": 1, "rew', "it is not JSON, EOF while parsing a string at column 16"),
    "deep": (b"[" * 100_000, "it is not JSON, recursion limit exceeded at column"),
    "a long number": (b'{"step": ' + b"9" * 10_000 + b"}", "it is not JSON, number out of range"),
    "no object": (b"[]", "its value: input should be an object"),
}


@pytest.mark.parametrize("name", LINES)
def test_a_line_is_a_row_or_says_what_is_wrong(name: str) -> None:
    line, wanted = LINES[name]
    read = row_reader(Written)
    if isinstance(wanted, dict):
        assert read(line) == wanted
    else:
        with pytest.raises(ValueError, match=wanted):
            read(line)


def test_lines_are_read_one_at_a_time_up_to_a_size(tmp_path: Path) -> None:
    path = tmp_path / "rows"
    path.write_bytes(b"one\ntwo\nend")
    assert list(read_lines(path)) == [b"one\n", b"two\n", b"end"] and list(read_lines(path, 6)) == [b"o\n", b"end"]
    with path.open("wb") as file:
        file.truncate(5 * 2**30)
    with pytest.raises(ValueError, match=f"Line 1 of {re.escape(str(path))} has more than 16 MiB"):
        list(read_lines(path))
