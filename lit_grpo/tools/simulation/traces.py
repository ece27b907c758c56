"""Families of made-up completion lengths."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from lit_grpo.process.inputs import open_input
from lit_grpo.scheduling.jobs import Job
from lit_grpo.types import Key

Draw = Callable[[np.random.Generator, tuple[int, int]], np.ndarray]


def _lognormal_mild(rng: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    return 0.25 * np.exp(0.4 * rng.standard_normal(shape))


def _lognormal_heavy(rng: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    return 0.12 * np.exp(1.0 * rng.standard_normal(shape))


def _bimodal(rng: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    """Four of five are short, the fifth is long: answers with and without a chain of thought."""
    medians = np.where(rng.random(shape) < 0.8, 0.08, 0.7)
    return medians * np.exp(0.2 * rng.standard_normal(shape))


def _per_prompt(rng: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    """Prompts differ by much, and the completions of one by little."""
    return 0.15 * np.exp(0.8 * rng.standard_normal((shape[0], 1)) + 0.25 * rng.standard_normal(shape))


def _truncated(rng: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    """About a fifth reaches the limit."""
    return 0.5 * np.exp(0.8 * rng.standard_normal(shape))


FAMILIES: dict[str, Draw] = {
    "lognormal_mild": _lognormal_mild,
    "lognormal_heavy": _lognormal_heavy,
    "bimodal": _bimodal,
    "per_prompt": _per_prompt,
    "truncated": _truncated,
}
"""Lengths as fractions of the limit, which cuts off what exceeds it."""


def synthetic_lengths(
    family: str, num_prompts: int, group_size: int, max_tokens: int, rng: np.random.Generator
) -> np.ndarray:
    """Return lengths between 1 and ``max_tokens``, int64, shape (prompts, group)."""
    fractions = FAMILIES[family](rng, (num_prompts, group_size))
    return np.clip(np.rint(fractions * max_tokens), 1, max_tokens).astype(np.int64)


@dataclass(frozen=True, slots=True)
class TraceRow:
    """One completion of a run; see :func:`read_rows` for the fields."""

    prompt_id: str
    sample_id: int
    prompt_tokens: int
    tokens: int
    visit: int = 0
    step: int = 0
    predicted: float | None = None
    token_ids: tuple[int, ...] | None = None
    prompt_token_ids: tuple[int, ...] | None = None


MOST_ROWS, MOST_BYTES, LARGEST = 200_000, 2**20, 2**31 - 1
"""The most completions of a trace, bytes of a line, and tokens or other numbers in it."""
LEAST = {"sample_id": 0, "prompt_tokens": 1, "tokens": 1, "visit": 0, "step": 0}
NEEDED = ("prompt_id", "sample_id", "prompt_tokens", "tokens")


def read_rows(path: Path) -> list[TraceRow]:
    """Read JSON lines, one object for each completion; a ValueError tells file, line, field, value and remedy.

    Fields: ``prompt_id`` (text), ``sample_id`` (0 or more), ``prompt_tokens`` and ``tokens`` (1 or more); and where
    recorded ``visit`` and ``step`` (0 or more, whole), ``predicted`` (the tokens that were expected; null, here NaN,
    where nothing was known yet), ``token_ids`` and, in the first row of a prompt's visit, ``prompt_token_ids`` (as many
    as are counted). Other fields are left alone. ``(prompt_id, visit, sample_id)`` comes once.
    """
    rows: list[TraceRow] = []
    seen: dict[tuple[str, int, int], int] = {}
    with open_input(path) as file:
        for number, line in enumerate(iter(lambda: file.readline(MOST_BYTES + 1), b""), start=1):
            if not line.strip():
                continue
            row = _parse(line, f"{path}, line {number}")
            if len(rows) == MOST_ROWS:
                raise ValueError(f"{path} has more than {MOST_ROWS:,} rows: give a trace of fewer steps.")
            key = (row.prompt_id, row.visit, row.sample_id)
            if key in seen:
                raise ValueError(
                    f"{path}, line {number}: prompt_id, visit and sample_id {key} are those of line {seen[key]}: "
                    "count visit up where a prompt comes again."
                )
            seen[key] = number
            rows.append(row)
    if not rows:
        raise ValueError(f"{path} has no rows: give a trace with one JSON object a line.")
    return rows


def _parse(line: bytes, place: str) -> TraceRow:
    shown = line[:60].decode("utf-8", "replace").strip()
    if len(line) > MOST_BYTES:
        raise ValueError(f"{place}: a line of more than {MOST_BYTES // 2**20} MiB is no row: give one object a line.")
    try:
        record = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise ValueError(f"{place}: byte 0x{line[error.start]:02x} is no UTF-8: save the file as UTF-8.") from None
    except (ValueError, RecursionError) as error:
        why = getattr(error, "msg", "a number or its nesting is too long")
        raise ValueError(f"{place}: {shown!r} is no JSON ({why}): give one object a line.") from None
    if not isinstance(record, dict):
        raise ValueError(f"{place}: {shown!r} is no JSON object: give one with {', '.join(NEEDED)}.")
    missing = [name for name in NEEDED if name not in record]
    if missing:
        raise ValueError(f"{place}: {missing[0]} is missing: give {', '.join(NEEDED)} in each row.")
    if not isinstance(record["prompt_id"], str):
        raise ValueError(f"{place}: prompt_id is {record['prompt_id']!r:.60}: give text in quotes.")
    whole = {name: _whole(place, name, record[name]) for name in LEAST if name in record}
    own = _token_ids(place, "token_ids", record, whole["tokens"])
    prompt = _token_ids(place, "prompt_token_ids", record, whole["prompt_tokens"])
    return TraceRow(
        record["prompt_id"], **whole, predicted=_predicted(place, record), token_ids=own, prompt_token_ids=prompt
    )


def _whole(place: str, name: str, value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not LEAST[name] <= value <= LARGEST:
        raise ValueError(f"{place}: {name} is {value!r:.60}: give a whole number from {LEAST[name]} to {LARGEST:,}.")
    return value


def _token_ids(place: str, name: str, record: dict[str, Any], count: int) -> tuple[int, ...] | None:
    if (value := record.get(name)) is None:
        return None
    if not isinstance(value, list) or any(type(token) is not int or not 0 <= token <= LARGEST for token in value):
        raise ValueError(f"{place}: {name} is {value!r:.60}: give a list of whole numbers, or leave it out.")
    if len(value) != count:
        raise ValueError(f"{place}: {name} has {len(value)} tokens, but {count} are counted: give all, or none.")
    return tuple(value)


def _predicted(place: str, record: dict[str, Any]) -> float | None:
    if "predicted" not in record:
        return None
    if (value := record["predicted"]) is None:
        return float("nan")
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value <= LARGEST:
        raise ValueError(
            f"{place}: predicted is {value!r:.60}: give the tokens expected, from above 0 to {LARGEST:,}, or "
            "leave it out."
        )
    return float(value)


SPEC = {"prompts": 32, "group": 16, "max_tokens": 1024, "seed": 0}
"""The fields of a spec with their defaults."""

NOISE_STREAM = 1


@dataclass(frozen=True)
class Trace:
    """Completions that wait to be decoded, in the order of arrival; all arrays have shape (completions,).

    Args:
        name: Name of the trace in tables.
        keys: ``(prompt_id, visit, sample_id)`` of each.
        group: A number for each, equal where they share a prompt: 0, 1, ... in the order of arrival.
        prompt_tokens: Tokens of its prompt.
        lengths: Tokens that it comes to.
        max_tokens: The most it could have come to.
        batch: Number of the batch that it waited in; each batch is decoded by itself. None for one batch.
        predicted: Tokens that the run expected of it, where that was recorded; NaN where it knew nothing yet.
        texts: Token ids of its prompt (none if those were not recorded) and its own, where the latter were recorded.
    """

    name: str
    keys: list[Key]
    group: np.ndarray
    prompt_tokens: np.ndarray
    lengths: np.ndarray
    max_tokens: np.ndarray
    batch: np.ndarray | None = None
    predicted: np.ndarray | None = None
    texts: Sequence[tuple[Sequence[int], Sequence[int]]] | None = None

    def batches(self) -> list[Trace]:
        """Return one trace for each batch, in their order."""
        if self.batch is None:
            return [self]
        return [self._select(np.flatnonzero(self.batch == number)) for number in np.unique(self.batch)]

    def _select(self, rows: np.ndarray) -> Trace:
        return Trace(
            self.name,
            [self.keys[row] for row in rows.tolist()],
            *(array[rows] for array in (self.group, self.prompt_tokens, self.lengths, self.max_tokens)),
            predicted=None if self.predicted is None else self.predicted[rows],
            texts=None if self.texts is None else [self.texts[row] for row in rows.tolist()],
        )

    @cached_property
    def jobs(self) -> list[Job]:
        """Return the facts about each completion that a scheduling policy gets."""
        sizes = zip(self.keys, self.prompt_tokens.tolist(), self.max_tokens.tolist(), strict=True)
        return [Job(key, prompt_tokens, max_tokens) for key, prompt_tokens, max_tokens in sizes]

    def __len__(self) -> int:
        """Return the number of completions."""
        return len(self.keys)


def noisy(lengths: np.ndarray, sigma: float, seed: int = 0) -> np.ndarray:
    """Return lengths times a log-normal factor ``exp(sigma x N(0, 1))``: predictions with errors of that size."""
    if not sigma >= 0:
        raise ValueError(f"The noise is {sigma}: it is the spread of the logarithm of a factor, so give 0 or more.")
    # Not the stream that made-up lengths of the same seed come from: the errors would follow the lengths.
    rng = np.random.default_rng((NOISE_STREAM, seed))
    return lengths * np.exp(sigma * rng.standard_normal(len(lengths)))


def load_trace(source: str) -> Trace:
    """Return the trace of a file, or of a spec.

    Args:
        source: A file (:func:`recorded_trace`), or a spec (:func:`synthetic_trace`) such as
            ``lognormal_heavy:prompts=32,group=16,max_tokens=1024,seed=0``.
    """
    if source.split(":")[0] in FAMILIES:
        return synthetic_trace(source)
    if Path(source).is_file():
        return recorded_trace(Path(source))
    raise ValueError(f"{source!r} is neither a file nor a family of traces: the families are {', '.join(FAMILIES)}.")


def synthetic_trace(spec: str) -> Trace:
    """Return a made-up trace: a family, then ``:`` and any of the fields of ``SPEC``.

    Prompts have 16 to 128 tokens.
    """
    family, _, settings = spec.partition(":")
    if family not in FAMILIES:
        raise ValueError(f"There is no family of traces {family!r}: take one of {', '.join(FAMILIES)}.")
    fields = SPEC | _parse_fields(spec, settings)
    num_prompts, group_size = fields["prompts"], fields["group"]
    rng = np.random.default_rng(fields["seed"])
    lengths = synthetic_lengths(family, num_prompts, group_size, fields["max_tokens"], rng)
    return Trace(
        name=spec,
        keys=[(str(prompt), 0, (sample,)) for prompt in range(num_prompts) for sample in range(group_size)],
        group=np.repeat(np.arange(num_prompts), group_size),
        prompt_tokens=np.repeat(rng.integers(16, 129, num_prompts), group_size),
        lengths=lengths.reshape(-1),
        max_tokens=np.full(num_prompts * group_size, fields["max_tokens"]),
    )


def recorded_trace(path: Path) -> Trace:
    """Read the trace that a run has recorded: JSON lines, as :func:`read_rows` describes.

    The limit of all completions is the longest of them: it is not recorded. Each ``step`` is a batch.
    """
    rows = read_rows(path)
    numbers: dict[tuple[str, int], int] = {}
    predicted = [row.predicted for row in rows]
    lengths = np.array([row.tokens for row in rows])
    prompts = {(row.prompt_id, row.visit): row.prompt_token_ids for row in rows if row.prompt_token_ids}
    texts = [(prompts.get((row.prompt_id, row.visit), ()), row.token_ids) for row in rows if row.token_ids is not None]
    return Trace(
        name=path.name,
        keys=[(row.prompt_id, row.visit, (row.sample_id,)) for row in rows],
        group=np.array([numbers.setdefault((row.prompt_id, row.visit), len(numbers)) for row in rows]),
        prompt_tokens=np.array([row.prompt_tokens for row in rows]),
        lengths=lengths,
        max_tokens=np.full(len(rows), lengths.max()),
        batch=np.array([row.step for row in rows]),
        predicted=None if None in predicted else np.array(predicted, dtype=np.float64),
        texts=texts if len(texts) == len(rows) else None,
    )


def _parse_fields(spec: str, settings: str) -> dict[str, int]:
    """Return the fields that a spec sets; a ValueError for others, and for what is no number."""
    fields: dict[str, int] = {}
    for part in filter(None, settings.split(",")):
        name, _, value = part.partition("=")
        least = 0 if name == "seed" else 1
        if name not in SPEC:
            raise ValueError(f"The trace {spec!r} sets {name!r}: the fields are {', '.join(SPEC)}.")
        if not value.isdecimal() or len(value) > 10 or not least <= int(value) <= LARGEST:
            raise ValueError(
                f"The trace {spec!r:.200} sets {name} to {value!r:.60}: give a whole number from {least} to "
                f"{LARGEST:,}."
            )
        fields[name] = int(value)
    if (number := (SPEC | fields)["prompts"] * (SPEC | fields)["group"]) > MOST_ROWS:
        raise ValueError(
            f"The trace {spec!r:.200} has {number:,} completions: lower prompts or group, to {MOST_ROWS:,} at most."
        )
    return fields
