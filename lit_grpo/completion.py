"""What has been sampled of one completion, packed: a group of thousands is kept until it is whole."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import numpy as np
    import torch

    from lit_grpo.types import Request

FinishReason = Literal["stop", "length", "abort"]


class Completion:
    """The tokens of one sample.

    ``token_ids_T`` (int64), ``logprobs_T`` (float32, of the distribution that was sampled from) and
    ``versions_T`` (int64, the policy version that sampled each token) lie on the CPU and have equal
    length. ``finish_reason`` is ``stop`` (an end-of-sequence token or a stop string; the token is
    kept), ``length`` (the limit) or ``abort``. ``entropy`` is the mean entropy, in nats, of the distributions that its
    tokens were sampled from; NaN where the generator does not tell.

    A token takes eight bytes, and there are no tensors until they are asked for: ``logprobs_T`` is then the memory that
    is kept, the others are copies, which can be assigned as a whole.
    """

    __slots__ = ("_memory", "_num_tokens", "_versions", "entropy", "finish_reason", "request", "text")

    def __init__(
        self,
        request: Request,
        token_ids_T: torch.Tensor,
        logprobs_T: torch.Tensor,
        versions_T: torch.Tensor,
        finish_reason: FinishReason,
        text: str = "",
        entropy: float = math.nan,
    ) -> None:
        self.request = request
        self._memory, self._num_tokens = bytearray(), 0  # ids (int32), then log-probs (float32)
        self.token_ids_T, self.logprobs_T, self.versions_T = token_ids_T, logprobs_T, versions_T
        self.finish_reason: FinishReason = finish_reason
        self.text = text
        self.entropy = entropy

    @property
    def num_tokens(self) -> int:
        """Number of sampled tokens."""
        return self._num_tokens

    @property
    def token_ids_T(self) -> torch.Tensor:
        """The tokens, int64; a copy."""
        import torch

        return _tensor(self._memory, torch.int32, 0, self._num_tokens).long()

    @token_ids_T.setter
    def token_ids_T(self, token_ids_T: torch.Tensor) -> None:
        logprobs = self._memory[4 * self._num_tokens :]
        self._memory, self._num_tokens = bytearray(_array(token_ids_T).astype("int32")) + logprobs, len(token_ids_T)

    @property
    def logprobs_T(self) -> torch.Tensor:
        """Their log-probs, float32; what is written to it is kept."""
        import torch

        begin = 4 * self._num_tokens
        return _tensor(self._memory, torch.float32, begin, (len(self._memory) - begin) // 4)

    @logprobs_T.setter
    def logprobs_T(self, logprobs_T: torch.Tensor) -> None:
        self._memory = self._memory[: 4 * self._num_tokens] + bytearray(_array(logprobs_T).astype("float32"))

    @property
    def versions_T(self) -> torch.Tensor:
        """The policy versions that sampled them, int64; a copy."""
        import torch

        if isinstance(self._versions, int):
            return torch.full((self.num_tokens,), self._versions)
        return _tensor(self._versions, torch.int64, 0, len(self._versions) // 8).clone()

    @versions_T.setter
    def versions_T(self, versions_T: torch.Tensor) -> None:
        values = _array(versions_T)
        uniform = len(values) > 0 and bool((values == values[0]).all())
        self._versions: int | bytearray = int(values[0]) if uniform else bytearray(values.astype("int64"))

    def __repr__(self) -> str:
        return f"Completion({self.request.key}, {self.num_tokens} tokens, {self.finish_reason!r}, {self.text!r})"


def _array(values_T: torch.Tensor) -> np.ndarray:
    return values_T.detach().cpu().contiguous().numpy()


def _tensor(memory: bytearray, dtype: torch.dtype, begin: int, count: int) -> torch.Tensor:
    """A tensor on that memory, from byte ``begin`` on; it may take part in autograd, wherever it is asked for."""
    import torch

    with torch.inference_mode(False):
        if not count:
            return torch.empty(0, dtype=dtype)
        return torch.frombuffer(memory, dtype=dtype, count=count, offset=begin)
