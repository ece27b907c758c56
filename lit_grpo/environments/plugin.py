"""The plug-in ``environments``: tools and many turns, beside decoding."""

from __future__ import annotations

import copy
import functools
import itertools
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NamedTuple

from lit_grpo.compatibility import Requirement
from lit_grpo.data.rendering import with_added
from lit_grpo.environments.calls import CallFormatName
from lit_grpo.environments.chat import Chat
from lit_grpo.environments.contract import COLUMN, Factory, Kind, make_kinds
from lit_grpo.environments.driver import Event, RerenderingDriver, TrajectoryDriver
from lit_grpo.environments.live import Failure, Limits
from lit_grpo.environments.log import EnvironmentLog
from lit_grpo.findings.rewards import Finding
from lit_grpo.limits import Count, Limit, Number
from lit_grpo.plugins import AllGather, Answer, GroupBatch, Plugin, Resume, RunFacts
from lit_grpo.process.calls import Calls
from lit_grpo.process.terminal import error_text
from lit_grpo.rewards.function import RewardFunction
from lit_grpo.types import EMPTY, OBSERVED, Completion, Episode, GroupKey, Key, Request, RolloutGroup, SamplePath

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from lit_grpo.data.chat import Message
    from lit_grpo.data.sources import Row
    from lit_grpo.policy.architecture.vision import Vision
    from lit_grpo.rollout.generator import StepEvents
    from lit_grpo.scheduling.ledger import RequestLedger

CLOSING_S = 10.0
"""How long the end of a run waits for environments that are closed."""
Seconds = Annotated[float, Limit(gt=0, finite=True)]


class Snapshot(NamedTuple):
    """A trajectory as its environment had answered, by its contents (:attr:`lit_grpo.types.Trajectory.contents`).

    The state is None where it cannot be gone on from: the environment was at work, or has no ``state``.
    """

    path: SamplePath
    contents: list[int]
    state: dict[str, Any] | None

    def fits(self, request: Request) -> tuple[int, int, bool, SamplePath]:
        """Return how well a request can go on from it; (-1, -1, False, ()) for not at all.

        By the tokens in common first, then by the beginning of the path: where several have equal tokens, the nearest
        parent's state is taken, and of its equally near relatives that of the last path, whichever came first. What the
        request has come to since must have been sampled, not observed.
        """
        num, prefix = len(self.contents), request.prefix
        if prefix.contents[:num].tolist() != self.contents or bool((prefix.versions_T[num:] == OBSERVED).any()):
            return (-1, -1, False, ())
        parts = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(self.path, request.path, strict=False))
        num_common = sum(1 for _ in parts)
        return (num, num_common, num_common == len(self.path), self.path)


def best_state(snapshots: Sequence[Snapshot], request: Request) -> dict[str, Any] | None:
    """Return a copy of the state that a request goes on from, the last one of its path; None where it begins again."""
    fitting = [(each.fits(request), each) for each in reversed(snapshots)]
    (common, *_), best = max(fitting, key=lambda pair: pair[0], default=((-1, -1, False, ()), None))
    return None if best is None or common < 0 else copy.deepcopy(best.state)


@dataclass(slots=True, eq=False)
class Record:
    """Record of a trajectory, from its first request, or from a checkpoint, until it has been scored.

    Attributes:
        driver: Leads it; None where it has been dropped or where a checkpoint alone knows it.
        completion: What it has come to; None until it has ended.
        num_rollouts: Rollouts that have begun since its group became whole; None before.
        kept: Where it can go on, of a checkpoint or of a rollout that has failed, until the next update.
        carried: Where it could go on as this rollout began, until that has been trained on.
        begun: Where others can begin within it in this rollout.
    """

    driver: TrajectoryDriver | None = None
    completion: Completion | None = None
    num_rollouts: int | None = None
    kept: list[Snapshot] = field(default_factory=list)
    carried: list[Snapshot] = field(default_factory=list)
    begun: list[Snapshot] = field(default_factory=list)

    def let_go(self) -> None:
        """Close its environment once it has been scored."""
        if self.driver is not None:
            self.driver.close()
        if self.completion is not None and self.completion.episode is not None:
            self.completion.episode = self.completion.episode._replace(environment=None)
        self.driver = self.completion = self.num_rollouts = None


RESUMED = ("go_on", "again", "rewritten")
"""How trajectories that have come together are resumed, one kind after another."""
ADDED = ("x", "The", "1", " 0", "\n.")
"""Texts that may be added to a message: the tokens before the first that any of them changes are those of all."""


def check_room(run: RunFacts, what_needs: str) -> None:
    """Check that a trajectory may observe anything.

    Args:
        run: What is known of the run.
        what_needs: How the message begins, up to its verb.
    """
    if run.max_observed < 1:
        raise ValueError(
            f"{what_needs} room, and max_observed of model.sampling or model.eval_sampling is 0; set it to the tokens "
            "that a trajectory may observe, such as 512. They do not count in max_tokens."
        )


class Trajectories(Plugin):
    """Leads trajectories: each has a :class:`lit_grpo.environments.driver.TrajectoryDriver`.

    A trajectory is away while its environment is at work, and its slot free. Between two steps of the rollout what has
    come meanwhile is taken; nothing is waited for. :meth:`setup` of a plug-in that derives from it calls :meth:`lead`.
    """

    traits: ClassVar[frozenset[str]] = frozenset({"evaluates"})
    _more_counts: ClassVar[tuple[str, ...]] = ()
    _shows_images = True  # in observations; of a class, whether it goes on from images at all

    def lead(
        self,
        kinds: Mapping[str | None, Kind],
        limits: Limits,
        num_threads: int,
        form: str | None,
        driver: Callable[..., TrajectoryDriver] = TrajectoryDriver,
    ) -> None:
        """Begin with no trajectory.

        Args:
            kinds: Of environments, by the values of the column ``environment``; a single one by None.
            limits: What a trajectory may take.
            num_threads: Calls at a time.
            form: How calls are written.
            driver: Makes the driver of a trajectory.
        """
        self._make_driver = driver
        self.kinds, self._limits, self._num_threads, self._form = kinds, limits, num_threads, form
        self.chat: Chat | None = None
        self._groups: dict[GroupKey, dict[SamplePath, Record]] = {}
        self._closing: list[Future[None]] = []  # of trajectories that were dropped
        self._events: deque[tuple[TrajectoryDriver, Event]] = deque()
        self._going_on: list[Request] = []  # from an earlier rollout, in lock-step
        self._log = EnvironmentLog(list(kinds.values()), self._more_counts)
        self._calls: Calls | None = None
        self._apart: bool | None = None  # whether a rollout has none of the trajectories that there are
        self._rewards = [
            RewardFunction.of(functools.partial(_reward_of, kind=name), name)
            for name in dict.fromkeys(kind.name for kind in kinds.values() if kind.gives_reward)
        ]

    @property
    def rewards(self) -> Sequence[RewardFunction]:
        """One for each class with ``get_reward``, by its name."""
        return self._rewards

    @property
    def records(self) -> dict[Key, Record]:
        return {(*group, path): each for group, records in self._groups.items() for path, each in records.items()}

    @property
    def drivers(self) -> dict[Key, TrajectoryDriver]:
        unfinished = ((key, each.driver) for key, each in self.records.items() if each.completion is None)
        return {key: driver for key, driver in unfinished if driver is not None}

    def _driver_of(self, key: Key) -> TrajectoryDriver | None:
        record = self._groups.get(key[:2], {}).get(key[2])
        return None if record is None or record.completion is not None else record.driver

    def _forget(self) -> None:
        """Remove the records in which nothing is left."""
        for group, records in list(self._groups.items()):
            for path, each in list(records.items()):
                if each.driver is None and not (each.kept or each.carried or each.begun):
                    del records[path]
            if not records:
                del self._groups[group]

    # ---- prompts ------------------------------------------------------------------------------------

    def prepare(
        self,
        tokenizer: PreTrainedTokenizerBase,
        options: Mapping[str, Any],
        plain_rows: bool = False,
        vision: Vision | None = None,
    ) -> None:
        """Try the chat template on the turns that will come."""
        if vision is not None and not type(self)._shows_images:
            raise ValueError(f"{type(self).__name__} sends texts alone; leave out data.image_column and model.vision.")
        if (known := self.chat) is not None and known.tokenizer is tokenizer and (known.vision or vision is None):
            return
        kinds = self.kinds.values()
        try:
            self.chat = Chat(tokenizer, options, self._form, plain_rows, vision)
            told = self.chat.check(
                schemas=[schema for kind in kinds for schema in kind.schemas],
                calls=any(kind.tools for kind in kinds),
                responds=any(kind.responds for kind in kinds),
                rewrites=self._make_driver is RerenderingDriver,
            )
        except ValueError as error:
            raise ValueError(f"rollout.plugins environments: {error}") from None
        for sentence in told:
            self._log.tell(sentence)

    def on_policy_start(self, eos_ids: Sequence[int]) -> None:
        if self.chat is not None:
            self.chat.shows_images &= self._shows_images
        if self.chat is not None and any(kind.tools for kind in self.kinds.values()):
            for sentence in self.chat.check_ends(eos_ids):
                self._log.tell(sentence)

    def tool_schemas(self, row: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return the schemas of a row's tools."""
        kind = self._kind(row)
        kind.check_columns(row)
        return kind.schemas

    def adds(self, row: Mapping[str, Any]) -> bool:
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

    def on_rollout_start(self, ledger: RequestLedger) -> None:
        """A rollout begins; what became whole in the one before the last has been scored."""
        self._ledger, self._apart = ledger, None
        for record in self.records.values():
            record.begun = []
            if record.num_rollouts is not None:
                record.num_rollouts += 1
                if record.num_rollouts > 1:
                    record.let_go()
        self._forget()
        self._closing = [future for future in self._closing if not future.done()]
        self._log.counts.clear()

    def on_requests(self, requests: Sequence[Request]) -> list[Request]:
        """Let each request begin with an environment of its own, which is reset first."""
        led = ((request.key, self._driver_of(request.key)) for request in requests)
        going_on = {key: driver for key, driver in led if driver is not None}
        if self._apart is None:  # trajectories of another rollout keep their threads until that goes on
            self._apart = bool(self.drivers) and not going_on
        for key, snapshots in self._snapshots_of(going_on).items():
            self._groups[key[:2]][key[2]].carried = snapshots
        held = [self._held(request) for request in requests]
        return [request for request in held if request is not None]

    def _held(self, request: Request) -> Request | None:
        """Return the request that waits for its environment first; None if the policy samples its turn at once."""
        driver = self._driver_of(request.key)
        match "new" if driver is None else driver.doing_after(request.prefix.num_tokens):
            case "answering":
                return request
            case "sampling":  # stopped in the middle of a turn or before one; in lock-step it goes on with all others
                if "lock_step" not in self.traits:
                    return None
                self._going_on.append(request)
                return request
            case "new" | "lost":
                return self._begin(request)

    def _begin(self, request: Request) -> Request:
        """Give a request an environment, in the state that it goes on from if one was kept, else to be reset."""
        records = self._groups.setdefault(request.group, {})
        record = records.setdefault(request.path, Record())
        record.let_go()  # of one that has ended or was stopped, and was too old
        driver = record.driver = self._driver(request)
        kept, record.kept = record.kept, []
        if kept:
            record.carried = kept
        begun = kept or [snapshot for each in records.values() for snapshot in each.begun]
        state = best_state(begun, request)
        if request.prefix.num_tokens and state is not None:
            driver.start(request, state)
            return request
        self._log.counts["restarted"] += bool(kept) or request.prefix.num_tokens > 0
        driver.start()
        return request.after(EMPTY)

    def _snapshots_of(self, drivers: Mapping[Key, TrajectoryDriver]) -> dict[Key, list[Snapshot]]:
        """Return where each of these can go on; environments are asked together, and it is told where one cannot say.

        Those whose environments are at work cannot go on from here either, without a word: these are not asked.
        """
        asked = {key: driver.ask_state() for key, driver in drivers.items()}
        wait([future for future in asked.values() if future is not None], timeout=self._limits.tool_timeout_s + 1)
        states = {key: _result(future) for key, future in asked.items()}
        failed = {key: state for key, state in states.items() if isinstance(state, Failure)}
        self._log.counts["unkept"] = len(failed)
        for key, failure in failed.items():  # places and values in the sentence are many: once for each kind
            name = drivers[key].kind.name
            self._log.tell_once(
                f"unkept {name}",
                "%d of %d unfinished trajectories cannot be kept in a checkpoint, and begin again where the run is "
                "resumed from it: the environment %s %s. Further ones are only counted.",
                *(len(failed), len(drivers), name, failure),
            )
        kept = {key: None if isinstance(state, Failure) else state for key, state in states.items()}
        return {key: [Snapshot(key[2], driver.contents, kept[key])] for key, driver in drivers.items()}

    def on_group(self, group: RolloutGroup) -> None:
        """No more requests begin within those of a group, and it is to be scored."""
        records = self._groups.get(group.key, {})
        for record in records.values():
            record.begun = []
        for rollout in group.rollouts:
            record = records.get(rollout.completion.request.path)
            if record is not None and record.completion is not None:
                record.num_rollouts = 0

    def _driver(self, request: Request) -> TrajectoryDriver:
        assert self.chat is not None, "prepare comes first"
        if self._calls is None:
            self._calls = Calls(self._num_threads, "environments or tools", "let them end by themselves")
        return self._make_driver(
            request=request.after(EMPTY),
            kind=self._kind(request.prompt.columns),
            chat=self.chat,
            limits=self._limits,
            calls=self._calls,
            log=self._log,
            events=self._events,
            keeps_states=self._ledger.forks,
            apart=bool(self._apart),
        )

    def on_turn(self, completion: Completion) -> Answer:
        record = self._groups[completion.request.group][completion.request.path]
        assert record.driver is not None
        record.driver.take_turn(completion)
        return Answer(hold=[completion.request.key])

    def on_step(self, events: StepEvents) -> Answer | None:
        return None if "lock_step" in self.traits or not self._events else self._answer()

    def on_idle(self) -> Answer | None:
        """Do the same, in lock-step once all environments at work have answered."""
        if "lock_step" in self.traits:
            away = [self._driver_of(key) for key in self._ledger.awaiting_env]
            wait([driver.work for driver in away if driver is not None and driver.waits])
        return self._answer() if self._events or self._going_on else None

    @property
    def waits_in_time(self) -> bool:
        return self._calls is not None and self._calls.is_in_time

    def _answer(self) -> Answer:
        """Take what trajectories of this rollout ask for, and leave to another rollout what is of that.

        What has come together is taken in the order of keys, whichever came first.
        """
        resumed, self._going_on = [Resume(request) for request in self._going_on], []
        ended: list[Completion] = []
        dropped: list[Key] = []
        of_others: list[tuple[TrajectoryDriver, Event]] = []
        come = [self._events.popleft() for _ in range(len(self._events))]
        for driver, event in sorted(come, key=lambda each: each[0].request.key):
            key = driver.request.key
            if self._driver_of(key) is not driver:
                continue  # the trajectory was discarded meanwhile
            if key not in self._ledger.awaiting_env:
                of_others.append((driver, event))
                continue
            if isinstance(event, Exception):
                raise event
            driver.took(event)
            if event is None:
                dropped.append(key)
            elif isinstance(event, Completion):
                ended.append(event)
            else:
                record = self._groups[key[:2]][key[2]]
                if event.resume.how == "again":
                    record.begun = []  # what a failed attempt has left is no part of the trajectory any more
                if event.state is not None:
                    record.begun.append(Snapshot(key[2], driver.contents, event.state))
                resumed.append(event.resume)
        self._events.extend(of_others)
        resumed.sort(key=lambda each: (RESUMED.index(each.how), each.request.key))
        return Answer(resume=resumed, finish=ended, drop=dropped)

    def on_completion(self, completion: Completion) -> None:
        """A trajectory has ended, perhaps in the middle; its environment is kept until it has been scored."""
        driver = self._driver_of(completion.request.key)
        if driver is None:
            return
        driver.stop()
        if completion.episode is None:  # another has ended it
            whole = driver.whole(completion)
            completion.take(whole)
            completion.request, completion.text = whole.request, whole.text
            completion.episode = driver.episode()._replace(turn_rewards=())
        self._groups[completion.request.group][completion.request.path].completion = completion
        num_rows, lasted_s = max(len(completion.contexts), 1), time.monotonic() - driver.began
        self._log.end(driver.num_turns, num_rows, driver.waited_s, lasted_s)

    def on_drop(self, request: Request) -> None:
        driver = self._driver_of(request.key)
        if driver is not None:
            self._groups[request.group][request.path].driver = None
            self._closing.append(driver.close())

    def on_rollout_end(self, failed: bool) -> None:
        """Let go of all environments where the rollout has failed: what they were told of it is void.

        Where trajectories can go on, from before the rollout or from now, stays known.
        """
        if self._calls is not None and (reopened := self._calls.reopen_streams()):
            self._log.tell(f"A tool or environment closed {' and '.join(reopened)}; the run has opened it again.")
        self._log.tell_news()
        if failed:
            for key, places in self._places().items():
                record = self._groups[key[:2]][key[2]]
                record.kept, record.carried = places, []
                if record.driver is not None and record.completion is None:
                    record.driver.close()
                    record.driver = None
            self._events.clear()
            self._going_on.clear()

    def on_update_end(self, batch: GroupBatch) -> dict[str, float]:
        """Nothing goes back to before the rollout any more."""
        for record in self.records.values():
            record.kept, record.carried = [], []
        self._forget()
        self._log.note_batch(batch.all_gather)
        return {}

    # ---- what is told -------------------------------------------------------------------------------

    def metrics(self, all_gather: AllGather = lambda own: [own]) -> dict[str, float]:
        return self._log.metrics(all_gather)

    def findings(self) -> list[Finding]:
        return self._log.findings()

    # ---- checkpoints --------------------------------------------------------------------------------

    def try_states(self) -> int:
        """Have the environments of trajectories that have ended say their states, and fresh ones take them.

        Returns:
            How many have.
        """
        ended = [each.driver for each in self.records.values() if each.completion is not None]
        drivers = [driver for driver in ended if driver is not None and "state" in driver.kind.methods]
        tried = [(driver, driver.calls.start(driver.environment.try_restore())) for driver in drivers]
        for driver, future in tried:
            try:
                future.result()
            except Failure as failure:
                raise ValueError(
                    f"the environment {driver.kind.name} {failure}; mend its state and restore, or a resumed run "
                    "begins its trajectories again."
                ) from None
        return len(tried)

    def state_dict(self) -> dict[str, Any]:
        """Return which trajectories have begun, where those can go on whose environments can be restored, and calls.

        As the rollout began and as they are now: until it has been trained on, what is resumed is before it. Of calls
        it is how many of each tool have failed.
        """
        places = self._places()
        trajectories = [[list(key), [[each.contents, each.state] for each in places[key]]] for key in places]
        return {"trajectories": trajectories, "tool_calls": self._log.tool_calls.state_dict()}

    def _places(self) -> dict[Key, list[Snapshot]]:
        now = self._snapshots_of(self.drivers)
        known = {key: [*each.kept, *each.carried, *now.get(key, [])] for key, each in self.records.items()}
        return {key: places for key, places in known.items() if places}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint; trajectories whose environments cannot be restored begin again, and are counted."""
        self._groups = {}
        for (name, visit, path), places in state["trajectories"]:
            kept = [Snapshot(tuple(path), contents, state_then) for contents, state_then in places]
            self._groups.setdefault((name, visit), {})[tuple(path)] = Record(kept=kept)
        self._log.tool_calls.load_state_dict(state["tool_calls"])

    def close(self) -> None:
        """End all environments, and what calls them."""
        drivers = [each.driver for each in self.records.values()]
        wait([*(driver.close() for driver in drivers if driver is not None), *self._closing], timeout=CLOSING_S)
        for record in self.records.values():
            record.driver = record.completion = None
        if self._calls is not None:
            self._calls.stop()
            self._calls = None


@dataclass
class Environments(Trajectories):
    """Let completions take many turns with an environment or with tools.

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

    factory: Factory | Mapping[str, Factory] | None = None
    """Class, or function that returns an environment (see :mod:`lit_grpo.environments.contract`), by its path as in
    ``my_env.py:Game``; or several by name, of which each row names one in its column ``environment``.
    """
    tools: Sequence[str | Callable[..., Any]] = field(default_factory=tuple)
    """Functions without an environment that the policy may call, by their paths."""
    max_turns: Count | None = None
    """Max turns of the policy; by default as many as its tokens allow."""
    max_answer_tokens: Annotated[int, Limit(ge=16)] = 512
    """Max tokens of an answer of a tool or the user. From a longer answer the middle is left out, and a note in its
    place tells the policy.
    """
    tool_timeout_s: Seconds = 60.0
    """Max seconds of one call."""
    reset_timeout_s: Seconds = 60.0
    """Max seconds of making an environment, and of its ``reset``."""
    trajectory_timeout_s: Seconds = 600.0
    """Max seconds of all calls of one trajectory together."""
    retries: Number = 2
    """Max number of restarts of a trajectory with a fresh environment after its environment has failed. After that it
    is left out of its group: a failure does not count as a reward of 0.
    """
    num_threads: Count = 64
    """Max number of calls that run at a time, except those of async functions."""
    calls: CallFormatName | None = None
    """Format of the policy's tool calls (see :mod:`lit_grpo.environments.calls`). By default the tokenizer's
    ``response_template``, else the format that reads a call as the chat template writes it; if none does, the run does
    not start.
    """
    history: Literal["appended", "rerendered"] = "appended"
    """Context of a turn. ``appended``: all tokens that were sampled and observed before it, unchanged, in one row of
    the update. ``rerendered``: the conversation as the chat template writes it at that time, perhaps without the
    reasoning of earlier turns; each turn is then a row of its own in the update, and a server of the trained policy may
    use the template as it is.
    """
    lock_step: bool = False
    """Wait after each decode step until all environments have answered, so that runs do not depend on the clock and are
    repeated bit for bit; a rollout with slow tools takes longer.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.lock_step:
            vars(self)["traits"] = self.traits | {"lock_step"}

    def requirement(self, name: str) -> Requirement:
        """Prompts that show tools are rendered by the data module; a conversation that is rewritten is in one rollout.

        Earlier turns are not in a request's prefix then, so that no other rollout could go on from that.
        """
        remedy = "set its history to appended" if self._rewrites else ""
        needs = frozenset({"prompt_stream"} | ({"whole_rollouts"} if self._rewrites else set[str]()))
        return Requirement(name, needs, self._changes, remedy)

    @property
    def _rewrites(self) -> bool:
        return self.history == "rerendered"

    @property
    def _changes(self) -> Mapping[str, str]:
        """Return its effects: no turns where there is one alone, and no rewards of turns that no environment gives.

        Turns that are sampled after other tokens than each other are trained on apart. Nothing can begin in the middle
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
        check_room(run, "answers of tools and environments need")
        self._shows_images = run.abilities is None or "observed_images" in run.abilities

    def setup(self) -> None:
        """Load factories and tools."""
        limits = Limits(
            max_turns=self.max_turns,
            max_answer_tokens=self.max_answer_tokens,
            tool_timeout_s=self.tool_timeout_s,
            reset_timeout_s=self.reset_timeout_s,
            trajectory_timeout_s=self.trajectory_timeout_s,
            retries=self.retries,
        )
        driver = RerenderingDriver if self._rewrites else TrajectoryDriver
        self.lead(self._kinds(), limits, self.num_threads, self.calls, driver)

    def _kinds(self) -> dict[str | None, Kind]:
        given = [self.tools] if isinstance(self.tools, str) or callable(self.tools) else self.tools
        try:
            return make_kinds(self.factory, given)
        except ValueError as error:
            raise ValueError(f"rollout.plugins environments: {error}") from None


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
    return episode.reward if episode is not None and episode.kind == kind else None


PLUGINS = {"environments": Environments()}
