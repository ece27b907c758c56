import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lit_grpo.data.sources import FileRows, HubRows, RowSource, make_source

ROWS = [{"prompt": "1 + 1 =", "answer": "2"}, {"prompt": "größer, als?", "answer": "ja"}]


class Doubles(RowSource):
    def rows(self) -> Iterator[dict[str, Any]]:
        for number in range(3):
            yield {"prompt": f"{number} + {number} =", "answer": str(2 * number)}


def write(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def error_of(path: Path) -> str:
    with pytest.raises(ValueError) as error:
        list(FileRows(path).rows())
    message = str(error.value)
    assert message.endswith(".") and "\n" not in message
    return message


def test_every_file_format_gives_the_same_rows(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    write(tmp_path / "a.jsonl", "".join(json.dumps(row) + "\n" for row in ROWS))
    write(tmp_path / "a.json", json.dumps(ROWS))
    write(tmp_path / "a.csv", 'prompt,answer\n1 + 1 =,2\n"größer, als?",ja\n')
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / "a.parquet")
    for suffix in ("jsonl", "json", "csv", "parquet"):
        assert list(FileRows(tmp_path / f"a.{suffix}").rows()) == ROWS


def test_byte_order_mark_blank_lines_and_odd_separators_do_not_disturb(tmp_path: Path) -> None:
    text = '\ufeff{"prompt": "a\u2028b"}\n\n{"prompt": "c"}\n'
    assert list(FileRows(write(tmp_path / "a.jsonl", text)).rows()) == [
        {"prompt": "a\u2028b"},
        {"prompt": "c"},
    ]
    text = '\ufeffprompt\na\u2028b\n\n"two\nlines"\n'
    rows = [{"prompt": "a\u2028b"}, {"prompt": "two\nlines"}]
    assert list(FileRows(write(tmp_path / "a.csv", text)).rows()) == rows


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"There is no file .*gone\.jsonl; check the path"):
        FileRows(tmp_path / "gone.jsonl")


def test_unknown_suffix_lists_the_known_ones(tmp_path: Path) -> None:
    path = write(tmp_path / "a.xlsx", "x")
    for make in (FileRows, lambda path: make_source(str(path))):
        with pytest.raises(ValueError, match=r"suffix '\.xlsx'.*\.jsonl, \.json, \.csv, \.parquet"):
            make(path)


EMPTY = [("a.jsonl", ""), ("a.jsonl", "\n \n"), ("a.json", " "), ("a.json", "[]"), ("a.csv", ""), ("a.csv", "a,b\n")]


@pytest.mark.parametrize(("name", "content"), EMPTY)
def test_file_without_rows_is_an_error(tmp_path: Path, name: str, content: str) -> None:
    assert f"{name} has no rows; give a file" in error_of(write(tmp_path / name, content))


def test_parquet_without_rows_is_an_error(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table({"prompt": pyarrow.array([], "string")}), tmp_path / "a.parquet")
    assert "a.parquet has no rows" in error_of(tmp_path / "a.parquet")


def test_only_parquet_and_datasets_need_an_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    write(tmp_path / "a.csv", "prompt\nx\n")
    assert list(FileRows(tmp_path / "a.csv").rows()) == [{"prompt": "x"}]
    with pytest.raises(ValueError, match=r"parquet needs the package pyarrow, .* lit_grpo\[datasets\]"):
        FileRows(tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=r"one/two \(split test\) needs .* lit_grpo\[datasets\]"):
        HubRows("one/two", split="test")


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("a.jsonl", '{"p": 1}\n\n{"p": \n', "line 3 of {path} is not JSON: Expecting value"),
        ("a.jsonl", '{"p": 1}\n[1]\n', "line 2 of {path} is a list, not an object"),
        ("a.jsonl", '{"p": 1}\n7\n', "line 2 of {path} is a number, not an object"),
        ("a.jsonl", b'{"p": 1}\n{"p": "\xff"}\n', "line 2 of {path} is not UTF-8 (byte 0xff at position 7)"),
        ("a.json", '{"p": 1}\n{"p": 2}\n', "{path} is not JSON: Extra data"),
        ("a.json", '{"data": []}', "{path} holds an object, not a list of objects"),
        ("a.json", '[{"p": 1}, null]', "element 1 (from 0) of {path} is null, not an object"),
        ("a.json", b'[{"p": "\xe9"}]', "{path} is not UTF-8 (byte 0xe9 after line 1)"),
        ("a.csv", "a,b\n1,2\n1,2,3\n", "Line 3 of {path} ends a row of 3 cells where the header names 2"),
        ("a.csv", "a,b\n1\n", "Line 2 of {path} ends a row of 1 cells where the header names 2"),
        ("a.csv", "a,a\n1,2\n", "The header of {path} names a column twice (a, a)"),
        ("a.csv", 'a\n"x\n', "Line 2 of {path} is not CSV: unexpected end of data"),
        ("a.csv", b"a\n\xff\n", "{path} is not UTF-8 (byte 0xff after line 0)"),
        *(("a.json" + end, "[" * 100_000, "nested too deeply") for end in ("", "l")),
        ("a.parquet", "hello", "{path} cannot be read as parquet: "),
    ],
)
def test_malformed_file_is_named_with_the_place(tmp_path: Path, name: str, content: str | bytes, expected: str) -> None:
    path = write(tmp_path / name, content)
    assert expected.format(path=path) in error_of(path)


def test_saved_dataset_is_read_from_its_folder(tmp_path: Path) -> None:
    from datasets import Dataset, DatasetDict

    data = Dataset.from_list(ROWS)
    data.save_to_disk(str(tmp_path / "plain"))
    splits: Any = {"train": data, "test": data.select([1])}
    DatasetDict(splits).save_to_disk(str(tmp_path / "splits"))
    assert list(make_source(str(tmp_path / "plain")).rows()) == ROWS
    assert list(HubRows(str(tmp_path / "splits")).rows()) == ROWS
    assert list(HubRows(str(tmp_path / "splits"), split="test").rows()) == ROWS[1:]
    with pytest.raises(ValueError, match=r"no split 'validation'; it has train, test\."):
        list(HubRows(str(tmp_path / "splits"), split="validation").rows())


def test_folder_that_holds_no_dataset_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"could not be loaded: Directory .*written by save_to_disk"):
        list(make_source(str(tmp_path)).rows())


def test_dataset_that_cannot_be_reached_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match=r"The dataset nobody/nothing \(main, split test\) could not be loaded"):
        list(HubRows("nobody/nothing", name="main", split="test").rows())


def test_make_source_tells_files_folders_hub_ids_and_sources_apart(tmp_path: Path) -> None:
    assert isinstance(make_source(str(write(tmp_path / "A.JSONL", "{}"))), FileRows)
    assert isinstance(make_source(str(tmp_path)), HubRows)
    assert isinstance(make_source("openai/gsm8k"), HubRows)
    doubles = Doubles()
    assert make_source(doubles) is doubles
    for wrong in ("", "data/train/rows", "./rows"):
        with pytest.raises(ValueError, match=f"The source {wrong!r} is no file"):
            make_source(wrong)


@pytest.mark.nightly
def test_import_loads_nothing_heavy() -> None:
    heavy = {"datasets", "pyarrow"}
    code = f"import sys, lit_grpo.data.sources; print(sorted({heavy!r} & set(sys.modules)))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


def test_a_dotted_path_that_does_not_import_is_not_looked_for_on_the_hub() -> None:
    with pytest.raises(ValueError, match=r"'my\.src\.Mine' is no file, .* ModuleNotFoundError: No module named 'my'"):
        make_source("my.src.Mine")
    with pytest.raises(ValueError, match=r"json has no 'Mine'; check it, or name a dataset by class_path"):
        make_source("json.Mine")
    with pytest.raises(ValueError, match=r"it is no subclass of lit_grpo\.data\.RowSource"):
        make_source("json.JSONDecoder")
