"""A run from Python, in one call."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import lightning.pytorch as pl

from lit_grpo.callbacks import GRPOProgressBar, RunSummary
from lit_grpo.data.module import PromptDataModule
from lit_grpo.module import GRPOModule
from lit_grpo.rewards.function import listed
from lit_grpo.settings import as_plain
from lit_grpo.training.defaults import TRAINER_DEFAULTS, default_callbacks
from lit_grpo.training.loggers import make_loggers
from lit_grpo.training.quiet import quiet
from lit_grpo.training.run_folder import RunConfig, RunFolder, is_first_rank

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from lit_grpo.data.sources import RowSource
    from lit_grpo.rewards.function import Reward

    Source = str | RowSource | Iterable[Any]


class Run(NamedTuple):
    """What has been trained, and where the run has left its metrics, checkpoints and policy."""

    module: GRPOModule
    folder: Path


def train(
    policy: str | PreTrainedModel,
    train: Source,
    rewards: Reward | Sequence[Reward],
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
    callbacks: Mapping[str, Mapping[str, Any] | None] | Sequence[pl.Callback] | pl.Callback | None = None,
    **settings: Any,
) -> Run:
    """Train a policy as ``python -m lit_grpo fit`` does, and show the same: in a notebook, plain lines.

    Args:
        policy: ``tiny``, a folder, a Hugging Face id, or a loaded model, which is then trained in place.
        train: Training prompts: a file, folder or id, a RowSource, a ``datasets.Dataset`` or a list of dicts.
        rewards: Functions, ``file.py:name`` or import paths, or RewardSpecs; one of them, or a list.
        max_steps: Optimizer steps in all.
        batch_size: Prompts of one training iteration.
        tokenizer: Of a loaded model; by default that of where the model was loaded from.
        validation: Validation prompts, as ``train``.
        name: The run's folder is ``dir/name``, where a name may have several parts (``exp1/seed0``); an earlier run
            there is moved aside, and where one still goes on, this one gets a folder of its own.
        dir: Folder of all runs.
        seed: Of sampling and of the order of the prompts.
        data: Further settings of :class:`PromptDataModule`.
        trainer: Further settings of Lightning's Trainer; its ``callbacks`` come beside those of every run.
        callbacks: Settings of the callbacks of every run, by the names that the command line knows them by, such as
            ``{"rollout": {"plan": "lpt"}}``; or callbacks of your own, which come beside them.
        **settings: Further settings of :class:`GRPOModule`; dicts will do for ``sampling``, ``lora`` and the like.

    Raises:
        ValueError: A setting is not what it should be.
    """
    model = policy if isinstance(policy, str) else (policy, tokenizer)
    for one in () if callbacks is None or isinstance(callbacks, Mapping) else _listed(callbacks):
        if not isinstance(one, pl.Callback):
            raise ValueError(
                f"callbacks holds {one!r}, which is no Lightning Callback; give callbacks, or a mapping of settings "
                'such as {"rollout": {"plan": "lpt"}}.'
            )
    if tokenizer is not None and isinstance(policy, str):
        raise ValueError("tokenizer goes with a loaded model; leave it out, for policy names one with its tokenizer.")
    pl.seed_everything(seed, verbose=False)
    for_model: Any = {"policy": model, "rewards": listed(rewards), "sampling_seed": seed, **settings}
    module = GRPOModule(**for_model)
    for_data: Any = {"policy": model, "train": train, "validation": validation, "batch_size": batch_size, "seed": seed}
    for_data |= data or {}
    datamodule = PromptDataModule(**for_data)
    options: dict[str, Any] = {"max_steps": max_steps, **(trainer or {})}
    of_every_run = callbacks if isinstance(callbacks, Mapping) else {}
    own = [*_listed(options.pop("callbacks", None)), *([] if of_every_run else _listed(callbacks))]
    made = default_callbacks(of_every_run, [*own, *_displays(options)])
    with quiet(), RunFolder() as run_folder:
        run = _opened(run_folder, RunConfig(name, dir))
        told = {"model": for_model, "data": for_data, "trainer": options, **of_every_run}
        fitted = _trainer(run, made, options, as_plain(told))
        if validation is not None:
            fitted.validate(module, datamodule, verbose=False)
        fitted.fit(module, datamodule)
    return Run(module, Path(fitted.default_root_dir))


def _listed(given: Any) -> list[Any]:
    """One or several as a list; none of ``None`` and of an empty mapping."""
    if given is None or given == {}:
        return []
    return list(given) if isinstance(given, Sequence) and not isinstance(given, str) else [given]


def _opened(run_folder: RunFolder, run: RunConfig) -> RunConfig:
    """Open the run's folder; return the run by the name that it has then."""
    if not is_first_rank():  # learns of it once it has met the first
        return run
    run_folder.claim(run.folder, resumes=False)
    run_folder.open()
    return replace(run, name=run.name_of(run_folder.path))


def _displays(options: Mapping[str, Any]) -> list[pl.Callback]:
    """What shows a run, unless it is told not to."""
    return [RunSummary(), *([] if options.get("enable_progress_bar") is False else [GRPOProgressBar()])]


def _trainer(
    run: RunConfig, callbacks: list[pl.Callback], settings: Mapping[str, Any], told: Mapping[str, Any]
) -> pl.Trainer:
    """Make the trainer, whose boards show what it was ``told``."""
    options: dict[str, Any] = {"default_root_dir": str(run.folder), **TRAINER_DEFAULTS, **settings}
    if "logger" not in options:
        options["logger"] = make_loggers(run, told)
    return pl.Trainer(callbacks=callbacks, **options)
