"""Swarm sampling policy optimization (arXiv 2509.08721): runs exchange completions, as text, through a folder.

An update has the groups of this run's own prompts (the paper's I, ``data.batch_size``) and up to ``groups`` groups of
others (the paper's J). Each run writes the groups of its last updates to one file of the folder, a line of JSON each,
and replaces the file as a whole. Of all groups in the files of others, those that this run has not used yet are drawn
at random, each as likely. This run's reward functions score them, those without a difference are dropped, as in the
paper, and the others join the batch. Runs may have other models, tokenizers and speeds, and none waits for another.

A group of others is compared within itself. Its tokens are those that this run's tokenizer makes of the text, and its
log-probs those of this run's policy before the update, so that it is trained on **as if this policy had sampled it**,
as in the paper: the ratio begins at 1, and says nothing about how unlikely the text was. A completion with a negative
advantage that the policy would hardly sample then has a large gradient, which no clip bounds in the first step. So by
default completions that are no better than the mean of their group count in that mean alone; ``failures`` trains on
them too, as the paper does.

Nothing that others write is executed or believed: a line is text, its question has to be one of ``data.train``, from
which reward functions get the row's columns (the paper sends the answer along), and control tokens that it spells are
plain characters. What cannot be used is named once per file, and left where it is. Reward functions do read what others
wrote: those that run code need a sandbox, as for what a policy writes.

Deviations from gensyn-ai/rl-swarm 9c95410, which draws as many groups of the right size at random, whatever their
rewards: a group with another number of completions than ``model.num_generations`` is used, at most so many of them.
Runs depend on each other's clocks, so they cannot be repeated bit for bit.

Evidence: an update on a group of others equals that on the same tokens sampled by this policy, and files of hostile
writers, in ``tests/test_swarm.py``; accuracy beside GRPO at equal tokens of its own, in ``docs/methods.md``.
"""

from __future__ import annotations

import json
import math
import os
import random
import secrets
import stat
from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from typing_extensions import TypedDict

from lit_grpo.budgets.history import all_equal
from lit_grpo.limits import Count, Limit
from lit_grpo.plugins import AllGather, GroupBatch, Plugin, RunFacts
from lit_grpo.process.files import replace_file
from lit_grpo.process.inputs import MOST_BYTES, kind_of, read_lines, row_reader
from lit_grpo.process.terminal import counted, first_line, on_one_line
from lit_grpo.ranks import Ranks
from lit_grpo.rewards.function import RewardError
from lit_grpo.types import EMPTY, Completion, Part, Prompt, Request, Rollout, RolloutGroup, over_ranks

if TYPE_CHECKING:
    from lit_grpo.budgets.rewriting import TextWriter

LONGEST_TOKEN = 128
"""Characters of a token at most, by which a text is too long before it is encoded."""


class SharedCompletion(TypedDict):
    """Text that a policy sampled, and whether it ended there by itself."""

    text: str
    ended: bool


class SharedGroup(TypedDict):
    """A line of a file: the text or messages of a prompt, and all that was sampled after it at one visit."""

    swarm: Literal[1]
    question: str | list[dict[str, Any]]
    completions: list[SharedCompletion]


@dataclass
class Swarm(Plugin):
    """Lets groups that other runs have sampled join the batches of this one, and shares its own with them.

    Example: two runs on one machine, or on two that mount the same folder::

        python -m lit_grpo fit --config arithmetic --rollout.plugins swarm:folder=exchange --seed_everything 0
        python -m lit_grpo fit --config arithmetic --rollout.plugins swarm:folder=exchange --seed_everything 1
    """

    role: ClassVar[str] = "what turns are answered by"  # by nothing: the text of a turn alone is exchanged
    needs: ClassVar[frozenset[str]] = frozenset({"whole_groups", "whole_rollouts", "all_ranks", "prompt_stream"})
    changes: ClassVar[dict[str, str]] = {"fresh_members": "lets completions of other runs join the batch"}

    folder: Annotated[str, Limit(remedy="put it into quotes")] = ""
    """Folder through which the runs exchange their completions; it is made if it is not there."""
    groups: Count = 4
    """Max groups of other runs per update and rank."""
    failures: bool = False
    """Train on completions of others that are no better than the mean of their group too, as the paper does."""
    updates: Count = 2
    """Number of this run's last updates whose groups are in its file."""

    def check(self, run: RunFacts) -> None:
        """Check that there is a folder to exchange through, and note the questions that this run can score."""
        if not self.folder:
            raise ValueError("folder is empty; name a folder that all runs of the swarm can read and write.")
        if os.path.lexists(self._folder) and not self._folder.is_dir():
            raise ValueError(f"folder {self.folder} is there, and is no folder; name another one.")
        self._most, self._max_tokens = run.num_generations, run.max_tokens
        if run.data is not None:
            self._writer = run.data.writer
            prompts = [prompt for prompt in run.data.prompts["train"] if prompt.is_of(self.datasets)]
            if any(prompt.pictures is not None for prompt in prompts):
                raise ValueError("exchanges texts alone, and prompts of data.train have images; leave it out.")
            self._known = {_question(prompt): prompt for prompt in reversed(prompts)}

    def setup(self) -> None:
        self._folder = Path(self.folder).expanduser().absolute()
        self._name, self._eos_id = f"{secrets.token_hex(8)}.jsonl", 0
        self._writer: TextWriter | None = None
        self._known: dict[str, Prompt] = {}
        self._shared: list[list[SharedGroup]] = []
        self._read = dict[str, tuple[tuple[int, ...], dict[str, SharedGroup]]]()  # of each file: what it was, its rows
        self._used: set[str] = set()
        self._told: set[str] = set()
        self._joined: list[RolloutGroup] = []

    def on_policy_start(self, eos_ids: Sequence[int]) -> None:
        self._eos_id = eos_ids[0]

    def add_members(self, batch: GroupBatch) -> None:
        """Share the groups of this batch, and add those of others; all ranks call it together."""
        own = [_shared(group) for group in batch.groups if not group.prompt.altered and not group.prompt.given]
        everyone = batch.all_gather((self._name, [group for group in own if group["completions"]]))
        self._name, self._joined = everyone[0][0], []
        self._shared = [*self._shared, [group for _, of_rank in everyone for group in of_rank]][-self.updates :]
        ranks, like = Ranks(), next((each.completion.request for each in batch.rollouts), None)
        if ranks.rank == 0:
            self._share()
        self._look()
        waiting = sorted(row for _, rows in self._read.values() for row in rows.items() if row[0] not in self._used)
        waiting = [row for row in dict(waiting).items() if int(row[0][:8], 16) % ranks.size == ranks.rank]
        self._num_waiting = len(waiting)
        random.Random(f"{self._name} {batch.version}").shuffle(waiting)
        for digest, row in waiting:
            if like is None or len(self._joined) == self.groups:
                break
            self._used.add(digest)
            group = self._group(row, like, batch.version)
            if self._has_signal(group, batch):
                self._joined.append(group)
        batch.joining.extend(self._joined)

    def _share(self) -> None:
        lines = [json.dumps(group, default=str) for of_update in self._shared for group in of_update]
        path = self._folder / self._name
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            replace_file(path, "".join(f"{line}\n" for line in lines).encode())
        except (OSError, ValueError) as error:
            self._tell("folder", f"could not write {path} ({first_line(error)}), and goes on without sharing")

    def _look(self) -> None:
        """Read the files of others that have changed since; forget what is in them no more."""
        before, self._read = self._read, {}
        try:
            entries = sorted(os.scandir(self._folder), key=lambda entry: entry.name)
        except OSError as error:
            return self._tell("folder", f"could not read {self._folder} ({first_line(error)}), and goes on alone")
        for entry in entries:
            if entry.name == self._name or entry.name.startswith("."):  # a file that is being written is hidden
                continue
            try:
                status = entry.stat(follow_symlinks=False)
                now = status.st_mtime_ns, status.st_size, status.st_ino, status.st_mode
                known = before.get(entry.name)
                rows = known[1] if known is not None and known[0] == now else self._rows(entry, status)
            except FileNotFoundError:  # it has just been replaced or removed
                continue
            except (OSError, ValueError) as error:
                self._tell(entry.path, f"leaves {entry.path} alone: {first_line(error)}")
                now, rows = (), {}
            self._read[entry.name] = now, rows
        self._used &= {digest for _, rows in self._read.values() for digest in rows}

    def _rows(self, entry: os.DirEntry[str], status: os.stat_result) -> dict[str, SharedGroup]:
        """Return the rows of a file that this run can use, by a digest of their lines.

        Raises:
            ValueError: It is no file that a run of a swarm writes.
        """
        if not stat.S_ISREG(status.st_mode) or not entry.name.endswith(".jsonl"):
            kind = "a file of another kind" if stat.S_ISREG(status.st_mode) else kind_of(status.st_mode)
            raise ValueError(f"it is {kind}, and runs exchange .jsonl files")
        if status.st_size > MOST_BYTES:
            raise ValueError(f"it has more than {MOST_BYTES // 2**20} MiB")
        rows, wrong, num_bytes = dict[str, SharedGroup](), list[str](), 0
        for number, line in enumerate(read_lines(Path(entry.path)), start=1):
            try:
                row: SharedGroup = _READ_ROW(line)
                if _key(row["question"]) not in self._known:
                    raise ValueError("its question is none of data.train")
                rows[blake2b(line.strip(), digest_size=16).hexdigest()] = row
            except ValueError as error:
                wrong.append(f"line {number}, since {first_line(error)}")
            if (num_bytes := num_bytes + len(line)) >= status.st_size:  # what is added meanwhile is read next time
                break
        if wrong:
            more = f", and {counted(len(wrong) - 1, 'more line')}" if len(wrong) > 1 else ""
            self._tell(entry.path, f"leaves a part of {entry.path} alone: {wrong[0]}{more}")
        return rows

    def _group(self, row: SharedGroup, like: Request, version: int) -> RolloutGroup:
        """Return a row as a group at a visit that this run has not made; a text that does not fit is left out."""
        place = len(self._joined)
        prompt = replace(self._known[_key(row["question"])], visit=-1 - place, altered=True)
        group = RolloutGroup(prompt, [])
        assert self._writer is not None
        for answer in row["completions"][: self._most]:
            try:
                if len(answer["text"]) > LONGEST_TOKEN * self._max_tokens:
                    continue
                ids = self._writer.continued(prompt, answer["text"])
            except ValueError:  # such as a character that the tokenizer does not know
                continue
            is_stopped = any(text in answer["text"] for text in like.sampling.stop)
            ids += [self._eos_id] if answer["ended"] and not is_stopped else []
            if 0 < len(ids) <= self._max_tokens:
                request = replace(like, prompt=prompt, path=(-1 - len(group.rollouts),), prefix=EMPTY)
                reason = "stop" if answer["ended"] else "length"
                completion = Completion(request, ids, [0.0] * len(ids), [version] * len(ids), reason, answer["text"])
                group.rollouts.append(Rollout(prompt, completion, replayed=True, recompute=True))
        return group

    def _has_signal(self, group: RolloutGroup, batch: GroupBatch) -> bool:
        """Score a group; return whether its rewards differ."""
        try:
            if batch.score is not None:
                batch.score(group)
        except RewardError as error:
            self._tell("rewards", f"leaves a group of others out: {first_line(error)}")
            return False
        rewards = [each.reward for each in group.rollouts if math.isfinite(each.reward)]
        for rollout in group.rollouts:
            rollout.kept = self.failures or (bool(rewards) and rollout.reward > fmean(rewards))
        return bool(rewards) and not all_equal(rewards)

    def _tell(self, about: str, what: str) -> None:
        if about not in self._told:
            self._told.add(about)
            Ranks().warn(f"rollout.plugins swarm {on_one_line(what)}.")

    def metrics(self, all_gather: AllGather) -> dict[str, float]:
        rewards = [each.reward for group in self._joined for each in group.rollouts if math.isfinite(each.reward)]
        parts = {
            "swarm/groups": Part(len(self._joined)),
            "swarm/waiting": Part(self._num_waiting),
            "swarm/reward": Part(math.fsum(rewards), "mean", len(rewards)),
            "swarm/left_alone": Part(len(self._told), "max"),
        }
        return over_ranks(parts, all_gather)

    def state_dict(self) -> dict[str, Any]:
        return {"name": self._name, "used": sorted(self._used)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on under the same name, and without the groups that have been trained on."""
        self._name, self._used = state["name"], {*state["used"]}


_READ_ROW = row_reader(SharedGroup)


def _shared(group: RolloutGroup) -> SharedGroup:
    asked = group.prompt.text if group.prompt.messages is None else group.prompt.messages
    sampled = [each.completion for each in group.fresh if each.completion.episode is None]
    return {
        "swarm": 1,
        "question": asked,
        "completions": [
            {"text": each.text, "ended": each.finish_reason == "stop"}
            for each in sampled
            if each.num_sampled and each.finish_reason != "abort"
        ],
    }


def _question(prompt: Prompt) -> str:
    return _key(prompt.text if prompt.messages is None else prompt.messages)


def _key(question: str | list[dict[str, Any]]) -> str:
    return json.dumps(question, sort_keys=True, default=str)


PLUGINS = {"swarm": Swarm()}
