"""Memory for keys and values: what there is, what a request may take of it, and room for a step where it is scarce."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lit_grpo.memory import free_bytes, update_bytes
from lit_grpo.scheduling.layouts import Pieces, smallest_budget
from lit_grpo.scheduling.memory_amount import MemoryAmount
from lit_grpo.types import Request, SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def kv_budget_bytes(budget: MemoryAmount, policy: PreTrainedModel) -> int:
    """Return what ``budget`` comes to on the policy's device."""
    return budget.bytes(free_bytes(policy.device), update_bytes(policy))


class KVBudget:
    """What the slots may take: KV tokens, and prompt tokens that go through the model at once.

    Where memory runs out, the part that failed shrinks: KV tokens to four fifths of the most that were held, prompts to
    half. After some steps without a shortage both double, up to what was granted; with each shortage it takes twice as
    many steps, so that little is lost where the shortage lasts, and nothing where it passes.

    ``tokens`` and ``prefill_tokens`` are what there is now, ``granted_tokens`` the KV tokens that there were to begin
    with. ``prefills`` is set while prompts or prefixes go through the model: a failure then is one of these.

    Args:
        granted_bytes: The memory for keys and values.
        bytes_per_token: What those of a token take.
        prefill_tokens: Prompt tokens at once.
    """

    SHRINKAGE = 0.8
    PATIENCE = 8

    def __init__(self, granted_bytes: int, bytes_per_token: int, prefill_tokens: int) -> None:
        self._granted_bytes, self.bytes_per_token = granted_bytes, bytes_per_token
        self.tokens = self.granted_tokens = granted_bytes // bytes_per_token
        self._granted_prefill = self.prefill_tokens = prefill_tokens
        self._most_held = 0
        self._patience, self._num_good = self.PATIENCE, 0
        self.prefills = False

    def measure(self, bytes_per_token: int) -> None:
        """Count tokens of another size: autocast decides in which dtype keys and values come."""
        self.tokens = self.tokens * self.bytes_per_token // bytes_per_token
        self.bytes_per_token, self.granted_tokens = bytes_per_token, self._granted_bytes // bytes_per_token

    def shrink(self, allocated_tokens: int, num_preempted: int) -> str:
        """Go on with less after memory ran out; return what the user is told.

        Args:
            allocated_tokens: KV tokens there were when it did.
            num_preempted: Completions that had to be set aside for it.
        """
        if self.prefills and self.prefill_tokens > 1:
            self.prefill_tokens //= 2
        else:
            self.tokens = min(self.tokens, int(self.SHRINKAGE * max(self._most_held, allocated_tokens)))
        self.prefills = False
        self._patience, self._num_good = 2 * self._patience, 0
        return (
            f"Memory ran out with {allocated_tokens} KV tokens allocated; {num_preempted} completions were set aside "
            f"and go on with at most {self.tokens}, and prompts in pieces of {self.prefill_tokens} tokens; lower "
            "num_slots, kv_memory or prefill_tokens to keep this from happening."
        )

    def note_success(self, allocated_tokens: int) -> None:
        """A step has passed without a shortage."""
        self._most_held = max(self._most_held, allocated_tokens)
        self._num_good += 1
        if self._num_good % self._patience == 0:
            self.tokens = min(2 * self.tokens, self.granted_tokens)
            self.prefill_tokens = min(2 * self.prefill_tokens, self._granted_prefill)


def check_request(request: Request, sampling: SamplingParams, context: int, budget: KVBudget) -> None:
    """Check one request.

    Args:
        request: The request.
        sampling: That of the requests in flight.
        context: The most tokens that the model takes, prompt and completion together.
        budget: The KV tokens that were granted.

    Raises:
        ValueError: Its sampling is another, its prompt is empty, or it fits the context or the memory at no time.
    """
    if request.sampling != sampling:
        raise ValueError(
            f"Sample {request.path} of prompt {request.prompt.prompt_id!r} has other sampling parameters than the "
            "requests in flight, and in SlotGenerator these must share their sampling parameters; submit it once they "
            "have ended, or take a generator of vLLM's."
        )
    prompt, num_tokens = request.prompt, len(request.prompt.token_ids)
    if not num_tokens:
        raise ValueError(f"Prompt {prompt.prompt_id!r} has no tokens; a completion needs at least one.")
    if num_tokens + sampling.room > context:
        raise ValueError(
            f"Prompt {prompt.prompt_id!r} has {num_tokens} tokens and up to {sampling.room} are to follow, but "
            f"the model's context is {context}; lower sampling.max_tokens or data.max_prompt_tokens."
        )
    request.check_prefix()
    smallest = smallest_budget(Pieces(), num_tokens, sampling.room)
    if smallest > budget.granted_tokens:
        raise ValueError(
            f"Prompt {prompt.prompt_id!r} and {sampling.room} tokens of completion take "
            f"{_mib(smallest * budget.bytes_per_token)} of keys and values, but kv_memory allows "
            f"{_mib(budget.granted_tokens * budget.bytes_per_token)}; give at least the former."
        )


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.1f}MiB" if num_bytes < 2**30 else f"{num_bytes / 2**30:.2f}GiB"
