"""Requests that cannot be decoded, refused before they are admitted."""

from __future__ import annotations

from lit_grpo.scheduling.in_flight import smallest_budget
from lit_grpo.types import Request, SamplingParams


def check_request(
    request: Request, sampling: SamplingParams, context: int, kv_tokens: int, bytes_per_token: int
) -> None:
    """Check one request.

    Args:
        request: The request.
        sampling: That of the requests in flight.
        context: The most tokens that the model takes, prompt and completion together.
        kv_tokens: The KV tokens that there is memory for.
        bytes_per_token: The memory of one.

    Raises:
        ValueError: Its sampling is another, its prompt is empty, or it fits the context or the memory at no time.
    """
    if request.sampling != sampling:
        raise ValueError("Requests in flight at the same time must share their sampling parameters.")
    prompt, num_tokens = request.prompt, len(request.prompt.token_ids)
    if not num_tokens:
        raise ValueError(f"Prompt {prompt.prompt_id!r} has no tokens; a completion needs at least one.")
    if num_tokens + sampling.max_tokens > context:
        raise ValueError(
            f"Prompt {prompt.prompt_id!r} has {num_tokens} tokens and up to {sampling.max_tokens} are to follow, but "
            f"the model's context is {context}; lower sampling.max_tokens or data.max_prompt_tokens."
        )
    smallest = smallest_budget(num_tokens, sampling.max_tokens)
    if smallest > kv_tokens:
        raise ValueError(
            f"Prompt {prompt.prompt_id!r} and {sampling.max_tokens} tokens of completion take "
            f"{_mib(smallest * bytes_per_token)} of keys and values, but kv_memory allows "
            f"{_mib(kv_tokens * bytes_per_token)}; give at least the former."
        )


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.1f}MiB" if num_bytes < 2**30 else f"{num_bytes / 2**30:.2f}GiB"
