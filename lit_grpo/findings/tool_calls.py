"""Tools whose every call fails: the policy is answered with an error each time, and can learn nothing of the tool."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import Any

from lit_grpo.findings.rewards import Finding

LEAST_CALLS = 3
"""Fewer failed calls of a tool may be an accident."""
MOST_ERRORS = 32
"""So many different errors of a tool are told apart."""


class ToolCalls:
    """Counts the calls of each tool, and the errors of tools of which no call has succeeded.

    For example, after three calls of ``lookup`` that raised the same error, :meth:`findings` has one finding::

        All 3 calls of the tool `lookup` failed, 3 of them with "ValueError: no key". ...
    """

    def __init__(self) -> None:
        self._num_calls: Counter[str] = Counter()
        self._num_failed: Counter[str] = Counter()
        self._errors: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self._told: set[str] = set()

    def add(self, name: str, error: str | None = None) -> None:
        """Count one call that failed with ``error``, or succeeded if ``error`` is None."""
        self.add_many(name, 1, int(error is not None))
        if self._num_failed[name] < self._num_calls[name]:
            self._errors.pop(name, None)
        elif error is not None and (error in self._errors[name] or len(self._errors[name]) < MOST_ERRORS):
            self._errors[name][error] += 1

    def add_many(self, name: str, num_calls: int, num_failed: int) -> None:
        """Count calls whose errors are not known."""
        self._num_calls[name] += num_calls
        self._num_failed[name] += num_failed

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        errors = {name: dict(those) for name, those in list(self._errors.items())}
        return {
            "calls": dict(self._num_calls),
            "failed": dict(self._num_failed),
            "errors": errors,
            "told": {*self._told},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._num_calls, self._num_failed = Counter(state["calls"]), Counter(state["failed"])
        self._errors = defaultdict(Counter, {name: Counter(those) for name, those in state["errors"].items()})
        self._told = {*state["told"]}

    def findings(self) -> list[Finding]:
        """Return a finding for each tool whose calls have all failed."""
        numbers = {name: number for name, number in self._num_calls.items() if number >= LEAST_CALLS}
        return [
            Finding(f"tool {name}", "failed", self._sentence(name, number))
            for name, number in numbers.items()
            if self._num_failed[name] == number
        ]

    def news(self) -> list[Finding]:
        """Return the findings that were not returned before."""
        found = [finding for finding in self.findings() if finding.name not in self._told]
        self._told |= {finding.name for finding in found}
        return found

    def _sentence(self, name: str, number: int) -> str:
        if not self._errors[name]:
            return f"All {number} calls of the tool `{name}` failed. The answers in samples.jsonl have the errors."
        ((error, count),) = self._errors[name].most_common(1)
        remedy = "Mend the tool, or tell the policy in the prompt or the docstring how to call it."
        if "signal only works in main thread" in error:
            remedy = (
                "Tools run in threads, where signals fail: leave the alarm out, because tool_timeout_s limits calls."
            )
        return f'All {number} calls of the tool `{name}` failed, {count} of them with "{error}". {remedy}'
