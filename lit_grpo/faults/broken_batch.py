"""The batch of an update whose loss or gradient is not finite, saved in a file for the user to look at."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path

import torch

from lit_grpo.types import Rollout

MOST_TOKENS = 2**20
"""Tokens of prompts and completions in one file; they take about 20 MiB."""
MOST_FILES = 3
"""Files that one process writes."""


class BrokenBatches:
    """Counts skipped updates, and writes the batches of the first few.

    Args:
        folder: The folder of the files; None writes nothing.
        most: The number of skipped updates in a row that ends the run.

    Attributes:
        num_skipped: The number of skipped updates in a row.
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
        """Count an update; if it is skipped, write its batch.

        Args:
            skipped: Whether the update is skipped, because the gradient or the loss is not finite on some rank.
            version: Version of the policy.
            rank: The rank of this process.
            rollouts: The rollouts of the update.
            advantages: The advantage of each rollout.
            grad_norm: The norm of the gradient.
            loss: The loss of this rank.

        Raises:
            FloatingPointError: Too many updates in a row were skipped.
        """
        self.num_skipped = self.num_skipped + 1 if skipped else 0
        if not skipped:
            return
        about = {"grad_norm": grad_norm, "loss": loss}
        where = self.keep(f"update-{version}-rank-{rank}", rollouts, advantages, about)
        if self.num_skipped >= self._most:
            raise FloatingPointError(
                f"The policy collapsed at update {version}: the gradient's norm is {grad_norm} and the loss {loss}, "
                f"not finite {self._most} times in a row (max_skipped_updates), and no weight has changed since; "
                f"lower the learning rate, or look for extreme rewards{where}."
            )

    def keep(
        self, name: str, rollouts: Sequence[Rollout], advantages: Sequence[float], about: Mapping[str, float]
    ) -> str:
        """Write the rollouts of a rank, unless enough files are written; return the end of a sentence with the path.

        The safetensors hold the token ids of prompts and of completions one after another, and their lengths.
        ``sampled_logprobs`` and ``trained`` have a value for each of ``token_ids``, and ``advantages`` and ``rewards``
        one for each completion. The metadata name the rollouts and count those that were left out for the size.

        Args:
            name: The end of the file's name.
            rollouts: The rollouts of the update.
            advantages: The advantage of each rollout.
            about: Figures for the metadata.
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
        return f": the batch of the update is in {path}"


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
