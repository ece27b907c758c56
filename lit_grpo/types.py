"""Data types of one training iteration, from prompt to rollout group.

Dimension legend, used as a suffix on tensors everywhere (``rewards_PG``, ``logprobs_BT``):

====  ==========================================================
P     prompts in a batch
G     completions per prompt (the group size)
R     rollouts of a batch, group by group, however many each has
B     rows of a batch that goes through the model
C     completions of a micro-batch
T     tokens
N     completion tokens that are trained on, of a micro-batch, one completion after another
V     vocabulary
K     reward functions
====  ==========================================================
"""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from hashlib import blake2b
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

from lit_grpo.limits import Count, Limit, Number, check_fields
from lit_grpo.trajectory import EMPTY, OBSERVED, MutualSpan, Pictures, Segment, Trajectory

if TYPE_CHECKING:
    import numpy as np
    import torch

    from lit_grpo.trajectory import Values

__all__ = [
    "EMPTY",
    "OBSERVED",
    "Clock",
    "Completion",
    "Episode",
    "FinishReason",
    "GroupKey",
    "Key",
    "MutualSpan",
    "Observation",
    "PassRule",
    "Pictures",
    "Prompt",
    "PromptBatch",
    "Request",
    "Rollout",
    "RolloutGroup",
    "SamplePath",
    "SamplingParams",
    "Segment",
    "Span",
    "StepEvents",
    "Trajectory",
]

SamplePath = tuple[int, ...]
"""Which sample of a prompt: ``(sample,)``; where a sample forks and takes turns, ``(sample, branch, turn)``.

Below 0 it is one that is replayed.
"""
GroupKey = tuple[str, int]
"""``(prompt_id, visit)``: one visit of a prompt, whose completions are a group."""
Key = tuple[str, int, SamplePath]
"""``(prompt_id, visit, path)``: one completion of a run."""


class Span(NamedTuple):
    """A slot decodes one completion from ``start`` to ``end``, in steps or seconds.

    ``group`` is a number that completions of one prompt share. A completion that was set aside has several spans.
    """

    slot: int
    start: float
    end: float
    group: int


@dataclass
class Clock:
    """Times of a rollout's steps, in seconds since it began, and what was held then; 40 bytes a step.

    Columns have a row for each call of the generator: ``steps`` so far, when it ``began`` and ``ended``, the KV tokens
    held at its end, and the prompt tokens that it prefilled. ``slots`` there are, and memory for ``kv_limit`` tokens;
    None where that is no limit.
    """

    slots: int = 0
    kv_limit: int | None = None
    steps: array[int] = field(default_factory=partial(array, "q"))
    began: array[float] = field(default_factory=partial(array, "d"))
    ended: array[float] = field(default_factory=partial(array, "d"))
    kv_tokens: array[int] = field(default_factory=partial(array, "q"))
    prefilled: array[int] = field(default_factory=partial(array, "q"))


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters of completions."""

    temperature: Annotated[float, Limit(ge=0, finite=True)] = 1.0
    """Temperature that divides the logits; 0 is greedy decoding (validation and predict only)."""
    top_p: Annotated[float, Limit(gt=0, le=1, remedy="1 keeps every token")] = 1.0
    """Keep the smallest set of tokens whose probability reaches this; 1 keeps all."""
    top_k: Annotated[int, Limit(ge=0, remedy="0 keeps every token")] = 0
    """Keep this many most likely tokens; 0 keeps all."""
    min_p: Annotated[float, Limit(ge=0, lt=1, remedy="0 keeps every token")] = 0.0
    """Drop tokens whose probability is below this fraction of the likeliest token's; 0 keeps all."""
    max_tokens: Count = 256
    """Max number of sampled tokens per completion, including the end-of-sequence token."""
    stop: tuple[str, ...] = ()
    """Strings that end a completion once its text contains one of them; the text keeps the string."""
    max_observed: Number = 0
    """Max number of environment tokens per completion, such as tool results. They are masked from the loss and do not
    count towards ``max_tokens``.
    """

    def __post_init__(self) -> None:
        check_fields(self, "sampling ")
        if any(not text for text in self.stop):
            raise ValueError("sampling stop holds an empty string, which would end every completion; remove it.")

    @cached_property
    def room(self) -> int:
        """The most tokens of one completion: those that are sampled, and those that are observed."""
        return self.max_tokens + self.max_observed

    @cached_property
    def truncates(self) -> bool:
        """True if tokens of the model's distribution can be left out of sampling."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0


def own_copy(value: Any, what: str) -> Any:
    """Return a deep copy of a value of the data, for somebody who may change it.

    Args:
        value: Value to copy, such as a column of a row.
        what: Name of the value in messages, such as ``column 'board' of train/3``.

    Raises:
        ValueError: It cannot be copied.
    """
    try:
        return deepcopy(value)
    except Exception as error:  # copying may run code of the value's class, which may fail in any way
        why = f"{type(error).__name__}: {error}"
        raise ValueError(
            f"The {what} holds a {type(value).__name__} that cannot be copied ({why}), and each "
            "reset and each call of a reward function gets a copy of its row; give plain values, such as a path in "
            "place of an open file."
        ) from error


@dataclass(frozen=True)
class Prompt:
    """One prompt, tokenized.

    ``prompt_id`` is stable across runs and epochs (``"train/17"``: split and row number); ``visit``
    counts how often it has been drawn before, so that a second epoch samples again. ``columns`` are
    all fields of its row, for the reward functions. ``messages`` is the conversation that ``text`` was rendered from,
    where the row's prompt is one.

    ``altered`` says that the policy reads something else than the row says; such a visit shows nothing of the prompt
    itself. ``given`` is the beginning of the answer, where ``text`` ends in one. ``extra`` has numbers of the plug-in
    that altered it, by name; samples show them. ``dataset`` names its data set in a run with several, and is empty
    otherwise. ``pictures`` are the images whose placeholders are among its tokens.
    """

    prompt_id: str
    token_ids: tuple[int, ...]
    text: str
    columns: dict[str, Any] = field(default_factory=dict)
    visit: int = 0
    messages: list[dict[str, Any]] | None = None
    altered: bool = False
    given: str = ""
    extra: dict[str, float] = field(default_factory=dict)
    dataset: str = ""
    pictures: Pictures | None = None

    def is_of(self, datasets: Collection[str]) -> bool:
        """Return whether its data set is one of these; of an empty collection, always."""
        return not datasets or self.dataset in datasets

    def own_columns(self, names: Collection[str] | None = None) -> dict[str, Any]:
        """Return copies of its columns, all or those named, which others may change as they like.

        Raises:
            ValueError: A column holds something that cannot be copied.
        """
        kept = self.columns if names is None else {name: self.columns[name] for name in names if name in self.columns}
        return {name: own_copy(value, f"column {name!r} of {self.prompt_id}") for name, value in kept.items()}

    def own(self) -> Prompt:
        """Return the prompt with copies of its columns and messages, which others may change as they like.

        Raises:
            ValueError: A column holds something that cannot be copied.
        """
        messages = own_copy(self.messages, f"prompt of {self.prompt_id}")
        return replace(self, columns=self.own_columns(), messages=messages)

    @property
    def digest(self) -> bytes:
        """A digest of all that the policy reads of it: its tokens and the pixels of its images.

        Prompts with the same digest have the same keys and values.
        """
        key = b"" if self.pictures is None else self.pictures.digest
        return blake2b(array("q", self.token_ids), digest_size=16, key=key).digest()

    @property
    def end(self) -> int:
        """Position of the first token after it."""
        return len(self.token_ids) - (0 if self.pictures is None else self.pictures.shift)


@dataclass(frozen=True, slots=True)
class Request:
    """One completion to sample, or to go on with: a request owns what it has come to so far, its ``prefix``.

    Its random numbers depend on its ``key``, ``seed`` and the position of a token, counted over the prefix, alone.
    ``sampling.max_tokens`` limits what is sampled of the prefix and what follows together, ``sampling.max_observed``
    what is observed.
    """

    prompt: Prompt
    path: SamplePath
    sampling: SamplingParams
    seed: int = 0
    prefix: Trajectory = field(default=EMPTY, compare=False)

    @property
    def key(self) -> Key:
        """``(prompt_id, visit, path)``, unique among the requests of a run."""
        return (self.prompt.prompt_id, self.prompt.visit, self.path)

    @property
    def group(self) -> GroupKey:
        """``(prompt_id, visit)``."""
        return (self.prompt.prompt_id, self.prompt.visit)

    def after(self, prefix: Trajectory) -> Request:
        return self if prefix is self.prefix else replace(self, prefix=prefix)

    def check_prefix(self) -> None:
        """Check that there is a token left to sample after its prefix, and that it has not observed too many.

        Raises:
            ValueError: Its sampling parameters allow no more.
        """
        for kind, field_name, least, most in (
            ("sampled", "max_tokens", self.prefix.num_sampled + 1, self.sampling.max_tokens),
            ("observed", "max_observed", self.prefix.num_observed, self.sampling.max_observed),
        ):
            if least > most:
                raise ValueError(
                    f"The prefix of sample {self.path} of prompt {self.prompt.prompt_id!r} has "
                    f"{self.prefix.num_tokens} tokens, and sampling.{field_name} {most} allows no {least} that are "
                    f"{kind}; raise it, or end the completion there."
                )

    def ended(self, reason: FinishReason, text: str = "") -> Completion:
        """Return what it has come to as its completion."""
        return Completion.of(self.after(EMPTY), self.prefix, reason, text)


FinishReason = Literal["stop", "length", "abort"]


class Episode(NamedTuple):
    """Answer of an environment to a completion of several turns.

    Args:
        environment: The environment itself; None once a checkpoint has been loaded.
        messages: The conversation after the prompt, each turn and each answer a message.
        kind: The name of the environment's class.
        reward: Reward that the environment gives to the whole trajectory; None if it gives none.
        turn_rewards: Reward of each turn by itself, if the environment gives any.
        said: What the environment's ``reset`` returned, which stands at the end of the prompt's last user message: a
            text, or parts if there are images.
        asked: The text of the whole prompt with ``said``; empty if ``reset`` returned nothing.
    """

    environment: Any
    messages: list[dict[str, Any]]
    kind: str = ""
    reward: float | None = None
    turn_rewards: tuple[float, ...] = ()
    said: str | list[dict[str, Any]] = ""
    asked: str = ""


class Completion(Trajectory):
    """A trajectory that has come to its end.

    ``finish_reason`` is ``stop`` (an end-of-sequence token or a stop string; the token is kept), ``length`` (the limit)
    or ``abort``.

    Args:
        request: Request that the completion answers.
        token_ids_T: Token ids, as for :class:`Trajectory`.
        logprobs_T: Log-probs, as for :class:`Trajectory`.
        versions_T: Policy versions, as for :class:`Trajectory`.
        finish_reason: Reason for the end of the completion.
        text: The tokens that were sampled, as text.
        entropy: Mean entropy in nats, as for :class:`Trajectory`.
        trained_T: Tokens that are trained on, as for :class:`Trajectory`.
        contexts: Contexts of the turns, as for :class:`Trajectory`.
        pictures: Images that were observed, as for :class:`Trajectory`.

    Attributes:
        episode: What its environment has to say of it, where it has one.
    """

    __slots__ = ("episode", "finish_reason", "request", "text")

    def __init__(
        self,
        request: Request,
        token_ids_T: Values,
        logprobs_T: Values,
        versions_T: Values,
        finish_reason: FinishReason,
        text: str = "",
        entropy: float = math.nan,
        trained_T: Values | None = None,
        contexts: Sequence[Sequence[int]] = (),
        pictures: Sequence[tuple[int, Pictures]] = (),
    ) -> None:
        super().__init__(token_ids_T, logprobs_T, versions_T, trained_T, entropy, contexts, pictures)
        self.request = request
        self.finish_reason: FinishReason = finish_reason
        self.text = text
        self.episode: Episode | None = None

    @classmethod
    def of(cls, request: Request, trajectory: Trajectory, finish_reason: FinishReason, text: str = "") -> Completion:
        """Return the completion of a request that has come to ``trajectory``, whose memory it shares."""
        completion = cls.__new__(cls)
        completion.take(trajectory)
        completion.request, completion.finish_reason, completion.text = request, finish_reason, text
        completion.episode = None
        return completion

    def __repr__(self) -> str:
        return f"Completion({self.request.key}, {self.num_tokens} tokens, {self.finish_reason!r}, {self.text!r})"


@dataclass
class Observation:
    """Features of some completions when they have ``num_tokens`` tokens.

    With 0 tokens they are features of prompts, which all completions of a prompt share: ``keys`` are then the first two
    parts of a request's key. ``features`` (float32) has a row for each of ``keys``. From a generator with the ability
    ``hidden_states`` a row is the last hidden state, the mean log-prob so far and the entropy of the next token.
    """

    keys: Sequence[Key] | Sequence[GroupKey]
    num_tokens: int
    features: np.ndarray


class Likeliest(NamedTuple):
    """The distributions that the tokens of a decode step were drawn from, of the requests that it gave a token.

    Attributes:
        keys: Keys of the requests, in the order of rows.
        token_ids_B: The tokens that were drawn.
        entropies_B: Entropies of the whole distributions, in nats.
        ids_BK: The K likeliest tokens, the likeliest first.
        logprobs_BK: Their log-probs; minus infinity for a token that cannot be drawn.
        come_to: Returns what a request that still decodes has come to, the drawn token included.
    """

    keys: Sequence[Key]
    token_ids_B: np.ndarray
    entropies_B: np.ndarray
    ids_BK: np.ndarray
    logprobs_BK: np.ndarray
    come_to: Callable[[Key], Trajectory]


@dataclass
class StepEvents:
    """Result of a decode step: ``num_tokens`` new tokens in ``num_active`` slots, and the completions that finished.

    ``num_steps`` is above 1 if the generator took several decode steps in which nothing finished. ``preempted`` are
    requests that had to leave because memory was short, with their tokens as prefixes; they can be submitted again.
    ``message`` tells the user what went wrong, if anything. ``prefilled_tokens`` counts the prompt tokens that went
    through the policy, if the generator knows. ``observations`` are the hidden states at all points that anybody looks
    at (:attr:`lit_grpo.plugins.Listener.observes`). ``beyond`` has the requests that got other than a token a decode
    step, with the tokens beyond that, which is below 0 for fewer; ``num_drafted`` are the tokens that were tried, and
    ``accepted`` those of them that were kept, by the name of their source. ``likeliest`` are the distributions of the
    step, if anybody looks at them (:attr:`lit_grpo.plugins.Listener.likeliest`).
    """

    num_active: int = 0
    num_tokens: int = 0
    num_steps: int = 1
    prefilled_tokens: int = 0
    num_drafted: int = 0
    accepted: Counter[str] = field(default_factory=Counter)
    beyond: dict[Key, int] = field(default_factory=dict)
    finished: list[Completion] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)
    observations: list[Observation] = field(default_factory=list)
    likeliest: Likeliest | None = None
    message: str = ""


FEEDBACK = "feedback/"
"""Begins the names in ``Rollout.extra`` of what reward functions said of a completion; the function's name follows."""


@dataclass(slots=True)
class Rollout:
    """A completion and what it earned.

    ``rewards`` holds each reward function's value by name, ``None`` where it does not apply; ``reward``
    is their weighted sum, NaN where none applies (such a rollout takes no part in the update). One that is not ``kept``
    counts in the statistics of its group, and is not trained on; ``trained_before``: it has left in an earlier
    batch, with another part of its group. One that is ``replayed`` was sampled, rewarded and trained on at an
    earlier visit of the prompt, and takes part in the group's advantages and in the update alone; with
    ``recompute`` its tokens get the log-probs of the policy before the update, as if that policy had sampled them.
    ``extra`` is what reward functions and plug-ins logged of it, and ``advantage`` what it was trained on with, NaN
    before that.

    ``turn_rewards`` is what each turn of the completion earned by itself, where an environment says so.

    During an update ``columns`` holds the values of its tokens by name, those that are trained on unless said
    otherwise: ``token_advantage`` if tokens have others than ``advantage``, ``reference_logprob``, ``old_logprob``,
    ``mask``, ``weight``, ``candidate_ids`` and ``candidate_values``; of all tokens ``ce_weight``, the weight of each
    token's negative log-likelihood, averaged with those of the same ``ce_source``, the number of the plug-in that gave
    them; and of the row ``chunks``, and ``whole_length`` if only a part of its tokens is left.
    """

    prompt: Prompt
    completion: Completion
    rewards: dict[str, float | None] = field(default_factory=dict)
    reward: float = math.nan
    kept: bool = True
    trained_before: bool = False
    replayed: bool = False
    recompute: bool = False
    extra: dict[str, Any] = field(default_factory=dict)
    advantage: float = math.nan
    turn_rewards: tuple[float, ...] = ()
    columns: dict[str, Any] = field(default_factory=dict, compare=False)
    ce_source: int = field(default=0, compare=False)

    @property
    def feedback(self) -> str:
        """Texts that reward functions gave to ``log_feedback``, in their order; empty if there are none."""
        texts = (self.extra.get(f"{FEEDBACK}{name}") for name in self.rewards)
        return "\n".join(text for text in texts if isinstance(text, str))  # log_extra may have written anything

    @property
    def said(self) -> str | list[dict[str, Any]]:
        """Text or parts that the environment's ``reset`` added to the prompt; empty without one."""
        return "" if self.completion.episode is None else self.completion.episode.said

    @property
    def asked(self) -> str:
        """The prompt's text as the policy was asked: with what the environment's ``reset`` added to it."""
        episode = self.completion.episode
        return self.prompt.text if episode is None or not episode.asked else episode.asked

    @property
    def asked_messages(self) -> list[dict[str, Any]] | None:
        """The prompt's conversation with what ``reset`` added to its last user message; None for plain text."""
        messages = self.prompt.messages
        if messages is None or not self.said:
            return None if messages is None else list(messages)
        last = max(place for place, message in enumerate(messages) if message["role"] == "user")
        content, said = messages[last]["content"], self.said
        if isinstance(content, list) or isinstance(said, list):  # with images
            texts = ([{"type": "text", "text": each}] if isinstance(each, str) else each for each in (content, said))
            content, said = [part for parts in texts for part in parts], []
        turn = {**messages[last], "content": content + said}
        return [*messages[:last], turn, *messages[last + 1 :]]

    @property
    def rows(self) -> list[Rollout]:
        """Rollouts that are trained on: itself, or where its completion has ``contexts``, one for each turn.

        Each of these has its advantage, or those of the turn's tokens, and a path of its own.
        """
        if not self.completion.contexts:
            return [self]
        request, rows = self.completion.request, self.completion.rows
        counts, weights_T = [row.num_trained for row in rows], self.columns.get("ce_weight")
        columns = {name: its.split(counts) for name, its in self.columns.items() if name != "ce_weight"}
        found: list[Rollout] = []
        for turn, (row, (begin, end, _)) in enumerate(zip(rows, self.completion.places_of_turns, strict=True)):
            own = {name: its[turn] for name, its in columns.items()}
            if weights_T is not None:
                own["ce_weight"] = weights_T.new_zeros(row.num_tokens)
                own["ce_weight"][row.num_tokens - (end - begin) :] = weights_T[begin:end]
            completion = Completion.of(replace(request, path=(*request.path, turn)), row, self.completion.finish_reason)
            found.append(replace(self, completion=completion, columns=own))
        return found


@dataclass(frozen=True, slots=True)
class PassRule:
    """Rule for passing: the reward function named ``reward`` gives at least ``threshold``.

    Written out it is ``correct >= 1``. The default names no function, and nothing passes. Where that function does not
    apply to a completion, the first of ``others`` that applies decides.
    """

    reward: str = ""
    threshold: float = 1.0
    others: tuple[str, ...] = ()

    @classmethod
    def among(cls, names: Sequence[str], chosen: str | None, threshold: float, by_dataset: bool = False) -> PassRule:
        """Return the rule of the chosen one, or of the first of all reward functions' names.

        Args:
            names: Names of all reward functions, in order.
            chosen: Name of the function that decides; by default the first.
            threshold: Min reward of a correct completion.
            by_dataset: Whether functions score some data sets alone, so that another one may be the first that applies.
        """
        if chosen is not None or not names:
            return cls(chosen or "", threshold)
        return cls(names[0], threshold, tuple(names[1:]) if by_dataset else ())

    def check(self, names: Sequence[str]) -> None:
        """Check that its reward function is one of those that there are, once plug-ins have brought theirs.

        Raises:
            ValueError: It is none of them.
        """
        if self.reward and self.reward not in names:
            known = f"the names are {', '.join(names)}" if names else "model.rewards has none"
            raise ValueError(
                f"model.pass_reward {self.reward!r} names no reward function: {known}; write one of them, or leave it "
                "out for the first."
            )

    def judges(self, rewards: Mapping[str, float | None]) -> bool:
        """Return whether a completion with these values of reward functions, by name, can be called correct or wrong.

        It cannot if the functions that decide give no value, such as ``exact_match`` for a row without an answer.
        """
        return any(rewards.get(name) is not None for name in (self.reward, *self.others))

    def passes(self, rewards: Mapping[str, float | None]) -> bool:
        """Return whether a completion with these values of reward functions passes; not where none is given."""
        value = rewards.get(self.reward)
        if value is None:
            value = next((found for name in self.others if (found := rewards.get(name)) is not None), None)
        return value is not None and value >= self.threshold

    def __str__(self) -> str:
        return f"{' or '.join((self.reward, *self.others))} >= {self.threshold:g}"


@dataclass
class RolloutGroup:
    """The rollouts of one visit of a prompt, in the order of their paths: any number of them, missing ones allowed.

    Statistics are over all members, whatever part of them is kept.
    """

    prompt: Prompt
    rollouts: list[Rollout]

    @property
    def key(self) -> GroupKey:
        """``(prompt_id, visit)``."""
        return (self.prompt.prompt_id, self.prompt.visit)

    @property
    def fresh(self) -> list[Rollout]:
        """Its rollouts that no batch has had before."""
        return [rollout for rollout in self.rollouts if not (rollout.trained_before or rollout.replayed)]


class PromptBatch:
    """The seam between callbacks and module: prompts in, whole rollout groups added by the scheduler.

    ``groups`` is empty until :class:`lit_grpo.callbacks.RolloutScheduler` has filled it; then it has one group
    a prompt, in the order of ``prompts``, and none if the batch is ``without_rollouts`` and trained on examples alone.
    ``metrics`` is what the rollout has to say of itself, ``spans`` which slot decoded which completion when, by the
    steps of ``clock``, and ``predicted`` how many tokens were predicted of each before its first one (by
    ``Request.key``), those left out of which nothing was known yet.
    ``trained`` is set by the training step, and makes the batch count as consumed in a checkpoint. A batch is
    ``carried`` where a mode has filled it with what was open: of any number of groups then, and parts of them. Where
    its groups are trained on while others still decode, ``arriving`` gives them, and adds them to ``groups``.

    It is no dataclass, because Lightning copies those field by field to convert their tensors.
    """

    def __init__(self, prompts: list[Prompt]) -> None:
        self.prompts = prompts
        self.groups: list[RolloutGroup] = []
        self.metrics: dict[str, float] = {}
        self.spans: Sequence[tuple[Key, Span]] = []
        self.clock = Clock()
        self.predicted: Mapping[Key, float] = {}
        self.trained = False
        self.without_rollouts = False
        self.carried = False
        self.arriving: Iterator[list[RolloutGroup]] | None = None

    def to(self, device: torch.device | str) -> PromptBatch:
        """Return itself: rollouts stay on the host, micro-batches move to the device."""
        return self

    @property
    def rollouts(self) -> list[Rollout]:
        """All rollouts that no batch has had before, group by group."""
        every = (rollout for group in self.groups for rollout in group.rollouts)
        return [rollout for rollout in every if not (rollout.trained_before or rollout.replayed)]


class Part(NamedTuple):
    """One rank's share of a figure that is logged for all of them.

    Args:
        value: Its value, or a sum whose mean over all ranks is the figure.
        how: How the values of all ranks become the figure; ``mean`` divides their sum by the sum of ``number``.
        number: How many numbers ``value`` is the sum of, for ``mean``.
    """

    value: float
    how: Literal["sum", "max", "min", "mean"] = "sum"
    number: float = 1.0


def over_ranks(parts: Mapping[str, Part], all_gather: AllGather) -> dict[str, float]:
    """Return the figures of all ranks by name, the same on each of them; NaN for a mean over nothing.

    All ranks call it together. A rank may have no part of a figure.
    """
    named: dict[str, list[Part]] = {}
    for of_rank in all_gather(dict(parts)):
        for name, part in of_rank.items():
            named.setdefault(name, []).append(part)
    figures: dict[str, float] = {}
    for name, own in named.items():
        values = [part.value for part in own]
        match own[0].how:
            case "sum":
                figures[name] = float(math.fsum(values))
            case "max":
                figures[name] = float(max(values))
            case "min":
                figures[name] = float(min(values))
            case "mean":
                number = math.fsum(part.number for part in own)
                figures[name] = math.fsum(values) / number if number else math.nan
    return figures


def alone(value: Any) -> list[Any]:
    return [value]


AllGather = Callable[[Any], list[Any]]
"""Brings a value of each rank together, in the order of the ranks; all ranks call it together."""


@dataclass(frozen=True)
class GroupBatch:
    """The groups of a batch on this rank, and what a plug-in may go by beside them.

    Args:
        groups: Groups of the batch on this rank, with their rewards.
        version: Version of the policy: the number of its updates.
        pass_rule: Rule by which a completion is correct.
        all_gather: Function that gathers a value of all ranks, :data:`AllGather`.
        score: Gives rollouts of groups that a plug-in has made, such as ``score(group)``, the rewards of the run's
            functions; None if it has none, and in the hooks of the update.
        joining: Further groups that ``add_members`` lets join the batch, of rollouts that are ``replayed``.
    """

    groups: Sequence[RolloutGroup]
    version: int
    pass_rule: PassRule
    all_gather: AllGather
    score: Callable[..., None] | None = field(default=None, kw_only=True)
    joining: list[RolloutGroup] = field(default_factory=list, kw_only=True)

    @property
    def rollouts(self) -> list[Rollout]:
        return [rollout for group in self.groups for rollout in group.rollouts]
