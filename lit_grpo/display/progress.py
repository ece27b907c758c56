"""How far a run and its rollout are, as the fields of a line each."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from lit_grpo.display.lines import Field, count, duration

if TYPE_CHECKING:
    from lit_grpo.scheduling.flight import Flight

UNDER_WAY = {
    "reward": "waiting for rewards",
    "update": "learning",
    "weight sync": "sending weights",
    "checkpoint": "saving a checkpoint",
}
"""What a phase of a run is called; any other is getting ready."""
KNOWN = ("reward", "val/pass@1", "tokens/s", "peak_GiB")


class UpdateCount:
    """Counts the updates of a run, and how long they take.

    Args:
        done: Those that have been made.
        total: Those that are to be made; None where nothing says so.
    """

    def __init__(self, done: int, total: int | None) -> None:
        self.done, self.total = done, total
        self._first, self._began = done, time.monotonic()
        self._ended = self._began

    def move(self, done: int) -> None:
        """So many have been made by now."""
        self.done, self._ended = done, time.monotonic()

    @property
    def share(self) -> float | None:
        """The part that is done."""
        return None if not self.total else self.done / self.total

    @property
    def seconds_left(self) -> float:
        """Until all are made, at the speed so far, validation included; NaN before the first and behind the last."""
        if self.total is None or self.done in (self._first, self.total):
            return math.nan
        each = (self._ended - self._began) / (self.done - self._first)
        return max((self.total - self.done) * each - (time.monotonic() - self._ended), 0.0)

    @property
    def text(self) -> str:
        """``12/60``."""
        return str(self.done) if self.total is None else f"{self.done}/{self.total}"


class RolloutCount:
    """Counts what comes of a rollout; two additions a step.

    Args:
        flight: What is in work.
        mean_tokens: How long completions of an earlier rollout were; NaN where there was none.
    """

    def __init__(self, flight: Flight, mean_tokens: float) -> None:
        self._flight, self._expected = flight, mean_tokens
        self._began = time.monotonic()
        self.tokens = self.done = self._done_tokens = 0

    def end_one(self, num_tokens: int) -> None:
        """A completion has come to its end."""
        self.done += 1
        self._done_tokens += num_tokens

    @property
    def total(self) -> int:
        """All completions of this rollout."""
        return self.done + self._flight.num_active + self._flight.num_waiting

    @property
    def mean_tokens(self) -> float:
        """The mean length of those that have ended."""
        return self._done_tokens / self.done if self.done else math.nan

    @property
    def tokens_per_s(self) -> float:
        """Since it began."""
        return self.tokens / max(time.monotonic() - self._began, 1e-6)

    @property
    def seconds_left(self) -> float:
        """A rough estimate: as if completions were as long as in the last rollout, at the speed so far; NaN at first.

        Where there was none, they are taken to be as long as those that have ended.
        """
        expected = self.mean_tokens if math.isnan(self._expected) else self._expected
        tokens = max(self.total * expected - self.tokens, self.total - self.done)
        return tokens / self.tokens_per_s if self.tokens and not math.isnan(expected) else math.nan

    def fields(self, name: str, memory: str = "") -> list[Field]:
        """What a line says of it. Left out first: the bar, memory, slots, tokens/s, the time to go."""
        return [
            Field(f"{name} {self.done}/{self.total} completions", 0, "cyan"),
            Field("", 5, "cyan", share=self.done / max(self.total, 1)),
            Field(f"{self._flight.num_active}/{self._flight.num_slots} slots", 3),
            Field(f"{count(self.tokens_per_s)} tokens/s", 2),
            Field(_time(self.seconds_left, "to go"), 1),
            Field(memory, 4),
        ]


def run_fields(name: str, updates: UpdateCount, metrics: Mapping[str, float], passes: str = "") -> list[Field]:
    """What a line says of the run.

    Left out first: what passes, metrics of others, the bar, pass@1, the reward, the time left.
    """
    share, passed = updates.share, pass_text(metrics)
    return [
        Field(f"{name} {updates.text}", 0, "bold"),
        *([] if share is None else [Field("", 4, "green", share=share)]),
        Field(reward_text(metrics), 2),
        Field(passed, 3),
        Field(f"({passes})" if passed and passes else "", 6),
        Field(_time(updates.seconds_left, "left"), 1),
        *(Field(text, 5) for text in _others(metrics)),
    ]


def phase_fields(phase: str, seconds: float, metrics: Mapping[str, float]) -> list[Field]:
    """What a line says of a phase that counts nothing, with the last update's figures. Left out first: memory."""
    return [
        Field(f"{UNDER_WAY.get(phase, 'getting ready')} {duration(seconds)}", 0, "cyan"),
        Field(speed_text(metrics), 1),
        Field(memory_text(metrics), 2),
    ]


def update_fields(updates: UpdateCount, metrics: Mapping[str, float]) -> list[Field]:
    """What a plain line says of an update."""
    texts = (
        *(f"update {updates.text}", reward_text(metrics), pass_text(metrics), speed_text(metrics)),
        *(memory_text(metrics), _time(updates.seconds_left, "left"), *_others(metrics)),
    )
    return [Field(text) for text in texts]


def reward_text(metrics: Mapping[str, float]) -> str:
    """``reward 0.812``."""
    return f"reward {metrics['reward']:.3g}" if "reward" in metrics else ""


def pass_text(metrics: Mapping[str, float], passes: str = "") -> str:
    """``pass@1 94.1%``, of held-out prompts, or ``pass@1 (correct >= 1) 94.1%``."""
    name = f"pass@1 ({passes})" if passes else "pass@1"
    return f"{name} {metrics['val/pass@1']:.1%}" if "val/pass@1" in metrics else ""


def speed_text(metrics: Mapping[str, float]) -> str:
    """``2.31k tokens/s``, of rollout and update."""
    return f"{count(metrics['tokens/s'])} tokens/s" if "tokens/s" in metrics else ""


def memory_text(metrics: Mapping[str, float]) -> str:
    """``0.51 GiB``, the peak of the last update."""
    return f"{metrics['peak_GiB']:.3g} GiB" if "peak_GiB" in metrics else ""


def _time(seconds: float, what: str) -> str:
    return "" if math.isnan(seconds) else f"{duration(seconds)} {what}"


def _others(metrics: Mapping[str, float]) -> list[str]:
    return [f"{name} {value:.3g}" for name, value in metrics.items() if name not in KNOWN]
