"""What an update was to learn from whose loss or gradient is not finite, in a file for a look."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path

import torch

from lit_grpo.types import Rollout

MOST_TOKENS = 2**20
"""Of completions and prompts, in one file: about 20 MiB."""
MOST_FILES = 3
"""Of one process."""


class BrokenBatches:
    """Counts updates that are left out, and writes the batches of the first few.

    Args:
        folder: Where to; None writes nothing.
        most: So many updates in a row that are left out end the run.

    Attributes:
        num_skipped: Updates in a row that have been left out.
    """

    def __init__(self, folder: Path | None, most: int) -> None:
        self._folder, self._num_files, self._most = folder, 0, most
        self.num_skipped = 0

    def count(
        self,
        skipped: bool,
        version: int,
        rank: int,
        rollouts: Sequence[Rollout],
        advantages: Sequence[float],
        grad_norm: float,
        loss: float,
    ) -> None:
        """Count an update of a policy version; keep what one that is left out was to learn from.

        Args:
            skipped: Whether it is left out.
            version: Of the policy.
            rank: Of this process.
            rollouts: What was to be learnt from.
            advantages: One a rollout.
            grad_norm: Of the gradient.
            loss: Of this rank; either is not finite on some rank where the update is left out.

        Raises:
            FloatingPointError: Too many have been left out in a row.
        """
        self.num_skipped = self.num_skipped + 1 if skipped else 0
        if not skipped:
            return
        about = {"grad_norm": grad_norm, "loss": loss}
        where = self.keep(f"update-{version}-rank-{rank}", rollouts, advantages, about)
        if self.num_skipped >= self._most:
            raise FloatingPointError(
                f"The policy collapsed at update {version}: the gradient's norm is {grad_norm} and the loss {loss}, "
                f"not finite {self._most} times in a row (max_skipped_updates), and no weight has "
                f"been touched since; lower the learning rate, or look for extreme rewards{where}."
            )

    def keep(
        self, name: str, rollouts: Sequence[Rollout], advantages: Sequence[float], about: Mapping[str, float]
    ) -> str:
        """Write the rollouts of a rank, where there is room; return what to tell the user of it.

        The safetensors hold token ids of prompts and completions one after another, and their lengths.
        ``sampled_logprobs`` and ``trained`` go with ``token_ids``, and ``advantages`` and ``rewards`` with the
        completions. Metadata name the rollouts, and say how many were left out for the size.

        Args:
            name: Of the file.
            rollouts: What was to be learnt from.
            advantages: One a rollout.
            about: Goes into the metadata.
        """
        if self._folder is None or self._num_files == MOST_FILES:
            return ""
        self._num_files += 1
        path = self._folder / f"broken-{name}.safetensors"
        try:
            path.write_bytes(_safetensors(rollouts, advantages, about))
        except OSError as error:
            warnings.warn(f"The batch could not be written to {path} ({error.strerror}).", stacklevel=2)
            return ""
        return f": what it was to learn from is in {path}"


def _safetensors(rollouts: Sequence[Rollout], advantages: Sequence[float], about: Mapping[str, float]) -> bytes:
    from safetensors.torch import save

    sizes = accumulate(len(rollout.prompt.token_ids) + rollout.completion.num_tokens for rollout in rollouts)
    some = rollouts[: sum(size <= MOST_TOKENS for size in sizes)]
    completions = [rollout.completion for rollout in some]
    none = torch.empty(0)
    tensors = {
        "prompt_token_ids": torch.tensor([token for rollout in some for token in rollout.prompt.token_ids]).long(),
        "prompt_lengths": torch.tensor([len(rollout.prompt.token_ids) for rollout in some]).long(),
        "token_ids": torch.cat([none.long(), *(completion.token_ids_T for completion in completions)]),
        "sampled_logprobs": torch.cat([none, *(completion.logprobs_T for completion in completions)]),
        "trained": torch.cat([none.bool(), *(completion.trained_T for completion in completions)]),
        "lengths": torch.tensor([completion.num_tokens for completion in completions]).long(),
        "advantages": torch.tensor(advantages[: len(some)], dtype=torch.float32),
        "rewards": torch.tensor([rollout.reward for rollout in some], dtype=torch.float32),
    }
    names = [(rollout.prompt.prompt_id, rollout.prompt.visit, rollout.completion.request.path) for rollout in some]
    metadata = {name: repr(value) for name, value in about.items()}
    metadata |= {"rollouts": json.dumps(names), "left_out": str(len(rollouts) - len(some))}
    return save(tensors, metadata)
