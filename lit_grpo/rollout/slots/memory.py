"""Memory for keys and values: what there is, what a request may take of it, and room for a step where it is scarce."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lit_grpo.memory import free_bytes, update_bytes
from lit_grpo.rollout.slots.cache import SlotCache
from lit_grpo.rollout.slots.prompts import AHEAD_TOKENS
from lit_grpo.rollout.slots.rows import TokenRows
from lit_grpo.scheduling.budget import MemoryBudget
from lit_grpo.scheduling.flight import smallest_budget
from lit_grpo.types import Completion, Key, Request, SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def kv_budget_tokens(budget: MemoryBudget, policy: PreTrainedModel, bytes_per_token: int) -> int:
    """Return the KV tokens that ``budget`` comes to on the policy's device."""
    return budget.bytes(free_bytes(policy.device), update_bytes(policy)) // bytes_per_token


class KVRoom:
    """The KV tokens that the slots may take.

    Args:
        granted_tokens: How many there are; ``tokens`` starts from there and shrinks where they prove too many.
        bytes_per_token: What one takes.
    """

    SHRINKAGE = 0.8

    def __init__(self, granted_tokens: int, bytes_per_token: int) -> None:
        self.granted_tokens = self.tokens = granted_tokens
        self._bytes_per_token = bytes_per_token

    def measure(self, bytes_per_token: int) -> None:
        """Count tokens of another size: autocast decides in which dtype keys and values come."""
        before, self._bytes_per_token = self._bytes_per_token, bytes_per_token
        self.granted_tokens = self.granted_tokens * before // bytes_per_token
        self.tokens = self.tokens * before // bytes_per_token

    def is_scarce(self, rows: TokenRows, cache: SlotCache, num_fresh: int) -> bool:
        """Whether the memory could come to an end, if all in flight grew to their limit."""
        most = 2 * (len(rows) + num_fresh) * cache.max_tokens + AHEAD_TOKENS
        return cache.allocated_tokens + most > self.tokens

    def make(
        self,
        rows: TokenRows,
        cache: SlotCache,
        fresh: list[Request],
        set_aside: list[Request],
        begun: dict[Key, Completion],
    ) -> None:
        """Take the youngest out, those not begun first, until the next step fits; one is always left.

        Args:
            rows: The rows in use, which lose those that are taken out.
            cache: Their keys and values, likewise.
            fresh: Requests that have no row yet, likewise.
            set_aside: Gets the requests that are taken out.
            begun: Gets what those have that were begun, by their keys.
        """
        tight = False
        if not self.is_scarce(rows, cache, len(fresh)):
            return
        while cache.allocated_tokens + cache.growth(rows.counts_B - 1, len(fresh)) > self.tokens:
            if not tight:
                cache.tighten()
                tight = True
            elif len(rows) + len(fresh) == 1:
                return
            elif fresh:
                set_aside.append(fresh.pop())
            else:
                completion = take_out(rows, cache, rows.youngest())
                begun[completion.request.key] = completion
                set_aside.append(completion.request)
                tight = False

    def shrink(self, allocated_tokens: int) -> None:
        """After memory ran out: go on with less than what did not fit."""
        self.tokens = int(self.SHRINKAGE * allocated_tokens)


def take_out(rows: TokenRows, cache: SlotCache, row: int) -> Completion:
    """Free a row and return what it has."""
    completion = rows.completion(row, "abort")
    cache.remove(row)
    rows.remove(row)
    return completion


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
