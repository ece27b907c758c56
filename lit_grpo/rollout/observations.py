"""What the policy shows of completions and prompts, for those who predict lengths."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from lit_grpo.rollout.generator import Observation
from lit_grpo.rollout.token_rows import TokenRows


def observe_prompts(keys: Sequence[tuple[str, int]], hidden_BD: torch.Tensor, entropies_B: torch.Tensor) -> Observation:
    """Tell the last hidden states of prompts, and the entropies of their completions' first tokens."""
    entropies_B1 = entropies_B[:, None]
    parts = (hidden_BD.float(), torch.zeros_like(entropies_B1), entropies_B1)
    return Observation(keys, 0, torch.cat(parts, -1).cpu().numpy())


def observe_rows(
    points: Sequence[int], rows: TokenRows, counts_B: np.ndarray, hidden_BD: torch.Tensor, entropies_B: torch.Tensor
) -> list[Observation]:
    """Tell what the policy shows of the rows that have come to one of ``points``; a prompt's point, 0, is left out."""
    observations = []
    for point in points:
        if not point or not len(chosen := np.flatnonzero(counts_B == point)):
            continue
        index = torch.from_numpy(chosen).to(hidden_BD.device)
        parts = [
            hidden_BD[index].float().cpu(),
            rows.mean_logprobs(chosen.tolist()),
            entropies_B[index, None].cpu(),
        ]
        requests = rows.requests
        keys = [requests[row].key for row in chosen]
        observations.append(Observation(keys, point, torch.cat(parts, -1).numpy()))
    return observations
