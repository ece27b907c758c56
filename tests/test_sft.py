"""Examples: what is imitated of a row, in which order, and with which gradient."""

from __future__ import annotations

import json
import math
import multiprocessing
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import random_policy, save_policy, save_tokenizer
from hand_made import meet, step_of
from test_learner import make_learner, ragged_groups
from torch import distributed
from torch.nn.functional import cross_entropy

from lit_grpo.data import PromptDataModule
from lit_grpo.data.examples import Example
from lit_grpo.methods import make_plugins
from lit_grpo.methods.seco import SeCO
from lit_grpo.methods.sft import SFT
from lit_grpo.plugins import Plugin, RunFacts, RunNumbers, fresh
from lit_grpo.ranks import Ranks
from lit_grpo.tools.commands.sft import without_rollouts
from lit_grpo.types import OBSERVED, Rollout, RolloutGroup

pytestmark = pytest.mark.usefixtures("exact_norms")
CHAT = (
    "{% for m in messages %}{{ m.role[0] }}#{{ m.content }}{% if not (loop.last and continue_final_message) %}<eos>\n"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}a#{% endif %}"
)
NUM_TOKENS = 2 + len("0123456789+-*=# abcdefghijklmnop?")


@pytest.fixture(scope="module")
def chat_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy whose chat template ends each message with <eos> and a line break."""
    folder = tmp_path_factory.mktemp("chat")
    save_policy(folder, template=CHAT)
    return folder


def data_of(policy: Path, *rows: Any, **settings: Any) -> PromptDataModule:
    given: Any = {"train": list(rows), "batch_size": 1} | settings
    data = PromptDataModule(policy=str(policy), **given)
    data.setup("fit")
    return data


def ids_of(data: PromptDataModule, text: str) -> list[int]:
    return list(data._tokenizer(text, add_special_tokens=False)["input_ids"])


def test_an_answer_follows_its_prompt_and_ends_with_the_end_token(policy_folder: Path) -> None:
    data = data_of(policy_folder, {"prompt": "1+1=", "solution": "2"}, {"prompt": "2+2=", "solution": "4<eos>"})
    first, second = data.answered("train", "solution")
    assert first.prompt_ids == data.prompts["train"][0].token_ids == tuple(ids_of(data, "1+1="))
    assert first.answer_ids_T.tolist() == [*ids_of(data, "2"), 1] and first.learned_T.tolist() == [True, True]
    assert second.answer_ids_T.tolist() == [*ids_of(data, "4"), 1]  # its own end token is not doubled


def test_a_completion_that_was_cut_off_does_not_teach_to_end_there(policy_folder: Path, chat_folder: Path) -> None:
    row = {"prompt": "1+1=", "completion": "2", "gold": "3"}
    for folder, template in ((policy_folder, False), (chat_folder, True)):
        rows = {**row, "finish_reason": "stop"}, {**row, "finish_reason": "length"}
        data = data_of(folder, *rows, chat_template=template)
        ended, cut_off = data.answered("train", "completion")
        assert ended.answer_ids_T.tolist() == cut_off.answer_ids_T.tolist() == [*ids_of(data, "2"), 1]
        assert ended.learned_T.tolist() == [True, True] and cut_off.learned_T.tolist() == [True, False]
        assert all(example.learned_T.all() for example in data.answered("train", "gold"))  # nobody sampled that one


def test_a_chat_template_ends_the_answer_and_its_line_break_is_not_imitated(chat_folder: Path) -> None:
    data = data_of(chat_folder, {"prompt": "1+1=", "solution": "2"}, chat_template=True)
    (example,) = data.answered("train", "solution")
    assert example.prompt_ids == data.prompts["train"][0].token_ids
    assert list(example.prompt_ids) == ids_of(data, "u#1+1=<eos>\na#")
    assert example.answer_ids_T.tolist() == [*ids_of(data, "2"), 1] and example.learned_T.all()


TURNS = [
    {"role": "assistant", "content": "ab"},
    {"role": "user", "content": "c"},
    {"role": "assistant", "content": "d"},
]


def test_all_turns_of_an_answer_are_imitated_in_one_row_and_what_stands_between_is_not(chat_folder: Path) -> None:
    data = data_of(chat_folder, {"prompt": [{"role": "user", "content": "1"}], "turns": TURNS})
    (example,) = data.answered("train", "turns")
    between = ids_of(data, "\nu#c<eos>\na#")
    assert example.answer_ids_T.tolist() == [*ids_of(data, "ab"), 1, *between, *ids_of(data, "d"), 1]
    assert example.learned_T.tolist() == [True] * 3 + [False] * len(between) + [True] * 2
    (last,) = data.answered("train", "turns", turns="last")
    assert list(last.prompt_ids) == [*example.prompt_ids, *example.answer_ids_T[:-2].tolist()]
    assert last.answer_ids_T.tolist() == [*ids_of(data, "d"), 1] and last.learned_T.all()


BAD_ANSWERS: dict[str, tuple[Any, str]] = {
    "none": (None, "row 1 has no value in column 'solution'"),
    "empty": (" ", "row 1 has an empty answer"),
    "a number": (7, "row 1 has an answer of type int"),
    "messages for a text": (TURNS, "row 1 has an answer of type list, and a prompt that is a text needs a text"),
    "too long": ("1" * 300, r"row 1 has 302 tokens with its answer, and the policy's context is 256"),
    "half a character": ("\ud83d", "row 1 has an answer with the lone surrogate"),
}


@pytest.mark.parametrize("name", BAD_ANSWERS)
def test_a_row_without_a_usable_answer_is_refused_or_left_out(name: str, policy_folder: Path) -> None:
    answer, sentence = BAD_ANSWERS[name]
    rows = {"prompt": "1", "solution": "2"}, {"prompt": "3", "solution": answer}
    with pytest.raises(ValueError, match=sentence):
        data_of(policy_folder, *rows).answered("train", "solution")
    data = data_of(policy_folder, *rows, unusable_rows="drop")
    with pytest.warns(UserWarning, match=sentence):
        assert len(data.answered("train", "solution")) == 1


def test_a_column_that_is_not_there_is_named_with_those_that_are(policy_folder: Path) -> None:
    data = data_of(policy_folder, {"prompt": "1", "answer": "2"})
    with pytest.raises(ValueError, match=r"has no column 'solution' \(it has 'prompt', 'answer'\); no row is left"):
        data.answered("train", "solution")


BAD_CONVERSATIONS: dict[str, tuple[list[dict[str, Any]], str]] = {
    "ends in a user's message": (TURNS[:2], "do not begin and end with one of the assistant"),
    "an empty turn": ([{"role": "assistant", "content": ""}], "has an empty answer"),
    "two turns in a row": (TURNS[:1] * 2, "two messages of the assistant one after another"),
    "no messages": ([], "do not begin and end with one of the assistant"),
}


@pytest.mark.parametrize("name", BAD_CONVERSATIONS)
def test_messages_that_are_no_answer_are_refused(name: str, chat_folder: Path) -> None:
    answer, sentence = BAD_CONVERSATIONS[name]
    data = data_of(chat_folder, {"prompt": [{"role": "user", "content": "1"}], "turns": answer})
    with pytest.raises(ValueError, match=sentence):
        data.answered("train", "turns")


def test_a_template_that_rewrites_earlier_turns_needs_the_last_turn_alone(tmp_path: Path) -> None:
    shortens = "{% if loop.last or m.role != 'assistant' %}{{ m.content }}{% endif %}"
    save_tokenizer(tmp_path, chat_template=CHAT.replace("{{ m.content }}", shortens))
    random_policy().save_pretrained(tmp_path)
    data = data_of(tmp_path, {"prompt": [{"role": "user", "content": "1"}], "turns": TURNS})
    with pytest.raises(ValueError, match="set turns to last"):
        data.answered("train", "turns")
    (last,) = data.answered("train", "turns", turns="last")
    assert last.answer_ids_T.tolist() == [*ids_of(data, "d"), 1]


DIALOGUE = [{"role": "user", "content": "1"}, *TURNS]


def test_conversations_end_with_their_answer(chat_folder: Path) -> None:
    """The prompt of the row is what stands before it, if the data says so; else the row is refused."""
    with pytest.raises(ValueError, match=r"set data\.cut_answers to true"):
        data_of(chat_folder, {"prompt": DIALOGUE})
    data = data_of(chat_folder, {"prompt": DIALOGUE}, cut_answers=True)
    (example,), (last,) = data.answered("train", ""), data.answered("train", "", turns="last")
    assert list(example.prompt_ids) == ids_of(data, "u#1<eos>\na#") and example.learned_T.sum() == 5
    assert last.prompt_ids == data.prompts["train"][0].token_ids
    assert last.answer_ids_T.tolist() == [*ids_of(data, "d"), 1]


def test_a_conversation_that_nobody_answers_is_no_example(chat_folder: Path) -> None:
    data = data_of(chat_folder, {"prompt": DIALOGUE[:1]})
    with pytest.raises(ValueError, match="row 0 has no answer: its conversation does not end in a message of the"):
        data.answered("train", "")
    with pytest.raises(ValueError, match="row 0 has a prompt that is a text, and no answer; name the column of"):
        data_of(chat_folder, {"prompt": "1"}).answered("train", "")


def test_examples_of_a_data_set_of_their_own_are_rendered_as_prompts_are(chat_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "examples.jsonl").write_text('{"question": "1+1=", "solution": "2"}\n')
    data = data_of(chat_folder, {"prompt": "3"}, chat_template=True, system_prompt="e")
    plugin = sft(data, data=str(tmp_path / "examples.jsonl"), prompt_column="question")
    (example, _) = examples_of(plugin, 0)
    assert list(example.prompt.token_ids) == ids_of(data, "s#e<eos>\nu#1+1=<eos>\na#")
    assert example.completion.token_ids_T.tolist() == [*ids_of(data, "2"), 1]


BAD_SETTINGS: dict[str, tuple[dict[str, Any], str]] = {
    "no file": ({"data": "nowhere.jsonl"}, r"There is no file nowhere\.jsonl"),
    "an empty file": ({"data": "empty.jsonl"}, r"empty\.jsonl has no rows"),
    "no such column": ({"column": "answer"}, r"has no column 'answer' \(it has 'prompt', 'solution'\)"),
    "a column of prompts without data": ({"prompt_column": "question"}, "prompt_column is set, but data is not"),
    "held-out examples without data": ({"validation": "some.jsonl"}, "validation is set, but data is not"),
    "a negative weight": ({"weight": -1.0}, "weight must be at least 0"),
    "a word": ({"warm_up": "most"}, "warm_up must be a whole number of at least 0, or all"),
}


@pytest.mark.parametrize("name", BAD_SETTINGS)
def test_settings_that_cannot_work_are_refused(
    name: str, policy_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, sentence = BAD_SETTINGS[name]
    (tmp_path / "empty.jsonl").touch()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=sentence):
        sft(data_of(policy_folder, {"prompt": "1", "solution": "2"}), **settings)


def test_the_command_sft_makes_the_warm_start_the_whole_run() -> None:
    every: list[Any] = ["gigpo", {"sft": {"column": "a", "warm_up": 3}}]
    assert without_rollouts(every) == ["gigpo", {"sft": {"column": "a", "warm_up": "all"}}]
    assert without_rollouts("sft:column=a") == ["sft:column=a,warm_up=all"]
    assert make_plugins(without_rollouts(["sft"]))["sft"].numbers.first_rollout == math.inf
    for none in (None, [], ["gigpo"], {"gigpo": None}):
        with pytest.raises(ValueError, match=r"rollout\.plugins has no sft, which has the examples"):
            without_rollouts(none)


def sft(data: PromptDataModule, /, **settings: Any) -> SFT:
    """A plug-in that has read its examples."""
    usual: dict[str, Any] = {"column": "solution", "weight": 1.0}
    plugin = fresh(SFT(**usual | settings))
    plugin.check(RunFacts(num_prompts=2, num_generations=2, max_tokens=8, updates_per_batch=1, data=data))
    return plugin


def examples_of(plugin: SFT, version: int, ranks: Ranks | None = None) -> list[Rollout]:
    return step_of(plugin, "on_minibatch", version=version, ranks=ranks or Ranks()).values["examples"]


def test_each_epoch_imitates_each_example_once_whatever_the_number_of_ranks(policy_folder: Path) -> None:
    rows = [{"prompt": f"{number}=", "solution": str(number)} for number in range(6)]
    plugin = sft(data_of(policy_folder, *rows))
    alone = [one for version in range(12) for one in examples_of(plugin, version)]
    names = [one.prompt.prompt_id for one in alone]
    assert sorted(names[:6]) == sorted(names[6:12]) == [f"sft/{number}" for number in range(6)]
    assert names[:6] != names[6:12] and len({one.completion.request.key for one in alone}) == len(alone)
    of_two: list[str] = []
    for version in range(6):
        for rank in range(2):
            ranks: Any = SimpleNamespace(rank=rank, size=2)
            of_two += [one.prompt.prompt_id for one in examples_of(plugin, version, ranks)]
    assert of_two == names


def test_an_example_that_fits_into_no_micro_batch_is_named_before_the_run(policy_folder: Path) -> None:
    plugin = sft(data_of(policy_folder, {"prompt": "1", "solution": "2"}, {"prompt": "12", "solution": "3" * 29}))
    run = RunFacts(2, 2, 8, 1, policy=random_policy(), micro_batch_tokens=30)
    plugin.check(run)
    plugin.check(replace(run, micro_batch_tokens=8, largest_chunk=8))
    named = "row 1 of .* has a prompt of 2 tokens and an answer of 30, but model.max_tokens_per_micro_batch is"
    with pytest.raises(ValueError, match=f"{named} 29; the smallest that works is 30"):
        plugin.check(replace(run, micro_batch_tokens=29))
    with pytest.raises(ValueError, match=f"{named} 30; the smallest that works is 32"):
        plugin.check(replace(run, shares_prefix=False))


def on_a_rank(rank: int, folder: str, policy: str) -> None:
    meet(rank, folder)
    learner, steps = make_learner(plugins=[sft(mixed_rows(Path(policy)), warm_up="all")])  # two examples each
    logs = learner.learn_examples()
    distributed.all_reduce(steps.gradients[0])
    torch.save((steps.gradients[0], logs["ce/tokens"], logs["loss"]), f"{folder}/{rank}.pt")
    distributed.destroy_process_group()


def test_two_ranks_with_a_share_each_take_the_step_of_one(policy_folder: Path, tmp_path: Path) -> None:
    fork = multiprocessing.get_context("fork")
    ranks = [fork.Process(target=on_a_rank, args=(n, str(tmp_path), str(policy_folder))) for n in (0, 1)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(60)
    learner, steps = make_learner(plugins=[sft(mixed_rows(policy_folder), per_update=4, warm_up="all")])
    logs = learner.learn_examples()
    assert logs["ce/tokens"] == 31 and "reward" not in logs
    for rank in (0, 1):
        gradient, num_tokens, loss = torch.load(tmp_path / f"{rank}.pt")
        assert float((gradient - steps.gradients[0]).abs().max()) < 1e-10
        assert (num_tokens, loss) == (31, pytest.approx(logs["loss"], rel=1e-9))


def own_gradient(examples: Sequence[Example], weight: float) -> tuple[torch.Tensor, float]:
    """The gradient of the mean cross entropy of the answers' tokens, a row at a time, by the model's own forward."""
    policy: Any = make_learner()[0].policy
    total, number = torch.zeros(()), 0
    for example in examples:
        ids_T = torch.tensor([*example.prompt_ids, *example.answer_ids_T.tolist()])
        labels_T = ids_T.clone()
        labels_T[: len(example.prompt_ids)] = -100
        labels_T[len(example.prompt_ids) :][~torch.from_numpy(example.learned_T)] = -100
        logits_TV = policy(input_ids=ids_T[None]).logits[0]
        total = total + cross_entropy(logits_TV[:-1], labels_T[1:], reduction="sum")
        number += int(example.learned_T.sum())
    loss = weight * total / number
    loss.backward()
    return torch.cat([parameter.grad.flatten() for parameter in policy.parameters()]), loss.item()


SPLITS: dict[str, dict[str, Any]] = {
    "one row": {},
    "micro-batches": {"max_tokens_per_micro_batch": 30},
    "padded": {"shares_prefix": False},
    "chunks": {"plugins": [SeCO(4)]},
}


def mixed_rows(data_folder: Path) -> PromptDataModule:
    """Answers of several lengths; two rows have the same prompt, whose tokens are those of a group of rollouts."""
    rows = [("12 3", "0" * 20), ("a=", "b"), ("a=", "c + d"), ("12 3", "7")]
    return data_of(data_folder, *({"prompt": prompt, "solution": answer} for prompt, answer in rows))


@pytest.mark.parametrize("name", SPLITS)
def test_loss_and_gradient_are_those_of_the_mean_cross_entropy(name: str, policy_folder: Path) -> None:
    changes = dict(SPLITS[name])
    plugin = sft(data := mixed_rows(policy_folder), per_update=4, weight=0.5)
    learner, steps = make_learner(plugins=[*changes.pop("plugins", []), plugin], **changes)
    logs = learner.learn(without_rewards())
    expected, loss = own_gradient(data.answered("train", "solution"), 0.5)
    assert float((steps.gradients[0] - expected).norm() / expected.norm()) < 1e-10
    assert logs["ce/loss"] == pytest.approx(loss, rel=1e-9) and logs["loss"] == pytest.approx(loss, rel=1e-9)
    assert logs["ce/tokens"] == 21 + 2 + 6 + 2


def without_rewards() -> list[RolloutGroup]:
    groups = ragged_groups()
    for rollout in (rollout for group in groups for rollout in group.rollouts):
        rollout.reward, rollout.rewards = math.nan, {"exact": None}
    return groups


@pytest.mark.parametrize("name", SPLITS)
def test_mixed_with_rollouts_the_gradient_is_the_sum_of_both(name: str, policy_folder: Path) -> None:
    found: list[torch.Tensor] = []
    for groups, weight in ((ragged_groups(), 0.5), (ragged_groups(), 0.0), (without_rewards(), 0.5)):
        changes = dict(SPLITS[name])
        plugin = sft(mixed_rows(policy_folder), per_update=4, weight=weight)
        learner, steps = make_learner(plugins=[*changes.pop("plugins", []), plugin], **changes)
        learner.learn(groups)
        found.append(steps.gradients[0])
    both, rl, ce = found
    assert float((both - rl - ce).abs().max()) < 1e-10 and min(float(rl.norm()), float(ce.norm())) > 1e-3


def test_examples_take_part_in_no_statistic_of_rollouts(policy_folder: Path) -> None:
    plugin = sft(mixed_rows(policy_folder), per_update=4, weight=0.5)
    with_examples = make_learner(plugins=[plugin])[0].learn(ragged_groups())
    without = make_learner()[0].learn(ragged_groups())
    differing = {name for name in without if with_examples[name] != pytest.approx(without[name], nan_ok=True)}
    assert differing == {"loss", "grad_norm"}


def test_the_gradient_is_whole_where_its_norm_is_measured_in_parts(policy_folder: Path) -> None:
    class Measured(Plugin):
        @property
        def numbers(self) -> RunNumbers:
            return RunNumbers(num_parts=2)

        def on_optimizer_step(self, step: Any) -> None: ...

    gradients: list[torch.Tensor] = []
    for more in ([], [Measured()]):
        learner, steps = make_learner(plugins=[sft(mixed_rows(policy_folder), per_update=4, weight=0.5), *more])
        learner.learn(ragged_groups())
        gradients.append(steps.gradients[0])
    assert float((gradients[0] - gradients[1]).norm() / gradients[0].norm()) < 1e-10


def test_an_example_is_observed_and_has_no_part_in_the_other_channel(policy_folder: Path) -> None:
    (first, *_) = examples_of(sft(mixed_rows(policy_folder)), 0)
    assert (first.completion.versions_T == OBSERVED).all() and first.completion.num_trained == 0
    assert math.isnan(first.advantage) and json.dumps(first.rewards) == "{}"
