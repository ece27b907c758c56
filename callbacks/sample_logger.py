"""Shows sampled completions."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.loggers import TensorBoardLogger, WandbLogger
from lightning.pytorch.trainer.states import TrainerFn

from lit_grpo.display.due import is_due
from lit_grpo.display.pictures import from_data_url, last_turn, strip, without_images
from lit_grpo.display.samples import Sample, Samples, as_text, transcript
from lit_grpo.display.screen import the_console
from lit_grpo.faults import forget_after, json_line, writable
from lit_grpo.faults.observers import Observer
from lit_grpo.limits import Count, Number, checks_arguments
from lit_grpo.module import GRPOModule
from lit_grpo.process.terminal import markdown
from lit_grpo.process.urls import masked
from lit_grpo.rewards.function import RewardFunction
from lit_grpo.types import Prompt, PromptBatch, Rollout

IMAGES = "prompt_images"
USUAL = ("answer", "solution", "ground_truth", "target", "label", "reference")
"""Columns with the expected answer, for runs whose reward functions name no column."""


class SampleLogger(Observer):
    """Print some sampled completions, and write them to ``samples.jsonl`` and loggers.

    On the terminal a completion is a block of lines: rewards, advantage, tokens and the reason of its end; the end of
    the prompt's last user message; the beginning and end of the completion; and the columns that reward functions use,
    or a column named ``answer``, ``solution``, ``ground_truth``, ``target``, ``label`` or ``reference``. Files and
    loggers have the full texts, the value of each reward function as ``rewards/NAME``, and all columns of the data as
    ``columns/NAME``. Images of a prompt are shown in small: ``samples.jsonl`` has them in ``prompt_images`` as one
    PNG file, side by side, and W&B's table shows them. On the terminal an image is ``[image 640x480]``.

    Each validation adds completions of the first validation prompts, the same ones every time, to ``val_samples.jsonl``
    and to the loggers as ``val_samples``. The best and the worst one of the last validation are shown on the terminal
    at the end of the run.

    Args:
        every_n_updates: Show samples of the first batch, and whenever the policy's version reaches or passes a multiple
            of this number; 0 never shows any.
        num_samples: Number of completions to show, of as many different prompts as possible.
        num_validation_samples: Number of completions to keep of a validation, for each of its data sets, from the first
            rank; 0 keeps none.
    """

    @checks_arguments("sample_logger.")
    def __init__(
        self, every_n_updates: Number = 20, num_samples: Count = 4, num_validation_samples: Number = 16
    ) -> None:
        self.every_n_updates = every_n_updates
        self.num_samples = num_samples
        self.num_validation_samples = num_validation_samples
        self._version = 0  # the policy's version before this batch
        self._validated: dict[int, list[Rollout]] = {}  # of this validation, by the number of the data set
        self._held_out: tuple[int, list[Rollout]] = (0, [])  # of the last one: its update, the best and the worst

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Drop the rows that a resumed run will write again."""
        self._version = trainer.global_step
        self._make_folder(trainer)
        if trainer.is_global_zero and trainer.global_step:
            for table in ("samples", "val_samples"):
                forget_after(Path(trainer.default_root_dir) / f"{table}.jsonl", trainer.global_step)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: PromptBatch, batch_idx: int
    ) -> None:
        before, step = self._version, trainer.global_step
        self._version = step
        if not is_due(self.every_n_updates, before, step) or not trainer.is_global_zero:
            return
        assert isinstance(pl_module, GRPOModule)
        picked = self._pick(batch)
        if not picked:  # no group has a new rollout
            return
        _show(f"samples at update {step}", picked, trainer, pl_module)
        self._keep(trainer, "samples", _same_columns([_row(step, rollout) for rollout in picked]))

    def on_validation_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._validated = {}
        if trainer.state.fn == TrainerFn.VALIDATING:  # outside of training
            self._make_folder(trainer)

    def on_validation_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: PromptBatch,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        kept = self._validated.setdefault(dataloader_idx, [])
        kept += batch.rollouts[: self.num_validation_samples - len(kept)]

    def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Write completions of the first prompts."""
        rollouts = [rollout for kept in self._validated.values() for rollout in kept]
        if rollouts and trainer.is_global_zero and not trainer.sanity_checking:
            rows = _same_columns([_row(trainer.global_step, rollout) for rollout in rollouts])
            for row in rows:
                del row["advantage"]  # they are not trained on
            self._keep(trainer, "val_samples", rows)
            self._held_out = trainer.global_step, _best_and_worst(rollouts, worst_first=0)[:2]

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        assert isinstance(pl_module, GRPOModule)
        step, rollouts = self._held_out
        if rollouts and self.every_n_updates:
            _show(f"held-out samples at update {step}, best and worst", rollouts, trainer, pl_module)

    def _pick(self, batch: PromptBatch) -> list[Rollout]:
        ordered = [_best_and_worst(group.fresh, number % 2) for number, group in enumerate(batch.groups)]
        rounds = zip_longest(*ordered)
        return [rollout for round_ in rounds for rollout in round_ if rollout is not None][: self.num_samples]

    def _make_folder(self, trainer: pl.Trainer) -> None:
        """Make the run's folder, which a user's own Trainer may lack; not later, for one that was moved stays away."""
        if trainer.is_global_zero:
            Path(trainer.default_root_dir).mkdir(parents=True, exist_ok=True)

    def _keep(self, trainer: pl.Trainer, table: str, rows: list[dict[str, Any]]) -> None:
        folder, step, rows = Path(trainer.default_root_dir), trainer.global_step, masked(rows)
        with (folder / f"{table}.jsonl").open("a", encoding="utf-8") as file:
            file.writelines(json_line(row) for row in rows)
        pictures = [row.pop(IMAGES, None) for row in rows]
        for logger in trainer.loggers:
            if (log_table := getattr(logger, "log_table", None)) is not None:  # W&B and trackio
                columns, cells = list(rows[0]), _cells(rows)
                if any(pictures) and isinstance(logger, WandbLogger):
                    columns.append(IMAGES)
                    cells = [[*row, _picture(url)] for row, url in zip(cells, pictures, strict=True)]
                log_table(table, columns=columns, data=cells, step=step)
            elif isinstance(logger, TensorBoardLogger):
                logger.experiment.add_text(table, _markdown(rows), step)


def _show(title: str, rollouts: Sequence[Rollout], trainer: pl.Trainer, module: GRPOModule) -> None:
    data = trainer.datamodule  # pyrefly: ignore[missing-attribute]
    column = getattr(getattr(data, "renderer", None), "prompt_column", "prompt")
    the_console().print(Samples(title, [_sample(rollout, module.rewards, column) for rollout in rollouts]))


def _best_and_worst(rollouts: Iterable[Rollout], worst_first: int) -> list[Rollout]:
    left = deque(sorted(rollouts, key=lambda rollout: rollout.reward))
    return [left.popleft() if (turn + worst_first) % 2 else left.pop() for turn in range(len(left))]


def _sample(rollout: Rollout, rewards: Sequence[RewardFunction], prompt_column: str) -> Sample:
    completion = rollout.completion
    return Sample(
        prompt=_last_turn(rollout.prompt, prompt_column) + as_text(rollout.said),
        completion=completion.text if completion.episode is None else transcript(completion.episode.messages),
        tokens=completion.num_sampled,
        finish=completion.finish_reason,
        reward=rollout.reward,
        advantage=rollout.advantage,
        rewards=rollout.rewards,
        reference=_reference(rollout.prompt.columns, rewards),
    )


def _last_turn(prompt: Prompt, column: str) -> str:
    """Return the last user message without its chat template; for a prompt that was altered, the whole prompt."""
    if prompt.altered:
        return prompt.text
    if prompt.pictures is not None:
        return last_turn(prompt)
    turns = [turn["content"] for turn in prompt.messages or () if turn["role"] == "user"]
    asked = turns[-1] if turns else prompt.columns.get(column)
    return asked if isinstance(asked, str) and asked.strip() in prompt.text else prompt.text


def _reference(columns: dict[str, Any], rewards: Sequence[RewardFunction]) -> dict[str, Any]:
    """Return the columns that reward functions name, or else those of ``USUAL``."""
    named = {name for function in rewards for name in (*(function.names - {*function.inputs}), *function.declared)}
    taken = {name: value for name, value in columns.items() if name in named}
    return taken or {name: columns[name] for name in USUAL if name in columns}


def _row(step: int, rollout: Rollout) -> dict[str, Any]:
    columns, pictures = rollout.prompt.columns, rollout.prompt.pictures
    columns = columns if pictures is None else without_images(columns)
    return {
        "step": step,
        "prompt_id": rollout.prompt.prompt_id,
        "prompt": rollout.asked,
        **rollout.prompt.extra,
        "completion": rollout.completion.text,
        **({} if rollout.completion.episode is None else {"messages": rollout.completion.episode.messages}),
        **({"rows": len(rollout.completion.contexts)} if rollout.completion.contexts else {}),
        "tokens": rollout.completion.num_sampled,
        "finish": rollout.completion.finish_reason,
        "reward": rollout.reward,
        "advantage": rollout.advantage,
        **{f"rewards/{name}": value for name, value in rollout.rewards.items()},
        **{f"columns/{name}": value for name, value in columns.items()},
        **rollout.extra,
        **({} if pictures is None else {IMAGES: strip(pictures)}),
    }


def _same_columns(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Give all rows the same columns, null where a reward function has logged a column for some prompts only."""
    columns = dict.fromkeys(name for row in rows for name in row)
    return [columns | row for row in rows]


def _cells(rows: list[dict[str, Any]]) -> list[list[Any]]:
    """Return rows for W&B's tables, in which a column has one type: numbers, or text."""
    numbers = {name for name in rows[0] if all(type(row[name]) in (int, float, type(None)) for row in rows)}
    return [[value if name in numbers else _text(value) for name, value in row.items()] for row in rows]


def _picture(url: str | None) -> Any:
    """Return W&B's picture of a data URL."""
    from wandb import Image

    return None if url is None else Image(from_data_url(url))


def _text(value: Any) -> str | None:
    if value is None:
        return None
    return writable(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str))


def _markdown(rows: list[dict[str, Any]]) -> str:
    lines = [" | ".join(map(markdown, rows[0])), " | ".join("---" for _ in rows[0])]
    lines += [" | ".join(markdown(str(value)) for value in row.values()) for row in rows]
    return writable("\n".join(lines))
