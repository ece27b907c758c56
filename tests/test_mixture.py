"""Several data sets in a run: their order, their reward functions, and plug-ins that act on some of them alone."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from hand_made import learning_batch, make_rollout, make_step
from test_channels import Imitated
from test_credit import Alternating, Falling
from test_learner import HIGH, LOW, make_learner, ragged_groups, reference_gradient

from lit_grpo.data import Mixture, MixtureWeights, PromptDataModule
from lit_grpo.data.loaders import PromptLoader
from lit_grpo.data.mixture import MixtureOrder
from lit_grpo.methods import make_plugins, shipped
from lit_grpo.methods.shared.selection import Subset
from lit_grpo.metrics import dataset_metrics
from lit_grpo.plugins import Answer, GroupBatch, Plugin, ask, check_decisions, fresh, restricted
from lit_grpo.plugins.columns import COLUMNS
from lit_grpo.ranks import Ranks
from lit_grpo.rewards import RewardRunner, RewardSpec, load_rewards
from lit_grpo.tools.doctor.samples import by_turns
from lit_grpo.types import PassRule, Prompt, Request, RolloutGroup
from lit_grpo.update.advantages.estimator import Advantages, GroupRewards
from lit_grpo.update.objective.objective import Objective
from lit_grpo.update.plugin import Batch
from lit_grpo.update.step import Step

CALCULATE = ["lit_grpo.tasks.calculator.calculate"]
pytestmark = pytest.mark.usefixtures("exact_norms")
SIZES = {"sums": 5, "puzzles": 3, "never": 4}
DATASETS = [name for name, size in SIZES.items() for _ in range(size)]


def drawn(weights: MixtureWeights, number: int, shuffle: bool = True) -> list[tuple[str, int, int]]:
    """Data set, row and visit of the first prompts of a stream."""
    order = MixtureOrder(DATASETS, weights, 7, shuffle)
    return [(DATASETS[row], row, visit) for row, visit in map(order.place, range(number))]


# ---- the order -------------------------------------------------------------------------------------


def test_every_stretch_has_the_wanted_shares_to_within_a_prompt_per_data_set() -> None:
    shares = {"sums": 0.6, "puzzles": 0.4, "never": 0.0}
    names = [name for name, _, _ in drawn(MixtureWeights({"sums": 3, "puzzles": 2, "never": 0}), 400)]
    for begin in range(0, 400, 7):
        for length in (1, 4, 8, 33):
            counts = Counter(names[begin : begin + length])
            number = len(names[begin : begin + length])
            assert all(abs(counts[name] - share * number) < 2 for name, share in shares.items())
            assert counts["never"] == 0
    assert Counter(names) == {"sums": 240, "puzzles": 160}


def test_each_data_set_has_epochs_of_its_own_in_each_of_which_every_row_comes_once() -> None:
    places = drawn(MixtureWeights({"sums": 3, "puzzles": 1, "never": 2}), 600)
    by_epoch = Counter((name, visit, row) for name, row, visit in places)
    assert set(by_epoch.values()) == {1}
    for name, size in SIZES.items():
        its = [(visit, row) for each, row, visit in places if each == name]
        assert [visit for visit, _ in its] == [number // size for number in range(len(its))]
        assert len({tuple(row for visit, row in its if visit == epoch) for epoch in range(5)}) > 1  # shuffled anew


def test_a_curriculum_goes_from_the_first_weights_to_the_last() -> None:
    first, last = {"sums": 1.0, "puzzles": 0.0, "never": 0.0}, {"sums": 0.0, "puzzles": 1.0, "never": 0.0}
    names = [name for name, _, _ in drawn(MixtureWeights(first, last, 100), 200)]
    shares = [names[begin : begin + 20].count("puzzles") / 20 for begin in range(0, 200, 20)]
    assert shares[:5] == pytest.approx([0.1, 0.3, 0.5, 0.7, 0.9], abs=0.05)
    assert shares[5:] == [1.0] * 5


def test_the_order_does_not_depend_on_what_was_asked_before() -> None:
    weights = MixtureWeights({"sums": 3, "puzzles": 2, "never": 1})
    orders = [MixtureOrder(DATASETS, weights, 7, True) for _ in range(2)]
    forward = [orders[0].place(index) for index in range(50)]
    assert [orders[1].place(index) for index in reversed(range(50))] == forward[::-1]


def prompts_of(names: Sequence[str]) -> list[Prompt]:
    return [Prompt(f"train/{number}", (5,), "", dataset=name) for number, name in enumerate(names)]


def test_a_loader_resumes_a_mixture_where_it_was_and_refuses_other_weights() -> None:
    weights = MixtureWeights({"sums": 3, "puzzles": 2, "never": 1})

    def loader(mixture: MixtureWeights | None) -> PromptLoader:
        return PromptLoader(prompts_of(DATASETS), 4, seed=3, mixture=mixture)

    def asked(loader: PromptLoader) -> list[str]:
        return [prompt.prompt_id for _ in range(3) for batch in loader for prompt in batch.prompts]

    first, second = loader(weights), loader(weights)
    batch = next(iter(first))
    batch.trained = True
    second.load_state_dict(first.state_dict())
    assert [prompt.prompt_id for prompt in batch.prompts] + asked(second)[:30] == asked(loader(weights))[:34]
    state = first.state_dict()
    for other in (MixtureWeights({"sums": 1, "puzzles": 2, "never": 1}), None):
        with pytest.raises(ValueError, match="mixture was MixtureWeights"):
            loader(other).load_state_dict(state)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"weights": {"sums": -1}}, "data.mixture.weights of 'sums' is -1"),
        ({"weights": {"sums": 0}}, "are all 0"),
        ({"weights": {"sums": 1}, "ramp_prompts": 5}, "ramp_prompts is set, but final_weights is not"),
        ({"weights": {"sums": 1}, "final_weights": {"sums": 2}}, "final_weights is set, but ramp_prompts is not"),
        ({"weights": {"sums": 1}, "final_weights": {"a": 2}, "ramp_prompts": 5}, "same data sets"),
        ({"weights": {"sums": True}}, "is True; give a number"),
    ],
)
def test_weights_that_mean_nothing_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MixtureWeights(**fields)


def test_weights_and_data_sets_are_the_same() -> None:
    with pytest.raises(ValueError, match=r"has no weight for 'puzzles'; the data sets of data\.train are 'sums'"):
        MixtureWeights({"sums": 1.0}).check(DATASETS)
    with pytest.raises(ValueError, match="names 'sum'"):
        MixtureWeights({**dict.fromkeys(SIZES, 1.0), "sum": 1.0}).check(DATASETS)


# ---- the sources -----------------------------------------------------------------------------------


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Any]:
    sums = [{"prompt": f"{number}%3=", "answer": str(number + 1)} for number in range(5)]
    puzzles = [{"question": f"{number}%2=", "solution": str(2 * number)} for number in range(3)]
    for name, rows in (("sums", sums), ("puzzles", puzzles)):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return {
        "sources": {name: str(tmp_path / f"{name}.jsonl") for name in ("sums", "puzzles")},
        "columns": {"puzzles": {"prompt": "question", "answer": "solution"}},
    }


def test_a_mixture_names_the_data_set_of_each_row_and_its_columns(files: dict[str, Any]) -> None:
    rows = list(Mixture(**files).rows())
    assert rows[0] == {"prompt": "0%3=", "answer": "1", "dataset": "sums"}
    assert rows[5] == {"prompt": "0%2=", "answer": "0", "dataset": "puzzles"}
    data = PromptDataModule("tiny", train=Mixture(**files), batch_size=2)
    data.setup("fit")
    assert Counter(prompt.dataset for prompt in data.prompts["train"]) == {"sums": 5, "puzzles": 3}
    assert [each.place.split()[1] for each in data.answered("train", "answer", datasets={"puzzles"})] == ["5", "6", "7"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sources": {}}, "no sources"),
        ({"sources": {"a": "gone.jsonl"}}, r"data set 'a' of the Mixture: There is no file gone\.jsonl"),
        ({"sources": {"a": [{"x": 1}]}, "columns": {"b": {}}}, "names 'b', which is none of its data sets a"),
        ({"sources": {"a": [{"x": 1}]}, "columns": {"a": {"y": "z"}}}, r"row 0 .*data set 'a'.* lacks the column 'z'"),
        ({"sources": {"a": [{"prompt": "x", "dataset": "b"}]}}, "has 'b' in column 'dataset', where the Mixture"),
        ({"sources": {"a": {"pth": "x"}}}, "data set 'a' of the Mixture"),
    ],
)
def test_a_mixture_that_cannot_be_read_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        list(Mixture(**change).rows())


def test_a_row_without_the_name_of_its_data_set_is_named() -> None:
    rows = [{"prompt": "1%2=", "dataset": "sums"}, {"prompt": "2%3="}]
    data = PromptDataModule("tiny", train=rows, mixture=MixtureWeights(), batch_size=1)  # pyrefly: ignore[bad-argument-type]
    with pytest.raises(ValueError, match="row 1 of the list given has None in column 'dataset'"):
        data.setup("fit")


def test_doctor_samples_each_data_set() -> None:
    prompts = prompts_of(DATASETS)
    assert [prompt.dataset for prompt in by_turns(prompts)[:4]] == ["sums", "puzzles", "never", "sums"]
    assert by_turns(prompts_of([""] * 5)) == prompts_of([""] * 5)


def test_prompts_to_complete_need_no_data_set() -> None:
    rows = [{"prompt": "1%2="}, {"prompt": "2%3=", "dataset": "sums"}]
    data = PromptDataModule("tiny", train=rows, predict=rows, mixture=MixtureWeights())  # pyrefly: ignore[bad-argument-type]
    data.setup("predict")
    assert [prompt.dataset for prompt in data.prompts["predict"]] == ["", "sums"]


def test_a_column_that_names_no_data_sets_is_refused() -> None:
    rows = [{"prompt": "1%2=", "dataset": str(number)} for number in range(101)]
    data = PromptDataModule("tiny", train=rows, mixture=MixtureWeights(), batch_size=1)  # pyrefly: ignore[bad-argument-type]
    with pytest.raises(ValueError, match="column 'dataset' of the list given names 101 data sets"):
        data.setup("fit")


# ---- rewards ---------------------------------------------------------------------------------------


def test_a_reward_function_scores_its_data_sets_alone(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "def of_sums(completion, answer): return float(completion == answer)\n"
        "def of_puzzles(completions, hint): return [2.0] * len(completions)\n"
    )
    functions = load_rewards(
        [
            RewardSpec(f"{tmp_path}/mine.py:of_sums", datasets=["sums"]),
            RewardSpec(f"{tmp_path}/mine.py:of_puzzles", datasets=["puzzles"]),
        ]
    )
    groups = [group for group in ragged_groups() if group.rollouts][:2]
    columns = {"sums": {"answer": "x"}, "puzzles": {"hint": "y"}}
    for group, name in zip(groups, columns, strict=True):
        group.prompt = replace(group.prompt, dataset=name, columns=columns[name])
        for rollout in group.rollouts:
            rollout.prompt = group.prompt
    runner = RewardRunner(functions)
    for group in groups:
        runner.submit(group)
    runner.gather()
    runner.close()
    assert [rollout.rewards for rollout in groups[0].rollouts] == [{"of_sums": 0.0, "of_puzzles": None}] * 5
    assert {rollout.reward for rollout in groups[1].rollouts} == {2.0}
    assert {rollout.rewards["of_sums"] for rollout in groups[1].rollouts} == {None}


def test_the_first_reward_function_that_applies_decides_what_is_correct() -> None:
    rule = PassRule.among(["a", "b"], None, 1.0, by_dataset=True)
    assert [rule.passes(each) for each in ({"a": None, "b": 1.0}, {"a": 0.0, "b": 1.0}, {"a": 1.0, "b": None})] == [
        True,
        False,
        True,
    ]
    assert not PassRule.among(["a", "b"], None, 1.0).passes({"a": None, "b": 1.0})
    assert str(rule) == "a or b >= 1"


# ---- plug-ins --------------------------------------------------------------------------------------


def mixed_groups() -> list[RolloutGroup]:
    """Ragged groups of two data sets by turns."""
    groups = ragged_groups()
    for number, group in enumerate(groups):
        group.prompt = replace(group.prompt, dataset=("sums", "puzzles")[number % 2])
        for rollout in group.rollouts:
            rollout.prompt = group.prompt
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    assert {rollout.prompt.dataset for rollout in rollouts} == {"sums", "puzzles"}
    return groups


def update_of(groups: Sequence[RolloutGroup], *plugins: Plugin, **changes: Any) -> torch.Tensor:
    learner, steps = make_learner(
        objective=Objective("dapo", epsilon=LOW, epsilon_high=HIGH), plugins=plugins, **changes
    )
    learner.learn(groups)
    return steps.gradients[0]


@pytest.mark.parametrize("max_tokens", [20, 10_000])
def test_each_method_credits_the_rows_of_its_data_set_alone(max_tokens: int) -> None:
    """By the gradient, against one token after another in float64."""
    alternating, falling = Alternating(), Falling()

    def of_token(rollout: Any, advantage: float, token: int) -> float:
        method = alternating if rollout.prompt.dataset == "sums" else falling
        return method.of_token(rollout, advantage, token)

    expected = reference_gradient(mixed_groups(), "dapo", of_token)
    plugins = [restricted("a", alternating, ["sums"]), restricted("b", falling, ["puzzles"])]
    found = update_of(mixed_groups(), *plugins, max_tokens_per_micro_batch=max_tokens)
    assert float((found - expected).norm() / expected.norm()) < 1e-6

    def of_sums(rollout: Any, advantage: float, token: int) -> float:
        return alternating.of_token(rollout, advantage, token) if rollout.prompt.dataset == "sums" else advantage

    expected = reference_gradient(mixed_groups(), "dapo", of_sums)
    found = update_of(mixed_groups(), plugins[0], max_tokens_per_micro_batch=max_tokens)
    assert float((found - expected).norm() / expected.norm()) < 1e-6


def test_imitation_of_one_data_set_adds_nothing_to_the_gradient_of_the_other() -> None:
    limited = update_of(mixed_groups(), restricted("imitated", Imitated(), ["sums"]))
    alone = mixed_groups()
    for group in alone:
        if group.prompt.dataset == "puzzles":
            group.rollouts = []
    for rollout in (rollout for group in alone for rollout in group.rollouts):
        rollout.reward, rollout.rewards = float("nan"), {"exact": None}
    imitation = update_of(alone, Imitated())
    assert float((limited - update_of(mixed_groups()) - imitation).abs().max()) < 1e-10
    assert float(imitation.norm()) > 1e-3


@dataclass
class Half(Plugin):
    """Chooses the first half of each group, and shapes advantages."""

    writes = frozenset({"chosen", "advantage"})
    factor: float = 2.0

    def on_batch(self, batch: Batch) -> None:
        for group in batch.groups:
            for place, rollout in enumerate(group.rollouts):
                batch.set("chosen", rollout, place < len(group.rollouts) // 2)
        self._compare(batch)
        for rollout in batch.rollouts:
            batch.set("advantage", rollout, self.factor * rollout.advantage)

    def _compare(self, batch: Batch) -> None: ...


@dataclass
class Counting(Half):
    """Leaves the others out of the statistics too."""

    def _compare(self, batch: Batch) -> None:
        batch.compare()


@pytest.mark.parametrize(("kind", "other"), [*product([Half, Counting], repeat=2)])
def test_rollouts_are_chosen_and_advantages_shaped_as_if_the_data_sets_were_apart(kind: Any, other: Any) -> None:
    """Against batches of one data set each, which the plug-in has for itself."""
    together = mixed_groups()
    plugins = [restricted("a", kind(2.0), ["sums"]), restricted("b", other(3.0), ["puzzles"])]
    make_learner(plugins=plugins)[0].learn(together)
    for name, alone in (("sums", kind(2.0)), ("puzzles", other(3.0))):
        apart = [group for group in mixed_groups() if group.prompt.dataset == name]
        make_learner(plugins=[alone])[0].learn(apart)
        own = [group for group in together if group.prompt.dataset == name]
        found, expected = (
            [rollout.advantage for group in groups for rollout in group.rollouts] for groups in (own, apart)
        )
        assert found == pytest.approx(expected, nan_ok=True)
        assert any(value == value for value in found)


def test_rollouts_are_not_compared_again_with_the_whole_batch_where_others_are_chosen_too() -> None:
    """The statistics would depend on the order of the plug-ins."""
    plugins = [restricted("a", Counting(), ["sums"]), restricted("b", Half(), ["puzzles"])]
    with pytest.raises(ValueError, match=r"Counting.on_batch calls batch.compare, but .* needs the whole batch, in"):
        make_learner(plugins=plugins, advantages=Advantages("reinforce_plus_plus"))[0].learn(mixed_groups())


def _even(number: int) -> torch.Tensor:
    return torch.arange(number) % 2 == 0


@dataclass
class Sparse(Plugin):
    """Trains on every other token, with weight 2."""

    writes: ClassVar[frozenset[str]] = frozenset({"mask", "weight"})

    def on_minibatch(self, step: Step) -> None:
        for rollout in step.rollouts:
            sparse = _even(rollout.completion.num_trained)
            step.set("mask", rollout, sparse)
            step.set("weight", rollout, 2 * sparse)


def test_masks_and_weights_of_tokens_leave_other_data_sets_whole() -> None:
    rollouts = [rollout for group in mixed_groups() for rollout in group.rollouts]
    step = make_step(rollouts)
    for name in ("sums", "puzzles"):
        limited = restricted("sparse", Sparse(), [name])
        ask(limited, "on_minibatch", step.of(limited, "on_minibatch"))
        for rollout in rollouts:
            assert rollout.columns.keys() == (
                {"mask", "weight"} if name in ("puzzles", rollout.prompt.dataset) else set()
            )
    for rollout in rollouts:
        sparse = _even(rollout.completion.num_trained)
        assert torch.equal(rollout.columns["mask"], sparse)
        assert torch.equal(rollout.columns["weight"], 2.0 * sparse)


def test_a_token_of_a_data_set_without_a_mask_or_a_weight_is_trained_on_as_it_is() -> None:
    """By the gradient: of rows of the one data set as with the plug-in, of the others as without."""
    whole, sparse = update_of(mixed_groups()), update_of(mixed_groups(), Sparse())
    parts = [update_of(mixed_groups(), restricted("sparse", Sparse(), [name])) for name in ("sums", "puzzles")]
    assert float((sum(parts) - whole - sparse).abs().max()) < 1e-10
    assert float((parts[0] - whole).norm()) > 1e-3 and float((parts[1] - whole).norm()) > 1e-3


def test_imitation_of_each_data_set_adds_a_mean_of_its_own() -> None:
    """Two plug-ins with the same fields are two sources of weights."""
    whole = update_of(mixed_groups())
    limited = [restricted("imitated", Imitated(), [name]) for name in ("sums", "puzzles")]
    added = [update_of(mixed_groups(), plugin) - whole for plugin in limited]
    assert float((update_of(mixed_groups(), *limited) - whole - sum(added)).abs().max()) < 1e-10
    assert all(float(each.norm()) > 1e-3 for each in added)


@dataclass
class Told(Plugin):
    """Keeps what its hooks are told of."""

    def setup(self) -> None:
        self.of: list[str] = []

    def on_requests(self, requests: Sequence[Request]) -> Sequence[Request]:
        self.of += [request.prompt.prompt_id for request in requests]
        return requests

    def on_completion(self, completion: Any) -> Answer:
        self.of.append(completion.request.prompt.prompt_id)
        return Answer(drop=[completion.request.key])

    def on_group(self, group: RolloutGroup) -> None:
        self.of.append(group.prompt.prompt_id)

    def rewrite(self, prompt: Prompt, writer: Any, longest: bool = False) -> Prompt:
        self.of.append(prompt.prompt_id)
        return replace(prompt, text="rewritten")

    def on_update_end(self, batch: GroupBatch) -> dict[str, float]:
        self.of += [group.prompt.prompt_id for group in batch.groups]
        return {"groups": len(batch.groups)}


def test_hooks_hear_of_the_rows_of_their_data_sets_alone() -> None:
    own, other = (
        make_rollout(prompt.token_ids, [3], 1.0, None, prompt.prompt_id) for prompt in prompts_of(["sums", "puzzles"])
    )
    own.prompt, other.prompt = prompts_of(["sums", "puzzles"])
    for rollout in (own, other):
        rollout.completion.request = replace(rollout.completion.request, prompt=rollout.prompt)
    groups = [RolloutGroup(each.prompt, [each]) for each in (other, own)]
    batch = GroupBatch(groups, 0, PassRule(), lambda own: [own])
    requests = [each.completion.request for each in (other, own)]
    told = fresh(restricted("told", Told(), ["sums"]))
    assert ask(told, "on_requests", requests) == requests[1:]
    assert ask(told, "on_completion", own.completion).drop == [own.completion.request.key]
    assert ask(told, "on_completion", other.completion) is ask(told, "on_group", groups[0]) is None
    assert ask(told, "rewrite", own.prompt, None).text == "rewritten"
    assert ask(told, "rewrite", other.prompt, None) is other.prompt
    assert ask(told, "on_update_end", batch) == {"groups": 1}
    ask(told, "on_group", groups[1])
    assert told.of == [own.prompt.prompt_id] * 5


class Dear(Plugin):
    """Adds a loss to tokens, and names no candidates, which say whose."""

    writes: ClassVar[frozenset[str]] = frozenset({"added_loss"})

    def loss(self, tokens: Any) -> None:
        tokens["added_loss"] = -tokens.logprobs_N


def test_a_loss_of_all_tokens_cannot_be_limited() -> None:
    with pytest.raises(ValueError, match="dear adds a loss to the tokens of all data sets, which can"):
        restricted("dear", Dear(), ["a"])


def test_names_and_fields_of_limited_plugins() -> None:
    plugins = make_plugins([{"echo": {"datasets": ["a", "b"]}}, "gigpo:datasets=c"])
    assert list(plugins) == ["echo (a, b)", "gigpo (c)"]
    assert [sorted(plugin.datasets) for plugin in plugins.values()] == [["a", "b"], ["c"]]
    assert len(make_plugins([{"gigpo": {"datasets": "a"}}, {"gigpo": {"datasets": "b"}}])) == 2


@pytest.mark.parametrize(
    ("specs", "message"),
    [
        ([{"gigpo": {"datasets": "a"}}, {"return_to_go": {"datasets": ["b", "a"]}}], "both decide what each turn"),
        ([{"gigpo": {"datasets": "a"}}, "return_to_go"], "or limit each to other data sets"),
        ([{"distill": {"datasets": "a"}}, {"distill": {"datasets": "b"}}], "both decide which further tokens"),
        (
            [{"environments": {"datasets": name, "tools": CALCULATE}} for name in "ab"],
            "both decide what turns are answered by",
        ),
        ([{"dars_equal": {"datasets": "a"}}], "spends the completions of all prompts, which cannot be limited"),
        ([{"april": {"datasets": "a"}}], "does nothing by rows, which cannot be limited"),
        ([{"treepo": {"datasets": "a"}}], "acts on all requests of a rollout, which cannot be limited"),
        ([{"router_loss": {"datasets": "a"}}], "changes the optimizer step as a whole"),
        ([{"echo": {"datasets": [1]}}], "give names of data sets"),
    ],
)
def test_limits_that_cannot_hold_are_refused(specs: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_plugins(specs)


def test_two_for_the_same_rows_are_refused_as_before() -> None:
    with pytest.raises(ValueError, match="which both decide what each turn is trained on with; take one of them"):
        check_decisions([("a", Alternating()), ("b", Falling())])


def _writes_rows(plugin: Plugin) -> bool:
    """Whether it can be limited to data sets, and writes columns of rollouts."""
    try:
        restricted("any", plugin, ["none"])
    except ValueError:
        return False
    return bool(plugin.writes - {"examples"})


@pytest.mark.parametrize("name", [name for name, plugin in shipped().items() if _writes_rows(plugin)])
def test_a_shipped_method_does_nothing_in_a_batch_without_rows_of_its_data_set(name: str) -> None:
    """Small data sets are in some batches alone."""
    plugin = shipped()[name]
    plugin = replace(plugin, keep=2) if isinstance(plugin, Subset) else plugin
    limited, groups = fresh(restricted(name, plugin, ["none"])), mixed_groups()
    if "asks_teacher" in limited.traits:
        vars(limited)["teacher"] = SimpleNamespace(score=lambda _, rollouts, *others: dict.fromkeys(rollouts))
    batch, rollouts = learning_batch(groups), [rollout for group in groups for rollout in group.rollouts]
    for rollout in rollouts:
        rollout.advantage = 0.5
    for column in limited.writes:
        hook = COLUMNS[column].hook
        if hook in ("on_batch", "on_minibatch"):
            ask(limited, hook, batch.of(limited) if hook == "on_batch" else make_step(rollouts).of(limited, hook))
    assert not any(rollout.columns for rollout in rollouts)
    assert {rollout.advantage for rollout in rollouts} == {0.5}


# ---- metrics ---------------------------------------------------------------------------------------


def test_metrics_of_each_data_set() -> None:
    groups = mixed_groups()
    logs = dataset_metrics(groups, GroupRewards.of(groups, ["exact"]), Ranks())
    for name in ("sums", "puzzles"):
        its = [group for group in groups if group.prompt.dataset == name]
        rewards = torch.tensor([rollout.reward for group in its for rollout in group.rollouts]).double()
        assert logs[f"datasets/{name}/reward"] == pytest.approx(float(rewards.nanmean()))
        assert logs[f"datasets/{name}/prompts"] == len(its)
