"""One family in vLLM: an engine starts, the policy changes, its weights are sent, and completions are sampled."""

from __future__ import annotations

import os
import sys
import tempfile
import traceback
import warnings
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoModelForCausalLM
from vllm.model_executor.models import registry

import lit_grpo
from benchmarks.architectures import GROUP, PROMPTS, SAMPLING, logprobs
from benchmarks.processes import Figures
from benchmarks.rollouts import roll_out
from lit_grpo.policy.architecture.support import check_policy
from lit_grpo.policy.loading import load_policy
from lit_grpo.policy.spec import PolicySpec
from lit_grpo.policy.weights import persistent_buffers
from lit_grpo.rollout.proof import SyncProof
from lit_grpo.rollout.vllm.engine import VLLMGenerator
from lit_grpo.rollout.weights.tensors import WeightSyncError, check_arrival
from scripts.make_tiny import make_tokenizer
from tests.doubles.small_models import small_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel

WIDTH = 4
"""Of the small model: heads have 32 dimensions, the fewest that vLLM's CPU build knows."""
_LATENT = {"kv_lora_rank": 512, "qk_rope_head_dim": 64}  # the one size that vLLM's CPU build knows
_LLAMA4 = {"attention_chunk_size": 128, "num_experts_per_tok": 1}  # a multiple of vLLM's blocks, and what it knows
CHANGES: dict[str, dict[str, Any]] = {
    "afmoe": {"score_func": "sigmoid", "route_norm": True},
    "axk1": _LATENT | {"topk_method": "noaux_tc"},
    "deepseek_v2": _LATENT,
    "deepseek_v3": _LATENT | {"topk_method": "noaux_tc"},
    "falcon": {"ffn_hidden_size": 512},
    "gemma4": {"text_config": {"num_experts": None}},
    "gemma4_text": {"num_experts": None},
    "gemma4_unified": {"text_config": {"num_experts": None}},
    "glm4_moe": {"head_dim": 32},
    "glm4_moe_lite": _LATENT | {"first_k_dense_replace": 1},
    "hy_v3": {"first_k_dense_replace": 1, "expert_hidden_dim": 96},
    "lfm2": {"conv_dim": 128, "block_dim": 128},
    "llama4": {"text_config": _LLAMA4},
    "llama4_text": _LLAMA4,
    "longcat_flash": {"mla_scale_q_lora": True, "mla_scale_kv_lora": True},
    "minimax_m2": {"rotary_dim": 32, "scoring_func": "sigmoid", "use_routing_bias": True},
}
"""What vLLM needs beside: sizes, and fields that stand in the configs of real models and have no default."""
OURS = Path(lit_grpo.__file__).parent


def answer(family: str, parent: Connection, log: str) -> None:
    """Send what becomes of a family; all that is printed goes to the file ``log``."""
    with open(log, "w") as file:
        os.dup2(file.fileno(), sys.stdout.fileno())
        os.dup2(file.fileno(), sys.stderr.fileno())
    warnings.simplefilter("ignore")
    registry._run_in_subprocess = lambda fn: fn()  # a process of its own would import vLLM once more
    with tempfile.TemporaryDirectory() as folder:
        figures = _figures(family, Path(folder))
        parent.send({name: _without(folder, value) for name, value in figures.items()})


def _without(folder: str, value: str | float) -> str | float:
    return value.replace(folder, "FOLDER") if isinstance(value, str) else value


def _figures(family: str, folder: Path) -> Figures:
    try:
        model = small_model(family, CHANGES.get(family, {}), width=WIDTH)
    except Exception as error:
        return {"outcome": "not built", "detail": _line(error)}
    try:
        return {"outcome": "computed", "gap": _gap(model, folder)}
    except Exception as error:
        traceback.print_exc()
        raised = Path(traceback.extract_tb(error.__traceback__)[-1].filename)
        if isinstance(error, ValueError | WeightSyncError) and raised.is_relative_to(OURS):
            return {"outcome": "refused", "detail": _line(error)}
        return {"outcome": "traceback", "detail": f"{type(error).__name__}: {_line(error)} ({raised.name})"}


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:600]


def _gap(model: PreTrainedModel, folder: Path) -> float:
    """Return the largest difference, in nats, between a sampled log-prob and that of a plain forward.

    Raises:
        ValueError: The family is refused.
        WeightSyncError: The run would end at its first sync, or at the one after an update.
    """
    tokenizer = make_tokenizer()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    policy = load_policy(str(folder))
    check_policy(policy)
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    if plain.config._attn_implementation == "sdpa":
        plain.set_attn_implementation("eager")  # it leaves out nothing, such as caps and sinks
    generator = VLLMGenerator(4, kv_memory="32MiB", engine_args={"max_model_len": 128})
    generator.start(PolicySpec(policy, tokenizer))
    proof = SyncProof(tokenizer, max_gap=0.02, max_growth=1.3)  # as WeightSync has them in float32
    _sync(generator, policy, proof, 0)
    for one in (policy, plain):
        _change(one)
    _sync(generator, policy, proof, 1)
    groups, _ = roll_out(generator, PROMPTS, GROUP, SAMPLING)
    gaps = [
        (rollout.completion.logprobs_T - logprobs(plain, group.prompt, rollout.completion).detach()).abs().max()
        for group in groups
        for rollout in group.rollouts
    ]
    return float(max(gaps))


@torch.no_grad()
def _change(model: PreTrainedModel) -> None:
    """Change all numbers that a file of the model holds, parameters and buffers, as an update would."""
    draw = torch.Generator().manual_seed(1)
    for _, weight in [*model.named_parameters(), *persistent_buffers(model)]:
        if weight.is_floating_point():
            weight.add_(torch.randn(weight.shape, generator=draw), alpha=0.02)


def _sync(generator: VLLMGenerator, policy: PreTrainedModel, proof: SyncProof, version: int) -> None:
    """Send the weights, and prove that they arrived, as a run does."""
    weights = generator.weights()
    report = generator.load_weights(weights, version)
    check_arrival(weights.digests, report.digests)
    gap = proof.measure(generator, policy)
    print(version, gap)
    if not proof.accepts(gap):
        proof.check(gap, version)
