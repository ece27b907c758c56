"""Groups between their prompts and the update: the one owner of what has ended and has not yet been trained on."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from lit_grpo.process.values import find_foreign
from lit_grpo.rollout.rules import SYNCHRONOUS, ReleaseRule
from lit_grpo.scheduling.ledger import Entry, RequestLedger
from lit_grpo.types import (
    EMPTY,
    Completion,
    Episode,
    GroupKey,
    Key,
    MutualSpan,
    Pictures,
    Prompt,
    Request,
    Rollout,
    RolloutGroup,
    SamplePath,
    SamplingParams,
    Trajectory,
)


@dataclass
class _Open:
    """Ended completions of an unfinished group; the others are in the ledger."""

    prompt: Prompt
    completions: dict[SamplePath, Completion] = field(default_factory=dict)
    due: RolloutGroup | None = None  # whole, or the part of it that has ended, and waiting for its release
    is_out: bool = False  # what was due has been given out, and not been trained on yet
    trained_before: list[Rollout] = field(default_factory=list)  # in parts that have left before
    num_restarts: int = 0
    oldest: int | None = None  # version of what it had when the policy that samples now began to

    @property
    def num_ended(self) -> int:
        """Completions that have ended and have not been trained on."""
        return len(self.completions) + (0 if self.due is None else len(self.due.rollouts))


@dataclass(frozen=True)
class Renewal:
    """Result of renewing a buffer's unfinished groups for another policy.

    Args:
        num_discarded: Tokens that were lost.
        num_continued: Number of tokens that stay.
        unscored: Groups of a checkpoint that are whole and are to be scored.
    """

    num_discarded: int = 0
    num_continued: int = 0
    unscored: Sequence[RolloutGroup] = ()


class RolloutBuffer:
    """Groups of a run, from their opening to their release.

    It lives as long as the run and goes into its checkpoints, with its ledger: completions that have ended, and the
    prefixes of those that have not. A group is whole when none of its requests is unfinished; whole groups, or the
    parts of groups that have ended, leave in the order of arrival, as the rule says. Where groups stay open between
    releases, what is given out stays in the buffer until :meth:`end_update`.

    Args:
        rule: Rule by which groups are released.

    Attributes:
        ledger: The unfinished requests of all groups.
    """

    def __init__(self, rule: ReleaseRule = SYNCHRONOUS) -> None:
        self.rule = rule
        self.ledger = RequestLedger()
        self._groups: dict[GroupKey, _Open] = {}  # in the order of arrival
        self._before: tuple[dict[GroupKey, _Open], RequestLedger] | None = None
        self._version = 0  # of the policy that samples

    def __len__(self) -> int:
        return len(self._groups)

    def __contains__(self, key: GroupKey) -> bool:
        return key in self._groups

    # ---- in -----------------------------------------------------------------------------------------

    def open(self, requests: Sequence[Request]) -> None:
        """Open the groups of these requests, in the order of arrival.

        Raises:
            ValueError: A group is open already, or a request comes twice.
        """
        groups: dict[GroupKey, _Open] = {}
        keys: set[Key] = set()
        for request in requests:
            if request.key in keys or request.group in self._groups:
                raise ValueError("A batch holds the same visit of a prompt twice; give its rows distinct prompt ids.")
            keys.add(request.key)
            groups.setdefault(request.group, _Open(request.prompt))
        self._groups |= groups
        for request in requests:
            self.ledger.ask(request)

    def ask(self, request: Request) -> None:
        """Ask for a further sample of an open group, or for one that goes on from another prefix.

        Raises:
            ValueError: Its group is not open, has a completion of this path, or has it in work.
        """
        if request.group not in self._groups:
            raise ValueError(f"No group of {request.group} is open; open it with its prompt first.")
        if request.path in self._groups[request.group].completions:
            raise ValueError(f"Sample {request.path} of {request.group} has ended; give each sample a path of its own.")
        self.ledger.ask(request)

    # ---- what happens to requests -------------------------------------------------------------------

    @property
    def unfinished(self) -> list[Request]:
        """Requests to decode, in the order of arrival, without those that wait for their environments."""
        entries = (entry for group in self._groups for entry in self.ledger.groups.get(group, {}).values())
        return [entry.request for entry in entries if entry.state != "awaiting_env"]

    @property
    def away(self) -> list[Request]:
        """Requests that wait for their environments, in the order of arrival."""
        entries = (entry for group in self._groups for entry in self.ledger.groups.get(group, {}).values())
        return [entry.request for entry in entries if entry.state == "awaiting_env"]

    @property
    def asks(self) -> bool:
        return bool(self.ledger.groups)

    @property
    def prompts(self) -> dict[GroupKey, Prompt]:
        items = self._groups.items()
        unfinished = self.ledger.groups
        return {key: each.prompt for key, each in items if each.due is None or each.completions or key in unfinished}

    def finish(self, completion: Completion) -> None:
        """Take a completion, whose request has left the ledger."""
        self._groups[completion.request.group].completions[completion.request.path] = completion

    def make_due(self, key: GroupKey) -> RolloutGroup | None:
        """Let a group be due where it is whole; return it, which is to be scored. None while it is not whole.

        What is released in parts is never whole.
        """
        if key in self.ledger.groups or self.rule.releases_parts:
            return None
        return _close(self._groups[key])

    def renew(self, version: int) -> Renewal:
        """Let open groups go on as the rule says, before the policy of ``version`` samples.

        What would be too old begins again, completions that have ended and wait among it.

        Raises:
            ValueError: A prefix was sampled by a version that is yet to come.
        """
        num_discarded = num_continued = 0
        unscored: list[RolloutGroup] = []
        self._version = version
        for key, group in self._groups.items():
            ended = [] if group.due is None else [rollout.completion for rollout in group.due.rollouts]
            if ended and any(self._is_stale(each, version) for each in ended):
                group.due, group.completions, ended = None, {each.request.path: each for each in ended}, []
            stays: list[Trajectory] = [*ended]
            num_lost = 0
            for entry in self.ledger.groups.get(key, {}).values():
                request = entry.request
                if not request.prefix.num_tokens:
                    continue
                if self._is_lost(request.prefix, version):
                    num_lost += request.prefix.num_tokens
                    self.ledger.ask(request.after(EMPTY))
                else:
                    stays.append(request.prefix)
                    num_continued += request.prefix.num_tokens
            for each in list(group.completions.values()):
                if self._is_stale(each, version):
                    num_lost += each.num_tokens
                    del group.completions[each.request.path]
                    self.ledger.ask(each.request.after(EMPTY))
                else:
                    stays.append(each)
            num_discarded += num_lost
            group.num_restarts += num_lost > 0
            group.oldest = min((each.oldest_version for each in stays if each.oldest_version is not None), default=None)
            is_whole = key not in self.ledger.groups and not self.rule.releases_parts
            if is_whole and group.completions and group.due is None:
                unscored.append(_close(group))
        return Renewal(num_discarded, num_continued, tuple(unscored))

    def _is_lost(self, prefix: Trajectory, version: int) -> bool:
        oldest, newest = prefix.oldest_version, prefix.newest_version
        if newest is not None and newest > version:
            raise ValueError(
                f"A kept completion has tokens of policy version {newest}, which this run, at version {version}, does "
                "not know; begin with an empty buffer."
            )
        goes_on = self.rule.leftovers == "keep" and not self._is_stale(prefix, version)
        return oldest is not None and not goes_on

    def _is_stale(self, trajectory: Trajectory, version: int) -> bool:
        oldest = trajectory.oldest_version
        return oldest is not None and version - oldest > self.rule.max_staleness

    def versions(self, version: int) -> set[int]:
        """Return the versions of tokens that may yet be trained on, once the policy of ``version`` samples.

        Of what has been given out and not been trained on, too.
        """
        having: list[Trajectory] = []
        for key, group in self._groups.items():
            having += group.completions.values()
            having += [] if group.due is None else [rollout.completion for rollout in group.due.rollouts]
            if self.rule.leftovers == "keep":
                having += [entry.request.prefix for entry in self.ledger.groups.get(key, {}).values()]
        segments = [segment for each in having for segment in each.segments if segment.trained]
        versions = {segment.version for segment in segments if segment.version is not None}
        return {each for each in versions if version - each <= self.rule.max_staleness}

    # ---- out ----------------------------------------------------------------------------------------

    def ready(self, num_steps: int = 0) -> bool:
        """Return whether there is enough for a release, after so many decode steps of a rollout."""
        rule, groups = self.rule, self._groups.values()
        if not self.ledger.groups:
            return True
        if rule.num_steps is not None:
            gives = (each.due is not None or (rule.releases_parts and each.completions) for each in groups)
            return num_steps >= rule.num_steps and any(gives)
        if rule.num_completions is not None:
            enough = sum(group.num_ended for group in groups) >= rule.num_completions
        elif rule.num_groups is not None:
            enough = sum(group.due is not None for group in groups) >= rule.num_groups
        else:
            return False  # it waits for all
        unfinished = self.ledger.groups
        return enough and not any(self._is_due_now(group) for key, group in self._groups.items() if key in unfinished)

    def _is_due_now(self, group: _Open) -> bool:
        """Return whether it would lose tokens after this release, and may not."""
        rule = self.rule
        if rule.max_restarts is None or group.num_restarts < rule.max_restarts:
            return False
        if rule.leftovers == "discard":
            return True
        return group.oldest is not None and self._version + rule.num_updates - group.oldest > rule.max_staleness

    @property
    def num_waiting(self) -> int:
        """Groups, or parts of them, that are due and have not been given out."""
        return sum(group.due is not None and not group.is_out for group in self._groups.values())

    @property
    def num_left(self) -> int:
        """Groups that stay open once all that is out has been trained on, those among them that leave in parts."""
        items = self._groups.items()
        unfinished = self.ledger.groups
        return sum(not group.is_out or key in unfinished or bool(group.completions) for key, group in items)

    def close(self) -> list[RolloutGroup]:
        """Make groups of what has ended, where groups leave in parts; return them, to be scored."""
        if not self.rule.releases_parts:
            return []
        return [_close(group) for group in self._groups.values() if group.completions]

    def take(self) -> list[RolloutGroup]:
        """Release what is due, in the order of arrival: where the rule says so many groups, no more of them.

        Those that would be too old at the next release, and may not lose tokens, come first.

        What has left in earlier parts of a group is among its members, ``trained_before`` and not ``kept``.
        """
        due = [(key, group) for key, group in self._groups.items() if group.due is not None]
        waits = self.rule.num_steps is None and self.rule.max_staleness > 0  # what is over may be trained on later
        if waits and self.rule.num_groups is not None:
            due.sort(key=lambda item: not self._is_due_now(item[1]))
        chosen = due[: self.rule.num_groups] if waits else due
        released = []
        for key, group in chosen:
            assert group.due is not None
            group.is_out = True
            released.append(RolloutGroup(group.prompt, [*group.trained_before, *group.due.rollouts]))
            if self.rule.leftovers == "finish":
                del self._groups[key]
        return released

    def end_update(self) -> None:
        """Forget what was given out, which has been trained on."""
        self._before = None
        for key, group in list(self._groups.items()):
            if group.is_out and group.due is not None:
                group.trained_before += [
                    replace(rollout, kept=False, trained_before=True) for rollout in group.due.rollouts
                ]
                group.due, group.is_out = None, False
                if key not in self.ledger.groups and not group.completions:
                    del self._groups[key]

    # ---- rollouts that come to nothing ----------------------------------------------------------------

    def begin(self) -> None:
        """A rollout begins: until it has been trained on, checkpoints have what there was before it.

        So a run that is cut off in it, or in the update, takes both again, with the same result. Where a release waits
        for all, there is nothing before it: the prompts are drawn again.
        """
        if self.rule.leftovers != "finish":
            groups = {key: replace(group, completions=dict(group.completions)) for key, group in self._groups.items()}
            self._before = groups, self.ledger.copy()

    def undo(self) -> None:
        (self._groups, self.ledger), self._before = self._before or ({}, RequestLedger()), None

    # ---- checkpoints --------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        groups, ledger = self._before or (self._groups, self.ledger)
        return {"groups": [_group_state(group, ledger.groups.get(key, {}).values()) for key, group in groups.items()]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with what had been kept."""
        self._groups, self.ledger, self._before = {}, RequestLedger(), None
        for saved in state["groups"]:
            group = _group(saved)
            self._groups[group.prompt.prompt_id, group.prompt.visit] = group
            for each in saved["unfinished"]:
                self.ledger.ask(_request(group.prompt, each), away=each["path"] in saved["away"])

    def give_columns(self, prompts: Iterable[Prompt]) -> None:
        """Give the groups of a checkpoint the columns and images of their rows, which ``prompts`` have by their ids."""
        rows = {prompt.prompt_id: prompt for prompt in prompts} if self._groups else {}
        for group in self._groups.values():
            if group.prompt.prompt_id in rows:
                group.prompt.columns.update(rows[group.prompt.prompt_id].own_columns())
                vars(group.prompt)["pictures"] = rows[group.prompt.prompt_id].pictures


def group_requests(
    prompts: Sequence[Prompt], num_samples: int | Sequence[int], sampling: SamplingParams, seed: int
) -> list[Request]:
    """Return requests for so many samples of each prompt; a number for all, or one for each.

    Raises:
        ValueError: A group would have no member.
    """
    sizes = [num_samples] * len(prompts) if isinstance(num_samples, int) else num_samples
    if sizes and min(sizes) < 1:
        raise ValueError(f"A group of {min(sizes)} samples has no member; give num_generations of 1 or more.")
    samples = ((prompt, sample) for prompt, size in zip(prompts, sizes, strict=True) for sample in range(size))
    return [Request(prompt, (sample,), sampling, seed) for prompt, sample in samples]


def _close(group: _Open) -> RolloutGroup:
    """Let what has ended be due, beside what is due already; return it alone, which is to be scored."""
    rollouts: list[Rollout] = []
    for _, completion in sorted(group.completions.items()):
        turn_rewards = () if completion.episode is None else completion.episode.turn_rewards
        rollouts.append(Rollout(group.prompt, completion, turn_rewards=turn_rewards))
    before = [] if group.due is None else group.due.rollouts
    group.due, group.completions = RolloutGroup(group.prompt, [*before, *rollouts]), {}
    return RolloutGroup(group.prompt, rollouts)


def _group_state(group: _Open, unfinished: Collection[Entry]) -> dict[str, Any]:
    """As plain values; what has not been scored yet is whole again when it is loaded.

    Images and columns that no checkpoint can hold, such as times, are left out: :meth:`RolloutBuffer.give_columns`
    brings them.
    So is what a reward gave to ``log_extra`` that no checkpoint can hold.
    """
    if group.due is not None and group.due.rollouts and not any(rollout.rewards for rollout in group.due.rollouts):
        ended = {rollout.completion.request.path: rollout.completion for rollout in group.due.rollouts}
        group = replace(group, due=None, completions=group.completions | ended)
    columns = {name: value for name, value in group.prompt.columns.items() if find_foreign({name: value}) is None}
    return {
        "prompt": vars(group.prompt)
        | {"token_ids": list(group.prompt.token_ids), "columns": columns, "pictures": None},
        "unfinished": [_request_state(entry.request) for entry in unfinished],
        "away": sorted(list(entry.request.path) for entry in unfinished if entry.state == "awaiting_env"),
        "completions": [_completion_state(completion) for completion in group.completions.values()],
        "due": None if group.due is None else [_rollout_state(rollout) for rollout in group.due.rollouts],
        "learnt": [_rollout_state(rollout) for rollout in group.trained_before],
        "num_restarts": group.num_restarts,
    }


def _group(state: dict[str, Any]) -> _Open:
    prompt = Prompt(**(state["prompt"] | {"token_ids": tuple(state["prompt"]["token_ids"])}))
    completions = [_completion(prompt, each) for each in state["completions"]]
    due = None if state["due"] is None else RolloutGroup(prompt, [_rollout(prompt, each) for each in state["due"]])
    return _Open(
        prompt,
        {completion.request.path: completion for completion in completions},
        due,
        trained_before=[_rollout(prompt, each) for each in state["learnt"]],
        num_restarts=state["num_restarts"],
    )


def _rollout_state(rollout: Rollout) -> dict[str, Any]:
    own = {name: getattr(rollout, name) for name in ("rewards", "reward", "kept")} | {"learnt": rollout.trained_before}
    own["turn_rewards"] = list(rollout.turn_rewards)
    own["extra"] = {name: value for name, value in rollout.extra.items() if find_foreign({name: value}) is None}
    return {"completion": _completion_state(rollout.completion), **own}


def _rollout(prompt: Prompt, state: dict[str, Any]) -> Rollout:
    own = {name: value for name, value in state.items() if name not in ("completion", "learnt")}
    own |= {"turn_rewards": tuple(own["turn_rewards"]), "trained_before": state["learnt"]}
    return Rollout(prompt, _completion(prompt, state["completion"]), **own)


def _trajectory_state(trajectory: Trajectory) -> dict[str, Any]:
    names = ("token_ids_T", "logprobs_T", "versions_T", "trained_T", "entropy", "contexts")
    seen: list[tuple[int, dict[str, Any]]] = []
    for place, each in trajectory.pictures:
        seen.append((place, vars(each) | {"images": [*each.images], "mutual": [[*span] for span in each.mutual]}))
    return {name: getattr(trajectory, name) for name in names} | ({"pictures": seen} if seen else {})


def _request_state(request: Request) -> dict[str, Any]:
    sampling = asdict(request.sampling) | {"stop": list(request.sampling.stop)}
    prefix = _trajectory_state(request.prefix)
    return {"path": list(request.path), "sampling": sampling, "seed": request.seed, "prefix": prefix}


def _completion_state(completion: Completion) -> dict[str, Any]:
    own = {"finish_reason": completion.finish_reason, "text": completion.text}
    told = completion.episode
    episode = None if told is None else [*told[1:4], list(told.turn_rewards), told.said, told.asked]
    trajectory = _trajectory_state(completion)
    return {"request": _request_state(completion.request), "episode": episode, **own, **trajectory}


def _request(prompt: Prompt, state: dict[str, Any]) -> Request:
    sampling = SamplingParams(**(state["sampling"] | {"stop": tuple(state["sampling"]["stop"])}))
    return Request(prompt, tuple(state["path"]), sampling, state["seed"], Trajectory(**_with_pictures(state["prefix"])))


def _with_pictures(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a trajectory is made of."""
    seen: list[tuple[int, Pictures]] = []
    for place, own in state.get("pictures", ()):
        spans = tuple(MutualSpan(*span) for span in own["mutual"])
        seen.append((place, Pictures(**(own | {"images": tuple(own["images"]), "mutual": spans}))))
    return {**state, "pictures": seen}


def _completion(prompt: Prompt, state: dict[str, Any]) -> Completion:
    own = {name: value for name, value in _with_pictures(state).items() if name not in ("request", "episode")}
    completion = Completion(_request(prompt, state["request"]), **own)
    if state["episode"] is not None:
        messages, kind, reward, turn_rewards, said, asked = state["episode"]
        completion.episode = Episode(None, messages, kind, reward, tuple(turn_rewards), said, asked)
    return completion
