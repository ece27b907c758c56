"""Objects from Python as sources of rows: each kind gives its rows, or is refused with one sentence."""

from __future__ import annotations

import csv
import io
import itertools
import json
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import numpy as np
import pandas
import pyarrow
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from lit_grpo.data import Mixture, PromptDataModule, RowSource
from lit_grpo.data.sources import GivenRows, make_source
from lit_grpo.training.written import write_config

ROWS = [{"prompt": f"{number}=", "answer": str(number + 1)} for number in range(3)]


def endless() -> Iterator[dict[str, Any]]:
    for number in itertools.count():
        yield {"prompt": f"{number}="}


class MapStyle(Dataset[Any]):
    """Never raises IndexError, so that the old protocol of iteration would read it for ever."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> dict[str, Any]:
        return ROWS[index % 3]


class Cycling(MapStyle):
    def __iter__(self) -> Iterator[dict[str, Any]]:
        return itertools.cycle(ROWS)


class Streamed(IterableDataset[Any]):
    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(ROWS)


class Sized(Streamed):
    def __len__(self) -> int:
        return 3


class TooLong(Streamed):
    def __len__(self) -> int:
        return 2


class TooShort(MapStyle):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> dict[str, Any]:
        return ROWS[index]


class EndlessSequence:
    def __getitem__(self, index: int) -> dict[str, Any]:
        return ROWS[index % 3]


class OnceOnly(RowSource):
    """A source of the user's that breaks its promise: it can be read once."""

    def __init__(self) -> None:
        self._rows = iter(ROWS)

    def rows(self) -> Iterator[dict[str, Any]]:
        return self._rows


class Asynchronous:
    async def __aiter__(self) -> AsyncIterator[dict[str, Any]]:
        yield ROWS[0]


def polars_frame() -> Any:
    """A stand-in of the class ``polars.DataFrame``, which is not among the tests' packages."""
    kind = type("DataFrame", (), {"__module__": "polars.dataframe", "iter_rows": lambda self, named: iter(ROWS)})
    kind.__iter__ = lambda self: iter(["a series"])  # pyrefly: ignore[missing-attribute]
    return kind()


def csv_text() -> io.StringIO:
    return io.StringIO("prompt,answer\n" + "".join(f"{row['prompt']},{row['answer']}\n" for row in ROWS))


READ: dict[str, Callable[[], Any]] = {
    "list": lambda: ROWS,
    "tuple": lambda: tuple(ROWS),
    "deque": lambda: deque(ROWS),
    "object_array": lambda: np.array(ROWS, dtype=object),
    "generator": lambda: (row for row in ROWS),
    "iterator": lambda: iter(ROWS),
    "map": lambda: map(dict, ROWS),
    "dict_values": lambda: dict(enumerate(ROWS)).values(),
    "csv_reader": lambda: csv.DictReader(csv_text()),
    "bounded_stream": lambda: itertools.islice(
        ({"prompt": f"{n}=", "answer": str(n + 1)} for n in itertools.count()), 3
    ),
    "dataset": lambda: datasets.Dataset.from_list(ROWS),
    "iterable_dataset": lambda: datasets.Dataset.from_list(ROWS).to_iterable_dataset(),
    "taken_of_endless": lambda: (
        datasets.IterableDataset.from_generator(endless)
        .take(3)
        .map(lambda row: {"answer": str(int(row["prompt"][0]) + 1)})
    ),
    "one_split": lambda: datasets.DatasetDict({"train": datasets.Dataset.from_list(ROWS)})["train"],
    "pandas": lambda: pandas.DataFrame(ROWS),
    "polars": polars_frame,
    "arrow_table": lambda: pyarrow.Table.from_pylist(ROWS),
    "arrow_batch": lambda: pyarrow.RecordBatch.from_pylist(ROWS),
    "torch_map_style": MapStyle,
    "torch_map_style_that_cycles": Cycling,
    "torch_subset": lambda: torch.utils.data.Subset(MapStyle(), [0, 1, 2]),
    "torch_iterable": Streamed,
    "torch_iterable_with_a_length": Sized,
    "row_source": OnceOnly,
}


@pytest.mark.parametrize("kind", READ)
def test_a_kind_gives_its_rows_however_often_they_are_read(kind: str) -> None:
    source = GivenRows(READ[kind]())
    assert list(source.rows()) == ROWS
    assert list(source.rows()) == ROWS
    assert all(type(row) is dict for row in source.rows())


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "dataset_dict": (
        lambda: datasets.DatasetDict(
            {"train": datasets.Dataset.from_list(ROWS), "test": datasets.Dataset.from_list(ROWS)}
        ),
        "the source is a DatasetDict of the splits 'train', 'test'; give one split, as in data['train'].",
    ),
    "iterable_dataset_dict": (
        lambda: datasets.IterableDatasetDict({"test": datasets.IterableDataset.from_generator(endless)}),
        "the source is an IterableDatasetDict of the splits 'test'; give one split, as in data['test'].",
    ),
    "splits": (lambda: {"train": ROWS}, "the source is a dict of the splits 'train'; give one split, as in"),
    "empty_dict": (dict, "the source is a dict of the splits nothing; give one split, as in data['train']."),
    "columns": (
        lambda: datasets.Dataset.from_list(ROWS)[:2],
        "the source is a dict of the columns 'prompt', 'answer'; give one dict per row, or a datasets.Dataset.",
    ),
    "columns_of_numpy": (lambda: {"prompt": np.array(["a"])}, "the source is a dict of the columns 'prompt'; give one"),
    "one_row": (lambda: ROWS[0], "the source is a dict of 'prompt', 'answer', one row; give a list of rows."),
    "set": (lambda: {("prompt", "1+1=")}, "the source is a set, which has no order; give a list of rows."),
    "asynchronous": (Asynchronous, "the source is an Asynchronous, which is asynchronous; give a list of its rows."),
    "loader": (
        lambda: DataLoader(MapStyle()),
        "the source is a DataLoader, which gives batches; give its dataset.",
    ),
    "function": (
        lambda: endless,
        "the source is a function, endless; call it, and give the rows that it returns.",
    ),
    "class": (lambda: MapStyle, "the source is the class MapStyle; give an object of it, such as MapStyle()."),
    "number": (lambda: 3, "the source is an int, 3; give a file, a list of rows or another source."),
    "bytes": (lambda: b"rows.jsonl", "the source is a bytes; give rows, or the path of a file as text."),
    "endless_generator": (
        endless,
        "the generator given has no length and more than 200,000 rows, perhaps without end; give its first rows, for "
        "example list(itertools.islice(rows, 1000)), or rows.take(1000) of an IterableDataset.",
    ),
    "endless_stream": (
        lambda: datasets.IterableDataset.from_generator(endless),
        "the IterableDataset given has no length and more than 200,000 rows, perhaps without end; give its first",
    ),
    "endless_sequence": (EndlessSequence, "the EndlessSequence given has no length and more than 200,000 rows, perh"),
    "more_than_its_length": (TooLong, "the TooLong given has a length of 2, but more rows; give its first rows, for"),
    "less_than_its_length": (
        TooShort,
        "the TooShort given has a length of 4, but [3] fails (IndexError: list index out of range); mend its",
    ),
    "read_before": (
        lambda: iter(()),
        "the tuple_iterator given has no rows; if it has been read before, give a list of its rows.",
    ),
    "no_rows": (list, "the list given has no rows; give a source that has at least one."),
    "texts": (lambda: ["1+1="], "row 0 of the list given is of type str, not a dict; give one dict a row."),
    "text_file": (csv_text, "row 0 of the StringIO given is of type str, not a dict; give one dict a row."),
    "pandas_series": (lambda: pandas.Series(["1+1="]), "row 0 of the Series given is of type str, not a dict; give"),
    "structured_array": (
        lambda: np.array([("1+1=",)], dtype=[("prompt", "U8")]),
        "row 0 of the ndarray given is of type void, not a dict; give one dict a row.",
    ),
    "namespaces": (lambda: [SimpleNamespace(prompt="1")], "row 0 of the list given is of type SimpleNamespace, not a"),
}


@pytest.mark.parametrize("split", ["train", "validation"])
@pytest.mark.parametrize("kind", REFUSED)
def test_another_kind_is_refused_with_the_split_and_one_sentence(kind: str, split: str) -> None:
    given, sentence = REFUSED[kind]
    sources: Any = {"train": ROWS, split: given()}
    with pytest.raises(ValueError) as refused:
        PromptDataModule(**sources, batch_size=1).setup("fit")
    message = str(refused.value)
    assert message.startswith(f"data.{split}: {sentence}") and message.endswith(".") and "\n" not in message


def test_missing_values_of_a_data_frame_are_none() -> None:
    frame = pandas.DataFrame({"prompt": ["a", "b"], "answer": ["1", None], "score": [0.5, float("nan")]})
    rows = list(GivenRows(frame).rows())
    assert rows == [{"prompt": "a", "answer": "1", "score": 0.5}, {"prompt": "b", "answer": None, "score": None}]


def test_a_path_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    assert list(make_source(tmp_path / "rows.jsonl").rows()) == ROWS


def test_what_can_be_read_once_is_in_the_config_and_in_the_run(tmp_path: Path) -> None:
    source = GivenRows(row for row in ROWS)
    assert write_config(tmp_path, {"data": {"train": source}}, seed=0) == []
    module = PromptDataModule(train=source, batch_size=1)
    module.setup("fit")
    assert [json.loads(line) for line in (tmp_path / "train.jsonl").read_text().splitlines()] == ROWS
    assert [prompt.text for prompt in module.prompts["train"]] == [row["prompt"] for row in ROWS]


def test_a_mixture_that_is_read_once_still_names_its_data_sets() -> None:
    module = PromptDataModule(train=GivenRows(Mixture({"sums": GivenRows(ROWS)})), batch_size=1)
    module.setup("fit")
    assert {prompt.dataset for prompt in module.prompts["train"]} == {"sums"}
