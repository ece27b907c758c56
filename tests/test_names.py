"""Short names on the command line, in configs and in Python."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
from jsonargparse._actions import ActionConfigFile
from jsonargparse._util import import_object
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable

from lit_grpo.cli.parsing.errors import InputParser
from lit_grpo.cli.parsing.names import DEFAULTS, FIELDS, GENERATORS, OPTIMIZERS
from lit_grpo.rewards.loading import REWARDS
from lit_grpo.rollout.generator import Generator


class Model:
    """Has the fields that know short names."""

    def __init__(
        self,
        generator: Generator | None = None,
        optimizer: OptimizerCallable | None = None,
        lr_scheduler: LRSchedulerCallable | None = None,
    ) -> None: ...


def test_a_field_may_stand_before_its_class(tmp_path: Path) -> None:
    config = {"generator": {"class_path": "slots", "init_args": {"num_slots": 64}}}
    early = parse(tmp_path, "--model.generator.adapters", "alone", "--model.generator", "vllm", config=config)
    late = parse(tmp_path, "--model.generator", "vllm", "--model.generator.adapters", "alone", config=config)
    assert early == late and early.generator.init_args.adapters == "alone"
    assert early.generator.class_path == GENERATORS["vllm"]


def parse(folder: Path, *arguments: str, config: Any = None) -> Any:
    parser = InputParser()
    parser.add_argument("--config", action=ActionConfigFile)
    parser.add_class_arguments(Model, "model")
    parser.set_defaults(DEFAULTS)
    (folder / "config.yaml").write_text(json.dumps({"model": config or {}}))
    return parser.parse_args(["--config", str(folder / "config.yaml"), *arguments]).model


@pytest.mark.parametrize("path", [path for names in (*FIELDS.values(), REWARDS) for path in names.values()])
def test_every_name_stands_for_something(path: str) -> None:
    module, _, name = path.rpartition(".")
    if module.startswith("bitsandbytes"):
        pytest.importorskip("bitsandbytes")
    assert callable(getattr(importlib.import_module(module), name))


SLOTS = {"class_path": GENERATORS["slots"], "init_args": {"num_slots": 5}}
GIVEN = {
    "a field without a class": (["--model.generator.num_slots", "8"], None, "slots", 8),
    "a name and a field": (["--model.generator", "vllm", "--model.generator.num_slots", "8"], None, "vllm", 8),
    "a name in a config": ([], {"class_path": "vllm", "init_args": {"num_slots": 8}}, "vllm", 8),
    "a name over a path": (["--model.generator", "vllm_server"], SLOTS, "vllm_server", 5),
    "a field over a path": (["--model.generator.num_slots", "8"], SLOTS, "slots", 8),
    "a path": (["--model.generator", GENERATORS["vllm"]], None, "vllm", 64),
}


@pytest.mark.parametrize("case", GIVEN)
def test_a_generator_is_named_shortly_or_not_at_all(tmp_path: Path, case: str) -> None:
    arguments, generator, name, num_slots = GIVEN[case]
    parsed = parse(tmp_path, *arguments, config={"generator": generator} if generator else None).generator
    assert import_object(parsed.class_path) is import_object(GENERATORS[name])
    assert parsed.init_args.num_slots == num_slots


def test_what_another_class_does_not_take_is_left_out_and_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = {"generator": {"class_path": "vllm", "init_args": {"num_slots": 8, "engine_args": {"dtype": "float16"}}}}
    parsed = parse(tmp_path, "--model.generator", "slots", config=config).generator
    assert set(parsed.init_args.as_dict()) == {
        "num_slots",
        "prefill_tokens",
        "kv_memory",
        "packed_weights",
        "drafts",
        "drafter",
    }
    told = "Left out, because SlotGenerator has no such field: model.generator.engine_args "
    told += "(set before for VLLMGenerator).\n"
    assert capsys.readouterr().err == told
    parsed = parse(tmp_path, "--model.optimizer", "SGD").optimizer
    assert capsys.readouterr().err == ""
    assert (parsed.init_args.lr, parsed.init_args.weight_decay) == (1e-6, 0.0)  # AdamW's own 0.01 is not kept


def test_an_optimizer_of_less_memory_takes_what_the_config_sets_for_adamw(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = {"optimizer": {"class_path": "AdamW", "init_args": {"lr": 5e-4, "weight_decay": 0.02}}}
    parsed = parse(tmp_path, "--model.optimizer", "examples.galore.GaLore", config=config).optimizer
    assert (parsed.init_args.lr, parsed.init_args.weight_decay) == (5e-4, 0.02)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("field", ["generator", "optimizer", "lr_scheduler"])
@pytest.mark.parametrize("by_file", [False, True])
def test_a_name_that_nothing_has_is_told_with_those_there_are(
    tmp_path: Path, field: str, by_file: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [] if by_file else [f"--model.{field}", "slotz"]
    with pytest.raises(SystemExit):
        parse(tmp_path, *arguments, config={field: {"class_path": "slotz"}} if by_file else None)
    names = ", ".join(FIELDS[f"model.{field}"])
    said = capsys.readouterr().err
    assert f"model.{field} is 'slotz'; take {names}, or the path of a class." in said
    assert said.count("\n") == 1


def test_optimizers_and_schedules_have_names_and_keep_what_both_take(tmp_path: Path) -> None:
    optimizer = ["--model.optimizer", "SGD", "--model.optimizer.momentum", "0.5", "--model.optimizer.lr=2e-3"]
    parsed = parse(tmp_path, *optimizer)
    assert import_object(parsed.optimizer.class_path) is import_object(OPTIMIZERS["SGD"])
    assert (parsed.optimizer.init_args.momentum, parsed.optimizer.init_args.lr) == (0.5, 2e-3)
    assert parse(tmp_path, "--model.optimizer", "SGD").optimizer.init_args.lr == 1e-6
    schedule = parse(tmp_path, "--model.lr_scheduler", "LinearLR", "--model.lr_scheduler.total_iters", "4").lr_scheduler
    assert schedule.class_path == "torch.optim.lr_scheduler.LinearLR" and schedule.init_args.total_iters == 4
