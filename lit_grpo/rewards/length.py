"""What a long completion costs."""

from __future__ import annotations


class SoftOverlongPenalty:
    """DAPO's soft overlong punishment (arXiv 2503.14476, equation 13).

    0 up to ``max_tokens - buffer`` tokens, then linear down to -1 at ``max_tokens``, and -1 beyond.

    Args:
        buffer: The number of tokens over which the punishment grows; at least 1.
        max_tokens: Where it reaches -1; by default the most tokens that sampling allows.
    """

    def __init__(self, buffer: int, max_tokens: int | None = None) -> None:
        if buffer < 1:
            raise ValueError(f"buffer must be at least 1 token, not {buffer}.")
        self.buffer = buffer
        self.max_tokens = max_tokens
        if max_tokens is not None:
            self._check(max_tokens)

    def __call__(self, completion: str, num_tokens: int, max_tokens: int) -> float:
        """Score one completion by its length."""
        limit = max_tokens if self.max_tokens is None else self.max_tokens
        self._check(limit)
        return max(-1.0, min(0.0, (limit - self.buffer - num_tokens) / self.buffer))

    def _check(self, max_tokens: int) -> None:
        if self.buffer > max_tokens:
            raise ValueError(f"buffer {self.buffer} is larger than max_tokens {max_tokens}; make it smaller.")
