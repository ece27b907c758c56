"""Making room for a decode step where memory for keys and values is scarce."""

from __future__ import annotations

from lit_grpo.rollout.prompt_states import AHEAD_TOKENS
from lit_grpo.rollout.slot_cache import SlotCache
from lit_grpo.rollout.token_rows import TokenRows
from lit_grpo.types import Completion, Request


class KVRoom:
    """The KV tokens that the slots may take.

    Args:
        granted_tokens: How many there are; ``tokens`` starts from there and shrinks where they prove too many.
    """

    SHRINKAGE = 0.8

    def __init__(self, granted_tokens: int) -> None:
        self.granted_tokens = self.tokens = granted_tokens

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
        begun: dict[tuple[str, int, int], Completion],
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
