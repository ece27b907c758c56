"""The requests that engines decode, their tokens so far, and what these tell the prediction of lengths."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
import torch

from lit_grpo.policy.sharding import is_scattered
from lit_grpo.process.terminal import counted
from lit_grpo.rollout.generator import Observation, StepEvents
from lit_grpo.scheduling.layouts import KVLayout
from lit_grpo.types import OBSERVED, FinishReason, GroupKey, Key, Prompt, Request, Trajectory

if TYPE_CHECKING:
    from lit_grpo.policy.spec import PolicySpec


_LAST_TOKENS = 4
_NUM_BEFORE = 8  # tokens with which the text that continues them is decoded
_SURE = 1e-3  # how far rounding may put a log-prob above 0
_NONE = -9999.0  # what vLLM writes for a log-prob that is NaN or infinite
_tickets = itertools.count()


class NotAsAsked(Exception):
    """An engine sends what it cannot have sampled as asked; the text is a predicate, whose subject is the engine."""


class DraftCount(NamedTuple):
    """Tokens that an engine has drafted for a completion that has ended, and how many of them it has kept."""

    num_drafted: int
    num_accepted: int


class SampledChunk(NamedTuple):
    """Some tokens of a completion, and why it ended if these are its last."""

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    finish_reason: str | None

    def check(self, num_left: int, vocab_size: int) -> None:
        """Raise NotAsAsked unless these can be tokens, at most ``num_left``, of a vocabulary, with their log-probs."""
        if len(self.token_ids) != len(self.logprobs):
            sent = counted(len(self.token_ids), "token")
            raise NotAsAsked(f"sends {sent} with {counted(len(self.logprobs), 'log-prob')}")
        if len(self.token_ids) > num_left:
            raise NotAsAsked(f"sends {counted(len(self.token_ids) - num_left, 'token')} more than max_tokens")
        for token_id, logprob in zip(self.token_ids, self.logprobs, strict=True):
            if type(token_id) is not int or not 0 <= token_id < vocab_size:
                raise NotAsAsked(f"sends the token {token_id!r}, which is not among the {vocab_size} known")
            if type(logprob) not in (int, float) or not _NONE < logprob < _SURE:
                raise NotAsAsked(
                    f"sends the log-prob {logprob!r}, which none can be; look for NaN weights or a learning rate that "
                    "is too high where all engines do"
                )


class TextFeatures:
    """Features of a text: the policy's input embeddings, averaged over all of it and over its end, and log-probs.

    ``points`` are the numbers of sampled tokens at which a completion is looked at; 0 is its prompt.

    Args:
        policy: The policy whose embeddings are read in place; of a sharded policy, the embeddings last sent.

    Attributes:
        unseen: Prompts to observe next.
    """

    def __init__(self, policy: PolicySpec | None) -> None:
        self.points: tuple[int, ...] = ()
        self.unseen: list[Prompt] = []
        self._embeddings: Any = policy and policy.embeddings
        self._name = policy and policy.embeddings_name
        self._traveled: torch.Tensor | None = None

    def watched(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Pass on the weights that travel to an engine, and keep the embeddings of a policy in shards."""
        for name, tensor in weights:
            if name == self._name:
                self._traveled = tensor.cpu() if is_scattered(self._embeddings) else None
            yield name, tensor

    def of_prompts(self) -> list[Observation]:
        """Observe new prompts; the list is empty where 0 is not among ``points``."""
        prompts, self.unseen = self.unseen, []
        if 0 not in self.points or not prompts:
            return []
        rows = [self._rows(torch.tensor([prompt.token_ids]), np.zeros((1, 1))) for prompt in prompts]
        return [Observation([(prompt.prompt_id, prompt.visit) for prompt in prompts], 0, np.concatenate(rows))]

    def of_completions(self, streams: Sequence[EngineRequest], point: int) -> Observation:
        """Observe completions as they were at ``point`` sampled tokens."""
        first = [stream.first_sampled(point) for stream in streams]
        ids_BT, logprobs_BT = zip(*first, strict=True)
        rows = self._rows(torch.tensor(ids_BT), np.array(logprobs_BT))
        return Observation([stream.request.key for stream in streams], point, rows)

    @torch.no_grad()
    def _rows(self, ids_BT: torch.Tensor, logprobs_BT: np.ndarray) -> np.ndarray:
        weight = self._embeddings.weight if self._traveled is None else self._traveled
        embedded_BTD = weight[ids_BT.to(weight.device)].float()
        pooled = torch.cat([embedded_BTD.mean(1), embedded_BTD[:, -_LAST_TOKENS:].mean(1)], 1).cpu().numpy()
        scalars = np.stack([logprobs_BT.mean(1), logprobs_BT.std(1)], 1)
        return np.concatenate([pooled, scalars], 1, dtype=np.float32)


class EngineRequest:
    """A request in flight, and its tokens so far, which begin with its prefix.

    An engine knows it by its ``ticket``, which is ``None`` while no engine has been asked for it; ``num_begun`` of the
    tokens were there when the engine was asked, for at most ``num_asked`` more. ``engine`` is the name of the one that
    was asked last.

    Args:
        expected: Expected number of tokens.
        salt: The engine may share the KV cache of requests with the same salt.
    """

    def __init__(self, request: Request, expected: float, salt: str) -> None:
        self.request, self.expected, self.salt = request, expected, salt
        self.token_ids: list[int] = request.prefix.token_ids_T.tolist()
        self.logprobs: list[float] = request.prefix.logprobs_T.tolist()
        self.versions: list[int] = request.prefix.versions_T.tolist()
        self.ticket: int | None = None
        self.num_begun = self.num_asked = 0
        self.engine = "vLLM's engine in this process"
        self.engines = request.prefix.engines  # that have sampled tokens, as of a trajectory
        self.num_observed = request.prefix.num_observed
        self.num_reported = len(self.token_ids)  # by steps, and those that it began with
        self.num_failures = 0

    @property
    def prompt(self) -> list[int]:
        return [*self.request.prompt.token_ids, *self.token_ids]

    @property
    def num_sampled(self) -> int:
        return len(self.token_ids) - self.num_observed

    @property
    def num_left(self) -> int:
        """Number of tokens that the engine may still send."""
        return self.num_asked + self.num_begun - len(self.token_ids)

    def first_sampled(self, count: int) -> tuple[list[int], list[float]]:
        """Return the first ``count`` tokens that were sampled, and their log-probs."""
        if not self.num_observed:
            return self.token_ids[:count], self.logprobs[:count]
        began = len(self.request.prefix.versions_T)  # what follows the prefix was sampled
        observed = {place for place, version in enumerate(self.versions[:began]) if version == OBSERVED}
        places = [place for place in range(len(self.token_ids)) if place not in observed][:count]
        return [self.token_ids[place] for place in places], [self.logprobs[place] for place in places]

    def drop_new(self) -> None:
        """Forget the tokens that came since an engine was asked."""
        for values in (self.token_ids, self.logprobs, self.versions):
            del values[self.num_begun :]
        self.engines = tuple(each for each in self.engines if each[0] < self.num_begun)

    @property
    def so_far(self) -> Request:
        """The request, with its tokens so far as its prefix."""
        prefix = self.request.prefix
        num_whole = len(self.versions)  # versions are added last, so an interrupt may leave tokens without them
        num_new = num_whole - prefix.num_tokens
        if not num_new:
            return self.request
        trained = [*prefix.trained_T.tolist(), *([True] * num_new)]
        tokens, logprobs = self.token_ids[:num_whole], self.logprobs[:num_whole]
        trajectory = Trajectory(tokens, logprobs, self.versions, trained)
        trajectory.engines = self.engines
        return self.request.after(trajectory)


class EngineRequests:
    """The requests in flight, in the order in which they came, and what a step reports of them.

    Args:
        policy: The policy whose tokenizer decodes texts, and whose embeddings are features of them.
    """

    def __init__(self, policy: PolicySpec | None = None) -> None:
        self._policy, self._tokenizer = policy, cast(Any, None if policy is None else policy.tokenizer)
        self.features = TextFeatures(policy)
        self._ends = frozenset(() if policy is None else policy.eos_ids)
        self._vocab_size = 0 if policy is None else int(policy.config.get_text_config().vocab_size)
        self._streams: dict[Key, EngineRequest] = {}
        self._asked: dict[int, EngineRequest] = {}
        self._reached: dict[int, list[EngineRequest]] = {}

    def __len__(self) -> int:
        return len(self._streams)

    def __iter__(self) -> Iterator[EngineRequest]:
        return iter(list(self._streams.values()))

    def open(self, request: Request, expected: float, salt: str) -> EngineRequest:
        stream = self._streams[request.key] = EngineRequest(request, expected, salt)
        return stream

    def close(self, keys: Iterable[Key]) -> list[EngineRequest]:
        return [self._streams.pop(key) for key in dict.fromkeys(keys) if key in self._streams]

    # ---- tickets ----------------------------------------------------------------------------------

    def give_ticket(self, stream: EngineRequest) -> None:
        """Note that an engine is about to be asked for the tokens to follow."""
        stream.ticket, stream.num_begun = next(_tickets), len(stream.token_ids)
        stream.num_asked = stream.request.sampling.max_tokens - stream.num_sampled
        self._asked[stream.ticket] = stream

    def of_ticket(self, ticket: int) -> EngineRequest | None:
        """Return the stream with this ticket; ``None`` where the ticket has been taken back."""
        return self._asked.get(ticket)

    def take_ticket(self, stream: EngineRequest) -> int:
        """Take the ticket back, since the engine is not to decode this stream any longer; return it."""
        ticket, stream.ticket = stream.ticket, None
        assert ticket is not None
        del self._asked[ticket]
        return ticket

    # ---- tokens -----------------------------------------------------------------------------------

    def take(self, stream: EngineRequest, chunk: SampledChunk, version: int, events: StepEvents) -> FinishReason | None:
        """Add tokens that can be a completion's next; return why they end it, if they do.

        A completion ends with its first end token, with the first token that completes a stop string (also one that
        began before the engine was asked), or with the last token that the engine was asked for.

        Raises:
            NotAsAsked: These can be no tokens, or the engine goes on where it should end, or ends where it should not.
        """
        chunk.check(stream.num_left, self._vocab_size)
        token_ids, before, sampled_before = chunk.token_ids, len(stream.token_ids), stream.num_sampled
        last = stream.token_ids[-1] if token_ids and before > stream.num_begun else None
        if last in self._ends or not self._ends.isdisjoint(token_ids[:-1]):
            raise NotAsAsked(f"goes on after one of the end tokens {sorted(self._ends)}")
        if not stream.engines or stream.engines[-1][1] != stream.engine:
            stream.engines = (*stream.engines, (before, stream.engine))
        stream.token_ids += token_ids
        end = self._end_of_stop_string(stream, before)
        if end is not None:
            del stream.token_ids[end:]
        num_new = len(stream.token_ids) - before
        stream.logprobs += chunk.logprobs[:num_new]
        stream.versions += [version] * num_new
        events.num_tokens += num_new
        if reached := [point for point in self.features.points if sampled_before < point <= stream.num_sampled]:
            self._reached.setdefault(max(reached), []).append(stream)
        if end is not None:
            return "stop"
        return None if chunk.finish_reason is None else self._checked_end(stream, chunk.finish_reason)

    def _checked_end(self, stream: EngineRequest, reason: str) -> FinishReason:
        """Return the reason for which an engine has ended a completion, if the tokens bear it out."""
        num_new = len(stream.token_ids) - stream.num_begun
        said = f"ends a completion with {reason!r} after {num_new} of {stream.num_asked} tokens"
        at_end = num_new > 0 and stream.token_ids[-1] in self._ends
        at_stop_string = False
        if stop := stream.request.sampling.stop:
            before, whole = self._new_texts(stream)
            if passed := [text for text in stop if text in before]:
                raise NotAsAsked(f"goes on after the stop string {passed[0]!r}")
            at_stop_string = any(text in whole for text in stop)
        if reason == "stop" and not (at_end or at_stop_string):
            last, what = stream.token_ids[-1:], "end token or end of a stop string" if stop else "end token"
            raise NotAsAsked(f"{said}, of which the last, {last[0] if num_new else None}, is no {what}")
        if reason == "length" and (num_new < stream.num_asked or at_end or at_stop_string):
            raise NotAsAsked(said + ", of which the last ends it with 'stop'" * (at_end or at_stop_string))
        if reason not in ("stop", "length"):
            raise NotAsAsked(said)
        return "stop" if reason == "stop" else "length"

    def _new_texts(self, stream: EngineRequest) -> tuple[str, str]:
        """Return the text of the tokens since the engine was asked, without the last token and with it."""
        new = stream.token_ids[stream.num_begun :]
        asked = [*stream.request.prompt.token_ids, *stream.token_ids[: stream.num_begun]][-_NUM_BEFORE:]
        before, *texts = self._tokenizer.batch_decode([asked, [*asked, *new[:-1]], [*asked, *new]])
        if not all(text.startswith(before) for text in texts):  # a character began in the prompt
            before, texts = "", self._tokenizer.batch_decode([new[:-1], new])
        return texts[0][len(before) :], texts[1][len(before) :]

    def _end_of_stop_string(self, stream: EngineRequest, first: int) -> int | None:
        """Return the number of tokens, above ``first``, at which a stop string ends that began before ``num_begun``."""
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

    def finish(self, stream: EngineRequest, reason: FinishReason, events: StepEvents) -> None:
        """End a completion, and report it."""
        del self._streams[stream.request.key]
        if stream.ticket is not None:
            self.take_ticket(stream)
        assert self._policy is not None
        ended = stream.so_far
        text = self._policy.text_of(ended.prefix.sampled_ids, ended.prompt)
        events.finished.append(ended.ended(reason, text))

    # ---- what a step reports ----------------------------------------------------------------------

    def kv_tokens(self, layout: KVLayout) -> int:
        """Return the KV tokens of all streams, with each group's prompt counted once."""
        if not self._streams:
            return 0
        streams = self._streams.values()
        prompts: dict[GroupKey, Prompt] = {stream.request.group: stream.request.prompt for stream in streams}
        lengths = np.array([len(stream.request.prompt.token_ids) for stream in streams])
        tokens = np.array([max(len(stream.token_ids), 1) for stream in streams])
        limits = np.array([stream.request.sampling.room for stream in streams])
        own = int(layout.completion(lengths, tokens, limits).sum())
        return own + sum(layout.prompt(len(prompt.token_ids)) for prompt in prompts.values())

    def observe(self, events: StepEvents) -> None:
        """Report what a step has brought that is not a token for each stream, and observations.

        These are of new prompts, and of completions that have reached a point since the last call.
        """
        for stream in self._streams.values():
            num_new, stream.num_reported = len(stream.token_ids) - stream.num_reported, len(stream.token_ids)
            if num_new != events.num_steps:
                events.beyond[stream.request.key] = num_new - events.num_steps
        events.observations += self.features.of_prompts()
        for point, streams in self._reached.items():
            if there := [each for each in dict.fromkeys(streams) if each.num_sampled >= point]:  # others were dropped
                events.observations.append(self.features.of_completions(there, point))
        self._reached.clear()
