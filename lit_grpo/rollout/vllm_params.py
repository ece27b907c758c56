"""What a request is to vLLM, in process and over HTTP alike."""

from __future__ import annotations

from typing import Any

from lit_grpo.rollout.sampling import request_key
from lit_grpo.types import FinishReason, Request


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
