"""Prompts with images on vLLM's build for CPUs: its log-probs beside the model's own forward, and whole runs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import table_rows
from seeing import WIDE, load, make_policy, plain_logits, png, read
from test_on_a_server import check_gaps
from test_slots import decode

from lit_grpo.policy.architecture.vision import Vision, tower_parameters
from lit_grpo.policy.spec import PolicySpec
from lit_grpo.rollout.generator import GenerationError
from lit_grpo.rollout.vllm import VLLMGenerator
from lit_grpo.rollout.weights.tensors import check_arrival
from lit_grpo.types import Request, SamplingParams

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(3600)]
ROUNDING = 1e-4
"""The most that a log-prob of vLLM and of the model's own forward may differ, in nats."""
GENERATOR = ["--model.generator", "vllm", "--model.generator.num_slots", "8"]
RUNS: dict[str, list[str]] = {
    "in this process": GENERATOR,
    "on a server": ["--model.generator", "vllm_server", *GENERATOR[2:], "--model.generator.timeout_s", "600"],
    "adapters alone": [
        *(*GENERATOR, "--model.generator.adapters", "alone", "--model.vision", "frozen"),
        *("--model.lora.r", "4", "--model.lora.target_modules", '["q_proj", "down_proj"]'),
    ],
}


def sync(generator: VLLMGenerator, version: int) -> None:
    weights = generator.weights()
    check_arrival(weights.digests, generator.load_weights(weights, version).digests)


@pytest.mark.parametrize("name", table_rows(WIDE, []))
def test_log_probs_are_those_of_the_models_own_forward_also_after_the_tower_has_changed(
    name: str, tmp_path: Path
) -> None:
    """Several images, one and none; equal tokens with other pixels; a resumed completion; a placeholder in favor."""
    if name != "idefics3":
        pytest.importorskip("torchvision")
    model, tokenizer, vision = load(make_policy(name, tmp_path, wide=True))
    with torch.no_grad():  # the placeholder would be likelier than the likeliest token
        model.lm_head.weight[vision.placeholder] = 2 * model.lm_head.weight[5]
    prompts = [
        read(vision, tokenizer, name, "one # and # two", [png(32, 48, 0), png(64, 32, 1)]),
        read(vision, tokenizer, name, "plain", []),
        read(vision, tokenizer, name, "#?", [png(48, 48, 2)]),
        read(vision, tokenizer, name, "#?", [png(48, 48, 3)]),
        read(vision, tokenizer, name, "#\n\n?\n#", [png(148, 48, 4), png(20, 200, 5)]),
    ]
    generator: Any = VLLMGenerator(8, kv_memory="16MiB", engine_args={"max_model_len": 512})
    generator.start(PolicySpec(model, tokenizer))
    sampling = SamplingParams(max_tokens=8)

    def largest_gap(completions: Any) -> float:
        gaps = []
        for each in completions:
            with torch.no_grad():
                logprobs_TV = plain_logits(model, vision, each).log_softmax(-1)
            expected_T = logprobs_TV.gather(-1, each.token_ids_T[:, None]).squeeze(-1)
            gaps.append(float((expected_T - each.logprobs_T).abs().max()))
            assert vision.placeholder not in each.token_ids_T
        return max(gaps)

    sync(generator, 0)
    requests = [Request(prompt, (sample,), sampling) for prompt in prompts for sample in range(2)]
    completions = decode(generator, requests)
    assert largest_gap(completions.values()) < ROUNDING
    half = [each for each in completions.values() if each.num_tokens > 3]
    again = [Request(each.request.prompt, each.request.path, sampling, prefix=each.until(3)) for each in half]
    for key, other in decode(generator, again).items():
        assert torch.equal(other.token_ids_T, completions[key].token_ids_T)
    with torch.no_grad():
        for weight in tower_parameters(model):
            weight.mul_(1.3)
    assert largest_gap(completions.values()) > 100 * ROUNDING  # so the tower's weights matter
    sync(generator, 1)
    assert largest_gap(decode(generator, requests).values()) < ROUNDING
    generator.close()


def test_an_engine_that_reads_images_as_other_tokens_ends_the_rollout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokenizer, vision = load(make_policy("idefics3", tmp_path, wide=True))

    def other(self: Vision, folder: Path) -> None:
        save(self, folder)
        settings = folder / "preprocessor_config.json"
        settings.write_text(re.sub(r'"do_image_splitting": true', '"do_image_splitting": false', settings.read_text()))

    save = Vision.save
    monkeypatch.setattr(Vision, "save", other)
    generator: Any = VLLMGenerator(2, kv_memory="16MiB", engine_args={"max_model_len": 512})
    generator.start(PolicySpec(model, tokenizer))
    sync(generator, 0)
    prompt = read(vision, tokenizer, "idefics3", "#?", [png(64, 64, 0)])
    with pytest.raises(
        GenerationError, match=r"reads a prompt with images as \d+ tokens, other ones than the policy's"
    ):
        decode(generator, [Request(prompt, (0,), SamplingParams(max_tokens=4))])
    generator.close()


@pytest.mark.parametrize("name", RUNS)
def test_a_run_trains_on_the_log_probs_that_were_sampled(name: str, tmp_path: Path) -> None:
    few = "--trainer.max_steps 2 --data.batch_size 4 --data.train.init_args.num_rows 16 --run.name run"
    few += " --data.validation.init_args.num_rows 8 --trainer.enable_progress_bar false"
    command = [sys.executable, "-m", "lit_grpo", "fit", "--config", "shapes", *RUNS[name], *few.split()]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=3000)
    check_gaps(tmp_path, run)
