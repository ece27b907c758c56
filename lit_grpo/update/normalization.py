"""The one denominator that all objectives share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

Normalization = Literal["token", "sequence", "constant", "sequence_sum"]


@dataclass(frozen=True)
class StepTotals:
    """What one optimizer step is normalised by, counted over all micro-batches and ranks beforehand.

    Because it is fixed before the first backward, the gradient does not depend on how the step is split.
    ``num_tokens`` and ``num_sequences`` are of the completions with a reward; ``num_entropy_tokens`` are those that an
    entropy bonus is averaged over, and ``num_ce_tokens`` those whose weight in the ``ce`` channel is not 0.
    """

    num_tokens: int
    num_sequences: int
    max_tokens: int
    num_entropy_tokens: int = 0
    num_ce_tokens: int = 0


def token_weights(
    lengths_C: torch.Tensor,
    totals: StepTotals,
    normalization: Normalization,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Return what each token of a completion counts in the step's loss, shape C.

    ``token``: every token of the step alike (DAPO; TRL's ``dapo``). ``sequence``: every completion alike,
    whatever its length (the first GRPO; TRL's ``grpo``). ``constant``: by the limit on completion length, so
    that length is not rewarded either way (Dr. GRPO; TRL's ``dr_grpo``). ``sequence_sum``: the mean over completions of
    the sum over their tokens (TRL's ``luspo``).
    """
    if normalization == "sequence":
        return 1 / (lengths_C.clamp(min=1) * max(totals.num_sequences, 1)).to(dtype)
    denominator = {
        "token": totals.num_tokens,
        "constant": totals.num_sequences * totals.max_tokens,
        "sequence_sum": totals.num_sequences,
    }[normalization]
    return torch.full_like(lengths_C, 1 / max(denominator, 1), dtype=dtype)
