"""Sources of rows: files, Hugging Face datasets, or a class of the user's own.

A row is a dict with the columns of one example. Nothing heavy is imported before rows are read.
"""

from __future__ import annotations

import csv
import importlib
import io
import itertools
import json
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from lit_grpo.process.inputs import open_input
from lit_grpo.process.packages import require
from lit_grpo.process.terminal import first_line

Row = dict[str, Any]
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
EXTRA = "lit_grpo[datasets]"
CLASS_PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+")


class RowSource(ABC):
    """Gives rows, in the same order each time, because row numbers are part of prompt ids.

    Example:
        A source of your own, named in a config as ``train: {class_path: my_module.Sums}``::

            class Sums(RowSource):
                def rows(self):
                    for a in range(10):
                        yield {"prompt": f"{a} + {a} =", "answer": str(a + a)}

    Attributes:
        names_datasets: Whether each row names its data set, in the column ``dataset``.
    """

    names_datasets: bool = False

    @abstractmethod
    def rows(self) -> Iterator[Row]:
        """Yield one dict a row, keyed by column name."""

    def describe(self) -> str:
        return type(self).__name__


class FileRows(RowSource):
    """Rows of a local file; its suffix decides how it is read.

    Args:
        path: A .jsonl file (one object a line), a .json file (a list of objects), a .csv file (with a header; every
            value is text) or a .parquet file.

    Raises:
        ValueError: The suffix is another, pyarrow is missing to read .parquet, or the file is missing, empty or
            malformed.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).expanduser()
        if self.path.suffix.lower() not in READERS:
            raise ValueError(
                f"{self.describe()} has the suffix {self.path.suffix!r}, which cannot be read; convert it to one of "
                f"{', '.join(READERS)}."
            )
        if self.path.suffix.lower() == ".parquet":
            require(
                "pyarrow",
                f"The file {self.describe()} needs the package pyarrow, which is not installed; install the extra "
                f"{EXTRA}, or convert it to .jsonl.",
            )
        if not os.path.isfile(self.path):  # Path's fails for a name that is too long
            raise ValueError(f"There is no file {self.describe()}; check the path, which is relative to {Path.cwd()}.")

    def rows(self) -> Iterator[Row]:
        empty = True
        for row in READERS[self.path.suffix.lower()](self.path):
            empty = False
            yield row
        if empty:
            raise ValueError(f"{self.describe()} has no rows; give a file that has at least one.")

    def describe(self) -> str:
        return str(self.path)


class HubRows(RowSource):
    """Rows of a Hugging Face dataset, read with the ``datasets`` library; code of a dataset is never run.

    Args:
        path: A dataset id such as ``openai/gsm8k``, or a folder written by ``save_to_disk``.
        name: The dataset's configuration if it has several, such as ``main`` of gsm8k.
        split: The split to read.
        revision: A branch, tag or commit of the dataset; by default the newest.

    Raises:
        ValueError: ``datasets`` is not installed, or the dataset cannot be loaded or lacks the split.
    """

    def __init__(self, path: str, name: str | None = None, split: str = "train", revision: str | None = None) -> None:
        self.path = path
        self.name = name
        self.split = split
        self.revision = revision
        require(
            "datasets",
            f"The dataset {self.describe()} needs the package datasets, which is not installed; install the extra "
            f"{EXTRA}, or give a .jsonl, .json or .csv file.",
        )

    def rows(self) -> Iterator[Row]:
        for row in self._load():
            yield dict(row)

    def describe(self) -> str:
        return f"{self.path} ({self.name + ', ' if self.name else ''}split {self.split})"

    def _load(self) -> Any:
        import datasets

        folder = Path(self.path).expanduser()
        try:
            if not folder.is_dir():
                return datasets.load_dataset(self.path, self.name, split=self.split, revision=self.revision)
            data = datasets.load_from_disk(str(folder))
        except (OSError, ValueError, RuntimeError) as error:
            raise ValueError(
                f"The dataset {self.describe()} could not be loaded: {first_line(error)}; "
                "check its id, name, split and revision (a local folder must be one written by save_to_disk)."
            ) from error
        if not isinstance(data, datasets.DatasetDict):
            return data
        if self.split not in data:
            raise ValueError(
                f"The dataset {self.path} has no split {self.split!r}; it has {', '.join(map(str, data))}."
            )
        return data[self.split]


class GivenRows(RowSource):
    """Rows of an object from Python. It is read once, however often the rows are asked for.

    Args:
        given: A list of dicts, a ``datasets.Dataset`` or ``IterableDataset``, a map-style dataset of torch or another
            object with ``len`` and ``[i]``, a data frame of pandas or polars, a table of pyarrow, a generator or
            another iterable of dicts, or a RowSource.

    Raises:
        ValueError: It holds no rows: it is a ``DatasetDict``, say, or a function.
    """

    def __init__(self, given: RowSource | Iterable[Any] | Any) -> None:
        if (fault := _fault_of(given)) is not None:
            raise ValueError(f"{fault}.")
        self.given = given
        self.names_datasets = isinstance(given, RowSource) and given.names_datasets
        self._read: list[Any] = []
        self._rest = _rows_of(given, self.describe())

    def rows(self) -> Iterator[Row]:
        """Yield the rows in order."""
        yield from self._read
        for row in self._rest:
            self._read.append(dict(row) if isinstance(row, Mapping) else row)
            yield self._read[-1]
        if not self._read and isinstance(self.given, Iterator):
            raise ValueError(f"{self.describe()} has no rows; if it has been read before, give a list of its rows.")

    def describe(self) -> str:
        return self.given.describe() if isinstance(self.given, RowSource) else f"the {type(self.given).__name__} given"


MOST_UNCOUNTED = 200_000
"""The most rows of an object without a length, which may have no end."""
TABLES: dict[str, Callable[[Any], Iterable[Any]]] = {
    "datasets.Dataset": iter,  # ten times as fast as [i]
    "pandas.DataFrame": lambda frame: frame.astype(object).where(frame.notna(), None).to_dict("records"),
    "polars.DataFrame": lambda frame: frame.iter_rows(named=True),
    "pyarrow.Table": lambda table: table.to_pylist(),
    "pyarrow.RecordBatch": lambda batch: batch.to_pylist(),
}
"""How kinds of other packages give their rows."""


def _fault_of(given: Any) -> str | None:
    """Say why an object is no source of rows, and what to give in its place."""
    kind = type(given).__name__
    is_one = f"the source is {'an' if kind[0] in 'AEIOUaeiou' else 'a'} {kind}"
    if isinstance(given, type):
        return f"the source is the class {given.__name__}; give an object of it, such as {given.__name__}()"
    if isinstance(given, Mapping):
        names = ", ".join(map(repr, given)) or "nothing"
        if any(isinstance(value, str) for value in given.values()):
            return f"{is_one} of {names}, one row; give a list of rows"
        if given and all(map(_is_column, given.values())):
            return f"{is_one} of the columns {names}; give one dict per row, or a datasets.Dataset"
        return f"{is_one} of the splits {names}; give one split, as in data[{next(iter(given), 'train')!r}]"
    if isinstance(given, AbstractSet):
        return f"{is_one}, which has no order; give a list of rows"
    if hasattr(given, "__aiter__"):
        return f"{is_one}, which is asynchronous; give a list of its rows"
    if hasattr(given, "batch_sampler") and hasattr(given, "dataset"):
        return f"{is_one}, which gives batches; give its dataset"
    if isinstance(given, RowSource) or hasattr(given, "__iter__") or hasattr(given, "__getitem__"):
        return f"{is_one}; give rows, or the path of a file as text" if isinstance(given, bytes | bytearray) else None
    if callable(given):
        return f"{is_one}, {getattr(given, '__name__', 'callable')}; call it, and give the rows that it returns"
    return f"{is_one}, {given!s:.80}; give a file, a list of rows or another source"


def _is_column(values: Any) -> bool:
    is_list = isinstance(values, Sequence) and not (values and isinstance(values[0], Mapping))
    return is_list or getattr(values, "ndim", 0) == 1


def _rows_of(given: Any, name: str) -> Iterator[Any]:
    """Yield the rows of an object by the protocol that it has."""
    if isinstance(given, RowSource):
        yield from given.rows()
        return
    kinds = [f"{kind.__module__.partition('.')[0]}.{kind.__name__}" for kind in type(given).__mro__]
    if (kind := next((kind for kind in kinds if kind in TABLES), None)) is not None:
        yield from TABLES[kind](given)
        return
    length = _length_of(given)
    if length is not None and not isinstance(given, Sequence) and _has_places(given):
        for number in range(length):
            try:
                yield given[number]
            except LookupError as error:
                raise ValueError(
                    f"{name} has a length of {length}, but [{number}] fails ({type(error).__name__}: {error}); mend "
                    "its __getitem__ or its __len__, or give a list of rows."
                ) from error
        return
    try:
        rows = iter(given)
    except TypeError as error:
        raise ValueError(f"{name} cannot be read row by row ({error}); give a list of rows.") from error
    most = MOST_UNCOUNTED if length is None else length
    read = list(itertools.islice(rows, most + 1))  # before the first of an endless number is rendered
    if len(read) > most:
        said = f"a length of {most}, but more rows"
        if length is None:
            said = f"no length and more than {most:,} rows, perhaps without end"
        raise ValueError(
            f"{name} has {said}; give its first rows, for example list(itertools.islice(rows, 1000)), or "
            "rows.take(1000) of an IterableDataset."
        )
    yield from read


def _length_of(given: Any) -> int | None:
    try:
        return len(given)
    except (TypeError, NotImplementedError):
        return None


def _has_places(given: Any) -> bool:
    """Return whether an object has ``[i]`` of its own; torch's IterableDataset inherits one that only raises."""
    from torch.utils.data import Dataset

    return getattr(type(given), "__getitem__", None) not in (None, Dataset.__getitem__)


class PolicyFault(ValueError):
    """Something is wrong with the policy's files, which are read with the first row, and nothing with the rows."""


@contextmanager
def naming(place: str) -> Iterator[None]:
    """Begin the message of a ValueError with the place, such as ``data.train``; of a :class:`PolicyFault` nothing."""
    try:
        yield
    except PolicyFault:
        raise
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from error


def make_source(source: str | os.PathLike[str] | RowSource | Iterable[Any]) -> RowSource:
    """Make a source of the value in a config or of an object from Python.

    A string is the path of a file with a known suffix, else a folder written by ``save_to_disk``, else the id of a
    dataset on the Hugging Face hub.

    Raises:
        ValueError: The string is none of these, or the object holds no rows.
    """
    if isinstance(source, RowSource):
        return source
    if not isinstance(source, str | os.PathLike):
        return GivenRows(source)
    name: str = os.fspath(source)
    path = Path(name).expanduser()
    if path.suffix.lower() in READERS or os.path.isfile(path):
        return FileRows(path)
    if not os.path.isdir(path) and CLASS_PATH.fullmatch(name):
        raise ValueError(
            f"The source {name!r} is no file, and not the class path of a RowSource either: {_not_a_class(name)}; "
            "check it, or name a dataset by class_path: lit_grpo.data.HubRows."
        )
    if name and (os.path.isdir(path) or HUB_ID.fullmatch(name)):
        return HubRows(name)
    raise ValueError(
        f"The source {name!r} is no file ({', '.join(READERS)}), no existing folder and no dataset id "
        "(owner/name); check the path."
    )


def _not_a_class(path: str) -> str:
    """Say why a dotted path names no source; the command line has already made a source of a path that does."""
    module, name = path.rsplit(".", 1)
    try:
        there = hasattr(importlib.import_module(module), name)
    except Exception as error:  # the user's module runs here, and may fail in any way
        return f"{type(error).__name__}: {first_line(error)}"
    return "it is no subclass of lit_grpo.data.RowSource" if there else f"{module} has no {name!r}"


MOST_BYTES = 16 * 2**20
"""The most bytes of one row's text; reading and encoding a longer one takes minutes, and no policy reads it."""
_CHUNK, _BATCH, _NO_SPACE = 2**20, 1024, re.compile(r"[^ \t\n\r]")
_MOST = f"a row may have at most {MOST_BYTES // 2**20} MiB; shorten its columns, or split the row"


def check_size(row: Any, place: str) -> None:
    """Refuse a row whose text no policy reads."""
    try:
        size = _num_characters(row)
    except RecursionError:  # a column contains itself, and so has no size
        return
    if size > MOST_BYTES:
        raise ValueError(f"{place} has {size / 2**20:,.0f} MiB of text, and {_MOST}.")


def _num_characters(value: Any) -> int:
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(map(_num_characters, value.values()))
    return sum(map(_num_characters, value)) if isinstance(value, list | tuple) else 0


def _jsonl_rows(path: Path) -> Iterator[Row]:
    with open_input(path) as file:
        for number, line in enumerate(iter(lambda: file.readline(MOST_BYTES + 1), b""), start=1):
            place = f"line {number} of {path}"
            if len(line) > MOST_BYTES:
                raise ValueError(f"{place} has more than {MOST_BYTES // 2**20} MiB, and {_MOST}.")
            try:
                text = line.decode("utf-8-sig").strip()
                value = json.loads(text) if text else None
            except UnicodeDecodeError as error:
                raise _not_utf8(place, error, f"at position {error.start}") from error
            except ValueError as error:
                raise ValueError(f"{place} is not JSON: {error}; make each line one JSON object.") from error
            except RecursionError as error:
                told = "is nested too deeply to be read; make each line one JSON object"
                raise ValueError(f"{place} {told}.") from error
            if text:
                yield _as_row(value, place)


def _json_rows(path: Path) -> Iterator[Row]:
    """Yield the objects of a list, one after another: the file may be larger than memory."""
    with open_input(path) as file:
        text = _Stream(file, path)
        if not (begin := text.next_character()):
            return
        if begin != "[":
            kind = _kind(text.value())
            if text.next_character():
                raise text.error("Extra data")
            raise ValueError(f"{path} holds {kind}, not a list of objects; make it a list, one object a row.")
        text.skip(1)
        number, follows = 0, text.next_character()
        while follows != "]":
            yield _as_row(text.value(), f"element {number} (from 0) of {path}")
            number, follows = number + 1, text.next_character()
            if follows == ",":
                text.skip(1)
            elif follows != "]":
                raise text.error("an element is followed by neither a comma nor the end of the list")
        text.skip(1)
        if text.next_character():
            raise text.error("Extra data")


class _Stream:
    """JSON values of a file, of which only a part is in memory."""

    def __init__(self, file: IO[bytes], path: Path) -> None:
        self._file, self._path = io.TextIOWrapper(file, "utf-8-sig"), path
        self._text, self._place, self._line = "", 0, 1
        self._decoder = json.JSONDecoder()

    def next_character(self) -> str:
        """Return the next character that is no white space, and stay before it; nothing at the end of the file."""
        while True:
            found = _NO_SPACE.search(self._text, self._place)
            if found is not None:
                self.skip(found.start() - self._place)
                return found[0]
            self.skip(len(self._text) - self._place)
            if not self._more():
                return ""

    def value(self) -> Any:
        self.next_character()
        while True:
            try:
                value, end = self._decoder.raw_decode(self._text, self._place)
                if end < len(self._text) or not self._more():  # a number may go on
                    self.skip(end - self._place)
                    return value
            except RecursionError:
                raise self.error("it is nested too deeply") from None
            except json.JSONDecodeError as error:
                if len(self._text) - self._place > MOST_BYTES:
                    raise self.error(f"a value has more than {MOST_BYTES // 2**20} MiB") from None
                if not self._more():
                    raise self.error(error.msg, error.pos) from None
            except ValueError:
                raise self.error("a number has too many digits") from None

    def skip(self, length: int) -> None:
        self._line += self._text.count("\n", self._place, self._place + length)
        self._place += length

    def error(self, what: str, place: int | None = None) -> ValueError:
        line = self._line + self._text.count("\n", self._place, self._place if place is None else place)
        remedy = "mend it, or name it .jsonl if it holds one object a line"
        return ValueError(f"{self._path} is not JSON: {what} in line {line}; {remedy}.")

    def _more(self) -> bool:
        """Read on: as much as there is of a value that is not whole yet; whether there was more."""
        rest = self._text[self._place :]
        try:
            more = self._file.read(max(_CHUNK, len(rest)))
        except UnicodeDecodeError as error:
            raise _not_utf8(self._path, error, f"after line {self._line}") from error
        self._text, self._place = rest + more, 0
        return bool(more)


def _csv_rows(path: Path) -> Iterator[Row]:
    limit = csv.field_size_limit(MOST_BYTES)  # of all readers; by default 128 KiB
    with open_input(path) as file:
        text = io.TextIOWrapper(file, "utf-8-sig", newline="")
        reader = csv.reader(iter(lambda: text.readline(4 * MOST_BYTES), ""), strict=True)  # a file without line ends
        try:
            header = next(reader, [])
            if len(set(header)) < len(header):
                raise ValueError(
                    f"The header of {path} names a column twice ({', '.join(header)[:200]}); rename one of them."
                )
            for cells in filter(None, reader):
                if len(cells) != len(header):
                    raise ValueError(
                        f"Line {reader.line_num} of {path} ends a row of {len(cells)} cells where the header "
                        f"names {len(header)}; mend the row, quoting cells that hold commas."
                    )
                yield dict(zip(header, cells, strict=True))
        except UnicodeDecodeError as error:
            raise _not_utf8(path, error, f"after line {reader.line_num}") from error
        except csv.Error as error:
            if "field limit" in str(error):
                raise ValueError(
                    f"Line {reader.line_num} of {path} has a cell of more than {MOST_BYTES // 2**20} MiB, and {_MOST}, "
                    "or end a quote that goes on."
                ) from error
            raise ValueError(f"Line {reader.line_num} of {path} is not CSV: {error}; mend that line.") from error
        finally:
            csv.field_size_limit(limit)


def _parquet_rows(path: Path) -> Iterator[Row]:
    import pyarrow
    import pyarrow.parquet

    try:
        with open_input(path) as content, pyarrow.parquet.ParquetFile(content) as file:
            for batch in file.iter_batches(batch_size=_BATCH):
                yield from batch.to_pylist()
    except (OSError, pyarrow.ArrowException) as error:
        raise ValueError(f"{path} cannot be read as parquet: {first_line(error)}; write the file again.") from error


READERS = {".jsonl": _jsonl_rows, ".json": _json_rows, ".csv": _csv_rows, ".parquet": _parquet_rows}


def _not_utf8(path: object, error: UnicodeDecodeError, where: str) -> ValueError:
    byte = f"byte 0x{error.object[error.start]:02x} {where}"
    return ValueError(f"{path} is not UTF-8 ({byte}); save the file as UTF-8.")


def _as_row(value: Any, place: str) -> Row:
    if not isinstance(value, dict):
        raise ValueError(f'{place} is {_kind(value)}, not an object; write it as {{"column": value, ...}}.')
    return value


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")
