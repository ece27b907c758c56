"""Traces: the lengths that completions came to, recorded by a run or made up."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from lit_grpo.scheduling.families import FAMILIES, synthetic_lengths
from lit_grpo.scheduling.jobs import Job, Key
from lit_grpo.scheduling.trace_file import read_rows

SPEC = {"prompts": 32, "group": 16, "max_tokens": 1024, "seed": 0}
"""The fields of a spec with their defaults."""

NOISE_STREAM = 1


@dataclass(frozen=True)
class Trace:
    """Completions that wait to be decoded, in the order of arrival; all arrays have shape (completions,).

    Args:
        name: What it is called in tables.
        keys: ``(prompt_id, visit, sample_id)`` of each.
        group: A number for each, equal where they share a prompt: 0, 1, ... in the order of arrival.
        prompt_tokens: Tokens of its prompt.
        lengths: Tokens that it comes to.
        max_tokens: The most it could have come to.
        batch: Number of the batch that it waited in; each batch is decoded by itself. None for one batch.
        predicted: Tokens that the run expected of it, where that was recorded.
    """

    name: str
    keys: list[Key]
    group: np.ndarray
    prompt_tokens: np.ndarray
    lengths: np.ndarray
    max_tokens: np.ndarray
    batch: np.ndarray | None = None
    predicted: np.ndarray | None = None

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
        )

    @cached_property
    def jobs(self) -> list[Job]:
        """What a plan is told of each completion."""
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
        keys=[(str(prompt), 0, sample) for prompt in range(num_prompts) for sample in range(group_size)],
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
    return Trace(
        name=path.name,
        keys=[(row.prompt_id, row.visit, row.sample_id) for row in rows],
        group=np.array([numbers.setdefault((row.prompt_id, row.visit), len(numbers)) for row in rows]),
        prompt_tokens=np.array([row.prompt_tokens for row in rows]),
        lengths=lengths,
        max_tokens=np.full(len(rows), lengths.max()),
        batch=np.array([row.step for row in rows]),
        predicted=None if None in predicted else np.array(predicted, dtype=np.float64),
    )


def _parse_fields(spec: str, settings: str) -> dict[str, int]:
    """Return the fields that a spec sets; a ValueError for others, and for what is no number."""
    fields: dict[str, int] = {}
    for part in filter(None, settings.split(",")):
        name, _, value = part.partition("=")
        least = 0 if name == "seed" else 1
        if name not in SPEC:
            raise ValueError(f"The trace {spec!r} sets {name!r}: the fields are {', '.join(SPEC)}.")
        if not value.isdecimal() or int(value) < least:
            raise ValueError(f"The trace {spec!r} sets {name} to {value!r}: give a whole number of {least} or more.")
        fields[name] = int(value)
    return fields
