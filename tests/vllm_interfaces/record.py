"""Record what is used of a version of vLLM: ``python tests/vllm_interfaces/record.py SITE_PACKAGES > VERSION.json``.

Nothing of vLLM is imported or copied: names of classes, methods, parameters and fields, and the routes of its server.
"""

from __future__ import annotations

import ast
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lit_grpo.rollout.vllm.arguments import _DRAFT_FIELDS

WORKER = "vllm/v1/worker/gpu_worker.py"
USED: dict[str, tuple[dict[str, str], tuple[str, ...]]] = {
    "LLMEngine": (
        {"vllm/v1/engine/llm_engine.py": "LLMEngine"},
        ("from_engine_args", "add_request", "abort_request", "step", "sleep", "wake_up", "collective_rpc", "add_lora",
         "engine_core", "vllm_config"),
    ),
    "EngineCoreClient": ({"vllm/v1/engine/core_client.py": "EngineCoreClient"}, ("shutdown",)),
    "EngineArgs": (
        {"vllm/engine/arg_utils.py": "EngineArgs"},
        ("model", "load_format", "dtype", "max_num_seqs", "enable_prefix_caching", "logprobs_mode", "enforce_eager",
         "disable_log_stats", "worker_extension_cls", "kv_cache_memory_bytes",
         "gpu_memory_utilization", "scheduling_policy", "enable_sleep_mode", "distributed_executor_backend",
         "max_model_len", "enable_lora", "max_loras", "max_cpu_loras", "max_lora_rank",
         "generation_config", "async_scheduling", "speculative_config", "spec_method", "spec_model", "spec_tokens",
         "per_request_spec_decode_metrics", "limit_mm_per_prompt", "mm_device_do_normalize", "mm_processor_kwargs",
         "media_io_kwargs"),
    ),
    "SpeculativeConfig": ({"vllm/config/speculative.py": "SpeculativeConfig"}, _DRAFT_FIELDS),
    "RequestSpecDecodeMetrics": (
        {"vllm/v1/metrics/stats.py": "RequestSpecDecodeMetrics"}, ("histogram", "num_draft_tokens"),
    ),
    "CacheConfig": (
        {"vllm/config/cache.py": "CacheConfig"},
        ("block_size", "num_gpu_blocks", "kv_cache_memory_bytes", "gpu_memory_utilization"),
    ),
    "ModelConfig": (
        {"vllm/config/model.py": "ModelConfig"}, ("max_model_len", "enable_sleep_mode", "is_multimodal_model"),
    ),
    "SamplingParams": (
        {"vllm/sampling_params.py": "SamplingParams"},
        ("n", "max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty",
         "presence_penalty", "frequency_penalty", "seed", "stop", "include_stop_str_in_output", "stop_token_ids",
         "logprobs", "prompt_logprobs", "detokenize", "output_kind", "ignore_eos", "skip_special_tokens",
         "logit_bias"),
    ),
    "RequestOutputKind": ({"vllm/sampling_params.py": "RequestOutputKind"}, ("DELTA", "FINAL_ONLY")),
    "TokensPrompt": (
        {"vllm/inputs/llm.py": "TokensPrompt", "vllm/inputs/data.py": "TokensPrompt"},
        ("prompt_token_ids", "cache_salt", "multi_modal_data", "multi_modal_uuids"),
    ),
    "GenerateRequest": (
        {"vllm/entrypoints/scale_out/token_in_token_out/protocol.py": "GenerateRequest"},
        ("token_ids", "content_parts", "return_token_ids"),
    ),
    "LoRARequest": ({"vllm/lora/request.py": "LoRARequest"}, ("lora_name", "lora_int_id", "lora_path")),
    "RequestOutput": (
        {"vllm/outputs.py": "RequestOutput"},
        ("request_id", "finished", "outputs", "prompt_token_ids", "prompt_logprobs"),
    ),
    "CompletionOutput": (
        {"vllm/outputs.py": "CompletionOutput"}, ("token_ids", "logprobs", "finish_reason", "spec_decode_metrics"),
    ),
    "Logprob": ({"vllm/logprobs.py": "Logprob"}, ("logprob",)),
    "Worker": (
        {"vllm/v1/worker/gpu_worker.py": "Worker", "vllm/v1/worker/worker_base.py": "WorkerBase"},
        ("sleep", "wake_up", "get_model", "get_draft_model", "model_runner", "reload_weights", "vllm_config"),
    ),
    "older runner": (
        {"vllm/v1/worker/gpu_model_runner.py": "GPUModelRunner"}, ("sampler", "input_batch", "_sample", "requests"),
    ),
    "older batch": (
        {"vllm/v1/worker/gpu_input_batch.py": "InputBatch"}, ("generators", "num_tokens_no_spec", "req_ids"),
    ),
    "newer runner": ({"vllm/v1/worker/gpu/model_runner.py": "GPUModelRunner"}, ("sampler",)),
    "newer sampler": ({"vllm/v1/worker/gpu/sample/sampler.py": "Sampler"}, ("sampling_states",)),
    "newer states": ({"vllm/v1/worker/gpu/sample/states.py": "SamplingStates"}, ("seeds",)),
    "LoRAModelManager": (
        {"vllm/lora/model_manager.py": "LoRAModelManager"},
        ("list_adapters", "lora_index_to_id", "lora_config", "packed_modules", "modules"),
    ),
    "LoRAModel": ({"vllm/lora/lora_model.py": "LoRAModel"}, ("get_lora",)),
    "LoRALayerWeights": ({"vllm/lora/lora_weights.py": "LoRALayerWeights"}, ("lora_a", "lora_b")),
    "LogitsProcessorWithLoRA": (
        {"vllm/lora/layers/logits_processor.py": "LogitsProcessorWithLoRA"}, ("base_layer", "_get_logits"),
    ),
    "WeightsMapper": ({"vllm/model_executor/models/utils.py": "WeightsMapper"}, ("get_rename_mapper",)),
}  # fmt: skip
"""By a name of ours, the class in each file that may have it, and what of it an engine in process or a worker uses."""
SLEEP = "vllm/device_allocator/__init__.py"
TAGS = re.compile(r"""_maybe_get_memory_pool_context\(\s*tag=["'](\w+)["']""")
ROUTE = re.compile(r"""@router\.(get|post)\(\s*["']([^"']+)["']""")


def used(sources: dict[str, str], places: dict[str, str], names: tuple[str, ...]) -> dict[str, list[str] | None]:
    """Those of the names that a class has: the parameters of methods, and None for what is no method."""
    found: dict[str, list[str] | None] = {}
    for path, name in places.items():
        tree = ast.parse(sources.get(path, ""))
        classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
        todo = [name]
        while todo:
            node = classes.get(todo.pop())
            if node is None:
                continue
            todo += [base.id for base in node.bases if isinstance(base, ast.Name)]
            found = {member: takes for member, takes in members(node) if member in names} | found
    return dict(sorted(found.items()))


def members(node: ast.ClassDef) -> Iterator[tuple[str, list[str] | None]]:
    """Methods with their parameters, fields, and what methods set."""
    for each in ast.walk(node):
        if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef):
            takes = each.args
            is_property = any("property" in ast.unparse(d) for d in each.decorator_list)
            yield each.name, None if is_property else [arg.arg for arg in (*takes.args, *takes.kwonlyargs)]
        elif isinstance(each, ast.AnnAssign | ast.Assign):
            for target in [each.target] if isinstance(each, ast.AnnAssign) else each.targets:
                if isinstance(target, ast.Name):
                    yield target.id, None
                elif isinstance(target, ast.Attribute) and ast.unparse(target.value) == "self":
                    yield target.attr, None


def deferred_tags(source: str) -> list[str]:
    """The tags of memory that stays asleep until it is asked for by name; all where none are named."""
    for node in ast.parse(source).body:
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "DEFERRABLE_TAGS" and node.value:
            return list(ast.literal_eval(node.value))
    return []


def record(folder: Path) -> dict[str, Any]:
    """Read the package in a folder of packages."""
    paths = (folder / "vllm").rglob("*.py")
    sources = {path.relative_to(folder).as_posix(): path.read_text() for path in paths}
    routes = {
        (method.upper(), path)
        for name, source in sources.items()
        if name.startswith("vllm/entrypoints/")
        for method, path in ROUTE.findall(source)
    }
    return {
        "routes": sorted(" ".join(route) for route in routes),
        "used": {name: used(sources, *of) for name, of in USED.items()},
        "pools": sorted(set(TAGS.findall(sources[WORKER]))),
        "deferred": deferred_tags(sources.get(SLEEP, "")),
    }


if __name__ == "__main__":
    print(json.dumps(record(Path(sys.argv[1])), indent=1))
