"""Completions of held-out rows: one validation of Lightning samples the greedy ones, then the others."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, cast

import lightning.pytorch as pl

from lit_grpo.data.loaders import EvalLoader
from lit_grpo.data.module import TELL_EVERY_S, PromptDataModule
from lit_grpo.module import GRPOModule
from lit_grpo.process.terminal import say
from lit_grpo.types import PromptBatch, RolloutGroup, SamplingParams


@dataclass(frozen=True)
class SamplingPass:
    """One pass over the held-out rows.

    Args:
        greedy: Whether the pass decodes greedily.
        num_samples: Number of completions per row.
        sampling: Sampling parameters of the completions.
    """

    greedy: bool
    num_samples: int
    sampling: SamplingParams


@dataclass(frozen=True)
class Scored:
    """A completion and what it earned; a line of ``completions.jsonl``.

    Args:
        prompt_id: Name of the row, such as ``validation/17``.
        prompt: Text of the prompt, as the policy was asked.
        policy: The policy as the command line names it.
        greedy: Whether it was decoded greedily.
        sample: Number of the completion among those of the row.
        completion: Text of the sampled tokens.
        reward: Weighted sum of the rewards, NaN if no reward function applies.
        correct: Whether it passes the run's threshold; None if the rewards that decide give no value.
        answer: What the majority is taken of: empty without an answer, None if answers to the row are not told apart.
        length: Number of sampled tokens.
        truncated: Whether it ended at ``max_tokens``.
        columns: The columns of the row that reward functions need.
        dataset: Data set of the row, if the rows are of several.
        messages: The conversation after the prompt, if there is an environment.
    """

    prompt_id: str
    prompt: str
    policy: str
    greedy: bool
    sample: int
    completion: str
    reward: float
    correct: bool | None
    answer: str | None
    length: int
    truncated: bool
    columns: dict[str, Any] = field(default_factory=dict)
    dataset: str = ""
    messages: list[dict[str, Any]] | None = None

    def line(self) -> dict[str, Any]:
        """Return the line of the file, without what the completion has not."""
        line = asdict(self)
        if self.messages is None:
            del line["messages"]
        if not self.dataset:
            del line["dataset"]
        return line


class RepeatedLoader:
    """The batches of a loader, all of them once for each pass.

    Args:
        loader: Loader of the held-out prompts.
        num_passes: Number of times that all batches are repeated.
    """

    def __init__(self, loader: EvalLoader, num_passes: int) -> None:
        self._loader, self._num_passes = loader, num_passes

    def __len__(self) -> int:
        return len(self._loader) * self._num_passes

    def __iter__(self) -> Iterator[PromptBatch]:
        for _ in range(self._num_passes):
            yield from self._loader


class HeldOutRows(PromptDataModule):
    """The data of a run whose validation and test go over the rows several times.

    Attributes:
        num_passes: Number of passes over the rows.
    """

    num_passes = 1

    def val_dataloader(self) -> Any:
        return RepeatedLoader(cast(EvalLoader, super().val_dataloader()), self.num_passes)

    def test_dataloader(self) -> Any:
        return RepeatedLoader(super().test_dataloader(), self.num_passes)


class Collector(pl.Callback):
    """Sets the sampling parameters of each pass, and collects the completions.

    It stands before :class:`lit_grpo.callbacks.RolloutScheduler` among the callbacks, which samples at the beginning of
    a batch.

    Args:
        policy: Name of the policy, for messages.
        passes: The passes over the rows, in their order.
        num_batches: Number of batches of one pass.

    Attributes:
        collected: The groups of each pass, in the order of the rows.
    """

    def __init__(self, policy: str, passes: Sequence[SamplingPass], num_batches: int) -> None:
        self.policy, self.passes, self._num_batches = policy, passes, num_batches
        self._began = self._told = time.monotonic()
        self.collected: list[list[RolloutGroup]] = [[] for _ in passes]

    def on_validation_batch_start(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        batch: PromptBatch,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Set the sampling parameters of the pass that the batch belongs to."""
        assert isinstance(pl_module, GRPOModule)
        now = self.passes[batch_idx // self._num_batches]
        pl_module.eval_sampling, pl_module.eval_num_generations = now.sampling, now.num_samples

    def on_validation_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: PromptBatch,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Keep the groups, whose completions have their rewards, and say now and then how far the evaluation is."""
        self.collected[batch_idx // self._num_batches] += batch.groups
        done, total, now = batch_idx + 1, len(self.passes) * self._num_batches, time.monotonic()
        if done < total and now - self._told >= TELL_EVERY_S:
            self._told = now
            say(f"{self.policy}: {done} of {total} batches in {now - self._began:.0f} s", flush=True)

    on_test_batch_start, on_test_batch_end = on_validation_batch_start, on_validation_batch_end
