"""The seam for methods: what a run has of them, what goes together, and that the core knows none."""

from __future__ import annotations

import ast
import math
import re
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hand_made import make_module

from lit_grpo.callbacks import RolloutScheduler
from lit_grpo.compatibility import REQUIREMENTS, SHARDS, Requirement, check_together
from lit_grpo.data.module import PromptDataModule
from lit_grpo.methods import make_plugins
from lit_grpo.methods.entropy_target import EntropyTarget
from lit_grpo.methods.tr_dpo import MovingReference
from lit_grpo.plugins import GroupBatch, Listener, Plugin
from lit_grpo.plugins.columns import COLUMNS
from lit_grpo.policy.adapters import LoraSettings
from lit_grpo.ranks import Ranks
from lit_grpo.rollout.rules import RolloutMode
from lit_grpo.rollout.session import RolloutSession
from lit_grpo.rollout.vllm.server import VLLMServerGenerator
from lit_grpo.types import Prompt, PromptBatch
from lit_grpo.update.advantages.estimator import Advantages
from lit_grpo.update.objective.corrections import Correction
from lit_grpo.update.objective.kl import KLTerm
from lit_grpo.update.objective.objective import EntropyBonus, Objective
from lit_grpo.update.plugin import Batch, TrainingRun
from lit_grpo.update.step import Step

ROOT = Path(__file__).parents[1]
CORE = ("budgets", "data", "policy", "rewards", "rollout", "scheduling", "update")
METHODS = (
    "april",
    "sortedrl",
    "arrol",
    "knapsack",
    "greso",
    "dars",
    "reinforce-ada",
    "rlep",
    "sgpo",
    "near_half",
    "curriculum",
    "reasoning.gym",
    "adhint",
    "pods",
    "d3s",
    "drpo",
    "poise",
    "copo",
    "majority.vote",
    "dps",
    "xrpo",
    "gdro",
    "noise_scale",
    "copus",
    "seco",
    "spaco",
    "capo",
    "router.loss",
    "vcpo",
    "a3po",
    "interpolated",
    "swarm",
    "entropy.target",
    "tr.dpo",
    "mixup",
    r"\w*(?<!type_)hint\w*",  # and not get_type_hints
)
TOOLS = ("doctor", "fit.check", "from.trl", "simulate")


@dataclass
class Counting(Plugin):
    """A method of a user's own, with something to remember."""

    step: int = 1

    def setup(self) -> None:
        self.count = 0

    def on_update_end(self, batch: GroupBatch) -> dict[str, float]:
        self.count += self.step
        return {"mine/count": float(self.count)}

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


def test_plug_ins_are_given_by_name_with_fields_or_by_class_path() -> None:
    plugins = make_plugins(
        ["april:max_staleness=3", {"knapsack": {"budget": 256}}, {f"{__name__}.Counting": {"step": 2}}]
    )
    assert list(plugins) == ["april", "knapsack", f"{__name__}.Counting"]
    assert plugins["april"] == RolloutMode(batches_in_work=2, leftovers="keep", max_staleness=3)
    assert plugins[f"{__name__}.Counting"] == Counting(2)
    assert make_plugins("greso") == make_plugins(["greso"]) and make_plugins([]) == {}


def test_parts_that_do_not_go_together_are_named_with_what_each_needs() -> None:
    needy = Requirement("first", needs=frozenset({"whole_groups"}))
    breaking = Requirement("second", changes={"whole_groups": "cuts groups"}, remedy="set cut to false")
    with pytest.raises(ValueError) as caught:
        check_together([needy, breaking])
    assert str(caught.value) == (
        "first needs complete groups in every update, but second cuts groups; set cut to false, or remove one of the "
        "two settings."
    )
    check_together([needy, Requirement("third", changes={"all_ranks": "lacks some"})])
    check_together([Requirement("alone", needs=frozenset({"whole_groups"}), changes={"whole_groups": "cuts them"})])


def refusal(*specs: str, data: object = None, **options: Any) -> str:
    """What a run with these plug-ins is refused with, nothing where it is not."""
    scheduler, module = RolloutScheduler(plugins=[*specs]), make_module("tiny", **options)
    try:
        scheduler.session.check(module.facts(4), scheduler._other_parts(data, module))
    except ValueError as error:
        return str(error)
    return ""


CORRECTED = Correction("token_truncate")


def test_replay_needs_ratios_to_the_sampler_and_members_that_nobody_else_counts() -> None:
    for plugins, proximal in (([], "recomputed"), (["a3po"], None)):
        objective = Objective(proximal=cast(Any, proximal))
        said = refusal("repo", *plugins, objective=objective)
        assert "repo needs probability ratios to the behavior policy of each token" in said
        assert f"{' '.join(plugins) or 'proximal recomputed'} takes" in said
        assert "set logprobs of it to recomputed, or" in said and "model.objective.correction.mode" in said
        assert refusal("repo", *plugins, objective=replace(objective, correction=CORRECTED)) == ""
        assert refusal("rlep", *plugins, objective=objective) == ""
    assert "estimator dcpo needs every completion" in refusal("rlep", advantages=Advantages("dcpo"))
    corrected = Objective(correction=CORRECTED)
    said = refusal("repo", "snapshots", objective=corrected)
    assert "rollout.plugins snapshots takes them to policies whose weights it has to keep" in said
    assert refusal("rlep", "snapshots", objective=corrected) == ""
    assert refusal("rlep") == refusal(advantages=Advantages("dcpo")) == ""


@pytest.mark.parametrize("name", ["a3po", "snapshots"])
def test_one_setting_alone_chooses_the_denominator_of_ratios(name: str) -> None:
    said = refusal(name, objective=Objective(proximal="sampled"))
    needs = f"rollout.plugins {name} needs the denominator of the probability ratio for itself"
    assert f"{needs}, but model.objective.proximal sampled sets it; remove" in said
    with pytest.raises(ValueError, match="which both decide which log-probs ratios are taken to"):
        make_plugins(["a3po", "snapshots"])


def test_the_seam_is_no_wider_than_it_has_to_be() -> None:
    members = {name for kind in (Listener, Plugin) for name in [*vars(kind), *kind.__annotations__] if name[0] != "_"}
    assert len(members) <= 56 and len(COLUMNS) <= 18 and len(REQUIREMENTS) <= 18


class OwnBonus(Plugin):
    """A plug-in of a user's own that decides the weight of the entropy bonus, and needs nothing else."""

    writes = frozenset({"entropy_coefficient"})

    def on_minibatch(self, step: Step) -> None:
        step["entropy_coefficient"] = 0.01


class OwnDenominator(Plugin):
    """Another one, of the denominator of ratios."""

    writes = frozenset({"old_logprob"})

    def on_batch(self, batch: Batch) -> None: ...


@pytest.mark.parametrize(
    ("kind", "objective", "message"),
    [
        (
            OwnBonus,
            Objective(entropy=EntropyBonus(0.1)),
            "the coefficient of the entropy bonus for itself, but model",
        ),
        (
            OwnDenominator,
            Objective(proximal="sampled"),
            "the denominator of the probability ratio for itself, but model",
        ),
    ],
)
def test_a_setting_that_a_plug_in_of_your_own_would_replace_is_not_passed_over(
    kind: type[Plugin], objective: Objective, message: str
) -> None:
    name = f"{__name__}.{kind.__name__}"
    assert f"rollout.plugins {name} needs {message}" in refusal(name, objective=objective)
    assert refusal(name) == ""
    module = make_module("tiny", objective=objective)
    with pytest.raises(ValueError, match=rf"rollout\.plugins {kind.__name__} needs {message}"):
        module.set_plugins(kind())


def test_two_plug_ins_that_decide_the_same_are_refused_where_no_names_are_given_too() -> None:
    module = make_module("tiny")
    with pytest.raises(
        ValueError, match=r"rollout\.plugins has OwnBonus and EntropyTarget, which both decide how much"
    ):
        module.set_plugins(OwnBonus(), EntropyTarget())


def test_snapshots_need_whole_weights() -> None:
    session = RolloutScheduler(plugins=["snapshots"]).session
    with pytest.raises(ValueError, match=r"snapshots needs the full weights on each rank, but trainer\.strategy fsdp2"):
        session.check(make_module("tiny").facts(4), [SHARDS])


def test_a_reference_that_moves_needs_weights_of_its_own() -> None:
    needs = "rollout.plugins tr_dpo: it needs a reference policy with weights of its own"
    assert f"{needs}, but model.objective.kl.beta 0.0 leaves the KL term out; set model" in refusal("tr_dpo")
    with_term = Objective(kl=KLTerm(0.1))
    bare = "takes the policy without its adapters, which needs no memory and cannot move; remove one of the two setti"
    assert f"{needs}, but model.lora {bare}" in refusal("tr_dpo", objective=with_term, lora=LoraSettings())
    assert refusal("tr_dpo", objective=with_term) == ""
    with pytest.raises(ValueError, match="tr_dpo needs a reference policy with weights of its own, which a run has"):
        MovingReference().on_train_start(TrainingRun(cast(Any, None), None, 0, 1, Ranks()))


def test_an_entropy_target_needs_the_bonus_for_itself_and_the_whole_batch_where_the_loss_is_no_mean_over_tokens() -> (
    None
):
    said = refusal("entropy_target", objective=Objective(entropy=EntropyBonus(0.1)))
    assert "entropy_target needs the coefficient of the entropy bonus for itself, but model.objective.entropy" in said
    scheduler = RolloutScheduler(plugins=["entropy_target"])
    for loss, needs_batch in (("dapo", False), ("grpo", True)):
        module = make_module("tiny", objective=Objective(loss))
        scheduler.session.check(module.facts(4), [])
        (part,) = scheduler.session.parts()
        assert ("all_ranks" in part.needs) == needs_batch


def test_what_decodes_beside_an_update_needs_devices_of_its_own() -> None:
    said = "periodic: it needs a generator with devices of its own, and model.generator SlotGenerator decodes on"
    assert said in refusal("periodic")
    assert refusal("periodic", generator=VLLMServerGenerator()) == ""
    said = refusal("april:at_sync=keep")
    assert "SlotGenerator drops them; take at_sync=recompute" in said or "prompts from" in said


def test_a_plug_in_that_is_given_to_two_runs_begins_anew_in_each() -> None:
    given = {"mine": Counting(2)}
    ranks = SimpleNamespace(gather=lambda own: [own], size=1, rank=0)
    run: Any = SimpleNamespace(ranks=ranks, pass_rule=None, policy_version=1)
    batch = PromptBatch([])
    for _ in range(2):
        assert RolloutSession(given).end_update(run, batch)["plugins"] == {"mine/count": 2.0}


def test_a_plug_in_of_ones_own_is_told_of_every_batch_and_kept_in_checkpoints() -> None:
    session = RolloutSession(make_plugins([f"{__name__}.Counting:step=2"]))
    ranks = SimpleNamespace(gather=lambda own: [own], size=1, rank=0)
    run: Any = SimpleNamespace(ranks=ranks, pass_rule=None, policy_version=1)
    batch = PromptBatch([])
    assert session.end_update(run, batch)["plugins"] == {"mine/count": 2.0}
    again = RolloutSession(make_plugins([f"{__name__}.Counting:step=2"]))
    again.load_state_dict(session.state_dict(ranks), ranks)  # pyrefly: ignore[bad-argument-type]
    assert again.end_update(run, batch)["plugins"] == {"mine/count": 4.0}


@dataclass
class Alternating(Counting):
    def on_update_end(self, batch: GroupBatch) -> dict[str, float]:
        logged = super().on_update_end(batch)
        return logged if self.count % 2 else {"mine/even": 1.0}


def test_a_figure_that_a_plug_in_leaves_out_is_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler, module = RolloutScheduler(), make_module("tiny")
    scheduler.session = RolloutSession({"mine": Alternating(1)})
    logs: list[dict[str, float]] = []
    monkeypatch.setattr(module, "log_dict", lambda values: logs.append(dict(values)))
    trainer: Any = SimpleNamespace(max_steps=-1)
    for number in range(3):
        batch = PromptBatch([])
        scheduler.on_train_batch_end(trainer, module, None, batch, number)
    own = [log for log in logs if "mine/count" in log]
    assert own[0] == {"mine/count": 1.0}
    assert math.isnan(own[1]["mine/count"]) and own[1]["mine/even"] == 1.0
    assert own[2]["mine/count"] == 3.0 and math.isnan(own[2]["mine/even"])


# ---- rings ---------------------------------------------------------------------------------------------


def test_the_core_names_no_method_and_no_tool() -> None:
    paths = [path for room in CORE for path in (ROOT / "lit_grpo" / room).rglob("*.py")]
    paths += [*(ROOT / "lit_grpo").glob("[a-z]*.py"), *(ROOT / "callbacks").glob("*.py")]
    wanted = re.compile(rf"\b({'|'.join((*METHODS, *TOOLS))})\b", re.IGNORECASE)
    named = {
        f"{path.relative_to(ROOT)}: {found.group()}"
        for path in paths
        for word in words_of(path)
        if (found := wanted.search(word))
    }
    assert named == set()


def words_of(path: Path) -> set[str]:
    """Names and texts of a file's code; examples in docstrings are no code."""
    tree = ast.parse(path.read_text())
    holders = (ast.Module, ast.ClassDef, ast.FunctionDef)
    said = {ast.get_docstring(node, clean=False) for node in ast.walk(tree) if isinstance(node, holders)}
    words: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value not in said:
            words.add(node.value)
        elif isinstance(node, ast.ClassDef | ast.FunctionDef):
            words.add(node.name)
        elif isinstance(node, ast.ImportFrom):
            words |= {str(node.module), *(alias.name for alias in node.names)}
        elif isinstance(node, ast.Name | ast.Attribute):
            words.add(node.id if isinstance(node, ast.Name) else node.attr)
    return words


@pytest.mark.parametrize("name", ["dps", "greso", "near_half", "prompt_gdro", "phases", "knapsack", "buckets", "rlep"])
def test_what_goes_by_earlier_visits_is_told_that_no_prompt_comes_twice(name: str) -> None:
    scheduler, module = RolloutScheduler(plugins=[name]), make_module("tiny")
    data = PromptDataModule(batch_size=4)
    data.prompts["train"] = [Prompt(f"train/{number}", (1,), "") for number in range(400)]
    candidates = 8 if name == "dps" else 1
    said = {}
    for steps in (2, 200):
        trainer: Any = SimpleNamespace(max_steps=steps, num_training_batches=math.inf, max_epochs=-1, world_size=1)
        trainer.datamodule = data
        said[steps] = scheduler._unvisited(trainer, module)
    (sentence,) = said[2]
    needed = f"{name} needs prompts that are sampled more than once"
    assert f"{needed}, but this run asks for {8 * candidates} of 400 training" in sentence
    trainer.max_steps = 2
    assert said[200] == RolloutScheduler(plugins=["uniform", "curriculum"])._unvisited(trainer, module) == []
