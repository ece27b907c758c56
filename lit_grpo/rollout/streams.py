"""Completions that an engine of its own decodes, as their tokens come in."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from lit_grpo.rollout.generator import StepEvents
from lit_grpo.types import Completion, FinishReason, Request

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from lit_grpo.rollout.text_features import TextFeatures

Key = tuple[str, int, int]


@dataclass
class Stream:
    """One completion on its way: its tokens, their log-probs, and the policy version that sampled each."""

    request: Request
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)

    def completion(self, reason: FinishReason, text: str = "") -> Completion:
        """Return what there is of it."""
        return Completion(
            self.request,
            torch.tensor(self.token_ids, dtype=torch.int64),
            torch.tensor(self.logprobs, dtype=torch.float32),
            torch.tensor(self.versions, dtype=torch.int64),
            reason,
            text,
        )


class Streams:
    """The completions in flight, and what is told of them.

    Args:
        tokenizer: Makes a finished completion's text.
        features: What is shown of completions for the prediction of their lengths.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, features: TextFeatures) -> None:
        self._tokenizer = tokenizer
        self._features = features
        self._streams: dict[Key, Stream] = {}
        self._reached: dict[int, list[Stream]] = {}

    def __len__(self) -> int:
        return len(self._streams)

    def __contains__(self, key: Key) -> bool:
        return key in self._streams

    @property
    def requests(self) -> list[Request]:
        """Those in flight, in the order in which they were opened."""
        return [stream.request for stream in self._streams.values()]

    @property
    def num_kv_tokens(self) -> int:
        """Prompt tokens once a group, and the tokens that have been sampled."""
        prompts = {stream.request.key[:2]: stream.request.prompt for stream in self._streams.values()}
        sampled = sum(len(stream.token_ids) for stream in self._streams.values())
        return sampled + sum(len(prompt.token_ids) for prompt in prompts.values())

    def num_tokens(self, key: Key) -> int:
        """The tokens that a completion in flight has."""
        return len(self._streams[key].token_ids)

    def open(self, request: Request) -> None:
        """Begin with a request."""
        self._streams[request.key] = Stream(request)

    def restart(self, key: Key) -> Request:
        """Forget what has come in of a request that is asked for again from its beginning."""
        request = self._streams[key].request
        self._streams[key] = Stream(request)
        return request

    def extend(
        self, key: Key, token_ids: Sequence[int], logprobs: Sequence[float], version: int, events: StepEvents
    ) -> None:
        """Add tokens.

        Raises:
            FloatingPointError: A log-prob is no number.
        """
        if any(math.isnan(logprob) for logprob in logprobs):
            raise FloatingPointError(
                f"The engine's log-probs are NaN at version {version}; look for NaN weights or a learning rate that is "
                "too high."
            )
        stream = self._streams[key]
        before = len(stream.token_ids)
        stream.token_ids += token_ids
        stream.logprobs += logprobs
        stream.versions += [version] * len(token_ids)
        events.num_tokens += len(token_ids)
        point = self._features.reached(before, len(stream.token_ids))
        if point is not None:
            self._reached.setdefault(point, []).append(stream)

    def observe(self, events: StepEvents) -> None:
        """Show the completions that have come to a point since the last time."""
        events.observations += [self._features.of_completions(streams, p) for p, streams in self._reached.items()]
        self._reached.clear()

    def finish(self, key: Key, reason: FinishReason, events: StepEvents) -> None:
        """End a completion."""
        stream = self._streams.pop(key)
        text = str(self._tokenizer.decode(stream.token_ids, skip_special_tokens=True))
        events.finished.append(stream.completion(reason, text))

    def abort(self, keys: Iterable[Key]) -> list[Completion]:
        """End those of ``keys`` that are in flight, and return what they have."""
        return [self._streams.pop(key).completion("abort") for key in set(keys) if key in self._streams]
