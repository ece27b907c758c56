"""Requests that an engine of its own decodes, what they have come to, and what that shows of lengths."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

from lit_grpo.policy.sharding import is_scattered
from lit_grpo.rollout.generator import Observation, StepEvents
from lit_grpo.scheduling.layouts import KVLayout
from lit_grpo.types import FinishReason, GroupKey, Key, Prompt, Request, Trajectory

if TYPE_CHECKING:
    from lit_grpo.policy.spec import PolicySpec


_LAST_TOKENS = 4
_tickets = itertools.count()


class TextFeatures:
    """The policy's input embeddings of a text, averaged over all of it and over its end, and the log-probs so far.

    ``points`` are the numbers of tokens at which a completion is looked at; 0 is its prompt.

    Args:
        policy: Its embeddings are read where they lie; of shards, as they last travelled.
    """

    points: tuple[int, ...] = ()

    def __init__(self, policy: PolicySpec) -> None:
        self._embeddings: Any = policy.embeddings
        self._name = policy.embeddings_name
        self._travelled: torch.Tensor | None = None

    def watched(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Pass on the weights that travel to an engine."""
        for name, tensor in weights:
            if name == self._name:
                self._travelled = tensor.cpu() if is_scattered(self._embeddings) else None
            yield name, tensor

    def of_prompts(self, prompts: Sequence[Prompt]) -> list[Observation]:
        """Observe prompts; the list is empty where they are not to be looked at."""
        if 0 not in self.points or not prompts:
            return []
        rows = [self._rows(torch.tensor([prompt.token_ids]), np.zeros((1, 1))) for prompt in prompts]
        return [Observation([(prompt.prompt_id, prompt.visit) for prompt in prompts], 0, np.concatenate(rows))]

    def reached(self, num_before: int, num_tokens: int) -> int | None:
        """Return the last point that a completion has come to since it had ``num_before`` tokens."""
        return next((point for point in sorted(self.points, reverse=True) if num_before < point <= num_tokens), None)

    def of_completions(self, streams: Sequence[Stream], point: int) -> Observation:
        """Observe completions as they were at ``point`` tokens."""
        rows = self._rows(
            torch.tensor([stream.token_ids[:point] for stream in streams]),
            np.array([stream.logprobs[:point] for stream in streams]),
        )
        return Observation([stream.request.key for stream in streams], point, rows)

    @torch.no_grad()
    def _rows(self, ids_BT: torch.Tensor, logprobs_BT: np.ndarray) -> np.ndarray:
        weight = self._embeddings.weight if self._travelled is None else self._travelled
        embedded_BTD = weight[ids_BT.to(weight.device)].float()
        pooled = torch.cat([embedded_BTD.mean(1), embedded_BTD[:, -_LAST_TOKENS:].mean(1)], 1).cpu().numpy()
        scalars = np.stack([logprobs_BT.mean(1), logprobs_BT.std(1)], 1)
        return np.concatenate([pooled, scalars], 1, dtype=np.float32)


class Stream:
    """A request on its way, with the tokens that it has come to, those of its prefix among them.

    An engine that is asked for what follows knows it by a ``ticket``, which is ``None`` while none is; ``num_begun`` of
    the tokens were there when it was asked, and it may use keys and values of requests with the same ``salt``.

    Args:
        request: What is asked for.
        expected: How many tokens it is thought to come to.
        salt: See above.
    """

    def __init__(self, request: Request, expected: float, salt: str) -> None:
        self.request, self.expected, self.salt = request, expected, salt
        self.token_ids: list[int] = request.prefix.token_ids_T.tolist()
        self.logprobs: list[float] = request.prefix.logprobs_T.tolist()
        self.versions: list[int] = request.prefix.versions_T.tolist()
        self.ticket: int | None = None
        self.num_begun = 0
        self.num_failures = 0

    @property
    def prompt(self) -> list[int]:
        """All tokens before the next one."""
        return [*self.request.prompt.token_ids, *self.token_ids]

    @property
    def so_far(self) -> Request:
        """The request that goes on from here."""
        prefix = self.request.prefix
        num_whole = len(self.versions)  # which come last: an interrupt may have left tokens without
        num_new = num_whole - prefix.num_tokens
        if not num_new:
            return self.request
        trained = [*prefix.trained_T.tolist(), *([True] * num_new)]
        tokens, logprobs = self.token_ids[:num_whole], self.logprobs[:num_whole]
        return self.request.after(Trajectory(tokens, logprobs, self.versions, trained))


class Streams:
    """The requests in flight, in the order in which they came, and what is told of them.

    Args:
        policy: Whose tokenizer makes texts, and whose embeddings are shown for the prediction of lengths.
    """

    def __init__(self, policy: PolicySpec | None = None) -> None:
        self._policy, self._tokenizer = policy, cast(Any, None if policy is None else policy.tokenizer)
        self._features = None if policy is None else TextFeatures(policy)
        self._streams: dict[Key, Stream] = {}
        self._asked: dict[int, Stream] = {}
        self._reached: dict[int, list[Stream]] = {}
        self._unseen: list[Prompt] = []

    def __len__(self) -> int:
        return len(self._streams)

    def __iter__(self) -> Iterator[Stream]:
        return iter(list(self._streams.values()))

    def watched(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Pass on the weights that travel to an engine, from which texts are looked at."""
        assert self._features is not None
        return self._features.watched(weights)

    def open(self, request: Request, expected: float, salt: str) -> Stream:
        """Begin with a request, from its prefix."""
        stream = self._streams[request.key] = Stream(request, expected, salt)
        return stream

    def close(self, keys: Iterable[Key]) -> list[Stream]:
        """End those of ``keys`` that are in flight."""
        return [self._streams.pop(key) for key in dict.fromkeys(keys) if key in self._streams]

    # ---- tickets ----------------------------------------------------------------------------------

    def give_ticket(self, stream: Stream) -> None:
        """Note that an engine is about to be asked for what follows."""
        stream.ticket, stream.num_begun = next(_tickets), len(stream.token_ids)
        self._asked[stream.ticket] = stream

    def of_ticket(self, ticket: int) -> Stream | None:
        """Return what an engine talks of; ``None`` where the ticket has been taken back."""
        return self._asked.get(ticket)

    def take_ticket(self, stream: Stream) -> int:
        """Note that the engine is to be asked no longer; return its ticket."""
        ticket, stream.ticket = stream.ticket, None
        assert ticket is not None
        del self._asked[ticket]
        return ticket

    # ---- tokens -----------------------------------------------------------------------------------

    def extend(
        self, stream: Stream, token_ids: Sequence[int], logprobs: Sequence[float], version: int, events: StepEvents
    ) -> bool:
        """Add tokens, up to the end of a stop string that began before the engine was asked; say if there is one.

        Raises:
            FloatingPointError: A log-prob is no number.
        """
        if any(math.isnan(logprob) for logprob in logprobs):
            raise FloatingPointError(
                f"The engine's log-probs are NaN at version {version}; look for NaN weights or a learning rate that is "
                "too high."
            )
        before = len(stream.token_ids)
        stream.token_ids += token_ids
        end = self._end_of_stop_string(stream, before)
        if end is not None:
            del stream.token_ids[end:]
        num_new = len(stream.token_ids) - before
        stream.logprobs += logprobs[:num_new]
        stream.versions += [version] * num_new
        events.num_tokens += num_new
        point = None if self._features is None else self._features.reached(before, len(stream.token_ids))
        if point is not None:
            self._reached.setdefault(point, []).append(stream)
        return end is not None

    def _end_of_stop_string(self, stream: Stream, first: int) -> int | None:
        """The number of tokens, above ``first``, with which a stop string across the engine's beginning is there."""
        begun, stop = stream.num_begun, stream.request.sampling.stop
        if not begun or not stop:
            return None
        longest = max(len(text.encode()) for text in stop)  # a token may hold as little as one byte of a character
        ids = stream.token_ids
        if first - begun > longest:
            return None
        start = max(begun - longest, 0)
        texts = self._tokenizer.batch_decode([ids[start:end] for end in (begun, *range(first + 1, len(ids) + 1))])
        old = [texts[0].count(text) for text in stop]  # an earlier turn may have ended with one
        for end, new in enumerate(texts[1:], first + 1):
            if any(new.count(text) > count for text, count in zip(stop, old, strict=True)):
                return end
        return None

    def finish(self, stream: Stream, reason: FinishReason, events: StepEvents) -> None:
        """End a completion."""
        del self._streams[stream.request.key]
        if stream.ticket is not None:
            self.take_ticket(stream)
        assert self._policy is not None
        text = self._policy.text_of(stream.token_ids)
        events.finished.append(stream.so_far.ended(reason, text))

    # ---- what is told -----------------------------------------------------------------------------

    def kv_tokens(self, layout: KVLayout) -> int:
        """Return the KV tokens that all take, prompts once a group."""
        if not self._streams:
            return 0
        streams = self._streams.values()
        prompts: dict[GroupKey, Prompt] = {stream.request.group: stream.request.prompt for stream in streams}
        lengths = np.array([len(stream.request.prompt.token_ids) for stream in streams])
        tokens = np.array([max(len(stream.token_ids), 1) for stream in streams])
        limits = np.array([stream.request.sampling.max_tokens for stream in streams])
        own = int(layout.completion(lengths, tokens, limits).sum())
        return own + sum(layout.prompt(len(prompt.token_ids)) for prompt in prompts.values())

    def look_at(self, points: Sequence[int]) -> None:
        """Show completions from now on that have come to so many tokens; with 0, prompts."""
        assert self._features is not None
        self._features.points = tuple(points)

    def expect(self, prompts: Iterable[Prompt]) -> None:
        """Show these prompts the next time."""
        self._unseen += prompts

    def observe(self, events: StepEvents) -> None:
        """Show prompts, and the completions that have come to a point since the last time."""
        assert self._features is not None
        events.observations += self._features.of_prompts(self._unseen)
        events.observations += [self._features.of_completions(streams, p) for p, streams in self._reached.items()]
        self._unseen.clear()
        self._reached.clear()
