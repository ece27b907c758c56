"""A run from Python, in one call."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import lightning.pytorch as pl

from lit_grpo.callbacks import GRPOProgressBar
from lit_grpo.data.module import PromptDataModule
from lit_grpo.module import GRPOModule
from lit_grpo.training.defaults import TRAINER_DEFAULTS, default_callbacks
from lit_grpo.training.run_folder import RunConfig, RunFolder, is_first_rank, make_loggers

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from lit_grpo.data.sources import RowSource
    from lit_grpo.rewards import RewardSpec

    Source = str | RowSource | Iterable[Any]


class Run(NamedTuple):
    """What has been trained, and where the run has left its metrics, checkpoints and policy."""

    module: GRPOModule
    folder: Path


def train(
    policy: str | PreTrainedModel,
    train: Source,
    rewards: Sequence[Callable[..., Any] | str | RewardSpec | Mapping[str, Any]],
    *,
    max_steps: int,
    batch_size: int = 8,
    tokenizer: PreTrainedTokenizerBase | None = None,
    validation: Source | None = None,
    name: str = "grpo",
    dir: str = "runs",
    seed: int = 0,
    data: Mapping[str, Any] | None = None,
    trainer: Mapping[str, Any] | None = None,
    callbacks: Mapping[str, Mapping[str, Any] | None] | None = None,
    **settings: Any,
) -> Run:
    """Train a policy as ``python -m lit_grpo fit`` does.

    Args:
        policy: ``tiny``, a folder, a Hugging Face id, or a loaded model, which is then trained in place.
        train: Training prompts: a file, folder or id, a RowSource, a ``datasets.Dataset`` or a list of dicts.
        rewards: Functions, ``file.py:name`` or import paths, or RewardSpecs.
        max_steps: Optimizer steps in all.
        batch_size: Prompts of one training iteration.
        tokenizer: Of a loaded model; by default that of where the model was loaded from.
        validation: Validation prompts, as ``train``.
        name: The run's folder is ``dir/name``; an earlier run there is moved aside, and where one still goes on, this
            one gets a folder of its own.
        dir: Folder of all runs.
        seed: Of sampling and of the order of the prompts.
        data: Further settings of :class:`PromptDataModule`.
        trainer: Further settings of Lightning's Trainer; its ``callbacks`` come beside those of every run.
        callbacks: Settings of the callbacks of every run, by the names that the command line knows them by, such as
            ``{"rollout_scheduler": {"plan": "lpt"}}``.
        **settings: Further settings of :class:`GRPOModule`; dicts will do for ``sampling``, ``lora`` and the like.

    Raises:
        ValueError: A setting is not what it should be.
    """
    model = policy if isinstance(policy, str) else (policy, tokenizer)
    if tokenizer is not None and isinstance(policy, str):
        raise ValueError("tokenizer goes with a loaded model; leave it out, for policy names one with its tokenizer.")
    pl.seed_everything(seed, verbose=False)
    given: Any = {"policy": model, "rewards": list(rewards), "sampling_seed": seed, **settings}
    module = GRPOModule(**given)
    given = {"policy": model, "train": train, "validation": validation, "batch_size": batch_size, "seed": seed}
    datamodule = PromptDataModule(**{**given, **(data or {})})
    made = default_callbacks(callbacks)
    with RunFolder() as run_folder:
        run = RunConfig(name, dir)
        if is_first_rank():  # the others learn of its folder once they have met it
            run_folder.claim(run.folder, resumes=False)
            run_folder.open()
            run = RunConfig(run_folder.path.name, dir)
        fitted = _trainer(run, made, {"max_steps": max_steps, **(trainer or {})})
        if validation is not None:
            fitted.validate(module, datamodule, verbose=False)
        fitted.fit(module, datamodule)
    return Run(module, Path(fitted.default_root_dir))


def _trainer(run: RunConfig, callbacks: Sequence[pl.Callback], settings: Mapping[str, Any]) -> pl.Trainer:
    """Make the trainer; the callbacks in its settings come behind the first of ``callbacks``."""
    options: dict[str, Any] = {"default_root_dir": str(run.folder), **TRAINER_DEFAULTS, **settings}
    checkpoint, *others = callbacks
    first = [checkpoint, *options.pop("callbacks", ())]
    if options.get("enable_progress_bar") is not False:
        first.append(GRPOProgressBar())
    if "logger" not in options:
        options["logger"] = make_loggers(run)
    return pl.Trainer(callbacks=[*first, *others], **options)
