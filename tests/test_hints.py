"""Hints: how much of one a prompt gets, what becomes of the prompt, and what stays as if there were none."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import ALPHABET, save_tokenizer
from hand_made import make_rollout, plugin

from lit_grpo.budgets.history import PromptHistory, Record, Visit
from lit_grpo.data.loaders import PromptLoader
from lit_grpo.data.module import PromptDataModule, asked_prompts
from lit_grpo.methods import make_plugins
from lit_grpo.methods.hints import Hint, HintRecord, HintVisit
from lit_grpo.plugins import GroupBatch, fresh
from lit_grpo.ranks import Ranks
from lit_grpo.rewards.runner import Surroundings, TrainerState, group_inputs, rollout_inputs
from lit_grpo.rollout.session import RolloutSession
from lit_grpo.types import PassRule, Prompt, PromptBatch, RolloutGroup
from lit_grpo.update.advantages.estimator import Advantages, GroupRewards

NAN = math.nan
ROWS = [{"prompt": f"{n}+{n}=", "solution": "abcdefghij"[: n + 1], "plan": "add"} for n in range(10)]


def visit(rewards: list[float], hint: float = 0.0, number: int = 0, name: str = "train/0") -> Visit:
    passed = sum(reward >= 1 for reward in rewards)
    return Visit(name, number, rewards, passed, 10 * len(rewards), number, altered=hint > 0)


def after(*visits: Visit) -> Record:
    record = Record()
    for each in visits:
        record = record.after(each)
    return record


def group_of(rewards: list[float], hint: float = 0.0, name: str = "train/0") -> RolloutGroup:
    rollouts = [make_rollout([1], [2], reward) for reward in rewards]
    for rollout in rollouts:
        rollout.rewards = {"one": None if math.isnan(rollout.reward) else rollout.reward}
    extra = {"hint": hint} if hint else {}
    return RolloutGroup(Prompt(name, (1,), "", altered=hint > 0, extra=extra), rollouts)


def hint_visit(rewards: list[float], hint: float = 0.0) -> HintVisit:
    return fresh(Hint()).visit_of(group_of(rewards, hint), PassRule("one"))


def hint_record(*visits: HintVisit) -> HintRecord:
    record = HintRecord()
    for each in visits:
        record = record.after(each)
    return record


# ---- how much ------------------------------------------------------------------------------------------


class ByHand:
    """The rule, step by step: failures on end before a hint, then a share that goes down and up."""

    def __init__(self, rule: Hint) -> None:
        self.rule, self.failures, self.now = rule, 0, 0.0

    def see(self, passed: bool) -> None:
        rule = self.rule
        if self.now == 0:
            self.failures = 0 if passed else self.failures + 1
            self.now = rule.begin if self.failures >= rule.after else 0.0
        else:
            self.now = max(self.now - rule.step, 0) if passed else min(self.now + rule.step, rule.most)
            self.now, self.failures = round(self.now, 9), 0


@pytest.mark.parametrize("seed", range(20))
def test_a_share_falls_where_somebody_passed_and_rises_where_nobody_did(seed: int) -> None:
    rng = random.Random(seed)
    rule = Hint(rng.randint(1, 3), 0.5, rng.choice([0.1, 0.2, 0.25]), rng.choice([0.8, 1.0]))
    record, by_hand, shares = HintRecord(), ByHand(rule), []
    for _ in range(200):
        share = rule.share(record)
        assert share == pytest.approx(by_hand.now) and (share == 0) == (by_hand.now == 0)
        shares.append(share)
        passed = rng.random() < share + 0.1
        record = record.after(hint_visit([float(passed), 0.0, NAN], share))
        by_hand.see(passed)
    assert 0.0 in shares and len(set(shares)) > 3


def test_a_visit_without_a_reward_moves_nothing() -> None:
    hinted = hint_record(hint_visit([0.0]), hint_visit([0.0, 1.0], 0.5))
    assert hinted == HintRecord(0, 0.5, 0.5)
    assert hinted.after(hint_visit([NAN, NAN], 0.25)) == hinted
    assert hint_record(hint_visit([0.0]), hint_visit([NAN])).num_unsolved == 1


def test_visits_with_a_hint_leave_all_else_that_is_known_of_a_prompt() -> None:
    plain = [visit([0.0, 0.0]), visit([0.5, 0.5]), visit([0.0, 1.0, 0.5])]
    among = [plain[0], visit([1.0, 0.0], 0.5), visit([1.0, 1.0], 0.25), plain[1], visit([0.0] * 3, 0.7), plain[2]]
    assert after(*among) == after(*plain)
    for place in range(1, 6):
        assert after(*among[:place]) == after(*(each for each in among[:place] if not each.altered))


def test_ranks_come_to_the_same_shares_and_log_the_same_whoever_asked_the_prompts() -> None:
    alone, ranks, passes = fresh(Hint()), [fresh(Hint()), fresh(Hint())], PassRule("one")
    for version in range(4):
        share = 0.5 if version else 0.0
        groups = [group_of([float(version == number), 0.0], share, name) for number, name in enumerate("abcd")]
        parts = [groups[:1], groups[1:]]
        visits = [[fresh(Hint()).visit_of(group, passes) for group in part] for part in parts]
        logged = alone.on_update_end(GroupBatch(groups, version, passes, lambda own: [own]))
        for rank, part in zip(ranks, parts, strict=True):
            assert rank.on_update_end(GroupBatch(part, version, passes, lambda own, visits=visits: visits)) == logged
            assert rank.known == alone.known
    assert set(alone.known) == {*"abcd"} and len({record.pass_rate for record in alone.known.values()}) == 2


def test_dcpo_standardizes_a_visit_with_a_hint_by_itself() -> None:
    history = PromptHistory()
    history.note([visit([0.0, 0.0, 1.0])])
    history.commit()
    rewards_R, groups_R = torch.tensor([0.0, 1.0, 1.0, 1.0, 0.0, 0.0]), torch.tensor([0, 0, 0, 1, 1, 1])
    names, dcpo = ["train/0", "train/0"], Advantages("dcpo")

    def advantages(rewards_R: torch.Tensor, altered: list[bool], count: int = 2) -> list[float]:
        some = slice(0, 3 * count)
        rewards = GroupRewards(rewards_R[some], rewards_R[some, None], groups_R[some], names[:count], altered=altered)
        return dcpo.compute(rewards, torch.ones(1), history).tolist()

    mean, deviation = 2 / 3, math.sqrt(1 / 3)
    own = [(reward - mean) / deviation for reward in (0.0, 1.0, 1.0)]
    first, second = torch.tensor([0.0, 1.0, 1.0]), rewards_R[3:]
    assert advantages(rewards_R, [True, False])[:3] == pytest.approx(own)
    assert advantages(rewards_R, [False, False])[:3] != pytest.approx(own)
    assert advantages(rewards_R, [True, False])[3:] == advantages(second, [], 1)  # as if the other had not been
    assert advantages(rewards_R, [False, True])[:3] == advantages(first, [], 1)


def test_metrics_tell_rewards_with_and_without_a_hint_apart() -> None:
    visits = [
        hint_visit([1.0, 0.0, NAN], 0.5),
        hint_visit([1.0] * 3, 0.25),
        hint_visit([0.25, 0.75]),
        hint_visit([0.0]),
    ]
    assert fresh(Hint()).metrics_of(visits) == {
        "hints/share_of_prompts": 0.5,
        "hints/mean_share": 0.375,
        "hints/pass_rate": 0.8,
        "hints/reward_hinted": 0.8,
        "hints/reward_unhinted": pytest.approx(1 / 3),
    }
    assert fresh(Hint()).metrics_of(visits[2:]) == {
        "hints/share_of_prompts": 0.0,
        "hints/reward_unhinted": pytest.approx(1 / 3),
    }
    assert math.isnan(fresh(Hint()).metrics_of(visits[:2])["hints/reward_unhinted"])


# ---- what becomes of a prompt --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tokenizer(tmp_path_factory.mktemp("tokenizer"), unk_token="?")


@pytest.fixture(scope="module")
def chat_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    template = (
        "{% for m in messages %}{{ 'ab'[m.role == 'user'] }} {{ m.content }}#{% endfor %}"
        "{% if add_generation_prompt %}a {% endif %}"
    )
    return save_tokenizer(tmp_path_factory.mktemp("chat"), chat_template=template)


def data_of(tokenizer: str, hint: str, rows: Any = ROWS, **options: Any) -> PromptDataModule:
    usual: dict[str, Any] = {"batch_size": 5, "shuffle": False}
    data = PromptDataModule(tokenizer, train=rows, **usual | options)
    data.setup("fit")
    data.plug_in(None, [] if hint == "none" else [fresh(plugin(hint))], on_demand=False)
    return data


def hinter_of(data: PromptDataModule) -> Hint:
    rewrite: Any = data.train_dataloader().rewrite
    hinter = rewrite.keywords["rules"][0]
    assert isinstance(hinter, Hint)
    return hinter


def share_of(prompt: Prompt) -> float:
    """Its share of a hint; what was altered has one, and nothing else."""
    share = prompt.extra.get("hint", 0.0)
    assert prompt.altered == (share > 0)
    return share


FAILED = HintRecord(num_unsolved=1)


def drawn(data: PromptDataModule, known: dict[str, HintRecord], num_prompts: int = 10) -> list[Prompt]:
    hinter_of(data).known = known
    return data.train_dataloader().draw(num_prompts)


def ids_of(text: str) -> tuple[int, ...]:
    return tuple(ALPHABET.index(character) + 2 for character in text)


def test_the_beginning_of_a_reference_stands_behind_the_prompt(tokenizer: str) -> None:
    data = data_of(tokenizer, "reference_hint:begin=0.4")
    history = {f"train/{number}": FAILED for number in range(1, 10)}
    for number, prompt in enumerate(drawn(data, history)):
        given = "" if number == 0 else "abcdefghij"[: max(int(0.4 * (number + 1)), 1)]
        assert prompt.text == f"{number}+{number}={given}" and prompt.token_ids == ids_of(prompt.text)
        assert (prompt.given, share_of(prompt)) == (given, 0.4 if number else 0.0)
        assert (prompt.prompt_id, prompt.visit) == (f"train/{number}", 0) and prompt.columns == ROWS[number]
    again = drawn(data, {})
    assert [share_of(prompt) for prompt in again] == [0.0] * 10 and {prompt.visit for prompt in again} == {1}


def test_a_strategy_stands_in_front_of_the_question(tokenizer: str, chat_tokenizer: str) -> None:
    failed = {"train/0": FAILED}
    said = drawn(data_of(tokenizer, 'strategy_hint:say=plan,between=" "'), failed)
    assert [prompt.text for prompt in said[:2]] == ["plan 0+0=", "1+1="]
    assert said[0].token_ids == ids_of("plan 0+0=") and (said[0].given, share_of(said[0])) == ("", 0.5)
    by_column = drawn(data_of(tokenizer, 'strategy_hint:column=plan,between=" "', template="{prompt}#"), failed)
    assert [prompt.text for prompt in by_column[:2]] == ["add 0+0=#", "1+1=#"]
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    rows = [{"prompt": turns}, {"prompt": turns[:1]}]
    options: dict[str, Any] = {"batch_size": 1}
    chat = drawn(data_of(chat_tokenizer, 'strategy_hint:say=name,between=" "', rows, **options), failed, 2)
    assert [prompt.text for prompt in chat] == ["b a#a b#b name c#a ", "b a#a "]
    assert chat[0].messages is not None and chat[0].messages[-1]["content"] == "name c" and turns[-1]["content"] == "c"
    goes_on = data_of(chat_tokenizer, "reference_hint:column=plan", [{"prompt": turns, "plan": "go on"}], batch_size=1)
    assert drawn(goes_on, failed, 1)[0].text == "b a#a b#b c#a go"


@pytest.mark.parametrize("limit", range(4, 14))
@pytest.mark.parametrize("hint", ["reference_hint:begin=0.9", 'strategy_hint:say=plan,between=" "'])
def test_a_hint_is_cut_to_fit_and_the_prompt_never(tokenizer: str, hint: str, limit: int) -> None:
    if limit == 4:
        with pytest.raises(ValueError, match=r"rollout\.plugins: no row of the list given has a text for \w+ that"):
            data_of(tokenizer, hint, max_prompt_tokens=limit)
        return
    data = data_of(tokenizer, hint, max_prompt_tokens=limit)
    for number, prompt in enumerate(drawn(data, {f"train/{number}": FAILED for number in range(10)})):
        plain, room = f"{number}+{number}=", limit - 4
        given = "abcdefghij"[: max(int(0.9 * (number + 1)), 1)][:room]
        assert prompt.text == (plain + given if hint.startswith("reference") else "plan "[:room] + plain)
        assert len(prompt.token_ids) <= limit and share_of(prompt) == (0.9 if hint.startswith("reference") else 0.5)


def test_what_hints_can_make_of_prompts_is_checked_with_them(tokenizer: str) -> None:
    data = data_of(tokenizer, "reference_hint")
    trainer: Any = SimpleNamespace(datamodule=data)
    assert [prompt.text for prompt in asked_prompts(trainer)["train"][10:]] == ["9+9=abcdefghi"] * 2
    assert asked_prompts(SimpleNamespace(datamodule=data_of(tokenizer, "none")))["train"] == data.prompts["train"]  # pyrefly: ignore[bad-argument-type]

    @dataclass
    class LongAtFirst(Hint):
        def text(self, prompt: Prompt, share: float) -> str:
            return "a" if share == self.most else "abcdefghijklmnop"

    longer = fresh(LongAtFirst())
    loader: Any = data.train_dataloader()
    loader.rewrite = partial(loader.rewrite, rules=[longer])
    assert {len(prompt.token_ids) for prompt in drawn(data, dict.fromkeys(["train/0"], FAILED))} == {13, 4}


def test_ranks_get_the_same_hints_and_so_do_prompts_that_are_asked_instead(tokenizer: str) -> None:
    data = data_of(tokenizer, "reference_hint")
    hinter_of(data).known = {f"train/{number}": FAILED for number in range(0, 10, 3)}
    prompts = data_of(tokenizer, "none").prompts["train"]

    def loader(size: int, rank: int = 0, ranks: int = 1) -> PromptLoader:
        return PromptLoader(prompts, size, rank, ranks, 3, rewrite=data.train_dataloader().rewrite)

    whole = loader(4)
    one = next(iter(whole)).prompts
    two = [next(iter(loader(2, rank, 2))).prompts for rank in (0, 1)]
    assert one == two[0] + two[1] and {share_of(prompt) for prompt in one} == {0.0, 0.5}
    further = list(whole.further(6))
    assert further == loader(10).draw(10)[4:] and {share_of(prompt) for prompt in further} == {0.0, 0.5}


def test_reward_functions_get_the_whole_answer_of_which_a_part_was_given() -> None:
    rollout = make_rollout([1, 2], [3, 4], 1.0)
    rollout.completion.text = "cd"
    rollout.prompt = replace(rollout.prompt, text="1+1=ab", altered=True, given="ab")
    around = Surroundings(TrainerState(), lambda name, value: None)
    one = rollout_inputs(rollout, around)
    assert (one["prompt"], one["completion"], one["completion_ids"]) == ("1+1=", "abcd", [3, 4])
    group = group_inputs(RolloutGroup(rollout.prompt, [rollout]), around)
    assert (group["prompts"], group["completions"]) == (["1+1="], ["abcd"])


# ---- a run ---------------------------------------------------------------------------------------------


def test_who_is_asked_is_not_learned_from_visits_with_a_hint(tokenizer: str) -> None:
    history, data = PromptHistory(), data_of(tokenizer, "reference_hint")
    session = RolloutSession(make_plugins(["greso", "reference_hint"]))
    data.plug_in(session.prompt_rule, session.rewriting, on_demand=False)
    chooser = data.train_dataloader().chooser
    assert chooser is not None
    session.open(history, data.train_dataloader())
    history.records = {"train/0": Record(1, num_hard=1), "train/1": Record(2, last_pass_rate=0.5)}
    history.note([visit([1.0, 0.0], 0.5), visit([0.0, 1.0], name="train/1")])
    history.commit()
    batch = PromptBatch([])
    batch.groups = [group_of([1.0, 0.0], 0.5), group_of([0.0, 1.0], name="train/1")]
    logged = session.end_update(run_of(), batch)["plugins"]
    assert chooser.state == {"easy": 0.51, "hard": 0.51}  # as if no group had been flat
    assert logged["hints/share_of_prompts"] == 0.5 and logged["hints/reward_unhinted"] == 0.5
    without = RolloutSession()
    without.open(history, data_of(tokenizer, "none").train_dataloader())
    assert without.end_update(run_of(), batch)["plugins"] == {}


def run_of() -> Any:
    return SimpleNamespace(ranks=Ranks(), pass_rule=PassRule("one"), policy_version=1)


@dataclass
class Numbers(Hint):
    def text(self, prompt: Prompt, share: float) -> Any:
        return 7


ROW = {"prompt": "1=", "solution": "a"}


@pytest.mark.parametrize(
    ("spec", "rows", "sentence"),
    [
        (
            "reference_hint:column=proof",
            ROWS,
            r"row 0 of .* since the row has no column 'proof' \(it has 'prompt', 'solu",
        ),
        (
            "reference_hint",
            [ROW, {"prompt": "2="}],
            r"row 1 of .* since the row has no column 'solution' \(it has 'prompt'\)",
        ),
        ("reference_hint", [ROW, {**ROW, "solution": 3}], r"row 1 of .* has no text in column 'solution', but 3"),
        (
            "reference_hint",
            [{**ROW, "solution": "A"}],
            r"row 0 of .* has a text with characters that the tokenizer",
        ),
        ("strategy_hint:say=do", ROWS, r"row 0 of .* has a text with characters .* \('do\\n\\n'\); mend the row"),
        (f"{__name__}.Numbers", ROWS, r"row 0 of .* gets 7 of type int, not a text"),
        (
            "reference_hint",
            [{**ROW, "solution": None}],
            r"no row of the list given has a text for Ref\w+ that there is",
        ),
    ],
)
def test_a_row_that_lacks_its_hint_is_told_before_anything_starts(
    tokenizer: str, spec: str, rows: list[dict[str, Any]], sentence: str
) -> None:
    with pytest.raises(ValueError, match=rf"^rollout\.plugins: .*{sentence}"):
        data_of(tokenizer, spec, rows, batch_size=1)


def test_validation_is_never_hinted(tokenizer: str) -> None:
    source: Any = ROWS
    data = data_of(tokenizer, "reference_hint", source, validation=source)
    hinter_of(data).known = {f"{split}/0": FAILED for split in ("train", "validation")}
    loader: Any = data.val_dataloader()
    assert [share_of(prompt) for batch in loader for prompt in batch.prompts] == [0.0] * 10
