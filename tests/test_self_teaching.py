"""Self-distillation: what the policy sees as its own teacher, and what that does to advantages and gradient."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import random_policy, save_tokenizer
from conversations import chat_tokenizer, play, text_of
from hand_made import Watching, full_logprobs, make_rollout
from test_environments import Guess, counting, worker_of
from test_learner import make_learner
from test_sft import chat_folder as chat_folder  # a policy whose chat template ends messages with <eos>
from test_sft import data_of, ids_of

from lit_grpo.data import PromptDataModule
from lit_grpo.data.rendering import PromptRenderer
from lit_grpo.data.writing import PromptWriter
from lit_grpo.methods.sdft import SDFT
from lit_grpo.methods.sdpo import SDPO
from lit_grpo.methods.shared.self_teaching import Hint, SelfTeacher
from lit_grpo.plugins import GroupBatch, Plugin, RunFacts, fresh
from lit_grpo.ranks import Ranks
from lit_grpo.types import PassRule, Prompt, Rollout, RolloutGroup
from lit_grpo.update.logprobs.teacher import ModelTeacher, TeacherSettings
from lit_grpo.update.objective.objective import Objective
from lit_grpo.update.plugin import TrainingRun

pytestmark = pytest.mark.usefixtures("exact_norms")
RIGHT = PassRule("exact")
SHORT: dict[str, Any] = {
    "template": "{prompt}{solution}{feedback}",
    "solution_template": "+{solution}",
    "feedback_template": "*{feedback}",
}


def facts(data: PromptDataModule | None = None, **known: Any) -> RunFacts:
    return RunFacts(num_prompts=2, num_generations=3, max_tokens=8, updates_per_batch=1, data=data, **known)


def started(plugin: SelfTeacher, policy: Any, data: PromptDataModule, **known: Any) -> Any:
    """The plug-in at the beginning of a run whose teacher is the policy as it is."""
    plugin = fresh(plugin)
    plugin.check(facts(data, **known))
    teacher = ModelTeacher(TeacherSettings("live"), 10**6, partial(nullcontext, policy))
    plugin.on_train_start(TrainingRun(policy, None, 0, 1, Ranks(), teacher=teacher))
    return plugin


def group_of(
    data: PromptDataModule,
    row: int,
    completions: Sequence[str],
    rewards: Sequence[float],
    feedback: Sequence[str] = (),
    policy: Any = None,
) -> RolloutGroup:
    """Completions of a row, sampled by the policy (its log-probs), with rewards and feedback."""
    prompt, rollouts = data.prompts["train"][row], list[Rollout]()
    for number, (text, reward) in enumerate(zip(completions, rewards, strict=True)):
        token_ids = [*ids_of(data, text), 1]
        rollout = make_rollout(prompt.token_ids, token_ids, reward, None, prompt.prompt_id, number)
        rollout.prompt = prompt
        rollout.rewards = {"exact": reward}
        if policy is not None:
            rollout.completion.logprobs_T = full_logprobs(policy, rollout)
        rollouts.append(rollout)
    for rollout, text in zip(rollouts, feedback, strict=False):
        rollout.extra |= {"feedback/exact": text} if text else {}
    return RolloutGroup(prompt, rollouts)


def shown(plugin: Any, group: RolloutGroup) -> list[list[str]]:
    """The texts of the prompts that the teacher may see for each rollout, the best first."""
    batch = GroupBatch([group], 0, RIGHT, lambda value: [value])
    return [[plugin.write(group.prompt, hint).text for hint in hints] for hints in plugin.hints(group, batch)]


def test_the_last_user_message_is_reworded_and_all_others_stay(chat_folder: Path) -> None:
    messages = [
        {"role": "system", "content": "ab"},
        {"role": "user", "content": "cab"},
        {"role": "assistant", "content": "a"},
        {"role": "user", "content": "bad"},
    ]
    data = data_of(chat_folder, {"prompt": messages})
    (prompt,) = data.prompts["train"]
    asked = data.writer.reworded(prompt, "{prompt} + {hint}", {"hint": "no <eos>"})
    whole = ids_of(data, "s#ab<eos>\nu#cab<eos>\na#a<eos>\nu#bad + no <eos><eos>\na#")
    place = len(ids_of(data, "s#ab<eos>\nu#cab<eos>\na#a<eos>\nu#bad + no "))
    whole[place : place + 1] = ids_of(data, "?eos?")  # what the hint spells is no control token
    assert list(asked.token_ids) == whole
    assert asked.prompt_id == prompt.prompt_id and asked.columns == prompt.columns


def test_a_prompt_that_is_a_text_is_reworded_as_a_whole(policy_folder: Path) -> None:
    data = data_of(policy_folder, {"prompt": "1+1="})
    asked = data.writer.reworded(data.prompts["train"][0], "{prompt} {hint}", {"hint": "2<eos>"})
    assert asked.text == "1+1= 2<eos>" and list(asked.token_ids) == ids_of(data, "1+1= 2") + ids_of(data, "?eos?")


def test_the_first_other_right_completion_and_the_feedback_are_shown(policy_folder: Path) -> None:
    data, policy = data_of(policy_folder, {"prompt": "p"}), random_policy()
    group = group_of(data, 0, ["a", "b", "c"], [0, 1, 1], ["x"])
    assert shown(started(SDPO(**SHORT), policy, data), group) == [
        ["p+b*x", "p+c*x", "p*x", "p+b", "p+c"],
        ["p+c"],
        ["p+b"],
    ]
    assert shown(started(SDPO(**SHORT, feedback="without_solution"), policy, data), group)[0] == ["p+b", "p+c", "p*x"]
    assert shown(started(SDPO(**SHORT, feedback="never"), policy, data), group)[0] == ["p+b", "p+c"]
    assert shown(started(SDPO(**SHORT, own_solution=True), policy, data), group)[1] == ["p+b", "p+c"]


def test_nothing_is_shown_without_a_right_completion_and_feedback(policy_folder: Path) -> None:
    data, policy = data_of(policy_folder, {"prompt": "p"}), random_policy()
    plugin = started(SDPO(**SHORT), policy, data)
    assert shown(plugin, group_of(data, 0, ["a", "b"], [0, 0])) == [[], []]
    assert shown(plugin, group_of(data, 0, ["a", "b"], [1, 0])) == [[], ["p+a"]]


def test_thinking_is_left_out_of_what_is_shown() -> None:
    class Writer:
        def decoded(self, token_ids: Sequence[int]) -> str:
            return texts[tuple(token_ids)]

    texts: dict[tuple[int, ...], str] = {
        (2, 1): "<think>x</think> y <think>z</think>",
        (3, 1): "begun by the prompt</think>\n7",
        (4, 1): "<think>w",
    }
    for keeps in (True, False):
        plugin: Any = fresh(SDPO(keep_thinking=keeps))
        plugin._writer = Writer()
        found = [plugin._text(make_rollout([5], ids).completion) for ids in texts]
        assert found == ([*texts.values()] if keeps else ["y", "7", "<think>w"])


def test_several_turns_are_shown_without_what_was_answered(policy_folder: Path) -> None:
    data = data_of(policy_folder, {"prompt": "p"})
    plugin = started(SDPO(**SHORT), random_policy(), data)
    group = group_of(data, 0, ["ab?cd", "e"], [1, 0])
    group.rollouts[0].completion.versions_T = torch.tensor([0, 0, -1, 0, 0, 0])
    assert plugin._text(group.rollouts[0].completion) == "ab\n\ncd"


def test_advantages_are_the_weighted_difference_of_log_probs(policy_folder: Path) -> None:
    data, policy = data_of(policy_folder, {"prompt": "1+1="}, {"prompt": "2*3="}), random_policy()
    groups = [
        group_of(data, 0, ["3", "2", "02"], [0, 1, 1], policy=policy),
        group_of(data, 1, ["8", "77"], [0, 0], ["", "= 6"], policy),
    ]
    plugin, watching = started(SDPO(**SHORT, weight=0.25), policy, data), Watching()
    learner, _ = make_learner(plugins=[plugin, watching], policy=policy, double=False)
    logs = learner.learn(groups)
    after = ["1+1=+2", "1+1=+02", "1+1=+2", "", "2*3=*= 6"]
    ratios = list[torch.Tensor]()
    for rollout, text in zip([each for group in groups for each in group.rollouts], after, strict=True):
        expected_T = torch.full((rollout.completion.num_trained,), 0.75 * rollout.advantage)
        if text:
            asked = Prompt("other", tuple(ids_of(data, text)), text)
            ratios.append(full_logprobs(policy, replace(rollout, prompt=asked)) - rollout.completion.logprobs_T)
            expected_T += 0.25 * ratios[-1]
        torch.testing.assert_close(watching.of(rollout)["token_advantage"], expected_T, rtol=0, atol=2e-6)
    metrics = plugin.on_update_end(GroupBatch(groups, 1, RIGHT, lambda value: [value]))
    assert metrics["teacher/reverse_kl"] == pytest.approx(-float(torch.cat(ratios).mean()), abs=1e-5)
    assert metrics["teacher/taught_share"] == 0.8 and metrics["teacher/misfit_share"] == 0
    assert (metrics["teacher/solved_share"], metrics["teacher/feedback_share"]) == (0.5, 0.2)
    assert math.isfinite(logs["loss"])


LIMITS: dict[str, tuple[dict[str, Any], list[str | None]]] = {
    "room for all": ({}, ["p+bbbbb", "p+cc", "p+bbbbb"]),
    "a prompt of five tokens": ({"micro_batch_tokens": 5}, ["p+cc", "p+cc", None]),
    "no room": ({"micro_batch_tokens": 2}, [None, None, None]),
    "a prompt with its completion, of nine": (
        {"micro_batch_tokens": 9, "shares_prefix": False},
        ["p+bbbbb", None, None],
    ),
}


@pytest.mark.parametrize("name", LIMITS)
def test_a_prompt_that_does_not_fit_gives_way_to_another_or_to_none(name: str, policy_folder: Path) -> None:
    known, expected = LIMITS[name]
    data = data_of(policy_folder, {"prompt": "p"})
    plugin = started(SDPO(**SHORT), random_policy(), data, **known)
    group = group_of(data, 0, ["a", "bbbbb", "cc"], [0, 1, 1])
    batch = GroupBatch([group], 0, RIGHT, lambda value: [value])
    found = [
        plugin._fitting(each, hints, {}) for each, hints in zip(group.rollouts, plugin.hints(group, batch), strict=True)
    ]
    assert [None if prompt is None else prompt.text for prompt, _ in found] == expected


def test_a_prompt_has_to_fit_into_the_context_with_its_completion(policy_folder: Path) -> None:
    data = data_of(policy_folder, {"prompt": "p"})
    policy: Any = random_policy(max_position_embeddings=12)
    plugin = started(SDPO(**SHORT), policy, data)
    group = group_of(data, 0, ["aaa", "bbbbbb", "aaaa"], [0, 1, 0], policy=policy)  # 8 + 4 tokens, and 8 + 5
    make_learner(plugins=[plugin], policy=policy, double=False)[0].learn([group])
    metrics = plugin.on_update_end(GroupBatch([group], 1, RIGHT, lambda value: [value]))
    assert (metrics["teacher/taught_share"], metrics["teacher/misfit_share"]) == (
        pytest.approx(1 / 3),
        pytest.approx(1 / 3),
    )
    assert metrics["teacher/tokens"] == 4


class Same(SelfTeacher):
    """A teacher that sees what the policy sees."""

    def hints(self, group: RolloutGroup, batch: GroupBatch) -> list[list[Hint]]:
        return [[{}] for _ in group.rollouts]


def gradient_and_groups(
    plugin: SelfTeacher, folder: Path, **known: Any
) -> tuple[torch.Tensor, list[RolloutGroup], Any]:
    """The gradient of one step in float64, its groups with their advantages, and the policy."""
    data = data_of(folder, {"prompt": "1+1=", "solution": "2"}, {"prompt": "2*3=", "solution": 6})
    learner, steps = make_learner(objective=Objective(normalization="sequence"))
    policy: Any = learner.policy
    groups = [
        group_of(data, 0, ["3", "2", "02 ="], [0, 1, 1], policy=policy),
        group_of(data, 1, ["8 or 9", "77"], [0, 0], ["", "= 6"], policy),
    ]
    learner.settings.set_plugins(started(plugin, policy, data))
    learner.learn(groups)
    return steps.gradients[0], groups, policy


def test_a_teacher_that_sees_what_the_policy_sees_gives_no_gradient(policy_folder: Path) -> None:
    gradient, groups, _ = gradient_and_groups(Same(), policy_folder)
    assert float(gradient.norm()) < 1e-5  # the log-probs of sampling are float32
    other, _, _ = gradient_and_groups(SDPO(**SHORT), policy_folder)
    assert float(other.norm()) > 0.1 and all(not math.isnan(each.advantage) for each in groups[0].rollouts)


@pytest.mark.parametrize("weight", [1.0, 0.3])
def test_the_gradient_is_that_of_the_formula_in_float64(weight: float, policy_folder: Path) -> None:
    gradient, groups, policy = gradient_and_groups(SDPO(**SHORT, weight=weight), policy_folder)
    after = ["1+1=+2", "1+1=+02 =", "1+1=+2", "", "2*3=*= 6"]
    policy.zero_grad()
    data = data_of(policy_folder, {"prompt": "p"})
    rollouts = [each for group in groups for each in group.rollouts]
    for rollout, text in zip(rollouts, after, strict=True):
        own_T = logprobs(policy, rollout.prompt.token_ids, rollout)
        its_T = logprobs(policy, ids_of(data, text), rollout).detach() if text else own_T.detach()
        loss_T = (1 - weight) * -rollout.advantage * own_T + weight * (own_T.detach() - its_T) * own_T
        (loss_T.mean() / len(rollouts)).backward()
    expected = torch.cat([parameter.grad.flatten() for parameter in policy.parameters()])
    assert float((gradient - expected).norm() / expected.norm()) < 1e-6


def logprobs(policy: Any, prompt_ids: Sequence[int], rollout: Rollout) -> torch.Tensor:
    ids_T = torch.tensor([*prompt_ids, *rollout.completion.token_ids_T.tolist()])
    own_T = ids_T[len(prompt_ids) :]
    logits_TV = policy(input_ids=ids_T[None]).logits[0, len(prompt_ids) - 1 : -1]
    return logits_TV.log_softmax(-1).gather(1, own_T[:, None])[:, 0]


def test_a_column_is_shown_to_the_teacher(policy_folder: Path) -> None:
    messages = [{"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    values = ["a", 7, messages, None]
    data = data_of(policy_folder, *({"prompt": "p", "solution": value} for value in values))
    plugin = started(SDFT(template="{prompt}={demonstration}"), random_policy(), data)
    found = [shown(plugin, group_of(data, row, ["1"], [0])) for row in range(4)]
    assert found == [[["p=a"]], [["p=7"]], [["p=b\nc"]], [[]]]


REFUSED: list[tuple[SelfTeacher, dict[str, Any], str]] = [
    (
        SDFT(),
        {"solution": "a", "teacher": "other"},
        "model.teacher.policy is 'other'; set that to live, average or base",
    ),
    (SDFT(column="steps"), {"solution": "a"}, r"row 0, which has no column 'steps' \(it has 'prompt', 'solution'\)"),
    (
        SDFT(),
        {"solution": [1]},
        r"row 0, which has neither text, number nor chat messages in .*, but \[1",
    ),
    (SDFT(), {"solution": True}, "has neither text, number nor chat messages"),
]


@pytest.mark.parametrize(("plugin", "row", "sentence"), REFUSED)
def test_a_run_without_what_the_teacher_needs_is_refused(
    plugin: Plugin, row: dict[str, Any], sentence: str, policy_folder: Path
) -> None:
    teacher = row.pop("teacher", "live")
    with pytest.raises(ValueError, match=sentence):
        fresh(plugin).check(facts(data_of(policy_folder, {"prompt": "p", **row}), teacher=teacher))


def test_templates_that_the_tokenizer_cannot_write_are_refused(tmp_path: Path) -> None:
    data = PromptDataModule(save_tokenizer(tmp_path, unk_token="?"), train=[{"prompt": "p"}], batch_size=1)  # pyrefly: ignore[bad-argument-type]
    data.setup("fit")
    with pytest.raises(
        ValueError, match="cannot be made of row 0, which then has a prompt with characters that the tok"
    ):
        fresh(SDPO()).check(facts(data))


@pytest.mark.parametrize(
    ("template", "sentence"),
    [
        (
            "{prompt}",
            r"template is '\{prompt\}'; let it hold \{prompt\} and \{demonstration\}, and nothing else in braces",
        ),
        ("{prompt}{demonstration.real}", "nothing else in braces"),
        ("{prompt}{demonstration:9}", "nothing else in braces"),
        ("{prompt}{", "is malformed"),
    ],
)
def test_a_template_holds_its_fields_and_nothing_else(template: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        SDFT(template=template)


def test_in_an_environment_the_hint_stands_before_what_reset_said() -> None:
    worker, rows = worker_of(Guess), [{"prompt": "Guess.", "number": 3}]
    (group,) = play(worker, counting, rows, num_generations=2)
    rollout, other = group.rollouts
    other.rewards = {"exact": 1.0}
    plugin: Any = fresh(SDPO(**SHORT))
    plugin._writer = PromptWriter(PromptRenderer(conversing=worker), chat_tokenizer(), {"train/0": rows[0]})
    batch = GroupBatch([group], 0, RIGHT, lambda value: [value])
    (hint,), none = map(list, plugin.hints(group, batch))
    asked = plugin.write(rollout.prompt, hint)
    text = chat_tokenizer().decode([*asked.token_ids, *rollout.completion.token_ids_T.tolist()])
    turns = [chat_tokenizer().decode(turn, skip_special_tokens=True) for turn in other.completion.turns]
    assert len(turns) > 1 and "It is below 10." in text and none == []
    assert text == text_of(rollout.completion).replace("Guess.", "Guess.+" + "\n\n".join(turns))
    assert other.completion.episode is not None
    other.completion.episode = other.completion.episode._replace(asked="Guess. It is below 99.")
    assert [*map(list, plugin.hints(group, batch))] == [[], []]  # the other one was asked something else


def test_a_batch_without_anything_to_show_has_the_rollouts_own_advantages(policy_folder: Path) -> None:
    data, policy = data_of(policy_folder, {"prompt": "p"}), random_policy()
    plugin, watching = started(SDPO(**SHORT, weight=0.75), policy, data), Watching()
    group = group_of(data, 0, ["a", "bc"], [0, 0.5], policy=policy)
    make_learner(plugins=[plugin, watching], policy=policy, double=False)[0].learn([group])
    for rollout in group.rollouts:
        assert rollout.advantage != 0
        own = 0.25 * torch.full((rollout.completion.num_trained,), rollout.advantage)
        torch.testing.assert_close(watching.of(rollout)["token_advantage"], own)
    metrics = plugin.on_update_end(GroupBatch([group], 1, RIGHT, lambda value: [value]))
    assert metrics["teacher/tokens"] == metrics["teacher/taught_share"] == 0 and math.isnan(metrics["teacher/entropy"])
