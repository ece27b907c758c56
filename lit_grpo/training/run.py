"""A run from Python, in one call."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from os import PathLike, fspath
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, ParamSpec

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ProgressBar

from lit_grpo.callbacks import GRPOProgressBar, RunSummary
from lit_grpo.checks import check_intervals
from lit_grpo.data.module import SPLITS, PromptDataModule
from lit_grpo.data.sources import GivenRows, naming
from lit_grpo.module import GRPOModule
from lit_grpo.process.terminal import shell
from lit_grpo.rewards.function import listed
from lit_grpo.settings import as_plain
from lit_grpo.tools.migration.python import check_arguments
from lit_grpo.training.defaults import TRAINER_DEFAULTS, default_callbacks
from lit_grpo.training.loggers import make_loggers, with_table
from lit_grpo.training.quiet import quiet
from lit_grpo.training.run_folder import RunConfig, RunFolder, is_first_rank
from lit_grpo.training.written import write_config

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from lit_grpo.data.sources import RowSource
    from lit_grpo.environments.contract import Factory
    from lit_grpo.rewards.function import Reward

    Source = str | RowSource | Iterable[Any]


P = ParamSpec("P")
_ENVIRONMENTS = "environments"
_ARGUMENTS = {"factory": "environment", "tools": "tools"}
"""The arguments of :func:`train` by the fields of the plug-in that they are for."""


class Run(NamedTuple):
    """The trained module, and the folder with the run's metrics, checkpoints and policy."""

    module: GRPOModule
    folder: Path

    def __repr__(self) -> str:
        """Return three lines: the run, its policy, and the command that resumes it."""
        policy = self.folder / "policy"
        return (
            f"run     {self.folder}, {self.module.policy_version} updates\n"
            f"policy  {policy if policy.is_dir() else 'not exported'}\n"
            f"resume  python -m lit_grpo fit --config {shell(str(self.folder / 'config.yaml'))} --ckpt_path last "
            f"--trainer.max_steps {2 * self.module.policy_version}"
        )


def _checks_names(train: Callable[P, Run]) -> Callable[P, Run]:
    """Let :func:`train` refuse arguments that neither it nor what it makes has, before Python asks for missing ones."""

    @functools.wraps(train)
    def checked(*args: P.args, **kwargs: P.kwargs) -> Run:
        own, module = _parameters(train), _parameters(GRPOModule)
        check_arguments("lit_grpo.train has no argument", kwargs, (own | module) - {"settings", "kwargs"})
        for name, taker in (("data", PromptDataModule), ("trainer", pl.Trainer)):
            if isinstance(given := kwargs.get(name), Mapping):
                check_arguments(f"{name} of lit_grpo.train has no setting", given, _parameters(taker) - {"kwargs"})
        return train(*args, **kwargs)

    return checked


def _parameters(taker: Callable[..., Any]) -> set[str]:
    return set(inspect.signature(taker).parameters)


@_checks_names
def train(
    policy: str | PreTrainedModel | tuple[PreTrainedModel, PreTrainedTokenizerBase],
    train: Source,
    rewards: Reward | Sequence[Reward] = (),
    *,
    max_steps: int,
    batch_size: int = 8,
    environment: Factory | Mapping[str, Factory] | None = None,
    tools: str | Callable[..., Any] | Sequence[str | Callable[..., Any]] = (),
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
    """Train a policy as ``python -m lit_grpo fit`` does, with the same lines on the screen (plain ones in a notebook).

    The run's folder has a ``config.yaml``, from which ``fit`` resumes the run. What a file cannot hold, such as a
    function that is defined in a notebook, is named when the run begins; give it to ``fit`` again.

    Args:
        policy: ``tiny``, a folder, a Hugging Face id, or a loaded model (or a pair of it and its tokenizer), which is
            trained in place.
        train: Training prompts: a file, folder or id, a RowSource, a ``datasets.Dataset``, a data frame, a list or a
            generator of dicts, or a map-style dataset of torch. Objects are read once. A stream without end is refused;
            give its first rows.
        rewards: One reward or a list: functions, paths (``file.py:name`` or an import path), RewardSpecs, or mappings
            of their fields such as ``{"function": score, "weight": 0.1}``. Those of an environment join them.
        max_steps: Optimizer steps of the run.
        batch_size: Prompts of one training iteration.
        environment: Environment of the trajectories: a class, or its path (``my_env.py:Game``), or several by the names
            that rows have in their column ``environment``. Further settings of it are given in ``callbacks``:
            ``{"rollout": {"plugins": [{"environments": {"max_turns": 8}}]}}``.
        tools: Functions that the policy may call, or their paths.
        tokenizer: The tokenizer of a loaded model; by default that of the place the model was loaded from.
        validation: Validation prompts, in the forms of ``train``.
        name: The run's folder is ``dir/name``, where a name may have several parts (``exp1/seed0``). An earlier run
            there is moved aside; if that run still goes on, this run gets another folder.
        dir: The folder of all runs.
        seed: The seed of sampling and of the order of the prompts.
        data: Further settings of :class:`PromptDataModule`.
        trainer: Further settings of Lightning's Trainer; its ``callbacks`` are added to those of every run.
        callbacks: Settings of the callbacks of every run, by their names on the command line, such as
            ``{"rollout": {"plan": "lpt"}}``; or your own callbacks, which are added to them.
        **settings: Further settings of :class:`GRPOModule`; ``sampling``, ``lora`` and others may be dicts.

    Raises:
        ValueError: A setting is wrong, or has no such name; for a name of TRL's GRPOTrainer or GRPOConfig the message
            says ours.
    """
    model = (policy, tokenizer) if tokenizer is not None else policy
    for one in () if callbacks is None or isinstance(callbacks, Mapping) else _listed(callbacks):
        if not isinstance(one, pl.Callback):
            raise ValueError(
                f"callbacks holds {one!r}, which is no Lightning Callback; give callbacks, or a mapping of settings "
                'such as {"rollout": {"plan": "lpt"}}.'
            )
    if tokenizer is not None and isinstance(policy, str | tuple):
        because = "policy is a name" if isinstance(policy, str) else "policy is a pair, which has one"
        raise ValueError(f"tokenizer belongs to a loaded model; leave it out, because {because}.")
    pl.seed_everything(seed, verbose=False)
    for_model: Any = {"policy": model, "rewards": listed(rewards), "sampling_seed": seed, **settings}
    module = GRPOModule(**for_model)
    for_data: Any = {"policy": model, "train": train, "validation": validation, "batch_size": batch_size, "seed": seed}
    shown_data = for_data = for_data | (data or {})
    for_data = for_data | {split: _read_once(split, for_data.get(split)) for split in SPLITS}
    datamodule = PromptDataModule(**for_data)
    options: dict[str, Any] = {"max_steps": max_steps, **(trainer or {})}
    of_every_run = callbacks if isinstance(callbacks, Mapping) else {}
    own = [*_listed(options.pop("callbacks", None)), *([] if of_every_run else _listed(callbacks))]
    turns = {"factory": environment, "tools": _listed(tools)}
    of_every_run = _with_turns(of_every_run, {name: one for name, one in turns.items() if one not in (None, [])})
    made = default_callbacks(of_every_run, [*own, *_displays(options, own)])
    with quiet(), RunFolder() as run_folder:
        told = {"model": for_model, "data": for_data, "trainer": options, **of_every_run}
        run = _opened(run_folder, RunConfig(name, dir), {"model": for_model, "data": for_data, **of_every_run})
        module.given = as_plain({**told, "data": shown_data})
        fitted = _trainer(run, made, options, module.given)
        if is_first_rank():
            left = write_config(run.folder, {"run": {"name": run.name, "dir": run.dir}, **told}, seed)
            if left:
                print(f"{run.folder / 'config.yaml'} lacks {'; '.join(left)}. To resume with fit, give these again.")
        if validation is not None:
            fitted.validate(module, datamodule, verbose=False)
        fitted.fit(module, datamodule)
    return Run(module, Path(fitted.default_root_dir))


def _read_once(split: str, source: Any) -> str | GivenRows | None:
    """Return the source of a split; rows of an object are read once, for ``config.yaml`` and for the run."""
    if source is None or isinstance(source, str | PathLike):
        return None if source is None else fspath(source)
    with naming(f"data.{split}"):
        return GivenRows(source)


def _listed(given: Any) -> list[Any]:
    """Return one or several things as a list; ``None`` and an empty mapping become an empty list."""
    if given is None or given == {}:
        return []
    return list(given) if isinstance(given, Sequence) and not isinstance(given, str) else [given]


def _with_turns(
    callbacks: Mapping[str, Mapping[str, Any] | None], turns: Mapping[str, Any]
) -> Mapping[str, Mapping[str, Any] | None]:
    """Return the settings of callbacks in which the plug-in ``environments`` has the fields ``turns`` too.

    Raises:
        ValueError: It has one of them already.
    """
    if not turns:
        return callbacks
    rollout = dict(callbacks.get("rollout") or {})
    plugins = _listed(rollout.get("plugins"))
    given = next((one for one in plugins if isinstance(one, Mapping) and _ENVIRONMENTS in one), {_ENVIRONMENTS: {}})
    fields = given[_ENVIRONMENTS] or {}
    if twice := [name for name in turns if name in fields]:
        raise ValueError(
            f"{twice[0]} of the plug-in {_ENVIRONMENTS} is set in callbacks, and given as "
            f"{_ARGUMENTS[twice[0]]} too; leave one of them out."
        )
    others = [one for one in plugins if one is not given]
    rollout["plugins"] = [*others, {_ENVIRONMENTS: {**fields, **turns}}]
    return {**callbacks, "rollout": rollout}


def _opened(run_folder: RunFolder, run: RunConfig, read: Mapping[str, Any]) -> RunConfig:
    """Open the run's folder, in which nothing of the settings ``read`` may lie; return the run with its final name."""
    if not is_first_rank():  # other ranks get the name from the first rank later
        return run
    run_folder.claim(run.folder, resumes=False)
    run_folder.check_inputs(read)
    run_folder.open()
    return replace(run, name=run.name_of(run_folder.path))


def _displays(options: Mapping[str, Any], own: Sequence[pl.Callback]) -> list[pl.Callback]:
    """Return the callbacks that show a run on the screen; a progress bar of the user's takes the place of ours."""
    has_bar = options.get("enable_progress_bar") is False or any(isinstance(one, ProgressBar) for one in own)
    return [RunSummary(), *([] if has_bar else [GRPOProgressBar()])]


def _trainer(
    run: RunConfig, callbacks: list[pl.Callback], settings: Mapping[str, Any], told: Mapping[str, Any]
) -> pl.Trainer:
    """Make the trainer; its loggers show the settings ``told``."""
    options: dict[str, Any] = {"default_root_dir": str(run.folder), **TRAINER_DEFAULTS, **settings}
    options["enable_checkpointing"] = True  # RunCheckpoint saves, and SavedByRun keeps Lightning from saving too
    check_intervals(options)
    given = options.get("logger")
    options["logger"] = make_loggers(run, told) if given in (None, True) else with_table(run, given)
    return pl.Trainer(callbacks=callbacks, **options)
