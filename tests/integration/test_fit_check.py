"""What a run is said to take, beside what it takes."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import random_policy
from seeing import load, make_policy
from transformers import AutoConfig, AutoModelForImageTextToText

from benchmarks.memory_case import Case
from benchmarks.processes import LEAN, measured
from benchmarks.random_policies import Sizes as Qwen3Sizes
from benchmarks.random_policies import random_qwen3
from lit_grpo.policy import load_policy
from lit_grpo.policy.architecture.attention import attention_calls
from lit_grpo.policy.architecture.states import state_shape
from lit_grpo.policy.architecture.vision import tower_parameters
from lit_grpo.policy.named import TINY_SHAPES, resolve_policy
from lit_grpo.tools.commands.fit_check import main as fit_check
from lit_grpo.training.forecast import Demand, Sizes, Tower, _teacher_bytes, expected_bytes, forecast, largest
from lit_grpo.update.logprobs.checkpointing import checkpoint_layers
from lit_grpo.update.micro_batch_size import activation_bytes
from scripts.make_tiny import make_tokenizer
from scripts.what_fits import MODELS
from tests.doubles.small_models import small_model


@pytest.mark.nightly
def test_the_forecast_is_above_the_measured_peaks_by_at_most_two_fifths(tmp_path: Path) -> None:
    policy: Any = random_qwen3(Qwen3Sizes(4, 256, 1024, 8, 4, 32))
    policy.save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    case = Case("lit_grpo", str(tmp_path), "cpu", 2, group_size=256, num_slots=32, max_tokens=128,
                max_tokens_per_micro_batch=4096)  # fmt: skip
    figures = measured("benchmarks.memory_case", case, LEAN)
    sizes = Sizes.of(AutoConfig.from_pretrained(tmp_path))
    taken = forecast(sizes, Demand(32, 256, prompt_tokens=8, max_tokens=128, micro_batch_tokens=4096))
    assert sizes.parameters == policy.num_parameters()
    assert taken.resident["weights"] == 4 * policy.num_parameters()
    update = sum(taken.update.values()) / 2**20  # the moments of AdamW come when the activations have gone
    assert 1.0 <= update / figures["update_mib"] <= 1.4, (update, figures)
    rollout = sum(taken.rollout.values()) / 2**20
    assert 0.8 <= rollout / figures["rollout_mib"] <= 1.4, (rollout, figures)


@pytest.mark.nightly
@pytest.mark.parametrize("vision", ["trained", "frozen"])
def test_the_forecast_of_a_vision_tower_is_near_the_measured_peak(vision: Any, tmp_path: Path) -> None:
    """160 prompts with a picture of 9 tokens, two completions each, whose tower keeps most of an update's memory."""
    shutil.copytree(resolve_policy(TINY_SHAPES), tmp_path, dirs_exist_ok=True)
    config = AutoConfig.from_pretrained(tmp_path)
    config.text_config.hidden_size = config.vision_config.hidden_size = 256
    config.text_config.intermediate_size = config.vision_config.intermediate_size = 1024
    config.vision_config.num_hidden_layers = 4
    policy = AutoModelForImageTextToText.from_config(config)
    policy.save_pretrained(tmp_path)
    case = Case("lit_grpo", str(tmp_path), "cpu", 160, group_size=2, num_slots=64, max_tokens=4,
                max_tokens_per_micro_batch=2048, config="shapes", vision=vision)  # fmt: skip
    figures = measured("benchmarks.memory_case", case, LEAN)
    demand = Demand(64, 2, prompt_tokens=14, max_tokens=4, micro_batch_tokens=2048, trains_tower=vision == "trained")
    sizes = replace(Sizes.of(config), tower=Tower.of({"policy": str(tmp_path), "vision": vision}, demand))
    taken = forecast(sizes, demand)
    assert taken.resident["weights"] == 4 * policy.num_parameters()
    update = sum(taken.update.values()) / 2**20
    least = 1.0 if vision == "trained" else 0.9
    assert least <= update / figures["update_mib"] <= 1.4, (taken.update, figures)


@pytest.mark.nightly
@pytest.mark.parametrize("checkpointing", [True, False])
@pytest.mark.parametrize("name", ["idefics3", "qwen2_5_vl", "qwen3_5"])
def test_a_tower_is_measured_by_its_layers(name: str, checkpointing: bool, tmp_path: Path) -> None:
    """Small towers of one layer and of two say what the whole one keeps: the bytes of its own forward pass."""
    folder = make_policy(name, tmp_path)
    demand = Demand(4, 4, 64, 16, 512, checkpointing=checkpointing, trains_tower=True)
    tower = Tower.of({"policy": folder, "vision": "trained"}, demand)
    model, _, _ = load(folder)
    checkpoint_layers(model.train(), checkpointing)
    assert tower.parameters == sum(weight.numel() for weight in tower_parameters(model))
    with_images, without = (activation_bytes(model, shares_prefix=False, image_share=share) for share in (1.0, 0.0))
    least = with_images.of_token - without.of_token
    assert 0.999 * least <= tower.kept_bytes <= (1.25 if checkpointing else 1.001) * least


def test_what_is_largest_fits_and_one_more_does_not() -> None:
    sizes = Sizes(4, 10**6, 4000, 10**5, 256, 256, 25_000.0, 5000.0)
    demand = Demand(32, 8, 64, 128, 2048)
    for field in ("num_slots", "micro_batch_tokens"):
        limit = 400 * 2**20
        most = largest(sizes, demand, field, limit)
        changes: list[dict[str, Any]] = [{field: most}, {field: most + 1}]
        at, beyond = (forecast(sizes, replace(demand, **change)).peak for change in changes)
        assert at <= limit < beyond


def test_the_command_tells_what_fits(capsys: pytest.CaptureFixture[str]) -> None:
    for memory, verdict, code in (("8GiB", "it fits into 8 GiB", 0), ("64MiB", "it does not fit into 0.0625 GiB", 1)):
        with pytest.raises(SystemExit) as exit_:
            fit_check(["--config", "arithmetic", "--memory", memory])
        said = capsys.readouterr().out
        assert exit_.value.code == code and verdict in said
        assert "keys and values" in said and "model.generator.num_slots can be" in said
    with pytest.raises(SystemExit, match="2"):
        fit_check(["--config", "arithmetic", "--model.generator", "vllm_server"])
    assert "VLLMServerGenerator, which decodes in processes of its own" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["--memory", "60%"], "--memory is '60%', but is the device's whole memory; give an amount such as 80GiB"),
        (["--memory", "much"], "--memory must be an amount such as"),
        (["--trainer.accelerator", "gpu"], "trainer.accelerator is gpu, but this machine has no CUDA GPU"),
    ],
)
def test_what_fit_check_cannot_know_is_asked_for(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="2"):
        fit_check(["--config", "arithmetic", *arguments])
    assert said in " ".join(capsys.readouterr().err.split())


def test_an_engine_of_vllm_on_a_gpu_has_a_forecast(capsys: pytest.CaptureFixture[str]) -> None:
    vllm = ["--model.generator", "vllm", "--trainer.accelerator", "gpu", "--trainer.precision", "bf16-mixed"]
    with pytest.raises(SystemExit, match="0"):
        fit_check(["--config", "arithmetic", *vllm, "--memory", "80GiB"])
    said = capsys.readouterr().out
    assert all(part in said for part in ("engine's weights", "keys and values", "device", "workspaces"))
    assert "With model.lora (r: 32) the peak is" not in said  # what the device takes is nearly all of it


def test_a_hybrid_is_counted_by_kinds_of_layers_and_with_the_states_of_its_slots(
    capsys: pytest.CaptureFixture[str],
) -> None:
    policy: Any = load_policy("tiny_hybrid").eval()
    sizes, states = Sizes.of(policy.config), state_shape(policy)
    assert states is not None and sizes.state_bytes == states.num_bytes
    assert sizes.parameters == policy.num_parameters()
    assert sizes.num_layers * sizes.kv_values == 2 * 2 * 32  # one of three layers keeps keys and values
    taken = forecast(sizes, Demand(64, 16, 8, 128, micro_batch_tokens=1))
    assert taken.rollout["states"] == (64 + 5) * states.num_bytes  # of slots, and of prompts
    counted = activation_bytes(policy.train(), shares_prefix=False)
    assert taken.update["activations"] == pytest.approx(counted.of_token, rel=0.01)
    with pytest.raises(SystemExit, match="0"):
        fit_check(["--config", "arithmetic", "--model.policy", "tiny_hybrid", "--memory", "8GiB"])
    said = capsys.readouterr()
    assert "states" in said.out and "235,088 parameters" in said.out and "falling back" not in said.err


def test_keys_and_values_of_latent_attention_are_counted_as_slots_keep_them() -> None:
    policy: Any = small_model("deepseek_v2").eval()
    calls = attention_calls(policy, 32)
    assert {(call.key_size, call.value_size) for call in calls} != {(policy.config.head_dim,) * 2}
    sizes = Sizes.of(policy.config)
    numbers = sum(call.num_kv_heads * (call.key_size + call.value_size) for call in calls)
    assert sizes.num_layers * sizes.kv_values == numbers


@pytest.mark.nightly
@pytest.mark.parametrize("adapters", [False, True])
def test_the_config_of_a_hybrid_fits_on_its_gpu_with_all_weights_and_with_the_adapters_of_its_comment(
    adapters: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    MODELS["Qwen3.5 0.8B"].save_pretrained(tmp_path)
    text = (Path(__file__).parents[2] / "configs" / "gsm8k_qwen3.5_0.8b.yaml").read_text()
    (line,) = re.findall(r"# Adapters instead: (.*) \(extra lora\)", text)
    told = ["--config", "gsm8k_qwen3.5_0.8b", "--model.policy", str(tmp_path), "--memory", "22GiB"]
    with pytest.raises(SystemExit, match="0"):
        fit_check([*told, *(line.split() if adapters else [])])
    said = capsys.readouterr().out
    assert "752,393,024 parameters; it fits into 22 GiB" in said
    (peak,) = re.findall(r"peak +│ +([\d.]+)", said)
    (estimate,) = re.findall(r"fit-check estimates (\d+) GiB", text)
    assert adapters or round(float(peak)) == int(estimate)


QWEN3 = Sizes(28, 50_345_216, 67_584, 311_166_976, 2048, 2048, 120_000.0, 30_000.0)
"""The sizes of Qwen3-1.7B; the bytes that tokens leave are round numbers."""


def test_on_a_gpu_adapters_alone_fit_where_all_weights_do_not() -> None:
    gpu = Demand(32, 32, 512, 1024, 8192, device="cuda", mixed=True, checkpointing=True, engine_bytes=2)
    whole, adapters = (forecast(QWEN3, replace(gpu, lora_rank=rank)) for rank in (0, 32))
    assert adapters.peak < 24 * 2**30 < whole.peak
    unfused = forecast(QWEN3, replace(gpu, fused=False))
    assert unfused.step["temporaries"] == pytest.approx(6.4 * 2**30, rel=0.02)  # as much as the weights
    assert "temporaries" not in whole.step
    assert whole.resident["device"] > 0.5 * 2**30
    awake = forecast(QWEN3, replace(gpu, engine_sleeps=False))
    assert awake.peak == pytest.approx(whole.peak + sum(whole.rollout.values()))


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("mixed", [False, True])
def test_the_forecast_and_a_run_count_the_same_bytes_a_token(mixed: bool, checkpointing: bool) -> None:
    policy: Any = random_policy(hidden_size=128, intermediate_size=512, num_hidden_layers=4).train()
    checkpoint_layers(policy, checkpointing)
    sizes = Sizes.of(policy.config, mixed)
    taken = forecast(sizes, Demand(1, 1, 8, 8, micro_batch_tokens=1, mixed=mixed, checkpointing=checkpointing))
    with torch.autocast("cpu", torch.bfloat16, enabled=mixed, cache_enabled=False):
        counted = activation_bytes(policy, shares_prefix=False)
    assert taken.update["activations"] == pytest.approx(counted.of_token, rel=0.1)


@pytest.mark.parametrize(
    ("teacher", "number"),
    [
        ({"policy": "tiny_calculator"}, 4 * 223_808),
        ({"policy": "tiny_calculator", "dtype": "bfloat16"}, 2 * 223_808),
        ({"policy": "tiny_calculator", "offload": True}, 0),
        ({"policy": "live"}, 0),
        ({"policy": "http://127.0.0.1:8000"}, 0),
    ],
)
def test_the_weights_of_a_teacher_are_counted(teacher: dict[str, Any], number: int) -> None:
    told = {"dtype": "float32", "offload": False} | teacher
    assert _teacher_bytes(told) == number


def test_a_teacher_that_is_a_copy_of_the_policy_takes_as_much(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        fit_check(["--config", "arithmetic", "--model.teacher.policy", "average", "--memory", "8GiB"])
    rows = dict(re.findall(r"(weights|teacher) +│ always +│ +([\d.e-]+)", capsys.readouterr().out))
    assert rows["teacher"] == rows["weights"]


def test_a_teacher_whose_folder_begins_with_live_has_weights_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    policy: Any = random_policy()
    policy.save_pretrained("live_policy")
    assert (
        _teacher_bytes({"policy": "live_policy", "dtype": "float32", "offload": False}) == 4 * policy.num_parameters()
    )


def test_the_estimate_of_a_run_leaves_random_numbers_as_they_are(tmp_path: Path) -> None:
    policy: Any = random_policy(attention_dropout=0.5)
    policy.save_pretrained(tmp_path)
    generator = {"class_path": "SlotGenerator", "init_args": {"num_slots": 8}}
    settings = {
        "trainer": {"precision": "32-true"},
        "data": {"max_prompt_tokens": 64},
        "model": {
            "policy": str(tmp_path), "generator": generator, "optimizer": {"class_path": "torch.optim.AdamW"},
            "lora": None, "dtype": "float32", "num_generations": 4, "sampling": {"max_tokens": 32},
            "max_tokens_per_micro_batch": "auto", "gradient_checkpointing": False, "objective": {"kl": {"beta": 0.0}},
            "teacher": None, "vision": "none",
        },
    }  # fmt: skip
    before = torch.get_rng_state()
    expected = expected_bytes(settings, "cpu")
    assert torch.equal(torch.get_rng_state(), before)
    assert expected["update"]["gradients"] == expected["rollout"]["weights"] == 4 * policy.num_parameters()
    assert expected_bytes(settings, "mps") == {"why": "fit-check knows cpu and cuda, not mps"}
