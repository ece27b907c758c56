"""Drafts against a trace with tokens: the steps that they would have saved, and the seconds on a known device."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
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
    equals the recorded one is the one that would have been sampled.

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
        texts = {key: text for key, (_, text) in zip(trace.keys, trace.texts, strict=True)}
        self._seen: Any = _SeenRows(texts)  # in the place of the slots' TokenRows
        self._prompts = {key: tuple(prompt) for key, (prompt, _) in zip(trace.keys, trace.texts, strict=True)}
        most = min(engine.num_slots * (1 + drafter.most_tokens), MOST_QUERIES)
        self._most_queries = max(engine.num_slots, most)
        self._incoming: list[Request] = []
        self._released: set[GroupKey] = set()

    def submit(self, requests: Sequence[Request], expected: Sequence[float] | None = None) -> None:
        """Admit requests."""
        super().submit(requests, expected)
        self._drafter.expect(requests, expected)
        self._incoming += requests

    def abort(self, keys: Iterable[Key]) -> list[Request]:
        """Hand requests back, with tokens that mean nothing as their prefixes."""
        stopped = super().abort(keys)
        gone = {request.key for request in stopped}
        self._incoming = [request for request in self._incoming if request.key not in gone]
        for row in reversed(range(len(self._seen.requests))):
            if self._seen.requests[row].key in gone:
                self._end(row, ended=False)
        return stopped

    def release(self, prompts: Iterable[Prompt]) -> None:
        """Say that no more requests for these prompts will come."""
        self._released |= {(prompt.prompt_id, prompt.visit) for prompt in prompts}
        self._forget_prompts()

    def _forget_prompts(self) -> None:
        in_flight = {request.group for request, _, _ in self._rows.values()}
        self._drafter.release(self._released - in_flight)
        self._released &= in_flight

    def step(self) -> StepEvents:
        """Give every row its next token, and what had been drafted right before it."""
        seen, alike = self._seen, dict[tuple[GroupKey, int], list[Request]]()
        for request in self._incoming:  # those that go on enter first, together if they are equally long
            num_tokens = request.prefix.num_tokens
            alike.setdefault((request.group if num_tokens else ("", 0), num_tokens), []).append(request)
        for (_, num_tokens), requests in sorted(alike.items(), key=lambda each: not each[0][1]):
            for request in requests:
                prompt_ids = self._prompts[request.key] or request.prompt.token_ids
                seen.requests.append(replace(request, prompt=replace(request.prompt, token_ids=prompt_ids)))
                seen.counts = seen.sampled = np.append(seen.counts, num_tokens)
        self._incoming = []
        events = super().step()
        seen.counts = seen.sampled = seen.counts + 1
        seen.counts[: len(self._accepted_B)] += self._accepted_B
        self._drafter.took(seen, _NOTHING, self._accepted_B)
        ended = {completion.request.key for completion in events.finished}
        for row in reversed(range(len(seen.requests))):
            if seen.requests[row].key in ended:
                self._end(row, ended=True)
        self._forget_prompts()
        return events

    def _end(self, row: int, ended: bool) -> None:
        """Free a row, whose place the last one takes."""
        seen = self._seen
        self._drafter.left(seen, row, ended)
        seen.requests[row], seen.counts[row] = seen.requests[-1], seen.counts[-1]
        del seen.requests[-1]
        seen.counts = seen.sampled = seen.counts[:-1]

    def _drafted(self) -> tuple[dict[Key, int], int, int, bool]:
        """Try drafts in the rows that have a token, as :class:`SlotGenerator` does."""
        seen, num_decoded = self._seen, int((self._seen.counts > 0).sum())
        sampled_B = seen.sampled[:num_decoded]
        limits_B = np.array([request.sampling.max_tokens for request in seen.requests[:num_decoded]], dtype=np.int64)
        points = np.array(sorted(self.feature_points), dtype=np.int64)
        ahead_B = np.append(points, LARGEST)[np.searchsorted(points, sampled_B)]
        room = self._most_queries - num_decoded
        most_B = self._drafter.most(seen, num_decoded, room) if num_decoded else sampled_B
        most_B = np.minimum(most_B, np.maximum(np.minimum(ahead_B, limits_B) - sampled_B - 1, 0))
        most_B = np.minimum(most_B, np.maximum(room - np.cumsum(most_B) + most_B, 0))
        accepted_B, tried_B = np.zeros((2, num_decoded), dtype=np.int64)
        waits = bool(most_B.any())
        for row, drafted in enumerate(self._drafter.draft(seen, most_B, _NOTHING, _NOTHING) if waits else ()):
            tried_B[row] = len(drafted)
            accepted_B[row] = _num_right(drafted, seen.texts[seen.requests[row].key][sampled_B[row] :])
        prompts_B = np.array([len(request.prompt.token_ids) for request in seen.requests[:num_decoded]], dtype=np.int64)
        num_read = int((tried_B * (prompts_B + sampled_B + 1) + tried_B * (tried_B + 1) // 2).sum())
        self._accepted_B = accepted_B
        beyond = {seen.requests[row].key: int(accepted_B[row]) for row in np.flatnonzero(accepted_B)}
        return beyond, int(tried_B.sum()), num_read, waits

    def _steps_until_change(self) -> int:
        return 1


class _SeenRows:
    """The rows of a replay as a drafter sees those of the slots, in the same order."""

    def __init__(self, texts: dict[Key, Sequence[int]]) -> None:
        self.texts, self.requests = texts, list[Request]()
        self.counts = self.sampled = np.zeros(0, dtype=np.int64)

    def token_ids(self, row: int) -> np.ndarray:
        """Return the tokens that a row has come to."""
        return np.array(self.texts[self.requests[row].key][: self.counts[row]], dtype=np.int64)


def _num_right(drafted: Sequence[int], text: Sequence[int]) -> int:
    """Return how many drafted tokens are those of the text, of which one more has to be left to sample."""
    for number, (token, other) in enumerate(zip(drafted, text[:-1], strict=False)):
        if token != other:
            return number
    return min(len(drafted), len(text) - 1)
