"""Fields of other trainers: the table is whole, and what is made of a config is right."""

from __future__ import annotations

import dataclasses
import inspect
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lit_grpo.cli.command_line import GROUPS
from lit_grpo.cli.parsing.errors import InputParser
from lit_grpo.data.module import PromptDataModule
from lit_grpo.methods import make_plugins
from lit_grpo.methods.entropy_target import EntropyTarget
from lit_grpo.methods.tr_dpo import MovingReference
from lit_grpo.module import GRPOModule
from lit_grpo.optim import WarmupDecayLR
from lit_grpo.tools.migration import SFT, TRL, VERL, Counterpart, convert_trl, convert_trl_sft
from lit_grpo.update.objective.recipes import RECIPES

LEAST_SFT = {"model_name_or_path": "tiny", "dataset_name": "some/data", "max_steps": 10}
LEAST = LEAST_SFT | {"reward_funcs": ["accuracy_reward"]}


def convert(**fields: Any) -> dict[str, Any]:
    return convert_trl(LEAST | fields).config


def convert_sft(**fields: Any) -> dict[str, Any]:
    return convert_trl_sft(LEAST_SFT | fields).config


@pytest.mark.parametrize(("trainer", "table"), [("grpo", TRL), ("sft", SFT)])
def test_every_field_of_trl_is_in_the_table_with_its_default(trainer: str, table: dict[str, Counterpart]) -> None:
    trl = pytest.importorskip("trl")
    from trl.scripts import grpo, utils

    own = (trl.GRPOConfig, grpo.GRPOScriptArguments) if trainer == "grpo" else (trl.SFTConfig, utils.ScriptArguments)
    kinds = (*own, trl.ModelConfig, trl.DatasetMixtureConfig)
    fields = {field.name: field for kind in kinds for field in dataclasses.fields(kind)}
    assert set(fields) == set(table)
    for name, field in fields.items():
        default, ours = field.default, table[name].default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory() or None
        assert ours in (default, [], None) if default in (None, []) else ours == default, name


def is_parameter(field: str) -> bool:
    """Whether it is a parameter that some loss takes."""
    place, _, name = field.rpartition(".")
    return place == "model.objective.parameters" and any(name in recipe.parameters for recipe in RECIPES.values())


def test_every_counterpart_is_a_field_of_ours() -> None:
    parser = InputParser()
    parser.add_class_arguments(GRPOModule, "model")
    parser.add_class_arguments(PromptDataModule, "data")
    ours = {action.dest for action in parser._actions}
    for name, row in (TRL | VERL).items():
        assert bool(row.fields) == (row.kind in ("same", "changed")), name
        assert row.note or row.kind == "same", name
        for field in row.fields:
            if field.startswith(("model.", "data.")):
                groups = (".optimizer.", ".generator.", ".lr_scheduler.", ".lora.", ".eval_sampling.")
                assert field in ours or any(group in field for group in groups) or is_parameter(field), (name, field)


def test_batches_keep_their_completions_and_steps() -> None:
    config = convert(
        per_device_train_batch_size=4, gradient_accumulation_steps=8, num_generations=8, steps_per_generation=16
    )
    assert config["data"]["batch_size"] * config["model"]["num_generations"] == 4 * 16
    assert config["model"]["num_minibatches"] == 2
    half = convert_trl(LEAST | {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 4}, devices=2).config
    assert half["data"]["batch_size"] == 4 and half["trainer"]["devices"] == 2
    epochs = {"max_steps": -1, "num_train_epochs": 2.0, "gradient_accumulation_steps": 2, "num_iterations": 3}
    assert convert_trl(LEAST | epochs, rows=21).config["trainer"]["max_steps"] == 2 * 10 * 3


def test_losses_keep_their_bounds() -> None:
    objective = convert(loss_type="grpo", epsilon_high=0.28, beta=0.04)["model"]["objective"]
    assert (objective["loss"], objective["epsilon"], objective["epsilon_high"]) == ("grpo", 0.2, 0.28)
    assert objective["kl"] == {"beta": 0.04, "importance_weighted": True}
    assert convert(importance_sampling_level="sequence")["model"]["objective"]["loss"] == "gspo"
    vllm = convert(use_vllm=True, vllm_importance_sampling_mode="token_truncate")["model"]
    assert vllm["objective"]["correction"] == {"mode": "token_truncate", "high": 3.0}
    assert vllm["generator"]["class_path"] == "vllm"
    assert "correction" not in convert()["model"]["objective"]
    assert convert(multi_objective_aggregation="normalize_then_sum")["model"]["advantages"] == {"estimator": "gdpo"}


def test_what_is_a_method_here_becomes_a_plug_in_with_its_fields() -> None:
    assert "rollout" not in convert(entropy_coef=0.01)
    config = convert(sync_ref_model=True, beta=0.1, ref_model_sync_steps=8, use_adaptive_entropy=True)
    moving, held = make_plugins(config["rollout"]["plugins"]).values()
    assert moving == MovingReference(0.6, 8) and held == EntropyTarget(0.2)
    assert "entropy" not in config["model"]["objective"]


def test_all_problems_are_told_at_once_each_with_its_remedy() -> None:
    with pytest.raises(ValueError) as caught:
        convert(top_k=50, warmup_ratio=0.1, max_prompt_length=256, optim="lomo", reward_funcs=["mine"], max_staleness=4)
    said = str(caught.value).splitlines()
    assert [line.split()[0] for line in said] == [
        *("top_k", "warmup_ratio", "max_prompt_length", "max_staleness", "optim", "reward_funcs")
    ]
    assert "warmup_steps: 0.1" in said[1] and "--data.max_prompt_tokens" in said[2]


def test_validation_on_the_training_rows_is_refused_with_the_remedy(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text("{}\n")
    with pytest.raises(
        ValueError, match=r"would be the training rows.* give fit --data\.validation a file of held-out"
    ):
        convert(dataset_name=str(file), eval_strategy="steps")
    with pytest.raises(ValueError, match="would be the training rows"):
        convert(dataset_test_split="train", eval_strategy="steps")
    assert convert(eval_strategy="steps")["data"]["validation"]["init_args"]["split"] == "test"


def test_every_field_of_a_group_that_is_named_is_one_of_ours() -> None:
    for name, row in (TRL | VERL).items():
        for group, field in re.findall(r"\b([a-z_]+)\.([a-z_]+)", " ".join((row.note, *row.fields))):
            if group in GROUPS:
                assert field in inspect.signature(GROUPS[group]).parameters, (name, group, field)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"num_generation": 4}, "TRL 1.16 has no field 'num_generation'"),
    ({"top_p": 0.9}, "top_p is 0.9, which cannot be had: log-probs of truncated sampling"),
    ({"num_generations": 3}, "8 completions, which make no whole number of prompts"),
    ({"per_device_train_batch_size": 4, "steps_per_generation": 2}, "a step is made of whole prompts"),
    ({"loss_type": "cispo"}, "largest weight is epsilon_high; give it"),
    ({"max_tool_calling_iterations": 3}, "set max_turns of the plug-in environments"),
    ({"reward_model_name_or_path": "a/b"}, "add the reward reward_model with its argument model"),
    ({"reward_funcs": ["mine"]}, "reward_funcs has 'mine'"),
    ({"optim": "lomo"}, "optim is 'lomo'"),
    ({"env": {"A": "1"}}, "set them in the shell"),
    ({"max_steps": -1}, "num_train_epochs is 3.0, but a run ends after a number of optimizer steps"),
]
REFUSED_SFT: list[tuple[dict[str, Any], str]] = [
    ({"completion_only_loss": False}, "prompts are always masked"),
    ({"packing": True}, "packing is True, which cannot be had: rows are packed anyway"),
    ({"loss_type": "dft"}, "loss_type is 'dft', which cannot be had; take nll"),
    ({"chat_template_path": "a"}, "put the template into the policy's folder"),
    ({"num_generations": 4}, "no field 'num_generations' for SFT"),
    ({"max_seq_length": 4}, "TRL 1.16 has no such field: give max_length"),
]


@pytest.mark.parametrize(
    ("made", "fields", "sentence"),
    [*((convert, *row) for row in REFUSED), *((convert_sft, *row) for row in REFUSED_SFT)],
)
def test_what_cannot_be_had_is_refused_in_one_sentence(
    made: Callable[..., Any], fields: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(sentence)):
        made(**fields)


WSD: dict[str, dict[str, Any]] = {
    "warmup_stable_decay": {"num_decay_steps": 3},
    "warmup_stable_decay linear": {"num_decay_steps": 4, "decay_type": "linear", "min_lr_ratio": 0.0},
    "warmup_stable_decay stable": {"num_decay_steps": 4, "num_stable_steps": 2, "num_cycles": 0.5},
}


@pytest.mark.parametrize("shape", ["linear", "cosine", "constant_with_warmup", *WSD])
@pytest.mark.parametrize("warmup", [0, 4])
def test_schedules_are_those_of_transformers(shape: str, warmup: int) -> None:
    from transformers import get_scheduler

    further, shape = WSD.get(shape), shape.partition(" ")[0]

    rates = []
    for ours in (False, True):
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=2.0)
        if ours:
            given = {"lr_scheduler_type": shape, "warmup_steps": warmup, "lr_scheduler_kwargs": further}
            schedule: Any = WarmupDecayLR(optimizer, **convert(**given)["model"]["lr_scheduler"]["init_args"])
        else:
            schedule = get_scheduler(shape, optimizer, warmup, 10, further)
        rates.append([])
        for _ in range(10):
            rates[-1].append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            schedule.step()
    assert all(math.isclose(one, other, abs_tol=1e-12) for one, other in zip(*rates, strict=True))


@pytest.mark.parametrize(
    ("shape", "further", "message"),
    [
        ("warmup_stable_decay", None, "lr_scheduler_kwargs has no num_decay_steps, which TRL needs too"),
        (
            "warmup_stable_decay",
            {"num_decay_steps": 3, "min_lr_ratio": 0.1},
            "has min_lr_ratio 0.1, .* take 0, or give",
        ),
        (
            "warmup_stable_decay",
            {"num_decay_steps": 3, "decay": "linear"},
            "'decay', which transformers' get_wsd_sched",
        ),
        (
            "cosine",
            {"num_cycles": 2},
            "lr_scheduler_kwargs has num_cycles, which cosine cannot have here; leave it out",
        ),
        ("polynomial", None, "is 'polynomial'; take linear, .* or warmup_stable_decay, or give a class"),
    ],
)
def test_schedules_that_cannot_be_had_are_refused(shape: str, further: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        convert(lr_scheduler_type=shape, lr_scheduler_kwargs=further)


@pytest.mark.parametrize(("steps", "shape"), [(10, "linear"), (10, "cosine"), (4, "constant")])
def test_a_rate_that_stays_before_it_falls_has_time_and_a_shape_to_fall(steps: int, shape: Any) -> None:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=2.0)
    with pytest.raises(ValueError, match=f"decay_steps is {steps}, with 9 steps after the warm-up and shape {shape}"):
        WarmupDecayLR(optimizer, 12, 3, shape, decay_steps=steps)


def test_what_has_no_counterpart_is_left_out_where_that_is_asked_for_and_each_field_is_named() -> None:
    given = LEAST | {"top_k": 50, "max_prompt_length": 512, "learning_rte": 1e-5, "beta": 0.04}
    with pytest.raises(
        ValueError, match="With --drop the rest is converted without top_k, max_prompt_length, learning_rte"
    ):
        convert_trl(given)
    converted = convert_trl(given, drop=True)
    assert converted.config == convert(beta=0.04)
    assert [note.split()[:3] for note in converted.notes[:3]] == [
        ["Left", "out:", "top_k"],
        ["Left", "out:", "max_prompt_length"],
        ["Left", "out:", "TRL"],
    ]
    with pytest.raises(ValueError, match=r"^reward_funcs is empty; name at least one.$"):
        convert_trl(given | {"reward_funcs": []}, drop=True)


@pytest.mark.parametrize(
    ("given", "taken"),
    [(None, "peft-default"), (["all-linear"], "all-linear"), (["q_proj", "k_proj"], ["q_proj", "k_proj"])],
)
def test_adapters_are_on_the_layers_that_trl_trains(given: Any, taken: Any) -> None:
    assert convert(use_peft=True, lora_target_modules=given)["model"]["lora"]["target_modules"] == taken


# ---- SFT ------------------------------------------------------------------------------------------------


def test_a_config_of_sft_becomes_a_run_on_examples_alone() -> None:
    config = convert_sft(
        per_device_train_batch_size=4, gradient_accumulation_steps=2, learning_rate=1e-4, max_length=4096, use_peft=True
    )
    assert config["rollout"]["plugins"] == [{"sft": {"column": "completion", "warm_up": "all"}}]
    assert config["data"] == {
        "batch_size": 8,
        "eval_batch_size": 8,
        "train": {"class_path": "HubRows", "init_args": {"path": "some/data", "split": "train"}},
        "max_prompt_tokens": 4096,
    }
    assert config["model"]["max_tokens_per_micro_batch"] == 4 * 4096 and "rewards" not in config["model"]
    assert config["model"]["optimizer"]["init_args"]["lr"] == 1e-4 and config["model"]["lora"]["r"] == 16
    assert "sampling" not in config["model"] and config["trainer"]["max_steps"] == 10
    assert make_plugins(config["rollout"]["plugins"])["sft"].numbers.first_rollout == math.inf


def test_epochs_of_sft_are_steps_over_all_rows() -> None:
    three = {"max_steps": -1, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
    assert convert_trl_sft(LEAST_SFT | three, rows=100).config["trainer"]["max_steps"] == 3 * 13
    assert convert_trl_sft(LEAST_SFT | three, rows=100, devices=2).config["trainer"]["max_steps"] == 3 * 7
    with pytest.raises(ValueError, match="give --rows N, the number of training rows, or max_steps"):
        convert_trl_sft(LEAST_SFT | three)


def test_messages_are_conversations_that_end_with_the_answer() -> None:
    config = convert_sft(assistant_only_loss=True)
    assert config["rollout"]["plugins"] == [{"sft": {"warm_up": "all"}}]
    assert (config["data"]["prompt_column"], config["data"]["cut_answers"]) == ("messages", True)
