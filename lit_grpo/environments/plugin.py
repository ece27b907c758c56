"""The plug-in ``environments``: tools and many turns, beside decoding."""

from __future__ import annotations

import copy
import functools
import itertools
import logging
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NamedTuple

from lit_grpo.data.rendering import with_added
from lit_grpo.environments.calls import CallFormatName
from lit_grpo.environments.chat import Chat
from lit_grpo.environments.contract import COLUMN, Factory, Kind, make_kinds
from lit_grpo.environments.session import Failure, Limits, Outcome, RewritingSession, Session
from lit_grpo.findings.reward_curves import Finding
from lit_grpo.findings.tool_calls import ToolCalls
from lit_grpo.limits import Count, Limit, Number
from lit_grpo.plugins import Answer, CannotGoOn, Plugin, RunFacts, Worker
from lit_grpo.process.calls import Calls
from lit_grpo.process.streams import KeptStreams
from lit_grpo.process.terminal import error_text
from lit_grpo.rewards.function import RewardFunction
from lit_grpo.types import (
    EMPTY,
    OBSERVED,
    Completion,
    Episode,
    GroupKey,
    Key,
    PassRule,
    Request,
    RolloutGroup,
    SamplePath,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from lit_grpo.data.chat import Message
    from lit_grpo.data.sources import Row
    from lit_grpo.rollout.generator import StepEvents
    from lit_grpo.scheduling.flight import Flight

logger = logging.getLogger(__name__)
MOST_BATCHES_GONE = 3
"""After so many batches in a row whose trajectories were all dropped the run ends."""
CLOSING_S = 10.0
"""How long the end of a run waits for environments that are closed."""
Seconds = Annotated[float, Limit(above=0, finite=True)]


@dataclass(frozen=True)
class Environments(Plugin):
    """Let completions take many turns with an environment or with tools.

    Args:
        factory: A class, or a function that returns an environment (see :mod:`lit_grpo.environments.contract`), by its
            path as in ``my_env.py:Game``; or several by name, of which each row says one in its column ``environment``.
        tools: Functions without an environment that the policy may call, by their paths.
        max_turns: The most turns of the policy; by default as many as its tokens allow.
        max_answer_tokens: The most tokens of an answer of a tool or the user. From a longer one the middle is left out,
            and the policy is told so.
        tool_timeout_s: The most seconds of one call.
        reset_timeout_s: The most seconds of making an environment, and of its ``reset``.
        trajectory_timeout_s: The most seconds of all calls of one trajectory together.
        retries: How often a trajectory begins again with a fresh environment after its environment has failed. After
            that it is left out of its group: a failure is no reward of 0.
        num_threads: How many calls run at a time, those of async functions apart.
        calls: How the policy writes calls (see :mod:`lit_grpo.environments.calls`). By default the tokenizer's
            ``response_template``, else the form that reads a call as the chat template writes it; if none does, the
            run does not start.
        history: What a turn is sampled after. ``appended``: all that was sampled and observed before it, as it was,
            in one row of the update. ``rerendered``: the conversation as the chat template writes it at that time,
            perhaps without the reasoning of earlier turns; each turn is then a row of its own in the update, and what
            serves the policy later may use the template as it is.
        lock_step: Whether decoding waits after each step until all environments have answered, so that the clock
            decides nothing, and runs can be repeated bit for bit; a rollout with slow tools takes longer.

    Example:
        For a policy that is to forget what it thought in earlier turns, as Qwen3's chat template has it::

            rollout:
              plugins:
              - environments: {factory: my_env.py:Game, history: rerendered}

        A trajectory counts once in its group, with one reward, and each of its turns has its advantage; the update
        reads each turn's conversation again, so that its work grows with the square of the turns.
        ``model.sampling.max_observed`` then limits the conversation before each turn, ``max_tokens`` all turns
        together.
    """

    role: ClassVar[str] = "what turns are answered by"

    factory: Factory | Mapping[str, Factory] | None = None
    tools: Sequence[str | Callable[..., Any]] = field(default_factory=tuple)
    max_turns: Count | None = None
    max_answer_tokens: Annotated[int, Limit(least=16)] = 512
    tool_timeout_s: Seconds = 60.0
    reset_timeout_s: Seconds = 60.0
    trajectory_timeout_s: Seconds = 600.0
    retries: Number = 2
    num_threads: Count = 64
    calls: CallFormatName | None = None
    history: Literal["appended", "rerendered"] = "appended"
    lock_step: bool = False

    @property
    def needs(self) -> frozenset[str]:
        """Prompts that show tools are rendered by the data module; a conversation that is rewritten is in one rollout.

        Earlier turns are not in a request's prefix then, so that no other rollout could go on from that.
        """
        return frozenset({"prompt_stream"} | ({"whole_rollouts"} if self._rewrites else set[str]()))

    @property
    def remedy(self) -> str:
        """The other history."""
        return "set its history to appended" if self._rewrites else ""

    @property
    def _rewrites(self) -> bool:
        return self.history == "rerendered"

    @property
    def changes(self) -> Mapping[str, str]:
        """What it takes away: turns where there is one alone, and rewards of turns that no environment gives.

        Turns that are sampled after other tokens than each other are learnt from apart. Nothing can begin in the middle
        of such an episode, nor where an environment has no ``state``.
        """
        kinds = {} if self.factory is None else self._kinds()
        lacking = [kind.name for kind in kinds.values() if not kind.can_be_restored]
        changes = {"turns": "has max_turns 1"} if self.max_turns == 1 else {}
        if not any("turn_reward" in kind.methods for kind in kinds.values()):
            silent = " and ".join(kind.name for kind in kinds.values())
            changes["turn_rewards"] = f"has {silent or 'tools alone'}, without a method turn_reward"
        if lacking:
            has = f"has {' and '.join(lacking)}, to which state and restore would have to be added"
            changes["restorable_environments"] = has
        if self._rewrites:
            changes["one_row"] = "makes each turn a row of its own"
            changes["restorable_environments"] = "writes the conversation again for each turn"
        return changes

    def check(self, run: RunFacts) -> None:
        """Check that there is room for what is observed.

        Raises:
            ValueError: There is none.
        """
        check_room(run, "answers of tools and environments need")

    def worker(self) -> EnvironmentWorker:
        """Return what leads conversations.

        Raises:
            ValueError: A factory or tool cannot be loaded, or breaks the contract.
        """
        limits = Limits(
            max_turns=self.max_turns,
            max_answer_tokens=self.max_answer_tokens,
            tool_timeout_s=self.tool_timeout_s,
            reset_timeout_s=self.reset_timeout_s,
            trajectory_timeout_s=self.trajectory_timeout_s,
            retries=self.retries,
        )
        begin = RewritingSession if self._rewrites else Session
        return EnvironmentWorker(self._kinds(), limits, self.num_threads, self.calls, begin, self.lock_step)

    def _kinds(self) -> dict[str | None, Kind]:
        given = [self.tools] if isinstance(self.tools, str) or callable(self.tools) else self.tools
        try:
            return make_kinds(self.factory, given)
        except ValueError as error:
            raise ValueError(f"rollout.plugins environments: {error}") from None


class Snapshot(NamedTuple):
    """What a trajectory had come to when its environment had answered, and the state of its session then.

    The state is None where it cannot be gone on from: the environment was at work, or has no ``state``.
    """

    path: SamplePath
    token_ids: list[int]
    state: dict[str, Any] | None

    def fits(self, request: Request) -> tuple[int, int, bool, SamplePath]:
        """Return how well a request can go on from it; (-1, -1, False, ()) for not at all.

        By the tokens in common first, then by the beginning of the path: where several have equal tokens, the nearest
        parent's state is taken, and of its equally near relatives that of the last path, whichever came first. What the
        request has come to since must have been sampled, not observed.
        """
        num, prefix = len(self.token_ids), request.prefix
        if prefix.token_ids_T[:num].tolist() != self.token_ids or bool((prefix.versions_T[num:] == OBSERVED).any()):
            return (-1, -1, False, ())
        parts = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(self.path, request.path, strict=False))
        num_common = sum(1 for _ in parts)
        return (num, num_common, num_common == len(self.path), self.path)


def best_state(snapshots: Sequence[Snapshot], request: Request) -> dict[str, Any] | None:
    """Return a copy of the state that a request goes on from, the last one of its path; None where it begins again."""
    fitting = [(each.fits(request), each) for each in reversed(snapshots)]
    (common, *_), best = max(fitting, key=lambda pair: pair[0], default=((-1, -1, False, ()), None))
    return None if best is None or common < 0 else copy.deepcopy(best.state)


ADDED = ("x", " 0", "\n.")
"""Texts that may be added to a message: the tokens before the first that any of them changes are those of all."""


def check_room(run: RunFacts, what_needs: str) -> None:
    """Check that a trajectory may observe anything.

    Args:
        run: What is known of the run.
        what_needs: How the message begins, up to its verb.

    Raises:
        ValueError: It may not.
    """
    if run.max_observed < 1:
        raise ValueError(
            f"{what_needs} room, and max_observed of model.sampling or model.eval_sampling is 0; set it to the tokens "
            "that a trajectory may observe, such as 512. They do not count in max_tokens."
        )


class EnvironmentWorker(Worker):
    """Leads conversations: each trajectory has a :class:`lit_grpo.environments.session.Session`.

    A trajectory is away while its environment is at work, and its slot free. Between two steps of the rollout what has
    come meanwhile is taken; nothing is waited for.

    Args:
        kinds: Of environments, by the values of the column ``environment``; a single one by None.
        limits: What a trajectory may take.
        num_threads: Calls at a time.
        form: How calls are written.
        begin: Makes the session of a trajectory.
        lock_step: Whether answers are waited for between two steps.
    """

    evaluates = True
    _more_counts: ClassVar[tuple[str, ...]] = ()

    def __init__(
        self,
        kinds: Mapping[str | None, Kind],
        limits: Limits,
        num_threads: int,
        form: str | None,
        begin: Callable[..., Session] = Session,
        lock_step: bool = False,
    ) -> None:
        self._begin, self.lock_step = begin, lock_step
        self.kinds, self._limits, self._num_threads, self._form = kinds, limits, num_threads, form
        self.chat: Chat | None = None
        self.sessions: dict[Key, Session] = {}
        self._ended: dict[Key, tuple[Session, Completion]] = {}  # until they have been scored
        self._scoring: set[Key] = set()  # of those, the ones whose groups became whole in this rollout
        self._scored: set[Key] = set()  # or in the last one
        self._closing: list[Future[None]] = []  # of trajectories that were dropped
        self._kept: dict[Key, list[Snapshot]] = {}  # of a checkpoint, or of a rollout that has failed
        self._carried: dict[Key, list[Snapshot]] = {}  # as this rollout began, until it has been learnt from
        self._snapshots: dict[GroupKey, list[Snapshot]] = {}  # of this rollout, where requests begin within others
        self._outcomes: deque[tuple[Session, Outcome]] = deque()
        self._going_on: list[Request] = []  # from an earlier rollout, in lock-step
        self._counts: Counter[str] = Counter()
        self._calls: Calls | None = None
        self._streams: KeptStreams | None = None
        self._apart: bool | None = None  # whether a rollout has none of the trajectories that there are
        self._told: set[str] = set()
        self._num_restarted = self._num_unkept = 0
        self._tried: set[str] = set()  # kinds whose first state has been looked at
        self._tool_calls = ToolCalls()
        self._num_gone, self._failure = 0, ""  # batches in a row whose trajectories were all dropped, and why
        self._rewards = [
            RewardFunction.of(functools.partial(_reward_of, kind=name), name)
            for name in dict.fromkeys(kind.name for kind in kinds.values() if kind.gives_reward)
        ]

    @property
    def rewards(self) -> Sequence[RewardFunction]:
        """One for each class with ``get_reward``, by its name."""
        return self._rewards

    # ---- prompts ------------------------------------------------------------------------------------

    def prepare(self, tokenizer: PreTrainedTokenizerBase, options: Mapping[str, Any], plain_rows: bool = False) -> None:
        """Try the chat template on the turns that will come.

        Raises:
            ValueError: It refuses them, or does not show them, or calls cannot be read.
        """
        if self.chat is not None and self.chat.tokenizer is tokenizer:
            return
        kinds = self.kinds.values()
        try:
            self.chat = Chat(tokenizer, options, self._form, plain_rows)
            told = self.chat.check(
                schemas=[schema for kind in kinds for schema in kind.schemas],
                calls=any(kind.tools for kind in kinds),
                responds=any(kind.responds for kind in kinds),
                rewrites=self._begin is RewritingSession,
            )
        except ValueError as error:
            raise ValueError(f"rollout.plugins environments: {error}") from None
        for sentence in told:
            self._tell(sentence)

    def start(self, eos_ids: Sequence[int]) -> None:
        """Tell the user if the policy does not stop after a call."""
        if self.chat is not None and any(kind.tools for kind in self.kinds.values()):
            for sentence in self.chat.check_ends(eos_ids):
                self._tell(sentence)

    def tools(self, row: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return the schemas of a row's tools.

        Raises:
            ValueError: The row names no environment that there is, or lacks a column.
        """
        kind = self._kind(row)
        kind.check_columns(row)
        return kind.schemas

    def adds(self, row: Mapping[str, Any]) -> bool:
        """Whether an environment is reset, which may say something."""
        return self._kind(row).type is not None

    def alternatives(self, row: Row, messages: list[Message]) -> Sequence[tuple[list[Message], Mapping[str, Any]]]:
        """Return the conversation with texts at the end of its last user message, where an environment is reset."""
        return [(with_added(messages, text), {}) for text in ADDED] if self.adds(row) else []

    def _kind(self, row: Mapping[str, Any]) -> Kind:
        if None in self.kinds:
            return self.kinds[None]
        name = row.get(COLUMN)
        if name not in self.kinds:
            listed = ", ".join(map(repr, self.kinds))
            raise ValueError(f"has {name!r} in column {COLUMN!r}, which names none of the environments {listed}")
        return self.kinds[name]

    # ---- rollouts -----------------------------------------------------------------------------------

    def on_rollout_start(self, flight: Flight) -> None:
        """A rollout begins; what became whole in the one before the last has been scored."""
        self._flight, self._apart = flight, None
        self._let_go(self._scored)
        self._closing = [future for future in self._closing if not future.done()]
        self._scored, self._scoring = self._scoring, set()
        self._counts.clear()
        self._snapshots.clear()
        self._waited_s = self._lasted_s = 0.0
        self._num_turns = self._num_rows = self._num_ended = self._num_restarted = 0

    def on_requests(self, requests: Sequence[Request]) -> list[Request]:
        """Let each request begin with an environment of its own, which is reset first."""
        going_on = {request.key: self.sessions[request.key] for request in requests if request.key in self.sessions}
        if self._apart is None:  # trajectories of another rollout keep their threads until that goes on
            self._apart = bool(self.sessions) and not going_on
        self._carried |= self._snapshots_of(going_on)
        held = [self._held(request) for request in requests]
        return [request for request in held if request is not None]

    def _held(self, request: Request) -> Request | None:
        key, session = request.key, self.sessions.get(request.key)
        num_known = len(session.token_ids) if session is not None else 0
        if session is not None and num_known == request.prefix.num_tokens and session.waits:
            return request
        if session is not None and num_known <= request.prefix.num_tokens > 0:
            # It goes on, whether it was stopped in the middle of a turn or before one; in lock-step with all others.
            self._going_on += [request] if self.lock_step else []
            return request if self.lock_step else None
        if session is not None:
            session.close()
        self._let_go({key})  # it has ended and begins again: it was too old
        session = self.sessions[key] = self._session(request)
        kept = self._kept.pop(key, [])
        if kept:
            self._carried[key] = kept
        state = best_state(kept or self._snapshots.get(request.group, []), request)
        if request.prefix.num_tokens and state is not None:
            session.restore(state, request)
            return request
        self._num_restarted += bool(kept) or request.prefix.num_tokens > 0
        session.open()
        return request.after(EMPTY)

    def _snapshots_of(self, sessions: Mapping[Key, Session]) -> dict[Key, list[Snapshot]]:
        """Return where each of these can go on; environments are asked together, and it is told where one cannot say.

        Those whose environments are at work cannot go on from here either, without a word: these are not asked.
        """
        asked = {key: session.ask_state() for key, session in sessions.items()}
        wait([future for future in asked.values() if future is not None], timeout=self._limits.tool_timeout_s + 1)
        states = {key: _result(future) for key, future in asked.items()}
        failed = {key: state for key, state in states.items() if isinstance(state, Failure)}
        self._num_unkept = len(failed)
        for key, failure in failed.items():
            name = sessions[key].kind.name
            if (once := f"unkept {name}") not in self._told:  # places and values in the sentence are many
                self._told.add(once)
                logger.warning(
                    "%d of %d unfinished trajectories cannot be kept in a checkpoint, and begin again where the run "
                    "is resumed from it: the environment %s %s. Further ones are only counted.",
                    *(len(failed), len(sessions), name, failure),
                )
        kept = {key: None if isinstance(state, Failure) else state for key, state in states.items()}
        return {key: [Snapshot(key[2], session.token_ids, kept[key])] for key, session in sessions.items()}

    def on_group(self, group: RolloutGroup) -> None:
        """No more requests begin within those of a group, and it is to be scored."""
        self._snapshots.pop(group.key, None)
        self._scoring |= {rollout.completion.request.key for rollout in group.rollouts}

    def _session(self, request: Request) -> Session:
        assert self.chat is not None, "prepare comes first"
        if self._calls is None:
            self._calls, self._streams = Calls(self._num_threads), KeptStreams()
        return self._begin(
            request=request.after(EMPTY),
            kind=self._kind(request.prompt.columns),
            chat=self.chat,
            limits=self._limits,
            calls=self._calls,
            outcomes=self._outcomes,
            counts=self._counts,
            told=self._tell,
            told_failure=self._tell_failure,
            called=self._called,
            keeps_states=self._flight.forks,
            apart=bool(self._apart),
            tried=self._tried,
        )

    def on_turn(self, completion: Completion) -> Answer:
        """Have the environment answer, while others decode."""
        self.sessions[completion.request.key].take_turn(completion)
        return Answer(hold=[completion.request.key])

    def on_step(self, events: StepEvents) -> Answer | None:
        """Take what environments have come to; in lock-step that is done between two steps."""
        return None if self.lock_step or not self._outcomes else self._answer()

    def on_idle(self) -> Answer | None:
        """Do the same, in lock-step once all that are at work have come to something."""
        if self.lock_step:
            away = [self.sessions[request.key] for request in self._flight.away if request.key in self.sessions]
            wait([session.work for session in away if session.work is not None])
        return self._answer() if self._outcomes or self._going_on else None

    @property
    def waits_in_time(self) -> bool:
        """Whether an environment is at work within its limits."""
        return self._calls is not None and self._calls.is_in_time

    def _answer(self) -> Answer:
        """Take what has come of trajectories of this rollout, and leave what is of another one to that.

        What has come together is taken in the order of keys, whichever came first.
        """
        go_on, self._going_on = self._going_on, []
        rewritten: list[Request] = []
        again: list[Request] = []
        finish: list[Completion] = []
        drop: list[Key] = []
        of_others: list[tuple[Session, Outcome]] = []
        come = [self._outcomes.popleft() for _ in range(len(self._outcomes))]
        for session, outcome in sorted(come, key=lambda each: each[0].request.key):
            key = session.request.key
            if self.sessions.get(key) is not session:
                continue  # the trajectory was discarded meanwhile
            if not self._flight.is_away(key):
                of_others.append((session, outcome))
                continue
            if outcome.error is not None:
                raise outcome.error
            session.took()
            following = outcome.goes_on or outcome.begins or outcome.rewritten
            if following is not None:
                session.token_ids = following.prefix.token_ids_T.tolist()
                self._keep_snapshot(session, outcome)
            if outcome.goes_on is not None:
                go_on.append(outcome.goes_on)
            elif outcome.rewritten is not None:
                rewritten.append(outcome.rewritten)
            elif outcome.begins is not None:
                again.append(outcome.begins)
            elif outcome.finished is not None:
                finish.append(outcome.finished)
            else:
                drop.append(key)
        self._outcomes.extend(of_others)
        go_on.sort(key=lambda request: request.key)
        return Answer(go_on=go_on, rewritten=rewritten, again=again, finish=finish, drop=drop)

    def _keep_snapshot(self, session: Session, outcome: Outcome) -> None:
        """Keep what others may begin with; what a failed attempt has left is no part of the trajectory any more."""
        request = session.request
        if outcome.begins is not None and request.group in self._snapshots:
            kept = [each for each in self._snapshots[request.group] if each.path != request.path]
            self._snapshots[request.group] = kept
        if outcome.state is not None:
            snapshot = Snapshot(request.path, session.token_ids, outcome.state)
            self._snapshots.setdefault(request.group, []).append(snapshot)

    def on_completion(self, completion: Completion) -> None:
        """A trajectory has ended, perhaps in the middle; its environment is kept until it has been scored."""
        session = self.sessions.pop(completion.request.key, None)
        if session is None:
            return
        session.stop()
        if completion.episode is None:  # another has ended it
            whole = session.whole(completion)
            completion.take(whole)
            completion.request, completion.text = whole.request, whole.text
            completion.episode = session.episode()._replace(turn_rewards=())
        self._ended[completion.request.key] = (session, completion)
        self._num_ended += 1
        self._num_turns += session.num_turns
        self._num_rows += max(len(completion.contexts), 1)
        self._waited_s += session.waited_s
        self._lasted_s += time.monotonic() - session.began

    def on_drop(self, request: Request) -> None:
        """A trajectory has been left out of its group, by whatever: its environment is let go."""
        session = self.sessions.pop(request.key, None)
        if session is not None and (closing := session.close()) is not None:
            self._closing.append(closing)

    def on_rollout_end(self, failed: bool) -> None:
        """Let go of all environments where the rollout has failed: what they were told of it is void.

        Where trajectories can go on, from before the rollout or from now, stays known.
        """
        if self._num_ended and self._counts["cut_short"] >= self._num_ended:
            self._tell(
                f"All {self._num_ended} trajectories of a rollout were cut short by max_turns, max_tokens or "
                "max_observed, and none came to its end; have the environment say so with done, or raise the limits."
            )
        if self._streams is not None and (mended := self._streams.mend()):
            self._tell(f"A tool or environment closed {' and '.join(mended)}; the run has opened it again.")
        for finding in self._tool_calls.news():
            self._tell(finding.sentence)
        if failed:
            self._kept, self._carried = self._places(), {}
            for session in self.sessions.values():
                session.close()
            self.sessions.clear()
            self._outcomes.clear()
            self._going_on.clear()

    def learnt(
        self, groups: Sequence[RolloutGroup], pass_rule: PassRule, version: int, gather: Callable[[Any], list[Any]]
    ) -> dict[str, float]:
        """Nothing goes back to before the rollout any more."""
        self._kept, self._carried = {}, {}
        numbers = gather((self._num_ended, self._counts["dropped"]))
        is_gone = not any(ended for ended, _ in numbers) and any(dropped for _, dropped in numbers)
        self._num_gone = self._num_gone + 1 if is_gone else 0
        if self._num_gone:
            self._failure = next((each for each in gather(self._failure) if each), "")
        return {}

    def check_goes_on(self) -> None:
        """Refuse to go on after several batches whose trajectories were all dropped."""
        if self._num_gone >= MOST_BATCHES_GONE:
            raise CannotGoOn(
                f"{self._gone()} Mend the environment, or what it connects to, and resume the run from its last "
                "checkpoint."
            )

    def _gone(self) -> str:
        return (
            f"All trajectories of the last {self._num_gone} batches were dropped after their retries, because the "
            f"environment failed: {self._failure}."
        )

    def _let_go(self, keys: Iterable[Key]) -> None:
        """Close environments whose completions have been scored."""
        for session, completion in [self._ended.pop(key) for key in keys if key in self._ended]:
            session.close()
            if completion.episode is not None:
                completion.episode = completion.episode._replace(environment=None)

    # ---- what is told -------------------------------------------------------------------------------

    def metrics(self) -> dict[str, float]:
        """Return what happened in the last rollout on this rank."""
        return self._described(self._totals())

    def metrics_of_ranks(self, gather: Callable[[Any], list[Any]]) -> dict[str, float]:
        """Return what happened in the last rollout on all ranks: sums of counts, and means over all trajectories."""
        totals: Counter[str] = Counter()
        for own in gather(dict(self._totals())):
            totals.update(own)
        return self._described(totals)

    def _totals(self) -> Counter[str]:
        """Return what may be added up over ranks."""
        own = {"ended": self._num_ended, "turns": self._num_turns, "rows": self._num_rows, "waited_s": self._waited_s}
        own |= {"lasted_s": self._lasted_s, "restarted": self._num_restarted, "unkept": self._num_unkept}
        return Counter({**self._counts, **own})

    def _described(self, totals: Mapping[str, float]) -> dict[str, float]:
        """Return the metrics of totals."""
        names = ("tool_calls", "tool_failures", "tool_timeouts", "broken_calls", "shortened_answers", "cut_short")
        names += ("failures", "retries", "dropped", "timeouts", "restarted", "unkept", *self._more_counts)
        by_tool = [f"{of}/{tool}" for of in ("calls", "failed_calls") for tool in self._tools]
        ended, lasted_s = totals["ended"] or math.nan, totals["lasted_s"] or math.nan
        return {
            "environments/turns": totals["turns"] / ended,
            "environments/rows": totals["rows"] / ended,
            "environments/waiting_share": totals["waited_s"] / lasted_s,
            **{f"environments/{name}": float(totals[name]) for name in (*names, *by_tool)},
        }

    @property
    def _tools(self) -> dict[str, None]:
        """The names of the tools of all kinds."""
        return dict.fromkeys(tool for kind in self.kinds.values() for tool in kind.tools)

    def findings(self) -> list[Finding]:
        """Return the tools whose calls have all failed, and batches that were all dropped."""
        gone = [Finding("environment", "failed", self._gone())] if self._num_gone else []
        return [*self._tool_calls.findings(), *gone]

    def _called(self, name: str, error: str | None) -> None:
        """Count a call of a tool, which succeeded if ``error`` is None."""
        self._tool_calls.add(name, error)
        self._counts[f"calls/{name}"] += 1
        self._counts[f"failed_calls/{name}"] += error is not None

    def _tell(self, sentence: str) -> None:
        if sentence not in self._told:
            self._told.add(sentence)
            logger.warning("%s", sentence)

    def _tell_failure(self, sentence: str) -> None:
        """Tell of the first failure of each kind; the others are counted."""
        self._failure = sentence
        self._tell(
            f"The environment {sentence}. The trajectory begins again with a fresh one, or is left out of its group; "
            "further failures are only counted."
        )

    # ---- checkpoints --------------------------------------------------------------------------------

    def try_states(self) -> int:
        """Have the environments of trajectories that have ended say their states, and fresh ones take them.

        Returns:
            How many have.

        Raises:
            ValueError: One cannot.
        """
        sessions = [session for session, _ in self._ended.values() if "state" in session.kind.methods]
        tried = [(session, session.calls.start(session.try_restore())) for session in sessions]
        for session, future in tried:
            try:
                future.result()
            except Failure as failure:
                raise ValueError(
                    f"the environment {session.kind.name} {failure}; mend its state and restore, or a resumed run "
                    "begins its trajectories again."
                ) from None
        return len(tried)

    def state_dict(self) -> dict[str, Any]:
        """Return which trajectories have begun, where those can go on whose environments can be restored, and calls.

        As the rollout began and as they are now: until it has been learnt from, what is resumed is before it. Of calls
        it is how many of each tool have failed.
        """
        places = self._places()
        sessions = [[list(key), [[each.token_ids, each.state] for each in places[key]]] for key in places]
        return {"sessions": sessions, "tool_calls": self._tool_calls.state_dict()}

    def _places(self) -> dict[Key, list[Snapshot]]:
        """Return where each trajectory can go on, the latest place last."""
        now = self._snapshots_of(self.sessions)
        known = (self._kept, self._carried, now)
        keys = dict.fromkeys(key for places in known for key in places)
        return {key: [each for places in known for each in places.get(key, [])] for key in keys}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint; trajectories whose environments cannot be restored begin again, and are counted."""
        self._kept = {
            (name, visit, tuple(path)): [Snapshot(tuple(path), token_ids, kept) for token_ids, kept in places]
            for (name, visit, path), places in state["sessions"]
        }
        if "tool_calls" in state:  # an earlier version has kept none
            self._tool_calls.load_state_dict(state["tool_calls"])

    def close(self) -> None:
        """End all environments, and what calls them."""
        sessions = [*self.sessions.values(), *(session for session, _ in self._ended.values())]
        closing = [future for session in sessions if (future := session.close()) is not None]
        wait([*closing, *self._closing], timeout=CLOSING_S)
        self.sessions.clear()
        self._ended.clear()
        if self._calls is not None:
            self._calls.stop()
            self._calls = None
        if self._streams is not None:
            self._streams.close()
            self._streams = None


def _result(future: Future[dict[str, Any]] | None) -> dict[str, Any] | Failure | None:
    """Return a state that has come, or why none has; None where none was asked for."""
    if future is None:
        return None
    if not future.done():
        return Failure("does not say its state in time")
    try:
        return future.result()
    except Exception as error:  # too many hang, or the loop is being closed: nothing depends on it
        return error if isinstance(error, Failure) else Failure(f"cannot be asked for its state ({error_text(error)})")


def _reward_of(completion: str, episode: Episode | None, kind: str) -> float | None:
    """Return what an environment of a class has given; None for a completion with another one."""
    return episode.reward if episode is not None and episode.kind == kind else None


PLUGINS = {"environments": Environments()}
