"""Cost of sending weights to vLLM: in process, to a server, and as changes.

In process: a Qwen3 of 100 million random parameters in float32; the time of ``load_weights`` with its digests on both
sides, beside one copy of the same bytes, and beside vLLM's ``reload_weights``, which digests nothing. On a CPU most of
either is packing: vLLM puts every matrix in an order of its own. As changes: its weights in bfloat16 to a server after
one step of AdamW with a learning rate of 1e-6; that the server rebuilt every bit is checked by digests. To a server:
the same weights in float32 to a server on this machine, all of them, through a file.
"""

from __future__ import annotations

import statistics
import sys
import time
from typing import Any

import torch

from benchmarks.random_policies import Sizes, random_qwen3
from benchmarks.report import Claim, Options, Row, finish, note, parse_options
from benchmarks.workloads import load
from lit_grpo.policy.spec import PolicySpec
from lit_grpo.policy.weights import PolicyWeights
from lit_grpo.rollout.vllm.engine import VLLMGenerator
from lit_grpo.rollout.vllm.server import VLLMServerGenerator
from lit_grpo.rollout.weights.tensors import check_arrival

ENGINE = {"max_model_len": 64, "block_size": 32}
KV = {"kv_cache_memory_bytes": 64 * 2**20}


def main(options: Options) -> int:
    """Measure both."""
    _, tokenizer = load(options.policy or "tiny", options.device)
    sizes = Sizes(2, 64, 256, 1, 1, 64) if options.quick else Sizes(12, 768, 3072, 12, 6, 64)
    policy = random_qwen3(sizes, options.device)
    num_parameters = sum(parameter.numel() for parameter in policy.parameters())
    times = _in_process(policy, tokenizer, repeats=2 if options.quick else 9)
    over_copy = _ratio(times["sync"], times["copy"])
    over_reload = _ratio(times["sync"], times["reload"])
    to_server = _to_server(policy, tokenizer, repeats=2 if options.quick else 5)
    low = random_qwen3(sizes, options.device, torch.bfloat16)
    share, bytes_share = _as_changes(low, tokenizer)
    rows: list[Row] = [
        {"case": "in process"} | {f"{name}_s": statistics.median(seconds) for name, seconds in times.items()},
        {"case": "to a server", "sync_s": statistics.median(to_server)},
        {"case": "as changes", "changed_share": share, "bytes_share": bytes_share},
    ]
    claims = [
        Claim("a sync in process over one copy of the same bytes, in time", over_copy, "<=", 3.0),
        Claim("a sync in process over vLLM's own reload, in time", over_reload, "<=", 1.5),
        Claim("bytes of a sync of changes over those of all weights", bytes_share, "<=", 0.5),
    ]
    return finish("weight_sync", options, {"parameters": num_parameters}, rows, claims)


def _ratio(over: list[float], under: list[float]) -> float:
    return statistics.median(one / other for one, other in zip(over, under, strict=True))


def _in_process(policy: Any, tokenizer: Any, repeats: int) -> dict[str, list[float]]:
    """Seconds of copies, of syncs and of vLLM's own reloads, in turn."""
    generator = VLLMGenerator(4, kv_memory="64MiB", engine_args=ENGINE)
    generator.start(PolicySpec(policy, tokenizer))
    engine: Any = generator
    target = [torch.empty_like(parameter) for parameter in policy.parameters()]

    def copy(version: int) -> None:
        for to, parameter in zip(target, policy.parameters(), strict=True):
            to.copy_(parameter)

    def sync(version: int) -> None:
        for parameter in policy.parameters():
            parameter.mul_(1.0)  # as an update does, after which a digest is taken again
        start = time.perf_counter()
        weights = PolicyWeights(policy)
        report = generator.load_weights(weights, version)
        check_arrival(weights.digests, report.digests)
        seconds["sync"].append(time.perf_counter() - start)

    def reload(version: int) -> None:
        engine._engine.collective_rpc("reload_weights", kwargs={"weights_iterator": policy.named_parameters()})

    seconds: dict[str, list[float]] = {"copy": [], "sync": [], "reload": []}
    for version in range(repeats + 1):
        for name, call in (("copy", copy), ("sync", sync), ("reload", reload)):
            start = time.perf_counter()
            with torch.no_grad():
                call(version)
            if name != "sync":
                seconds[name].append(time.perf_counter() - start)
        note(", ".join(f"{name} {values[-1]:.3f} s" for name, values in seconds.items()))
    return {name: values[1:] for name, values in seconds.items()}


def _to_server(policy: Any, tokenizer: Any, repeats: int) -> list[float]:
    """Seconds of syncs to a server."""
    generator = VLLMServerGenerator(4, server_args=ENGINE | KV)
    generator.start(PolicySpec(policy, tokenizer))
    seconds: list[float] = []
    for version in range(repeats + 1):
        with torch.no_grad():
            for parameter in policy.parameters():
                parameter.mul_(1.0)
        start = time.perf_counter()
        weights = PolicyWeights(policy)
        check_arrival(weights.digests, generator.load_weights(weights, version).digests)
        seconds.append(time.perf_counter() - start)
        note(f"to a server {seconds[-1]:.3f} s")
    generator.close()
    return seconds[1:]


def _as_changes(policy: Any, tokenizer: Any) -> tuple[float, float]:
    """The share of elements that one small update changes, and of the bytes that its sync takes."""
    generator = VLLMServerGenerator(4, transfer="changes", server_args=ENGINE | KV)
    generator.start(PolicySpec(policy, tokenizer))
    full = generator.load_weights(PolicyWeights(policy), 0)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-6, weight_decay=0.0)
    for parameter in policy.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    weights = PolicyWeights(policy)
    changes = generator.load_weights(weights, 1)
    check_arrival(weights.digests, changes.digests)
    generator.close()
    return changes.changed_share, changes.num_bytes / full.num_bytes


if __name__ == "__main__":
    assert __doc__ is not None
    sys.exit(main(parse_options(__doc__)))
