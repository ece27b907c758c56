"""Groups that other runs have sampled: what is written and read in the folder, and what the policy learns from it."""

from __future__ import annotations

import json
import math
import os
import socket
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import random_policy, save_tokenizer, table_rows
from hand_made import alone, full_logprobs, make_rollout
from test_learner import make_learner
from test_sft import data_of, ids_of

from lit_grpo.data import PromptDataModule
from lit_grpo.methods.swarm import Swarm
from lit_grpo.plugins import GroupBatch, RunFacts, fresh
from lit_grpo.process.terminal import visible
from lit_grpo.rewards import RewardRunner
from lit_grpo.rewards.function import RewardFunction
from lit_grpo.types import PassRule, Prompt, Rollout, RolloutGroup

EOS = 1
ROWS = [{"prompt": f"{number}+{number}=", "answer": str(2 * number)} for number in range(8)]
GOOD = json.dumps(
    {"swarm": 1, "question": "1+1=", "completions": [{"text": "2", "ended": True}, {"text": "3", "ended": True}]}
)
"""A line that a run can use: 1 + 1 is 2, and not 3."""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> PromptDataModule:
    folder = tmp_path_factory.mktemp("policy")
    random_policy().save_pretrained(folder)
    save_tokenizer(folder)
    return data_of(folder, *ROWS)


def correct(completion: str, answer: str) -> float:
    if completion == "9":
        raise RuntimeError("a nine")
    return float(completion == answer)


class Scored:
    """Scores as a runner does, without threads."""

    @staticmethod
    def score(group: RolloutGroup) -> None:
        for rollout in group.rollouts:
            rollout.reward = correct(rollout.completion.text, rollout.prompt.columns["answer"])


class Member:
    """A run of a swarm, as far as its plug-in goes."""

    rewards: Any = RewardRunner([RewardFunction.of(correct, "correct", 1.0)])

    def __init__(self, data: PromptDataModule, folder: Path, version: int = 0, **fields: Any) -> None:
        self.data, self.version = data, version
        self.plugin = fresh(Swarm(folder=str(folder), **fields))
        self.plugin.check(RunFacts(num_prompts=2, num_generations=4, max_tokens=6, updates_per_batch=1, data=data))
        self.plugin.on_policy_start([EOS])

    def sampled(self, row: int, *texts: str) -> RolloutGroup:
        prompt = self.data.prompts["train"][row]
        group = RolloutGroup(prompt, [])
        for number, text in enumerate(texts):
            rollout = make_rollout(
                prompt.token_ids, [*ids_of(self.data, text), EOS], 0.0, None, prompt.prompt_id, number
            )
            rollout.completion.text, rollout.completion.finish_reason = text, "stop"
            rollout.completion.request = replace(rollout.completion.request, prompt=prompt)
            group.rollouts.append(Rollout(prompt, rollout.completion))
        self.rewards.score(group)
        return group

    def update(self, *groups: RolloutGroup) -> list[RolloutGroup]:
        """Return the groups of others that join a batch of these, by default of one that nothing is learned from."""
        self.version += 1
        batch = GroupBatch([*groups] or [self.sampled(0, "5")], self.version, PassRule(), alone)
        batch = replace(batch, score=self.rewards.score)
        self.plugin.add_members(batch)
        return batch.joining


def texts_of(groups: Sequence[RolloutGroup]) -> list[tuple[str, list[str]]]:
    return [(group.prompt.text, [each.completion.text for each in group.rollouts]) for group in groups]


def test_a_group_of_another_run_joins_once_scored_by_this_one_as_if_its_policy_had_sampled_it(
    data: PromptDataModule, tmp_path: Path
) -> None:
    one, other = Member(data, tmp_path), Member(data, tmp_path, failures=True)
    own = one.sampled(1, "2", "3", "22")
    assert one.update(own, one.sampled(2, "4", "4")) == []  # the second has no difference
    (group,) = other.update()
    assert [each.reward for each in group.rollouts] == [1.0, 0.0, 0.0]
    assert (group.prompt.prompt_id, group.prompt.visit, group.prompt.columns["answer"]) == ("train/1", -1, "2")
    for mine, theirs in zip(own.rollouts, group.rollouts, strict=True):
        assert theirs.completion.token_ids_T.tolist() == mine.completion.token_ids_T.tolist()
        assert theirs.replayed and theirs.recompute and theirs.kept
    assert other.update() == []  # each group once
    # The update of their groups is that of our own with the same tokens.
    policy = random_policy().double()
    for rollout in own.rollouts:
        rollout.completion.logprobs_T = full_logprobs(policy, rollout)
        rollout.completion.versions_T = torch.zeros_like(rollout.completion.token_ids_T)
    updates = []
    for some in (group, own):
        learner, steps = make_learner(weights={"correct": 1.0}, pass_rule=PassRule("correct"))
        assert learner.learn([some])["ratio/mean"] == pytest.approx(1.0)
        updates.append(steps.gradients[0])
    assert updates[0].abs().max() > 0
    torch.testing.assert_close(*updates, rtol=1e-6, atol=1e-9)


def test_failures_of_others_count_in_the_mean_alone(data: PromptDataModule, tmp_path: Path) -> None:
    one, other = Member(data, tmp_path), Member(data, tmp_path)
    one.update(one.sampled(1, "2", "3", "2", "4"))
    (group,) = other.update()
    assert [each.kept for each in group.rollouts] == [True, False, True, False]
    logged = other.plugin.metrics(alone)
    assert logged == {"swarm/groups": 1.0, "swarm/waiting": 1.0, "swarm/reward": 0.5, "swarm/left_alone": 0.0}


def test_groups_are_drawn_each_as_likely_among_those_with_a_difference(data: PromptDataModule, tmp_path: Path) -> None:
    one = Member(data, tmp_path, updates=8)
    for row in range(8):
        one.update(one.sampled(row, ROWS[row]["answer"], "3" if row % 2 else ROWS[row]["answer"]))
    drawn, own = Counter[str](), one.sampled(0, "5")
    for seed in range(150):
        other = Member(data, tmp_path, seed, groups=2)
        other.plugin._name, other.plugin._share, other.rewards = f"{seed}.jsonl", lambda: None, Scored
        drawn.update(group.prompt.prompt_id for group in other.update(own))
    assert drawn.keys() == {"train/1", "train/3", "train/5", "train/7"} and drawn.total() == 300
    assert all(44 < number < 106 for number in drawn.values())  # 75 each; 5 standard deviations


def test_the_file_of_a_run_has_its_last_updates_and_a_resumed_run_keeps_its_name(
    data: PromptDataModule, tmp_path: Path
) -> None:
    one = Member(data, tmp_path / "new" / "folder")
    for row in range(4):
        one.update(one.sampled(row, "1"))
    (file,) = (tmp_path / "new" / "folder").iterdir()
    assert [json.loads(line)["question"] for line in file.read_text().splitlines()] == ["2+2=", "3+3="]
    again = Member(data, tmp_path / "new" / "folder")
    again.plugin.load_state_dict(one.plugin.state_dict())
    assert again.update(again.sampled(5, "1")) == [] and list(file.parent.iterdir()) == [file]
    hinted = again.sampled(6, "1")
    hinted.prompt = replace(hinted.prompt, altered=True)  # was asked something else than the row says
    again.update(hinted)
    assert "6+6=" not in file.read_text()


def test_a_folder_that_cannot_be_used_is_refused_or_told_once(data: PromptDataModule, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"is there, and is no folder; name another one"):
        Member(data, tmp_path / "file")
    lost = Member(data, tmp_path / "lost")
    lost.update()
    (tmp_path / "lost").rename(tmp_path / "moved")
    (tmp_path / "lost").touch()
    with pytest.warns(UserWarning, match=r"could not write .*lost.*goes on without sharing") as told:
        assert lost.update() == lost.update() == []
    assert len(told) == 1


# ---- what others may have written --------------------------------------------------------------------------


def line(**changes: Any) -> str:
    return json.dumps(json.loads(GOOD) | changes)


def answers(*texts: Any) -> list[Any]:
    return [{"text": text, "ended": True} for text in texts]


PICKLE = b"\x80\x04\x95\x1d\x00\x00\x00cos\nsystem\n(S'touch executed'\ntR."
LINES: dict[str, tuple[str | bytes, str]] = {
    "torn": (GOOD[:50], "it is not JSON"),
    "no JSON": ("rollouts", "it is not JSON"),
    "no UTF-8": (b'{"swarm": 1, "question": "\xff"}', "it is not JSON"),
    "a pickle": (PICKLE, "it is not JSON"),
    "a list": (f"[{GOOD}]", "its value: input should be"),
    "a number of a thousand digits": ("9" * 5000, ""),
    "nested deeply": ("[" * 100_000, "it is not JSON"),
    "another version": (line(swarm=2), "swarm: "),
    "no question": ('{"swarm": 1, "completions": []}', "question: "),
    "a number as a question": (line(question=1), "question"),
    "a question that is not asked": (line(question="import os"), "its question is none of data.train"),
    "messages that are not asked": (line(question=[{"role": "user", "content": "1+1="}]), "its question is none"),
    "no completions": (line(completions=None), "completions: "),
    "texts as completions": (line(completions=["2", "3"]), "completions.0: "),
    "a number as a text": (line(completions=answers(2, "3")), "completions.0.text: "),
    "a text as a truth": (line(completions=[{"text": "2", "ended": "yes"}]), "completions.0.ended: "),
    "code in place of a value": ('{"swarm": __import__("os").system("touch executed")}', "it is not JSON"),
    "zeros": (b"\0" * 4096, "it is not JSON"),
}
"""Lines that cannot be used, and what is said of each."""
UNFIT: dict[str, str] = {
    "nobody": line(completions=[]),
    "one": line(completions=answers("2")),
    "too long for the run": line(completions=answers("2" * 7, "3" * 7)),
    "longer than any token": line(completions=answers("2" * 10**6, "3" * 10**6)),
    "unknown characters": line(completions=answers("\N{SNOWMAN}", "\N{SNOWMAN}2")),
    "half a character": line(completions=answers("\ud800", "2\udfff")),
    "a control token": line(completions=answers("2", "<eos>")),
    "alike": line(completions=answers("2", "2")),
    "fails the reward": line(completions=answers("9", "2")),
}
"""Lines of which nothing can be trained on, and which need no sentence but for the last."""
FILES: dict[str, tuple[Callable[[Path], object], str]] = {
    "a folder": (Path.mkdir, "it is a folder"),
    "a pipe": (os.mkfifo, "it is a pipe"),
    "a link to a file": (lambda path: path.symlink_to(__file__), "it is a symbolic link"),
    "a link to nothing": (lambda path: path.symlink_to("nowhere"), "it is a symbolic link"),
    "a link to itself": (lambda path: path.symlink_to(path), "it is a symbolic link"),
    "a link to a device": (lambda path: path.symlink_to("/dev/zero"), "it is a symbolic link"),
    "a socket": (lambda path: bind(path), "it is a socket"),
    "a huge file": (lambda path: grow(path, 2**40), "it has more than 64 MiB"),
    "a huge line": (lambda path: grow(path, 20 * 2**20), "Line 1 of"),
    "unreadable": (lambda path: (path.write_text(GOOD), path.chmod(0)), "Permission denied"),
}
OTHERS = ("rollouts.pkl", "run.py", "weights.pt", "notes.txt", "sitecustomize.py", "conftest.py", "x.jsonl.exe")


def bind(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        here = Path.cwd()
        os.chdir(path.parent)  # the path of a socket may have about a hundred characters
        server.bind(path.name)
        os.chdir(here)


def grow(path: Path, size: int) -> None:
    with path.open("wb") as file:
        file.truncate(size)  # takes no room on the disk


@pytest.mark.parametrize("name", table_rows(LINES, ("torn", "a pickle", "a text as a truth")))
def test_a_line_that_cannot_be_used_is_named_once_and_the_others_of_its_file_are_used(
    name: str, data: PromptDataModule, tmp_path: Path
) -> None:
    content, said = LINES[name]
    content = content if isinstance(content, bytes) else content.encode()
    path = tmp_path / "other.jsonl"
    path.write_bytes(
        GOOD.encode() + b"\n" + content + b"\n" + line(question="2+2=", completions=answers("4", "5")).encode()
    )
    member = Member(data, tmp_path)
    with pytest.warns(UserWarning) as told:
        joined = member.update()
        path.write_bytes(path.read_bytes() + b"\n")  # it is read again
        assert member.update() == []
    assert sorted(text for text, _ in texts_of(joined)) == ["1+1=", "2+2="]
    (sentence,) = (str(each.message) for each in told)
    assert (
        sentence.startswith(f"rollout.plugins swarm leaves a part of {path} alone: line 2, since ") and said in sentence
    )
    assert sentence.endswith(".") and len(sentence) < 400 and visible(sentence) == sentence
    assert not Path("executed").exists() and path.exists()


@pytest.mark.filterwarnings("ignore:rollout.plugins swarm leaves a group of others out:UserWarning")
@pytest.mark.parametrize("name", table_rows(UNFIT, ("a control token", "fails the reward")))
def test_completions_that_do_not_fit_are_left_out(name: str, data: PromptDataModule, tmp_path: Path) -> None:
    (tmp_path / "other.jsonl").write_text(f"{UNFIT[name]}\n{line(question='2+2=', completions=answers('4', '5'))}\n")
    joined = Member(data, tmp_path, failures=True).update()
    assert all(EOS not in each.completion.token_ids_T[:-1] for group in joined for each in group.rollouts)
    assert ("2+2=", ["4", "5"]) in texts_of(joined)
    assert len(joined) == 1 + (name == "a control token")


@pytest.mark.parametrize("name", table_rows(FILES, ("a pipe", "a link to a file", "a huge file")))
def test_what_is_no_file_of_a_swarm_is_named_once_and_left_alone(
    name: str, data: PromptDataModule, tmp_path: Path
) -> None:
    make, said = FILES[name]
    make(tmp_path / "other.jsonl")
    if name == "unreadable" and os.geteuid() == 0:
        pytest.skip("root may read it")
    (tmp_path / "good.jsonl").write_text(f"{GOOD}\n")
    member = Member(data, tmp_path)
    with pytest.warns(UserWarning, match=said) as told:
        joined = [*member.update(), *member.update()]
    assert texts_of(joined) == [("1+1=", ["2", "3"])] and len(told) == 1
    assert os.path.lexists(tmp_path / "other.jsonl")


def test_a_file_that_grows_while_it_is_read_is_read_on(
    data: PromptDataModule, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, written = tmp_path / "other.jsonl", 0
    path.write_text(f"{GOOD}\n{GOOD[:30]}")
    member = Member(data, tmp_path)
    with pytest.warns(UserWarning, match=r"line 2, since it is not JSON"):
        assert texts_of(member.update()) == [("1+1=", ["2", "3"])]
    path.write_text(f"{GOOD}\n{line(completions=answers('3', '2'))}\n")
    assert texts_of(member.update()) == [("1+1=", ["3", "2"])]

    def writing(place: Path) -> Any:
        nonlocal written
        for each in range(10**6):  # a writer that is faster than the reader
            written = each
            yield f"{line(completions=answers('2', str(each)))}\n".encode()

    monkeypatch.setattr("lit_grpo.methods.swarm.read_lines", writing)
    path.touch()
    os.utime(path, (1, 1))
    member.update()
    assert written < 3  # up to the size that the file had


@pytest.mark.nightly
def test_hundreds_of_hostile_files_stop_nothing_and_lose_nothing(
    data: PromptDataModule, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "exchange"
    folder.mkdir()
    hostile = [folder / f"{number}\n\x1b[31m{place}.jsonl" for number in range(11) for place in range(len(LINES))]
    for path, (content, _) in zip(hostile, [*LINES.values()] * 11, strict=True):
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    for name, (make, _) in FILES.items():
        hostile.append(folder / f"{name}.jsonl")
        make(hostile[-1])
    for name in OTHERS:
        hostile.append(folder / name)
        hostile[-1].write_bytes(PICKLE)
    hostile.append(Path(os.fsdecode(bytes(folder) + b"/\xff\xfe.jsonl")))
    hostile[-1].write_bytes(PICKLE)
    (folder / ".half.jsonl.writing").write_bytes(PICKLE)  # of a writer that was killed
    before, want = {path.name for path in folder.iterdir()}, set[str]()
    one, other = Member(data, folder, updates=8), Member(data, folder, groups=2, failures=True)
    with pytest.warns(UserWarning) as told:
        found: list[tuple[str, list[str]]] = []
        for row in range(8):
            texts = ROWS[row]["answer"], "33"
            want.add(f"{ROWS[row]['prompt']} {texts}")
            one.update(one.sampled(row, *texts))
            found += texts_of(other.update())
    sentences = [str(each.message) for each in told]
    readable = [path for path in hostile if path.name != "unreadable.jsonl" or os.geteuid()]
    assert len(hostile) >= 200 and len(sentences) == 2 * len(readable)  # of both members
    assert all(visible(sentence) == sentence and "\n" not in sentence for sentence in sentences)
    assert {f"{question} {tuple(texts)}" for question, texts in found if "33" in texts} == want
    assert before <= {path.name for path in folder.iterdir()} and not (tmp_path / "executed").exists()


def test_two_writers_of_one_file_leave_one_of_both_whole(data: PromptDataModule, tmp_path: Path) -> None:
    one, twin, reader = Member(data, tmp_path), Member(data, tmp_path), Member(data, tmp_path)
    twin.plugin._name = one.plugin._name
    for row in range(1, 5):
        one.update(one.sampled(row, ROWS[row]["answer"], "33"))
        twin.update(twin.sampled(row + 1, ROWS[row + 1]["answer"], "44"))
        assert all(texts[1] == "44" for _, texts in texts_of(reader.update()))
    assert math.isclose(reader.plugin.metrics(alone)["swarm/left_alone"], 0)


def test_a_conversation_is_known_by_its_messages(data: PromptDataModule, tmp_path: Path) -> None:
    said = [{"role": "user", "content": "1+1="}]
    prompt = Prompt("train/0", (5, 6), "<user>1+1=", {}, messages=said)
    member = Member(data, tmp_path)
    rollout = member.sampled(1, "2").rollouts[0]
    member.update(RolloutGroup(prompt, [rollout]))
    (file,) = tmp_path.iterdir()
    assert json.loads(file.read_text())["question"] == said
