"""The batch of an update whose loss or gradient is not finite, saved in a file for the user to look at."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path

import torch

from lit_grpo.process.terminal import warn
from lit_grpo.types import Rollout

MOST_TOKENS = 2**20
"""Tokens of prompts and completions in one file; they take about 20 MiB."""
MOST_FILES = 3
"""Files that one process writes."""


class SkippedUpdates:
    """Counts skipped updates, and writes the batches of the first few.

    Args:
        folder: The folder of the files; None writes nothing.
        most: The number of skipped updates in a row that ends the run.
    """

    def __init__(self, folder: Path | None, most: int) -> None:
        self._folder, self._num_files, self._most = folder, 0, most
        self.num_skipped = 0

    def count(self, version: int, rank: int, rollouts: Sequence[Rollout], grad_norm: float, loss: float) -> None:
        """Count a skipped update, and write its rollouts, unless enough files are written.

        The safetensors hold the token ids of prompts and of completions one after another, and their lengths.
        ``sampled_logprobs`` and ``trained`` have a value for each of ``token_ids``, and ``advantages`` and ``rewards``
        one for each completion. The metadata name the rollouts and count those that were left out for the size.

        Args:
            version: Version of the policy.
            rank: The rank of this process.
            rollouts: The rollouts of the update on this rank, with their advantages.
            grad_norm: The norm of the gradient; it or the loss is not finite on some rank.
            loss: The loss of this rank.

        Raises:
            FloatingPointError: Too many updates in a row were skipped.
        """
        self.num_skipped, where = self.num_skipped + 1, ""
        if self._folder is not None and self._num_files < MOST_FILES:
            self._num_files += 1
            path = self._folder / f"broken-update-{version}-rank-{rank}.safetensors"
            try:
                path.write_bytes(_safetensors(rollouts, {"grad_norm": grad_norm, "loss": loss}))
                where = f": the batch of the update is in {path}"
            except OSError as error:
                warn(f"The batch could not be written to {path} ({error.strerror}).", stacklevel=2)
        if self.num_skipped >= self._most:
            raise FloatingPointError(
                f"The policy collapsed at update {version}: the gradient's norm is {grad_norm} and the loss {loss}, "
                f"not finite {self._most} times in a row (max_skipped_updates), and no weight has changed since; "
                f"lower the learning rate, or look for extreme rewards{where}."
            )


def _safetensors(rollouts: Sequence[Rollout], about: Mapping[str, float]) -> bytes:
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
        "advantages": torch.tensor([rollout.advantage for rollout in some], dtype=torch.float32),
        "rewards": torch.tensor([rollout.reward for rollout in some], dtype=torch.float32),
    }
    names = [(rollout.prompt.prompt_id, rollout.prompt.visit, rollout.completion.request.path) for rollout in some]
    metadata = {name: repr(value) for name, value in about.items()}
    metadata |= {"rollouts": json.dumps(names), "left_out": str(len(rollouts) - len(some))}
    return save(tensors, metadata)
