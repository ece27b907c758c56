"""Counts of what happened to the trajectories of a rollout, and warnings for the user."""

from __future__ import annotations

import logging
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from lit_grpo.environments.contract import Kind
from lit_grpo.findings.rewards import Finding
from lit_grpo.findings.tool_calls import ToolCalls
from lit_grpo.plugins import CannotGoOn

logger = logging.getLogger(__name__)
MOST_BATCHES_GONE = 3
"""Number of batches in a row with only dropped trajectories after which the run ends."""
COUNTED = (
    *("tool_calls", "tool_failures", "tool_timeouts", "broken_calls", "shortened_answers", "cut_short"),
    *("failures", "retries", "dropped", "timeouts", "restarted", "unkept"),
)
"""Names of the counted metrics."""


class EnvironmentLog:
    """Counts what happens to the trajectories of a rollout, on this rank, and logs each warning once.

    Args:
        kinds: The kinds of environment.
        more: Names of further counts.

    Attributes:
        counts: Of this rollout, by name; beside :data:`COUNTED` the numbers ``ended``, ``turns``, ``rows``,
            ``waited_s`` and ``lasted_s`` of all trajectories, from which means are made.
        tried_states: Names of the kinds whose first state has been checked.
        tool_calls: Calls of each tool in this run.
        has_begun: A trajectory has begun in this run: an environment could be reset, or an agent has ended.
    """

    def __init__(self, kinds: Sequence[Kind], more: Sequence[str] = ()) -> None:
        self.counts: defaultdict[str, float] = defaultdict(float)
        self.tried_states: set[str] = set()
        self.tool_calls = ToolCalls()
        self.has_begun = False
        self._tools = dict.fromkeys(tool for kind in kinds for tool in kind.tools)
        self._names = (*COUNTED, *more)
        self._told: set[str] = set()
        self._num_told: defaultdict[str, int] = defaultdict(int)  # by kind
        self._num_gone, self._failure = 0, ""  # batches in a row whose trajectories were all dropped, and why

    def tell(self, sentence: str) -> None:
        self.tell_once(sentence, "%s", sentence)

    def tell_once(self, what: str, message: str, *values: Any) -> None:
        if what not in self._told:
            self._told.add(what)
            logger.warning(message, *values)

    def tell_some(self, kind: str, sentence: str, most: int) -> None:
        """Log a warning once, and no more than ``most`` warnings of a kind."""
        if sentence not in self._told and self._num_told[kind] < most:
            self._num_told[kind] += 1
            self.tell(sentence)

    def tell_failure(self, sentence: str) -> None:
        """Log a warning for the first failure of each kind; further failures are only counted."""
        self._failure = sentence
        self.tell(
            f"The environment {sentence}. The trajectory restarts with a fresh environment, or is left out of its "
            "group; further failures are only counted."
        )

    def called(self, name: str, error: str | None) -> None:
        self.tool_calls.add(name, error)
        self.counts[f"calls/{name}"] += 1
        self.counts[f"failed_calls/{name}"] += error is not None

    def end(self, num_turns: int, num_rows: int, waited_s: float, lasted_s: float) -> None:
        self.has_begun = True
        figures = {"ended": 1, "turns": num_turns, "rows": num_rows, "waited_s": waited_s, "lasted_s": lasted_s}
        for name, figure in figures.items():
            self.counts[name] += figure

    # ---- after a rollout --------------------------------------------------------------------------------

    def tell_news(self) -> None:
        """Warn of a rollout without an end, and of tools that fail at every call."""
        if self.counts["ended"] and self.counts["cut_short"] >= self.counts["ended"]:
            self.tell(
                f"All {int(self.counts['ended'])} trajectories of a rollout were cut short by max_turns, max_tokens or "
                "max_observed, and none reached its end; set done in the environment at the end, or raise the limits."
            )
        for finding in self.tool_calls.news():
            self.tell(finding.sentence)

    def metrics(self, gather: Callable[[Any], list[Any]] | None = None) -> dict[str, float]:
        """Return what happened in the last rollout: sums of counts, and means over trajectories.

        Args:
            gather: Brings values of all ranks together in their order; all of them call it. By default the metrics are
                those of this rank.
        """
        totals: defaultdict[str, float] = defaultdict(float)
        for counts in [self.counts] if gather is None else gather(dict(self.counts)):
            for name, count in counts.items():
                totals[name] += count
        by_tool = [f"{of}/{tool}" for of in ("calls", "failed_calls") for tool in self._tools]
        ended, lasted_s = totals["ended"] or math.nan, totals["lasted_s"] or math.nan
        return {
            "environments/turns": totals["turns"] / ended,
            "environments/rows": totals["rows"] / ended,
            "environments/waiting_share": totals["waited_s"] / lasted_s,
            **{f"environments/{name}": totals[name] for name in (*self._names, *by_tool)},
        }

    def note_batch(self, gather: Callable[[Any], list[Any]]) -> None:
        """Note whether all trajectories of a batch were dropped, on all ranks.

        Raises:
            CannotGoOn: They were, in :data:`MOST_BATCHES_GONE` in a row, or in one if no trajectory has ever begun.
        """
        ended, dropped, begun = zip(
            *gather((self.counts["ended"], self.counts["dropped"], self.has_begun)), strict=True
        )
        is_gone = any(dropped) and not any(ended)
        self._num_gone = self._num_gone + 1 if is_gone else 0
        if self._num_gone:
            self._failure = next((each for each in gather(self._failure) if each), "")
        if self._num_gone >= (MOST_BATCHES_GONE if any(begun) else 1):
            raise CannotGoOn(
                f"{self._gone()} Fix the environment, or the service it connects to, and resume the run from its last "
                "checkpoint."
            )

    def findings(self) -> list[Finding]:
        gone = [Finding("environment", "failed", self._gone())] if self._num_gone else []
        return [*self.tool_calls.findings(), *gone]

    def _gone(self) -> str:
        which = f"last {self._num_gone} batches" if self._num_gone > 1 else "last batch"
        return (
            f"All trajectories of the {which} were dropped after their retries, because the environment failed: "
            f"{self._failure}."
        )
