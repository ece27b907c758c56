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
    points: Sequence[int], rows: TokenRows, counts_B: np.ndarray, hidden_BD: torch.Tensor, entropies_B: np.ndarray
) -> list[Observation]:
    """Tell what the policy shows of the rows that have come to one of ``points``; a prompt's point, 0, is left out."""
    observations = []
    for point in sorted(set(points).intersection(counts_B.tolist()) - {0}):
        chosen = np.flatnonzero(counts_B == point)
        states = hidden_BD[torch.from_numpy(chosen).to(hidden_BD.device)].float().cpu().numpy()
        features = np.column_stack([states, rows.mean_logprobs(chosen, point), entropies_B[chosen]])
        requests = rows.requests
        observations.append(Observation([requests[row].key for row in chosen], point, features))
    return observations
