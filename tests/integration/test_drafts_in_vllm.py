"""Real vLLM engines that draft.

They load exports with the layers of multi-token prediction that the base had; what they sample of a policy is of its
distribution, with its log-probs.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import forks
import pytest
import torch
from conftest import save_tokenizer, table_rows
from hand_made import save_policy_for_vllm
from safetensors.torch import load_file
from torch.nn.functional import scaled_dot_product_attention

from lit_grpo.policy.architecture.heads import prediction_head
from lit_grpo.policy.loading import load_policy, load_tokenizer
from lit_grpo.policy.saving import export
from lit_grpo.policy.spec import PolicySpec
from lit_grpo.rollout.loop import RolloutLoop
from lit_grpo.rollout.vllm.arguments import server_environment
from lit_grpo.rollout.vllm.engine import VLLMGenerator
from lit_grpo.rollout.vllm.generator import EngineGenerator
from lit_grpo.rollout.vllm.server import VLLMServerGenerator
from lit_grpo.types import Prompt, SamplingParams
from tests.doubles.draft_layers import add_layer, add_tensors
from tests.doubles.small_models import small_model

VOCABULARY, END = 35, 1
LINEAR_SIZES = ("linear_key_head_dim", "linear_value_head_dim")
TESTS = Path(__file__).parents[1]
FAMILIES: dict[str, tuple[dict[str, Any], int, dict[str, Any]]] = {
    "exaone_moe": ({"layer_types": ["full_attention"] * 2}, 0, {"num_nextn_predict_layers": 1}),
    "qwen3_5_text": ({"layer_types": ["linear_attention", "full_attention"]}, 1, {"mtp_num_hidden_layers": 1}),
}
"""Changes of the small model, its layer that those which draft are built like, and the fields that count these."""


def base_of(family: str, folder: Path) -> dict[str, torch.Tensor]:
    """Save a policy whose last layer is also one that drafts; return the tensors of that."""
    changes, number, counted = FAMILIES[family]
    model = small_model(family, changes, width=4)
    model.save_pretrained(folder)
    save_tokenizer(folder)
    hidden, own = model.config.hidden_size, load_file(folder / "model.safetensors")
    drawn = torch.Generator().manual_seed(0)
    of_layer = f"model.layers.{number}."
    like = {name.replace(of_layer, "mtp.layers.0."): one for name, one in own.items() if name.startswith(of_layer)}
    norms = ("norm", "pre_fc_norm_hidden", "pre_fc_norm_embedding")
    like |= {f"mtp.{name}.weight": own["model.norm.weight"] for name in norms}
    like["mtp.fc.weight"] = torch.empty(hidden, 2 * hidden)
    return add_tensors(folder, {name: torch.randn(one.shape, generator=drawn) for name, one in like.items()}, **counted)


def in_a_process(folder: Path, timeout_s: float, *arguments: str) -> str:
    """Run this file in a folder, which finds the tests and the package; return the last line that it prints."""
    environment = os.environ | server_environment() | {"OMP_NUM_THREADS": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    own = [str(TESTS), str(TESTS.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment["PYTHONPATH"] = os.pathsep.join(own)
    process = forks.run([sys.executable, __file__, *arguments], timeout_s, env=environment, cwd=folder)
    assert process.returncode == 0, process.stdout[-2000:] + process.stderr[-4000:]
    return process.stdout.splitlines()[-1] if process.stdout else ""


@pytest.mark.parametrize("family", table_rows(FAMILIES, []))
def test_an_export_drafts_with_what_the_base_drafted_with(family: str, tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    if family == "qwen3_5_text":
        pytest.importorskip("torchvision", reason="vLLM's model of this family imports torchvision")
    heads = base_of(family, tmp_path / "base")
    policy = load_policy(str(tmp_path / "base"))
    with torch.no_grad():
        for weight in policy.parameters():
            weight.add_(0.01)
    export(policy, load_tokenizer(str(tmp_path / "base")), tmp_path / "out")
    drafts = json.loads(in_a_process(tmp_path, 300, "out"))
    flat = {name.replace("mtp.", "model."): one for name, one in heads.items() if one.ndim == 1}
    assert drafts.keys() >= flat.keys() and len(flat) > 4
    for name, tensor in flat.items():
        assert torch.allclose(torch.tensor(drafts[name]), tensor.bfloat16().float())


PROMPT = Prompt("a", tuple(2 + i * 7 % 33 for i in range(66)), "")
"""Each token twice, so that a draft follows each."""
NUM_SHORT, NUM_LONG = 1500, 24
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
OF_ITSELF = {"method": "draft_model", "num_speculative_tokens": 2, "draft_load_config": {"load_format": "auto"}}
ENGINES: dict[str, tuple[type[EngineGenerator], dict[str, Any]]] = {
    "by n-grams": (VLLMGenerator, NGRAM),
    "by a model": (VLLMGenerator, OF_ITSELF),
    "by n-grams on a server": (VLLMServerGenerator, NGRAM),
}


@pytest.mark.nightly
@pytest.mark.parametrize("name", ENGINES)
def test_drafts_change_neither_what_is_sampled_nor_its_log_probs(name: str, tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    folder = save_policy_for_vllm(tmp_path / "policy", is_long=True)
    told = json.loads(in_a_process(tmp_path, 900, str(folder), name))
    policy, temperature = load_policy(str(folder)), told["temperature"]
    for ids, logprobs in told["long"]:
        own_TV = logprobs_after(policy, temperature, ids[:-1], len(ids))
        assert (own_TV.gather(1, torch.tensor(ids)[:, None])[:, 0] - torch.tensor(logprobs)).abs().max() < 1e-4
    metrics = told["metrics"]
    drafted, accepted = metrics["rollout/drafted_tokens"], metrics["rollout/accepted_tokens"]
    assert 0 < accepted < drafted and metrics["rollout/tokens_per_step"] > 1
    best = logprobs_after(policy, 1.0, told["greedy"][:-1], len(told["greedy"])).argmax(-1)
    assert told["greedy"] == best.tolist()
    if name == "by a model":  # which is the policy, so that it drafts what comes
        assert told["of_greedy"]["rollout/accepted_tokens"] > 0.95 * told["of_greedy"]["rollout/drafted_tokens"]
    thirds = torch.bincount(
        torch.tensor([ids[2] if len(ids) > 2 else END for ids in told["short"]]), minlength=VOCABULARY
    )
    expected = len(told["short"]) * distribution_of_third(policy, temperature)
    frequent = expected > 5
    chi_square = ((thirds - expected) ** 2 / expected)[frequent].sum()
    degrees = int(frequent.sum()) - 1
    assert degrees > 10 and chi_square < degrees + 6 * math.sqrt(2 * degrees), (chi_square, degrees)


@torch.no_grad()
def logprobs_after(policy: Any, temperature: float, token_ids: Sequence[int], count: int) -> torch.Tensor:
    """Return transformers' log-probs (T, V) of the ``count`` tokens that begin after the prompt."""
    ids = torch.tensor([[*PROMPT.token_ids, *token_ids]])
    return (policy(input_ids=ids).logits[0, -count:].double() / temperature).log_softmax(-1)


@torch.no_grad()
def distribution_of_third(policy: Any, temperature: float) -> torch.Tensor:
    """Return the probability of each token to be a completion's third (V); that of the end token is of ends by then."""
    first_V = logprobs_after(policy, temperature, [], 1)[0].exp()
    third_V = torch.zeros_like(first_V)
    third_V[END] = first_V[END]
    for first in (token for token in range(VOCABULARY) if token != END):
        second_V = logprobs_after(policy, temperature, [first], 1)[0].exp() * first_V[first]
        third_V[END] += second_V[END]
        seconds = [token for token in range(VOCABULARY) if token != END]
        ids_SB = torch.tensor([[*PROMPT.token_ids, first, second] for second in seconds])
        logits_SV = policy(input_ids=ids_SB).logits[:, -1].double() / temperature
        third_V += second_V[seconds] @ logits_SV.softmax(-1)
    return third_V


def sample(folder: str, name: str) -> None:
    """Decode with an engine that drafts; print completions, short ones for their tokens, and the metrics."""
    kind, config = ENGINES[name]
    arguments: dict[str, Any] = {"max_model_len": 160, "block_size": 32}
    arguments["speculative_config"] = config if config is NGRAM else config | {"model": folder}
    policy = PolicySpec(load_policy(folder), load_tokenizer(folder))
    if kind is VLLMGenerator:
        generator: Any = VLLMGenerator(64, kv_memory="64MiB", engine_args=arguments)
    else:
        generator = VLLMServerGenerator(64, server_args=arguments | {"kv_cache_memory_bytes": 2**26})
    generator.start(policy)
    generator.load_weights(generator.weights(), 0)
    loop, temperature = RolloutLoop(generator), 0.7
    (short,), _ = loop.collect([PROMPT], NUM_SHORT, SamplingParams(temperature, max_tokens=3), seed=0)
    (greedy,), of_greedy = loop.collect([PROMPT], 1, SamplingParams(0.0, max_tokens=64), seed=0)
    (long,), stats = loop.collect([PROMPT], NUM_LONG, SamplingParams(temperature, max_tokens=64), seed=1)
    told = {
        "temperature": temperature,
        "metrics": stats.metrics(),
        "greedy": greedy.rollouts[0].completion.token_ids_T.tolist(),
        "of_greedy": of_greedy.metrics(),
        "short": [each.completion.token_ids_T.tolist() for each in short.rollouts],
        "long": [(each.completion.token_ids_T.tolist(), each.completion.logprobs_T.tolist()) for each in long.rollouts],
    }
    generator.close()
    print(json.dumps(told), flush=True)


def test_our_layer_of_multi_token_prediction_computes_what_vllms_does(tmp_path: Path) -> None:
    """Also for further tokens, and where what was drafted is written over, in bfloat16."""
    pytest.importorskip("vllm")
    pytest.importorskip("torchvision", reason="vLLM's model of this family imports torchvision")
    changes = {"layer_types": ["linear_attention", "full_attention"]} | dict.fromkeys(LINEAR_SIZES, 128)
    small_model("qwen3_5_text", changes, width=4).save_pretrained(tmp_path / "base")
    save_tokenizer(tmp_path / "base")
    add_layer(tmp_path / "base", 1)
    in_a_process(tmp_path, 300, "base", "calls.pt")
    compare_calls(tmp_path / "base", torch.load(tmp_path / "calls.pt"))


@torch.no_grad()
def compare_calls(folder: Path, calls: list[tuple[torch.Tensor, ...]]) -> None:
    """Compare vLLM's layer, call by call, with ours over all that is in its cache then."""
    policy = load_policy(str(folder))
    layer, embeddings = prediction_head(policy), policy.get_input_embeddings()
    for weight in (*layer.parameters(), *embeddings.parameters()):
        weight.copy_(weight.bfloat16())

    def causal(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float) -> torch.Tensor:
        return scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=True)

    hidden_TD, tokens_T, again = torch.empty(0, policy.config.hidden_size), torch.empty(0, dtype=torch.int64), 0
    for ids, positions, hidden, expected in calls:
        begin = int(positions.flatten()[0])
        again += begin < len(tokens_T)
        hidden_TD = torch.cat([hidden_TD[:begin], hidden.float()])
        tokens_T = torch.cat([tokens_T[:begin], ids.long()])
        actual = layer(hidden_TD[None], tokens_T[None], 1 + torch.arange(len(tokens_T))[None], causal)[0, begin:]
        assert float((actual - expected.float()).norm() / expected.float().norm()) < 0.02
    assert len(calls) > 6 and again > 2


def record_calls(folder: str, path: str) -> None:
    """Decode with two drafted tokens a step; save what the drafter's layer gets and returns."""
    from vllm import LLM
    from vllm import SamplingParams as VLLMSampling
    from vllm.model_executor.models.qwen3_5_mtp import Qwen3_5MTP

    calls, forward = list[tuple[torch.Tensor, ...]](), Qwen3_5MTP.forward

    def recorded(self: Any, input_ids: Any, positions: Any, hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
        returned: Any = forward(self, input_ids, positions, hidden_states, *args, **kwargs)
        calls.append(tuple(each.clone() for each in (input_ids, positions, hidden_states, returned)))
        return returned

    Qwen3_5MTP.forward = recorded
    llm = LLM(
        folder,
        skip_tokenizer_init=True,
        enforce_eager=True,
        dtype="bfloat16",
        max_model_len=64,
        max_num_seqs=2,
        kv_cache_memory_bytes=2**26,
        enable_prefix_caching=False,
        speculative_config={"method": "mtp", "num_speculative_tokens": 2},
    )
    calls.clear()
    prompt: Any = {"prompt_token_ids": [5, 9, 17, 33, 4, 60, 71, 8, 22, 41, 13]}
    llm.generate([prompt], VLLMSampling(temperature=0, max_tokens=6, detokenize=False))
    torch.save(calls, path)


def main(folder: str) -> None:
    """Start an engine that drafts, and print the vectors that its drafter holds; matrices are packed on a CPU."""
    from vllm import LLM

    llm = LLM(
        folder,
        skip_tokenizer_init=True,
        enforce_eager=True,
        dtype="bfloat16",
        max_model_len=64,
        max_num_seqs=2,
        kv_cache_memory_bytes=2**26,
        speculative_config={"method": "mtp", "num_speculative_tokens": 1},
    )
    engine: Any = llm.llm_engine.engine_core
    runner = engine.engine_core.model_executor.driver_worker.worker.model_runner
    drafts = {name: one.float().tolist() for name, one in runner.drafter.model.named_parameters() if one.ndim == 1}
    print(json.dumps(drafts))


if __name__ == "__main__":
    if len(sys.argv) == 2:
        main(sys.argv[1])
    else:
        (sample if sys.argv[2] in ENGINES else record_calls)(*sys.argv[1:])
