"""One trajectory as a coroutine: turns of the policy and answers of its environment, from the reset to the reward."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from lit_grpo.data.chat import UnusableRow
from lit_grpo.environments.live import Failure, Limits, LiveEnvironment, copied
from lit_grpo.plugins import Resume
from lit_grpo.types import EMPTY, Completion, Episode, FinishReason, Request, Trajectory

if TYPE_CHECKING:
    from lit_grpo.data.chat import Message
    from lit_grpo.environments.calls import Turn
    from lit_grpo.environments.chat import Chat, Content
    from lit_grpo.environments.contract import Kind
    from lit_grpo.environments.log import EnvironmentLog
    from lit_grpo.process.calls import Calls
    from lit_grpo.types import Pictures


class Earlier(NamedTuple):
    """The turns before the one that is sampled, where the chat template writes the conversation for each turn.

    Args:
        turns: The tokens of the turns before, as they were sampled, and of what followed each of them.
        text: The text of the sampled tokens.
        contexts: Tokens between the prompt and a turn, for each turn and for the one that is sampled.
    """

    turns: Trajectory = EMPTY
    text: str = ""
    contexts: tuple[tuple[int, ...], ...] = ((),)


@dataclass(frozen=True)
class Sample:
    """A request of a trajectory for its next turn.

    Args:
        resume: The request whose prefix the turn is sampled after, and how it goes on: ``again`` once the environment
            has failed, ``rewritten`` after what the chat template has rendered.
        state: State from which the trajectory can be restored, if others may branch from it.
        earlier: The turns before this one, if they are not in the request's prefix.
    """

    resume: Resume
    state: dict[str, Any] | None
    earlier: Earlier | None = None


Event = Sample | Completion | Exception | None
"""An event from a trajectory to the rollout: its next turn, its end, an error that ends the run, or None (dropped)."""


class TrajectoryDriver:
    """Drives a trajectory and its environment.

    :meth:`play` runs on the event loop of ``calls``, beside decoding, and calls :meth:`sample` for each turn. The
    rollout takes what the trajectory asks for out of ``events`` between two steps, and brings each turn to
    :meth:`take_turn`. A trajectory whose request waits for a slot, is preempted, or is carried over into another
    rollout waits in :meth:`sample`, without noticing.

    Args:
        request: The request of the whole trajectory, without a prefix.
        kind: The kind of its environment.
        chat: Encodes messages and reads turns.
        limits: Time limits, retries, and the max number of turns.
        calls: Makes calls of users' code.
        log: Counts the trajectory's events.
        events: Queue into which :meth:`play` puts its events for the rollout.
        keeps_states: Whether the environment's state is saved at each turn, so that other trajectories can branch
            there.
        apart: Whether calls of this trajectory have threads of their own.

    Attributes:
        environment: The environment of the present attempt.
        messages: The conversation after the prompt.
        turn_rewards: The reward of each turn, if the environment gives one.
        num_turns: Turns of the present attempt.
        contents: What came after the prompt when the rollout and this trajectory last exchanged a turn
            (:attr:`lit_grpo.types.Trajectory.contents`).
        waits: Whether the rollout waits for the environment.
        work: Done as soon as there is something in ``events`` for which the rollout waits.
        waited_s: Seconds in which the environment was at work.
        began: Start of the trajectory, in seconds of ``time.monotonic``.
    """

    def __init__(
        self,
        request: Request,
        kind: Kind,
        chat: Chat,
        limits: Limits,
        calls: Calls,
        log: EnvironmentLog,
        events: deque[tuple[TrajectoryDriver, Event]],
        keeps_states: bool = False,
        apart: bool = False,
    ) -> None:
        self.request, self.kind, self.chat, self.limits = request, kind, chat, limits
        self.calls, self.log, self._events = calls, log, events
        self._keeps_states, self._apart = keeps_states, apart
        self._is_over = False
        self.environment = self._fresh()
        self.messages: list[Message] = []
        self.turn_rewards: list[float] = []
        self.said: Content = ""  # what reset added to the prompt
        self.asked = ""  # the prompt's text with it
        self.num_turns = self._num_failed = 0
        self._closing: list[Future[Any]] = []  # of environments that have failed
        self.contents: list[int] = []
        self.waits, self.work = False, Future[None]()
        self.waited_s, self.began = 0.0, time.monotonic()
        self._since = self.began  # the environment has been at work
        self._has_sampled = self._has_lost = False  # a turn, and that turn as its environment failed
        self._turn: asyncio.Future[Completion] | None = None  # the one that is being sampled
        self._played: Future[None] | None = None

    # ---- the trajectory --------------------------------------------------------------------------------

    async def play(self, request: Request, state: Mapping[str, Any] | None = None) -> Completion | None:
        """Play the trajectory to its end; restart it with a fresh environment if the environment fails.

        Args:
            request: The request whose prefix the first turn is sampled after, if ``state`` is given.
            state: State of an earlier environment, from a checkpoint or a branch; by default the environment is reset.

        Returns:
            The trajectory with its :class:`lit_grpo.types.Episode`; None if its environment failed too often.
        """
        while True:
            try:
                return await self._attempt(request, state)
            except Failure as failure:
                self._count_failure(failure)
                if self._num_failed > self.limits.retries:
                    self.log.counts["dropped"] += 1
                    return None
                self.log.counts["retries"] += 1
                self.environment, state = self._fresh(), None

    async def _attempt(self, request: Request, state: Mapping[str, Any] | None) -> Completion:
        """Play with one environment."""
        following = await self._begin() if state is None else await self._restore(request, state)
        while True:
            completion = await self.sample(following, state)
            state = None
            self.num_turns += 1
            if completion.finish_reason != "stop":
                text = str(self.chat.tokenizer.decode(completion.turns[-1], skip_special_tokens=True))
                self.messages.append({"role": "assistant", "content": text})
                await self._reward_turn()
                return await self._end(completion, completion.finish_reason)
            turn = self._read(completion)
            self.messages.append(turn.message)
            answers = await self.environment.answer(turn, self.chat)
            await self._reward_turn()
            self.messages += answers
            if not answers or await self.environment.is_done():
                return await self._end(completion, "stop")
            next_one = self._follow(completion, answers)
            is_full = completion.num_sampled >= self.request.sampling.max_tokens
            if next_one is None or is_full or self.num_turns == self.limits.max_turns:
                self.log.counts["cut_short"] += 1
                del self.messages[len(self.messages) - len(answers) :]
                return await self._end(completion, "length")
            following = next_one

    async def sample(self, request: Request, state: Mapping[str, Any] | None = None) -> Completion:
        """Have the policy sample a turn after a request's prefix; return the trajectory with that turn.

        Args:
            request: The trajectory so far is its prefix.
            state: The environment's state, if it is known.

        Raises:
            asyncio.CancelledError: The trajectory was ended meanwhile.
        """
        if self._keeps_states:
            state = await self.state() if state is None else copied(dict(state))
        self._turn = asyncio.get_running_loop().create_future()
        self._tell(self._asking(request, state if self._keeps_states else None))
        try:
            return await self._turn
        finally:
            self._turn = None

    async def _begin(self) -> Request:
        """Reset the environment; return the request of the first turn."""
        self.num_turns, self.messages, self.turn_rewards = 0, [], []
        self.said, self.asked = "", ""
        prompt, most = self.request.prompt, self.request.sampling.max_observed
        self.said = await self.environment.reset(prompt, self.chat.shows_images)
        self.log.has_begun = True
        observed, pictures = self._shown(self.chat.opening(prompt, self.said, self.kind.schemas), [self.said])
        if len(observed) > most:
            raise ValueError(
                f"{self.kind.name}.reset returned too much text for prompt {prompt.prompt_id}: {len(observed)} tokens, "
                f"but model.sampling.max_observed is {most}. Raise max_observed, or return less text."
            )
        if self.said:
            self.asked = self.chat.text_of(self.chat.conversation(prompt, self.said), self.kind.schemas)
        return self.request.after(EMPTY.followed_by(observed, pictures=pictures) if observed else EMPTY)

    async def _restore(self, request: Request, state: Mapping[str, Any]) -> Request:
        """Restore the state of an earlier environment; return the request of the next turn."""
        self._has_sampled = True
        await self.environment.restore(state["environment"])
        for name in ("messages", "turn_rewards", "num_turns"):
            setattr(self, name, copied(state[name]))
        self.said, self.asked = state["said"], state["asked"]
        return request

    def _read(self, completion: Completion) -> Turn:
        sampled, token_ids = completion.turns[-1], completion.token_ids_T.tolist()
        before = [*self.request.prompt.token_ids, *token_ids[: len(token_ids) - len(sampled)]]
        return self.chat.read(sampled, before, self.kind.tools)

    def _follow(self, completion: Completion, answers: Sequence[Message]) -> Request | None:
        """Return the request of the next turn; None if it would exceed ``max_observed``."""
        following = self.chat.following(answers, completion.turns[-1][-1])
        observed, pictures = self._shown(following, [answer["content"] for answer in answers])
        if completion.num_observed + len(observed) > self.request.sampling.max_observed:
            return None
        return self.request.after(completion.followed_by(observed, pictures=pictures))

    def _shown(self, token_ids: list[int], observed: Sequence[Content]) -> tuple[list[int], Pictures | None]:
        """Return what :meth:`Chat.shown` does; the run ends where the chat template does not show the images."""
        try:
            return self.chat.shown(token_ids, observed)
        except UnusableRow as error:
            raise ValueError(f"What {self.kind.name} shows {error}.") from None

    async def _reward_turn(self) -> None:
        if "turn_reward" in self.kind.methods:
            self.turn_rewards.append(await self.environment.reward("turn_reward") or 0.0)

    async def _end(self, completion: Completion, reason: FinishReason) -> Completion:
        reward = await self.environment.reward()
        ended = self.request.after(completion).ended(reason, completion.text)
        ended.episode = self.episode(reward)
        return ended

    def _fresh(self) -> LiveEnvironment:
        return LiveEnvironment(self.kind, self.limits, self.calls, self.log, self._apart, lambda: self._is_over)

    def _count_failure(self, failure: Failure) -> None:
        """Count a failure, and close the failed environment in the background."""
        self.log.counts["failures"] += 1
        self._num_failed += 1
        self._has_lost = self._has_lost or self._has_sampled
        self.log.tell_failure(f"{self.kind.name} {failure}")
        self._closing.append(self.calls.start(self.environment.close()))

    async def state(self) -> dict[str, Any]:
        """Return the state from which the trajectory can be restored."""
        own = {name: getattr(self, name) for name in ("messages", "turn_rewards", "num_turns", "said", "asked")}
        return copied(own | {"environment": await self.environment.state()})

    # ---- the rollout's side ------------------------------------------------------------------------------

    def start(self, request: Request | None = None, state: Mapping[str, Any] | None = None) -> None:
        """Start to play; with a ``state`` resume after the prefix of ``request``, where that state was saved."""
        if request is not None and state is not None:
            self.contents = request.prefix.contents.tolist()
        self.waits = True
        self._played = self.calls.start(self._play(request or self.request, state))
        self._played.add_done_callback(self._broke)

    def _broke(self, played: Future[None]) -> None:
        error = None if played.cancelled() else played.exception()
        if isinstance(error, Exception):  # of the event loop, on which nothing runs any more
            self._tell(error)

    async def _play(self, request: Request, state: Mapping[str, Any] | None) -> None:
        try:
            event: Event = await self.play(request, state)
        except asyncio.CancelledError:  # the trajectory was ended meanwhile
            self._done()
            raise
        except Exception as error:  # what is no failure of an environment ends the run
            event = error
        self._tell(event)

    def _tell(self, event: Event) -> None:
        self.waited_s += time.monotonic() - self._since
        self._events.append((self, event))
        self._done()

    def _done(self) -> None:
        if not self.work.done():
            self.work.set_result(None)

    def _asking(self, request: Request, state: Mapping[str, Any] | None) -> Sample:
        resume = Resume(request, "again" if self._has_lost else "go_on")
        if self._has_lost:
            self._has_sampled = self._has_lost = False
        return Sample(resume, None if state is None else dict(state))

    def took(self, event: Event) -> None:
        self.waits = False
        if isinstance(event, Sample):
            self.contents = event.resume.request.prefix.contents.tolist()

    def take_turn(self, completion: Completion) -> None:
        self.contents, self._has_sampled = completion.contents.tolist(), True
        self.waits, self.work, self._since = True, Future(), time.monotonic()
        self.calls.start(self._bring(completion))

    async def _bring(self, completion: Completion) -> None:
        if self._turn is not None and not self._turn.done():
            self._turn.set_result(completion)

    def doing_after(self, num_tokens: int) -> Literal["answering", "sampling", "lost"]:
        """Return who is at work where the rollout has so many tokens: the environment, the policy, or neither."""
        if self.waits and len(self.contents) == num_tokens:
            return "answering"
        return "sampling" if len(self.contents) <= num_tokens > 0 else "lost"

    def whole(self, completion: Completion) -> Completion:
        """Return the whole trajectory, if ``completion`` is what the present request has come to."""
        return completion

    def episode(self, reward: float | None = None) -> Episode:
        given, name = self.environment.object, self.kind.name
        return Episode(given, self.messages, name, reward, tuple(self.turn_rewards), self.said, self.asked)

    def ask_state(self) -> Future[dict[str, Any]] | None:
        """Ask for what a checkpoint keeps; None if the trajectory cannot be restored from where it is.

        The future raises a :class:`Failure` if the environment cannot say its state.
        """
        has_environment = self.kind.type is not None
        if not self.kind.can_be_restored or self.waits or (has_environment and self.environment.object is None):
            return None
        return self.calls.start(self.state())

    def stop(self) -> None:
        """End the trajectory; its environment is kept until it has been scored, and called no more.

        A call that is being made comes to its end.
        """
        self._is_over = True
        if self._played is not None and not self._played.done():
            self.calls.start(self._stop_sampling())

    async def _stop_sampling(self) -> None:
        if self._turn is not None:
            self._turn.cancel()

    def close(self) -> Future[None]:
        self.stop()
        return self.calls.start(self._close())

    async def _close(self) -> None:
        if self._played is not None and not self._played.done():
            await asyncio.wait([asyncio.wrap_future(self._played)])
        await asyncio.gather(self.environment.close(), *map(asyncio.wrap_future, self._closing))


class RerenderingDriver(TrajectoryDriver):
    """A trajectory whose conversation the chat template writes again before each turn.

    The request of a turn has the conversation as its prefix, all of it observed, and random numbers of its own. The
    trajectory is put together here: the turns as they were sampled, each with the conversation before it among
    :attr:`lit_grpo.types.Trajectory.contexts`, and between two of them what the answer added to the first.

    Attributes:
        earlier: The turns before the one that the rollout samples.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.earlier = self._next = Earlier()

    async def sample(self, request: Request, state: Mapping[str, Any] | None = None) -> Completion:
        return self.whole(await super().sample(request, state))

    async def _begin(self) -> Request:
        request = await super()._begin()
        self._next = Earlier(contexts=(tuple(request.prefix.token_ids_T.tolist()),))
        self._check_texts(bool(request.prefix.pictures))
        return request

    def _check_texts(self, has_images: bool) -> None:
        if has_images:
            raise ValueError(
                f"{self.kind.name} shows images, and history rerendered writes observations of texts alone; set "
                "history of the plug-in environments to appended."
            )

    def _asking(self, request: Request, state: Mapping[str, Any] | None) -> Sample:
        sample = replace(super()._asking(request, state), earlier=self._next)
        return sample if self.num_turns == 0 else replace(sample, resume=Resume(request, "rewritten"))

    def took(self, event: Event) -> None:
        super().took(event)
        if isinstance(event, Sample) and event.earlier is not None:
            self.earlier = event.earlier

    def whole(self, completion: Completion) -> Completion:
        """Return all turns, if the present request has come to ``completion``; at most ``max_tokens`` are sampled."""
        earlier, begin = self.earlier, len(self.earlier.contexts[-1])
        sampled: list[int] = completion.token_ids_T[begin:].tolist()
        room = self.request.sampling.max_tokens - earlier.turns.num_sampled
        is_cut = len(sampled) > room
        logprobs: list[float] = completion.logprobs_T[begin : begin + room].tolist()
        turns = earlier.turns.followed_by(sampled[:room], logprobs, completion.newest_version or 0)
        turns.contexts = earlier.contexts if sampled else earlier.contexts[:-1]
        said = "" if is_cut else completion.text
        said = said or str(self.chat.tokenizer.decode(sampled[:room], skip_special_tokens=True))
        reason = "length" if is_cut else completion.finish_reason
        return Completion.of(self.request, turns, reason, earlier.text + said)

    def _follow(self, completion: Completion, answers: Sequence[Message]) -> Request | None:
        """Return the request of the next turn: the conversation, as the chat template writes it now.

        None if it has more tokens than may be observed, or if the chat template refuses what the policy has said, such
        as two calls in one turn.

        Raises:
            ValueError: The chat template changes the prompt.
        """
        prompt, sampling = self.request.prompt, self.request.sampling
        observed = self.chat.following(answers, completion.turns[-1][-1])
        self._check_texts(any(isinstance(answer["content"], list) for answer in answers))
        try:
            messages = self.chat.conversation(prompt, self.said, self.messages)
            context = self.chat.beginning(prompt, messages, self.kind.schemas)
            self.chat.shown(context or [], [])  # the policy may spell the placeholder of an image
        except UnusableRow as error:
            self.log.tell(f"A turn of the policy {error} Such trajectories end there, and count as cut short.")
            return None
        if context is None:
            raise ValueError(
                f"The chat template changes the prompt of {prompt.prompt_id} when the conversation continues, "
                "but a trajectory keeps its prompt; set history of the plug-in environments to appended."
            )
        if len(context) > sampling.max_observed:
            return None
        contexts = (*self.earlier.contexts, tuple(context))
        self._next = Earlier(completion.followed_by(observed), completion.text, contexts)
        seed = self.request.seed + self.num_turns  # a turn may stand where an earlier one has stood
        return replace(self.request, seed=seed, prefix=EMPTY.followed_by(context))
