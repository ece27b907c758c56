"""Corrections of wrong completions by a teacher: what it decodes, what joins a group, and what is learned from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ALPHABET, random_policy, save_tokenizer
from hand_made import Watching, full_logprobs, make_rollout, random_groups
from test_learner import make_learner
from test_teachers import gradient_of, logits_of, other_policy, teacher_of

from lit_grpo.methods.scope import Scope
from lit_grpo.plugins import RunFacts, fresh
from lit_grpo.policy.loading import load_tokenizer
from lit_grpo.policy.spec import PolicySpec
from lit_grpo.ranks import Ranks
from lit_grpo.tasks.arithmetic import Remainder, first_wrong_step, working
from lit_grpo.types import (
    AllGather,
    Completion,
    GroupBatch,
    Key,
    PassRule,
    Prompt,
    Request,
    Rollout,
    RolloutGroup,
    alone,
)
from lit_grpo.update.plugin import TrainingRun

pytestmark = pytest.mark.usefixtures("exact_norms")
EXACT = PassRule("exact")
JUDGE = {"function": "lit_grpo.tasks.arithmetic:first_wrong_step"}
CORRECTION = [5, 9, 1]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(folder)
    return load_tokenizer(str(folder))


class Corrector:
    """A teacher that goes on with the same tokens after every prefix; ``asked`` has its requests."""

    num_tokens = 10**6

    def __init__(self) -> None:
        self.asked: list[Request] = []

    def complete(
        self, requests: Sequence[Request], spec: PolicySpec, version: int, all_gather: AllGather
    ) -> Mapping[Key, Completion]:
        self.asked += requests
        wholes = [each.prefix.followed_by(CORRECTION, version=version) for each in requests]
        return {each.key: each.after(its).ended("stop") for each, its in zip(requests, wholes, strict=True)}

    def follow(self, policy: Any) -> None:
        pass


def scope_of(policy: Any, tokenizer: Any, teacher: Any, **fields: Any) -> Scope:
    given: dict[str, Any] = {"judge": JUDGE, "separator": "=", **fields}
    plugin = fresh(Scope(**given))
    spec = PolicySpec(policy, tokenizer)
    plugin.on_train_start(TrainingRun(policy, None, 0, 1, Ranks(), teacher=teacher, spec=spec))
    return plugin


def written(text: str, step: float | None, tokenizer: Any, sample: int = 0, reward: float = 0.0) -> Rollout:
    """A rollout of a text, after the prompt ``ab``, whose judge names a step."""
    prompt_ids, ids = tokenizer.encode("ab"), tokenizer.encode(text)
    rollout = make_rollout(prompt_ids, [*ids, 1], reward, None, "train/0", sample)
    rollout.completion.text, rollout.rewards = text, {"exact": reward, "first_wrong_step": step}
    return rollout


# ---- what stays ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "step", "kept"),
    [
        ("ab+cd+ef", 3, "ab+cd+"),
        ("ab+cd+ef", 2, "ab+"),
        ("ab+cd+ef", 1, ""),
        ("ab+cd+ef", 4, None),
        ("ab+cd+ef", 0, None),
        ("ab+cd+ef", None, None),
        ("ab", 1, ""),
        ("+ab", 2, "+"),
    ],
)
def test_what_stays_is_all_before_the_step(text: str, step: float | None, kept: str | None, tokenizer: Any) -> None:
    plugin = scope_of(random_policy(), tokenizer, None, separator="+")
    found = plugin.right_beginning(written(text, step, tokenizer))
    assert (found if found is None else tokenizer.decode(found.token_ids_T)) == kept


def test_a_token_that_reaches_into_the_step_does_not_stay() -> None:
    """Tokens of two bytes, some with half a character; the longest beginning is found by trying all."""
    pieces = ["ab", "\n", "\n\nc", "é", "d\n", "\n"]

    class Pieces:
        def text_of(self, ids: Sequence[int], prompt: Any = None) -> str:
            parts = b"".join("".join(pieces).encode()[2 * each : 2 * each + 2] for each in ids)
            return parts.decode(errors="replace")

    whole = "".join(pieces)
    ids = list(range(-(-len(whole.encode()) // 2)))
    plugin: Any = scope_of(random_policy(), None, None, separator="\n\n")
    plugin._spec = Pieces()
    rollout = make_rollout([3], ids, 0.0)
    rollout.completion.text = whole
    for step in (1, 2, 3):
        rollout.rewards["first_wrong_step"] = float(step)
        before = "\n\n".join([*whole.split("\n\n")[: step - 1], ""])
        fitting = [end for end in range(len(ids)) if before.startswith(Pieces().text_of(ids[:end]))]
        assert plugin.right_beginning(rollout).num_tokens == max(fitting)


def test_given_words_belong_to_the_first_steps(tokenizer: Any) -> None:
    rollout = written("cd+ef", 3, tokenizer)
    rollout.prompt = replace(rollout.prompt, given="ab+")
    found = scope_of(random_policy(), tokenizer, None, separator="+").right_beginning(rollout)
    assert found is not None and tokenizer.decode(found.token_ids_T) == "cd+"


def test_the_demos_judge_finds_the_first_line_that_is_another() -> None:
    right = working(Remainder(265, 47))
    assert first_wrong_step(right, right) is None
    assert first_wrong_step("218%47=170%47=030", right) == 2
    assert first_wrong_step("030", right) == 1
    assert first_wrong_step(f"{right}=1", right) == right.count("=") + 2


# ---- who is corrected ----------------------------------------------------------------------------------


def test_those_with_the_longest_right_beginnings_are_corrected_and_join_if_they_pass(tokenizer: Any) -> None:
    teacher = Corrector()
    plugin = scope_of(random_policy(), tokenizer, teacher, separator="+", members=2)
    texts = [("ab+c", 1, 0.0), ("ab+cd+e", 3, 0.0), ("ab+cd", 2, 0.0), ("b+c+d+e", 4, 1.0), ("ab", None, 0.0)]
    members = [written(*each[:2], tokenizer, place, each[2]) for place, each in enumerate(texts)]
    solved = replace(members[0].prompt, prompt_id="train/1")
    groups = [RolloutGroup(members[0].prompt, [*members]), RolloutGroup(solved, [replace(members[3], prompt=solved)])]

    def score(*made: RolloutGroup) -> None:
        for rollout in (rollout for group in made for rollout in group.rollouts):
            rollout.reward = float(rollout.completion.num_tokens > 7)
            rollout.rewards = {"exact": rollout.reward}

    batch = GroupBatch(groups, 4, EXACT, alone, score=score)
    plugin.add_members(batch)
    assert [tokenizer.decode(each.prefix.token_ids_T) for each in teacher.asked] == ["ab+cd+", "ab+"]
    (joined,) = groups[0].rollouts[5:]  # the other correction does not pass
    assert joined.completion.token_ids_T.tolist() == [*tokenizer.encode("ab+cd+"), *CORRECTION]
    assert joined.completion.versions_T.tolist() == [0] * 6 + [4] * 3
    assert joined.replayed and joined.recompute and joined.completion.request.path == (-1,)
    assert len(groups[1].rollouts) == 1
    assert plugin.on_update_end(batch) == {"scope/corrected": 0.5, "scope/teacher_tokens": 6.0}


# ---- what is learned -----------------------------------------------------------------------------------


@pytest.mark.parametrize("least", [0.0, 0.02])
def test_the_gradient_is_that_of_the_masked_group(least: float, tokenizer: Any) -> None:
    """Advantages of all members, the corrected one among them; its teacher's tokens that are unlikely are left out."""
    policy, watching = random_policy().double(), Watching()
    plugin = scope_of(policy, tokenizer, Corrector(), separator="+", least_likelihood=least)
    (group,) = random_groups(policy, [[0.0, 0.0, 1.0]], noise=0.0)
    for rollout in group.rollouts:
        rollout.rewards = {"exact": rollout.reward, "first_wrong_step": None}
    wrong = group.rollouts[0]
    wrong.rewards["first_wrong_step"] = 2.0
    wrong.completion.text = tokenizer.decode(wrong.completion.token_ids_T[:2]) + "+c"
    first = wrong.completion.until(2).followed_by(tokenizer.encode("+c"), [0.0, 0.0], 0)
    wrong.completion = Completion.of(wrong.completion.request, first, "stop", wrong.completion.text)
    wrong.completion.logprobs_T = full_logprobs(policy, wrong)

    def score(*made: RolloutGroup) -> None:
        for rollout in (rollout for group in made for rollout in group.rollouts):
            rollout.reward = 1.0
            rollout.rewards["exact"] = 1.0

    plugin.add_members(GroupBatch([group], 0, EXACT, alone, score=score))
    joined = group.rollouts[-1]
    assert joined.completion.token_ids_T.tolist() == [*first.token_ids_T[:3].tolist(), *CORRECTION]
    chances_T = full_logprobs(policy, joined).exp()
    keep_T = torch.tensor([place < 3 or float(chance) >= least for place, chance in enumerate(chances_T)])
    assert bool(keep_T.all()) == (least == 0)  # so that the mask is tried
    rewards_G = torch.tensor([0.0, 0.0, 1.0, 1.0], dtype=torch.float64)
    advantages_G = (rewards_G - rewards_G.mean()) / (rewards_G.std() + 1e-4)
    terms, number = [], 0
    for rollout, advantage in zip(group.rollouts, advantages_G, strict=True):
        ids_T = rollout.completion.token_ids_T
        logprobs_T = logits_of(policy, rollout).log_softmax(1)[torch.arange(len(ids_T)), ids_T]
        kept_T = keep_T if rollout is joined else torch.ones(len(ids_T), dtype=torch.bool)
        terms.append(-advantage * (logprobs_T - logprobs_T.detach()).exp()[kept_T].sum())
        number += len(ids_T)  # what is left out stays in the denominator
    expected = gradient_of(torch.stack(terms).sum() / number, policy)
    learner, steps = make_learner(plugins=[plugin, watching])
    learner.learn([group])
    assert float((steps.gradients[0] - expected).norm() / expected.norm()) < 1e-6


# ---- the teacher decodes -------------------------------------------------------------------------------


def test_a_models_completions_are_those_of_generate(tokenizer: Any) -> None:
    model, policy = other_policy().float(), random_policy()
    rollouts = [rollout for group in random_groups(policy, [[0.0] * 3] * 2) for rollout in group.rollouts]
    requests = [
        replace(each.completion.request, path=(-1 - place,), prefix=each.completion.until(place % 3))
        for place, each in enumerate(rollouts)
    ]
    found = teacher_of(model, temperature=1e-6).complete(requests, PolicySpec(policy, tokenizer), 5)
    assert found.keys() == {each.key for each in requests}
    for request in requests:
        ids = [*request.prompt.token_ids, *request.prefix.token_ids_T.tolist()]
        left = request.sampling.max_tokens - request.prefix.num_tokens
        told: Any = model
        whole = told.generate(torch.tensor([ids]), max_new_tokens=left, do_sample=False, pad_token_id=0)[0]
        completion = found[request.key]
        assert completion.token_ids_T.tolist() == whole[len(request.prompt.token_ids) :].tolist()
        versions = [0] * request.prefix.num_tokens
        assert completion.versions_T.tolist() == versions + [5] * (completion.num_tokens - len(versions))
        assert completion.text == PolicySpec(policy, tokenizer).text_of(completion.token_ids_T.tolist(), request.prompt)


def test_a_models_samples_have_its_distribution(tokenizer: Any) -> None:
    """The log-probs of what it sampled are those of the model at its temperature, whatever the policy's sampling is."""
    model, policy = other_policy().float(), random_policy()
    (group,) = random_groups(policy, [[0.0] * 4])
    requests = [
        replace(its, path=(-1 - place,), sampling=replace(its.sampling, temperature=0.3, top_k=2))
        for place, its in enumerate(each.completion.request for each in group.rollouts)
    ]
    found = teacher_of(model, temperature=2.0).complete(requests, PolicySpec(policy, tokenizer), 0)
    for its in found.values():
        assert torch.allclose(its.logprobs_T, full_logprobs(model, Rollout(group.prompt, its), 2.0), atol=1e-4)


def test_nothing_that_either_cannot_read_goes_between_teacher_and_policy(tokenizer: Any) -> None:
    model, policy = other_policy().float(), random_policy()
    (group,) = random_groups(policy, [[0.0]])
    own = replace(group.rollouts[0].completion.request, prefix=group.rollouts[0].completion.until(0))
    spec = PolicySpec(policy, tokenizer)
    with torch.no_grad():
        model.get_output_embeddings().weight[len(ALPHABET) + 1] *= 100
    assert teacher_of(model, vocab_size=1).complete([own], spec, 0) == {}  # it samples tokens that the policy lacks
    unknown = replace(own, prompt=Prompt("train/0", (3, 10**4), ""))
    assert teacher_of(model).complete([unknown], spec, 0) == {} == teacher_of(model).complete([], spec, 0)


def test_what_cannot_be_judged_or_continued_is_refused() -> None:
    facts = RunFacts(4, 8, 64, 1)
    no_separator: dict[str, Any] = {"judge": "mine.py:step", "separator": ""}
    for fields in ({}, no_separator):
        with pytest.raises(ValueError, match="judge or separator is empty"):
            Scope(**fields).check(facts)
    with pytest.raises(ValueError, match=r"set model\.sampling\.max_observed to 0"):
        Scope(judge="mine.py:step").check(replace(facts, max_observed=9))
