"""Lossless speculation against a trace with tokens: how many steps drafts would have saved."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from lit_grpo.rollout.generator import StepEvents
from lit_grpo.scheduling.drafting import Drafts
from lit_grpo.tools.simulation.simulator import Engine, ReplayGenerator
from lit_grpo.tools.simulation.traces import Trace
from lit_grpo.types import Key, Request


@dataclass
class Speculation:
    """Drafts of at most ``most`` tokens a row and step, and what came of them; goes on from batch to batch.

    A token's random numbers depend on its completion and its position alone, so a drafted token that equals the one
    that was recorded is the one that would have been sampled. Drafts take slots that are free: with A rows in S slots
    each row gets ``min(most, (S - A) // A)`` drafted tokens, so that no step is wider than one with all slots in use.
    """

    most: int
    drafts: Drafts = field(default_factory=Drafts)
    num_drafted: int = 0
    num_accepted: int = 0

    @property
    def accepted(self) -> float:
        """Share of drafted tokens that were right."""
        return self.num_accepted / max(self.num_drafted, 1)


class SpeculativeReplay(ReplayGenerator):
    """Decodes completions that come to known tokens: in a step one each, and those drafted before it that were right.

    Args:
        engine: What decodes; without a limit on KV tokens.
        trace: With tokens.
        speculation: Makes drafts, and counts.
    """

    def __init__(self, engine: Engine, trace: Trace, speculation: Speculation) -> None:
        assert trace.texts is not None and engine.kv_tokens is None
        super().__init__(engine, dict(zip(trace.keys, trace.lengths.tolist(), strict=True)))
        self._texts = dict(zip(trace.keys, trace.texts, strict=True))
        self._speculation = speculation

    def submit(self, requests: Sequence[Request], expected: Sequence[float] | None = None) -> None:
        """Admit requests."""
        super().submit(requests, expected)
        for request in requests:
            prompt, tokens = self._texts[request.key]
            begun = [*prompt, *tokens[: request.prefix.num_tokens]]
            self._speculation.drafts.begin(request.key, request.prompt.prompt_id, begun)

    def abort(self, keys: Iterable[Key]) -> list[Request]:
        """Hand requests back."""
        stopped = super().abort(keys)
        for request in stopped:
            self._speculation.drafts.end(request.key)
        return stopped

    def step(self) -> StepEvents:
        """Give every row its next token, and what had been drafted right before it."""
        drafts, active = self._speculation.drafts, list(self._rows)
        width = min(self._speculation.most, (self._engine.num_slots - len(active)) // len(active))
        news = {key: self._next_tokens(key, width) for key in active}
        for key, (tokens, _) in news.items():
            drafts.extend(key, tokens)
            self._move(key, len(tokens) - 1)
        self.positions.append(len(active) + sum(drafted for _, drafted in news.values()))
        events = super().step()
        events.num_tokens = sum(len(tokens) for tokens, _ in news.values())
        for completion in events.finished:
            drafts.end(completion.request.key)
        return events

    def _next_tokens(self, key: Key, width: int) -> tuple[Sequence[int], int]:
        """Return the tokens that a row comes to in a step, and how many were drafted for it."""
        request, offset, _ = self._rows[key]
        _, tokens = self._texts[key]
        done = offset + self._step
        drafted = self._speculation.drafts.draft(key, min(width, request.sampling.max_tokens - done - 1))
        agree = [token == other for token, other in zip(drafted, tokens[done:], strict=False)]
        right = agree.index(False) if False in agree else len(agree)
        self._speculation.num_drafted += len(drafted)
        self._speculation.num_accepted += right
        return tokens[done : done + right + 1], len(drafted)

    def _steps_until_change(self) -> int:
        return 1
