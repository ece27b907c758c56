"""The forms of what stands in a run's folder, as the run has written it."""

from __future__ import annotations

import math
from typing import Annotated, Any, Required

from pydantic import AfterValidator, ConfigDict, Field, with_config
from typing_extensions import TypedDict

MAX_SPANS = 30_000  # of all timelines that are shown
_ALL, _DRAWN = ConfigDict(extra="allow", strict=True), Field(max_length=MAX_SPANS)


def _finite(number: float) -> float | None:
    return number if math.isfinite(number) else None


def _fits(row: TimelineRow) -> TimelineRow:
    """Check that a timeline names only prompts, completions and slots that it has."""
    prompts, completions, slots = len(row["prompts"]), len(row["completions"]), row["slots_kept"]
    if any(not 0 <= completion[0] < prompts for completion in row["completions"]):
        raise ValueError(f"a completion is of a prompt that is not among the {prompts}")
    for completion, slot, start, end in row["spans"]:
        if not (0 <= completion < completions and 0 <= slot < slots and start <= end):
            raise ValueError(
                f"the span {[completion, slot, start, end]} is not of {completions} completions in {slots} slots"
            )
    return row


Number = Annotated[float, AfterValidator(_finite)] | None
"""A number; NaN and infinity, which older files have, are None."""
Count = Annotated[int, Field(ge=0, le=2**53)]
"""A number of updates or tokens, which a float64 holds."""
Amount = Annotated[float, Field(ge=0, le=1e15)]
"""Seconds, tokens or decode steps of one update."""
MAX_NAME = 1000
MAX_PICTURE = 200_000  # characters of a data URL
Short = Annotated[str, Field(max_length=MAX_NAME)]
Slots = Annotated[int, Field(ge=0, le=2**16)]


@with_config(_ALL)
class SampleRow(TypedDict, total=False):
    """A row of samples.jsonl; the values of reward functions and of the data's columns are further keys."""

    step: Required[Count]
    prompt_id: str | None
    prompt: str | None
    completion: str | None
    tokens: Count | None
    finish: str | None
    reward: Number
    advantage: Number
    prompt_images: (
        Annotated[str, Field(max_length=MAX_PICTURE, pattern=r"^data:image/png;base64,[A-Za-z0-9+/=]*$")] | None
    )


@with_config(_ALL)
class Evaluated(TypedDict, total=False):
    """A row of evaluation/completions.jsonl."""

    policy: Required[Short]
    prompt_id: Required[str]
    prompt: str | None
    completion: str | None
    greedy: bool | None
    correct: bool | None
    reward: Number


@with_config(_ALL)
class Length(TypedDict, total=False):
    """A row of trace.jsonl."""

    step: Required[Count]
    tokens: Count
    predicted: Annotated[
        Number, AfterValidator(lambda number: number if number is None or 0 <= number < 1e15 else None)
    ]


class Seconds(TypedDict, total=False):
    """The seconds of the phases of an update."""

    rollout: Required[Amount]
    reward_wait: Required[Amount]
    update: Amount
    weight_sync: Amount


class TimelineRow(TypedDict):
    """A row of timeline.jsonl; see :func:`lit_grpo.scheduling.recording.timeline_row`."""

    step: Count
    slots: Slots
    slots_kept: Slots
    kv_limit: Amount | None
    seconds: Seconds
    prompts: Annotated[list[Short], _DRAWN]
    completions: Annotated[list[tuple[int, Short, Count | None, Amount | None, Short | None]], _DRAWN]
    spans: Annotated[list[tuple[int, int, Count, Count]], _DRAWN]
    clock: Annotated[list[tuple[Amount, Amount, Amount]], _DRAWN]
    prefills: Annotated[list[tuple[Amount, Amount, Amount]], _DRAWN]


WholeTimeline = Annotated[TimelineRow, AfterValidator(_fits)]


@with_config(_ALL)
class Estimate(TypedDict, total=False):
    """The bytes that ``fit-check`` estimates, by phase and part, or why it estimates none."""

    rollout: dict[str, Number]
    update: dict[str, Number]
    why: str


class Memory(TypedDict, total=False):
    """The content of memory.json: bytes by part."""

    device: str | None
    measured: dict[str, Number] | None
    forecast: Estimate | None


@with_config(_ALL)
class Reward(TypedDict, total=False):
    """A reward function of a config."""

    function: str | None
    name: str | None
    weight: Annotated[float, Field(allow_inf_nan=False)]


@with_config(_ALL)
class Sampling(TypedDict, total=False):
    """Fields of ``model.sampling`` and ``model.eval_sampling`` in a config."""

    temperature: Annotated[float, Field(ge=0, allow_inf_nan=False)]


@with_config(_ALL)
class Model(TypedDict, total=False):
    """Fields of ``model`` in a config."""

    policy: Annotated[str, Field(max_length=4096, pattern=r"^[^\x00]*$")] | None
    rewards: list[Reward | str] | None
    pass_reward: str | None
    pass_threshold: Annotated[float, Field(allow_inf_nan=False)] | None
    sampling: Sampling | None
    eval_sampling: Sampling | None
    eval_num_generations: Annotated[int, Field(ge=1, le=2**53)]


@with_config(_ALL)
class Trainer(TypedDict, total=False):
    """Fields of ``trainer`` in a config."""

    max_steps: int | None


@with_config(_ALL)
class RowSourceFields(TypedDict, total=False):
    """A source of rows in a config, or several by name."""

    class_path: str
    init_args: dict[str, Any] | None


@with_config(_ALL)
class Data(TypedDict, total=False):
    """Fields of ``data`` in a config."""

    train: str | RowSourceFields | list[Any] | None
    validation: str | RowSourceFields | list[Any] | None


@with_config(_ALL)
class Config(TypedDict, total=False):
    """A config.yaml, as far as a report or a card reads more of it than texts."""

    trainer: Trainer | None
    model: Model | None
    data: Data | None
