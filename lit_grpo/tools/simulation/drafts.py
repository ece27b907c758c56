"""Drafts against a trace with tokens: the steps that they would have saved, and the seconds on a known device."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from operator import eq
from typing import Any

import numpy as np

from lit_grpo.rollout.slots.drafts.price import StepCost
from lit_grpo.rollout.slots.drafts.suffix import SuffixDrafter
from lit_grpo.tools.simulation.simulator import Engine, ReplayGenerator
from lit_grpo.tools.simulation.traces import LARGEST, Trace
from lit_grpo.types import GroupKey, Key, Prompt, Request, StepEvents

MOST_QUERIES = 256
"""As in ``lit_grpo.rollout.slots.generator``, which brings torch."""
_NOTHING: Any = None  # of the device, where these drafts do not look

DEVICES = {"h100": StepCost(3.65e-3, 7.1e-6, 25e-6 / 612, wait_s=0.555e-3, wait_row_s=24e-6)}
"""Costs of decode steps by device, from ``benchmarks/results/gpu-2026-11-27.json``.

``h100``: Qwen3-1.7B in bfloat16 on one H100, 8 to 64 rows, a prompt of 512 tokens and 200 more. All but attention takes
3.45 ms and 7.1 us a row, attention .20 ms and 25 us a row: taken as proportional to the 612 tokens of a row's mean
context, since other contexts were not measured. The host's .555 ms and 4 us a row are those of 8 and 64 rows of which
some end (``host_cost-2026-11-29.json``, on another machine), with 20 us a row for proposals. They are taken as hidden
by the device, but for steps that try drafts.
"""


class DraftingReplay(ReplayGenerator):
    """Decodes completions that come to known tokens: in a step one each, and those drafted before it that were right.

    A token is a function of the policy's distribution and of its position's random number, so a drafted token that
    equals the recorded one is the one that would have been sampled. The drafter sees this in the place of the slots'
    ``TokenRows``: ``requests`` and ``counts``, in the same order.

    Args:
        engine: The engine that decodes; without a limit on KV tokens, for drafts are tried only while memory is no
            concern.
        trace: Completions with their tokens.
        drafter: Proposes tokens; goes on from batch to batch.
    """

    def __init__(self, engine: Engine, trace: Trace, drafter: SuffixDrafter) -> None:
        if trace.texts is None:
            raise ValueError(
                f"{trace.name} has completions without token_ids, which drafts are compared with: record it with "
                "--rollout_timeline.record_trace tokens, or leave out --drafts."
            )
        if engine.kv_tokens is not None:
            raise ValueError("Drafts are tried while memory is no concern: give --drafts or --kv_tokens, not both.")
        super().__init__(engine, dict(zip(trace.keys, trace.lengths.tolist(), strict=True)))
        self._drafter = drafter
        self._seen: Any = self
        self._texts = {key: text for key, (_, text) in zip(trace.keys, trace.texts, strict=True)}
        self.requests, self._incoming = list[Request](), list[Request]()
        self.counts = self.sampled = np.zeros(engine.num_slots, dtype=np.int64)
        self._most_queries = max(engine.num_slots, min(engine.num_slots * (1 + drafter.most_tokens), MOST_QUERIES))
        self._released: set[GroupKey] = set()

    def token_ids(self, row: int) -> np.ndarray:
        """Return the tokens that a row has come to."""
        return np.array(self._texts[self.requests[row].key][: self.counts[row]], dtype=np.int64)

    def submit(self, requests: Sequence[Request], expected: Sequence[float] | None = None) -> None:
        super().submit(requests, expected)
        self._drafter.expect(requests, expected)
        self._incoming += requests

    def abort(self, keys: Iterable[Key]) -> list[Request]:
        stopped = super().abort(keys)
        gone = {request.key for request in stopped}
        self._incoming = [request for request in self._incoming if request.key not in gone]
        self._end(gone, ended=False)
        return stopped

    def release(self, prompts: Iterable[Prompt]) -> None:
        """Let the drafter forget these prompts, once nothing of them is in flight."""
        self._released |= {(prompt.prompt_id, prompt.visit) for prompt in prompts}
        in_flight = {request.group for request, _, _ in self._rows.values()}
        self._drafter.release(self._released - in_flight)
        self._released &= in_flight

    def step(self) -> StepEvents:
        """Give every row its next token, and what had been drafted right before it."""
        numbers = dict[object, int]()

        def place(request: Request) -> tuple[bool, int]:
            """Those that go on enter first, together if they are equally long."""
            length = request.prefix.num_tokens
            return not length, numbers.setdefault((request.group, length) if length else None, len(numbers))

        for request in sorted(self._incoming, key=place):
            self.counts[len(self.requests)] = request.prefix.num_tokens
            self.requests.append(request)
        self._incoming = []
        events = super().step()
        self.counts[: len(self.requests)] += 1
        self.counts[: len(self._accepted_B)] += self._accepted_B
        self._drafter.took(self._seen, _NOTHING, self._accepted_B)
        self._end({completion.request.key for completion in events.finished}, ended=True)
        self.release(())
        return events

    def _end(self, keys: Collection[Key], ended: bool) -> None:
        """Free the rows of completions; the last row takes the place of each."""
        for row in reversed(range(len(self.requests))):
            if self.requests[row].key in keys:
                self._drafter.left(self._seen, row, ended)
                last = len(self.requests) - 1
                self.requests[row], self.counts[row], self.counts[last] = self.requests[last], self.counts[last], 0
                del self.requests[last]

    def _drafted(self) -> tuple[dict[Key, int], int, int, bool]:
        """Try drafts in the rows that have a token, as :class:`SlotGenerator` does."""
        num_decoded = int(np.count_nonzero(self.counts))
        requests, counts_B = self.requests[:num_decoded], self.counts[:num_decoded]
        limits_B, prompts_B = (
            np.array([(each.sampling.max_tokens, len(each.prompt.token_ids)) for each in requests]).reshape(-1, 2).T
        )
        points, room = np.array([*sorted(self.feature_points), LARGEST]), self._most_queries - num_decoded
        ahead_B = np.minimum(points[np.searchsorted(points[:-1], counts_B)], limits_B) - counts_B - 1
        most_B = self._drafter.most(self._seen, num_decoded, room) if num_decoded else counts_B
        most_B = np.clip(most_B, 0, np.maximum(ahead_B, 0))
        most_B = np.minimum(most_B, np.maximum(room - np.cumsum(most_B) + most_B, 0))
        waits, proposals = bool(most_B.any()), [()] * num_decoded
        if waits:
            proposals = self._drafter.draft(self._seen, most_B, _NOTHING, _NOTHING)
        tried_B, self._accepted_B = np.zeros((2, num_decoded), dtype=np.int64)
        for row, (request, drafted) in enumerate(zip(requests, proposals, strict=True)):
            to_come = self._texts[request.key][counts_B[row] : -1]  # the last one is left to sample
            tried_B[row], self._accepted_B[row] = len(drafted), [*map(eq, drafted, to_come), False].index(False)
        num_read = int((tried_B * (prompts_B + counts_B + 1) + tried_B * (tried_B + 1) // 2).sum())
        beyond = {requests[row].key: int(self._accepted_B[row]) for row in np.flatnonzero(self._accepted_B)}
        return beyond, int(tried_B.sum()), num_read, waits

    def _steps_until_change(self) -> int:
        return 1
