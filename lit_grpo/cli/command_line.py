"""The command line: ``fit``, ``validate``, ``test`` and ``predict``."""

from __future__ import annotations

import errno
import json
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import ProgressBar
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI

from lit_grpo.callbacks import GRPOProgressBar, MemoryMonitor, RunCheckpoint, RunSummary, SavedByRun
from lit_grpo.checkpoints import read_state, settled
from lit_grpo.checks import check_trainer
from lit_grpo.cli.parsing.errors import InputParser, one_sentence, own_frames
from lit_grpo.cli.parsing.help import add_short_help
from lit_grpo.cli.parsing.names import DEFAULTS
from lit_grpo.cli.parsing.places import with_place
from lit_grpo.cli.parsing.refusals import check_settings, check_values, find_checkpoint
from lit_grpo.cli.parsing.sentences import exit_with
from lit_grpo.data.module import PromptDataModule, asked_prompts
from lit_grpo.faults import lost_rank
from lit_grpo.foreign import owner_of
from lit_grpo.memory import is_out_of_memory
from lit_grpo.module import GRPOModule
from lit_grpo.plugins import CannotGoOn
from lit_grpo.process.calls import BrokenLoop, TooManyHang
from lit_grpo.process.files import FolderLostError
from lit_grpo.process.terminal import error_text, first_line, shell
from lit_grpo.rewards import RewardError
from lit_grpo.rollout.generator import GenerationError
from lit_grpo.rollout.weights.tensors import WeightSyncError
from lit_grpo.tasks import DrawnRows as DrawnRows  # so that a config may name a task by its class alone
from lit_grpo.tools.commands import TOOLS
from lit_grpo.training.defaults import CALLBACKS, TRAINER_DEFAULTS
from lit_grpo.training.forecast import expected_bytes
from lit_grpo.training.loggers import make_loggers, with_table
from lit_grpo.training.quiet import silence
from lit_grpo.training.run_folder import RunConfig, RunFolder, is_first_rank
from lit_grpo.update.metrics import LogprobGapError

RUN_NAME = "LIT_GRPO_RUN_NAME"
"""The environment variable by which the first rank tells the run's name to the ranks that it starts."""

EPILOG = "Also, each with --help: " + ", ".join(f"{name} ({tool.what})" for name, tool in TOOLS.items()) + "; --version"

GROUPS: dict[str, type] = {
    "run": RunConfig,
    "model": GRPOModule,
    "data": PromptDataModule,
    "checkpoint": RunCheckpoint,
    **CALLBACKS,
}
"""The class of each group of fields, except the trainer's."""

MISTAKES = (
    ValueError,
    MisconfigurationException,
    RewardError,
    BrokenLoop,
    CannotGoOn,
    GenerationError,
    WeightSyncError,
    LogprobGapError,
    TooManyHang,
    FloatingPointError,
)


TRAINERS = (TypeError, RuntimeError, KeyError, AttributeError, OverflowError, AssertionError, ImportError)
"""Further errors of Lightning's Trainer for settings that it does not check."""

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class Stage(NamedTuple):
    """A part of a run's set-up that may find a mistake, and the parts without which it cannot be tried."""

    name: str
    run: Callable[[], None]
    needs: tuple[str, ...] = ()


class GRPOCLI(LightningCLI):
    """LightningCLI for :class:`GRPOModule` and :class:`PromptDataModule`, with the callbacks in their order."""

    config_init: Any

    def __init__(self, run_folder: RunFolder, **kwargs: Any) -> None:
        self.run_folder = run_folder
        super().__init__(**kwargs)

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        """Return the subcommand of the command line, or all; making the parser of each takes a third of a second."""
        known = LightningCLI.subcommands()
        asked = sys.argv[1] if len(sys.argv) > 1 else ""
        return {asked: known[asked]} if asked in known else known

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add the run's folder and the callbacks, each configurable under its own name."""
        parser.add_class_arguments(RunConfig, "run")
        parser.add_argument(
            "--validate_first", type=bool, default=True, help="Validate the policy before fit changes it."
        )
        for name, kind in CALLBACKS.items():
            parser.add_lightning_class_args(kind, name)
        parser.add_class_arguments(RunCheckpoint, "checkpoint")
        parser.set_defaults(DEFAULTS)
        add_short_help(parser)
        parser.link_arguments("model.policy", "data.policy")
        parser.link_arguments("seed_everything", "model.sampling_seed", compute_fn=int)
        parser.link_arguments("seed_everything", "data.seed", compute_fn=int)

    @property
    def _settings(self) -> Any:
        return self.config if self.subcommand is None else self.config[self.subcommand]

    def _parse_ckpt_path(self) -> None:
        """Do nothing: the settings of a checkpoint do not override those of the command line."""

    def before_instantiate_classes(self) -> None:
        """Check the settings, claim the run's folder, and make it the folder of everything that is written."""
        settings = self._settings
        check_values(settings, GROUPS)
        find_checkpoint(settings)
        check_settings(settings, fits=self.subcommand == "fit")
        settings["weights_only"] = True  # no checkpoint runs code
        if self.subcommand == "fit":
            settings["run"]["name"] = self._claim(RunConfig(**settings["run"]), bool(settings.get("ckpt_path")))
        else:
            self.save_config_callback = None  # the folder keeps the config of the training
        folder = RunConfig(**settings["run"]).folder.absolute()
        settings["trainer"]["default_root_dir"] = str(folder)

    def _claim(self, run: RunConfig, resumes: bool) -> str:
        """Claim the run's folder; return the run's final name, which the first rank tells to the ranks it starts."""
        if not is_first_rank():
            return os.environ.get(RUN_NAME, run.name)
        self.run_folder.claim(run.folder, resumes)
        name = run.name_of(self.run_folder.path)
        if name != run.name:
            print(
                f"The run in {run.folder} still goes on, so this one is in {self.run_folder.path}; to resume it, add "
                f"--run.name {shell(name)}.",
                file=sys.stderr,
            )
        os.environ[RUN_NAME] = name
        return name

    def instantiate_trainer(self, **kwargs: Any) -> Any:
        """Make the trainer with the run's loggers, unless the config names others, and with the first callbacks."""
        settings = self._settings
        trainer = self._get(self.config_init, "trainer")
        run, fits, given = RunConfig(**settings["run"]), self.subcommand == "fit", trainer["logger"]
        if given in (None, True):
            resumes = bool(settings.get("ckpt_path"))
            kwargs["logger"] = make_loggers(run, self._described, resumes) if fits else False
        elif fits:
            kwargs["logger"] = with_table(run, given)
        own = trainer["callbacks"] or []
        own = own if isinstance(own, list) else [own]
        checkpoint = cast(RunCheckpoint, self._get(self.config_init, "checkpoint"))
        kwargs["callbacks"] = [checkpoint, *own, SavedByRun(checkpoint)]
        kwargs["enable_checkpointing"] = True  # RunCheckpoint saves, and SavedByRun keeps Lightning from saving too
        if self.subcommand == "fit":
            kwargs["callbacks"].append(RunSummary())
        if trainer["enable_progress_bar"] is not False and not any(isinstance(one, ProgressBar) for one in own):
            kwargs["callbacks"].append(GRPOProgressBar())
        try:
            return super().instantiate_trainer(**kwargs)
        except TRAINERS as error:
            raise ValueError(f"Lightning's Trainer refuses the settings of trainer: {error}") from error

    @cached_property
    def _described(self) -> dict[str, Any]:
        """All settings as plain values; to write them as JSON and read them takes a third of the time of YAML."""
        dump = self._parser(self.subcommand).dump
        return json.loads(dump(self._settings, format="json", skip_none=False, skip_validation=True))

    def before_fit(self) -> None:
        """Check everything, then open the run's folder, and validate the policy so that curves begin at update 0."""
        settings, described = self._settings, self._described
        if is_first_rank():
            self.run_folder.check_inputs({name: described[name] for name in ("model", "data", "rollout")})
        groups = {*GROUPS, "trainer"} - {"run"}
        cast(GRPOModule, self.model).given = {name: value for name, value in described.items() if name in groups}
        self._check(settings.get("ckpt_path"))
        device = self.trainer.strategy.root_device.type
        for callback in cast(Any, self.trainer).callbacks:
            if isinstance(callback, MemoryMonitor):
                callback.forecast = partial(expected_bytes, settings, device)
        if is_first_rank():
            moved = self.run_folder.open()
            if moved is not None:
                print(f"The earlier run in {self.run_folder.path} is now in {moved}.")
        if settings["validate_first"] and not settings.get("ckpt_path") and settings["data"]["validation"]:
            self.trainer.validate(self.model, self.datamodule, verbose=False)

    def _check(self, ckpt_path: str | None) -> None:
        """Set up data, policy and callbacks to find mistakes before anything is written or moved."""
        for stage in self._stages(ckpt_path):
            stage.run()

    def _stages(self, ckpt_path: str | None) -> list[Stage]:
        """Return the stages of :meth:`_check`, in their order."""
        trainer, module, data = (
            cast(Any, self.trainer),
            cast(GRPOModule, self.model),
            cast(PromptDataModule, self.datamodule),
        )
        is_local = bool(ckpt_path) and ckpt_path.endswith(".ckpt") and "://" not in ckpt_path
        if ckpt_path and is_local and not settled(Path(ckpt_path)).exists():
            raise ValueError(
                f"ckpt_path is {ckpt_path!r}, but there is no such checkpoint; give one of a run's checkpoints."
            )
        trainer.datamodule, data.trainer, module.trainer = data, trainer, trainer

        def set_up_callbacks() -> None:
            for callback in trainer.callbacks:
                if type(callback).__module__.startswith("lit_grpo."):  # other callbacks may write files
                    callback.setup(trainer, module, "fit")

        def load() -> None:
            with trainer.strategy.tensor_init_context(), trainer.precision_plugin.module_init_context():
                module.configure_model()
            if ckpt_path:
                module.check_fits(read_state(settled(Path(ckpt_path))), ckpt_path)

        return [
            Stage("trainer", lambda: check_trainer(trainer, module.policy_dtype)),
            Stage("data", lambda: data.setup("fit")),
            Stage("callbacks", set_up_callbacks, ("trainer", "data")),
            Stage("module", lambda: module.setup("fit"), ("callbacks",)),
            Stage("policy", load),
            Stage("teacher", module.find_teacher, ("module", "policy")),
            Stage("lengths", lambda: module.check_lengths(asked_prompts(trainer)), ("module", "policy")),
            Stage("optimizer", lambda: cast(None, module.configure_optimizers()), ("policy",)),
        ]


class LikeFitCLI(GRPOCLI):
    """The settings of ``fit`` for another command."""

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        """Return only ``fit``."""
        return {"fit": LightningCLI.subcommands()["fit"]}


def cli_arguments(args: list[str] | None) -> dict[str, Any]:
    """Return the arguments of LightningCLI for this project."""
    return {
        "model_class": GRPOModule,
        "datamodule_class": PromptDataModule,
        "args": args,
        "seed_everything_default": 0,
        "save_config_kwargs": {"overwrite": True},
        "trainer_defaults": TRAINER_DEFAULTS,
        "auto_configure_optimizers": False,
        "load_from_checkpoint_support": False,
        "parser_class": InputParser,
        # Without abbreviations: a misspelled field must not be taken for the field that begins with it.
        "parser_kwargs": {"prog": "python -m lit_grpo", "epilog": EPILOG, "allow_abbrev": False},
    }


def run(args: list[str] | None = None, cli: Callable[..., GRPOCLI] = GRPOCLI) -> None:
    """Parse and run; a mistake in the input ends the program with one sentence and exit code 2."""
    quieten()
    run_folder = RunFolder()
    try:
        with run_folder, _owners_named():
            cli(run_folder, **cli_arguments(args))
    except OSError as error:
        shows = os.environ.get("LIT_GRPO_TRACEBACK")
        if isinstance(error, FolderLostError) and not shows:
            exit_with(str(error), code=1)
        if _is_gone(error, run_folder.path) and not shows:
            exit_with(
                f"The run's file {error.filename} does not exist any more: its folder {run_folder.path} was moved or "
                "deleted while the run went on.",
                code=1,
            )
        if error.errno == errno.EMFILE and not shows:
            exit_with(
                f"The process may not open another file ({error.filename or error.strerror}): its limit, which ulimit "
                "-n shows, is too low; raise it, for example with ulimit -n 4096, and begin again or resume the run."
            )
        if error.errno not in FULL or shows:
            raise
        place = "" if error.filename is None else f" to {error.filename}"
        exit_with(
            f"A run's file could not be written{place} ({error.strerror}); make room, and resume the run from its last "
            "checkpoint, or choose another run.dir."
        )
    except MISTAKES as error:
        if os.environ.get("LIT_GRPO_TRACEBACK"):
            raise
        exit_with(
            f"{with_place(one_sentence(str(error)), InputParser.given)}{own_frames(error)}\n"
            "(LIT_GRPO_TRACEBACK=1 shows where)"
        )
    except (RuntimeError, MemoryError) as error:
        sentence = _out_of_memory(error) if is_out_of_memory(error) else lost_rank(error)
        if not sentence or os.environ.get("LIT_GRPO_TRACEBACK"):
            raise
        exit_with(sentence)


@contextmanager
def _owners_named() -> Iterator[None]:
    """End the program with one sentence if a hook of others raises an error; what no hook can mend is left alone."""
    try:
        yield
    except Exception as error:
        owner = owner_of(error)
        has_sentence = isinstance(error, CannotGoOn) or is_out_of_memory(error) or lost_rank(error)
        if owner is None or has_sentence or os.environ.get("LIT_GRPO_TRACEBACK"):
            raise
        exit_with(f"{owner}: {error_text(error)}.{own_frames(error)}\n(LIT_GRPO_TRACEBACK=1 shows where)")


def _out_of_memory(error: BaseException) -> str:
    raised = Path(traceback.extract_tb(error.__traceback__)[-1].filename)
    if raised.is_relative_to(Path(__file__).parents[1]):  # it has a sentence of its own
        return str(error)
    where = "The device's" if isinstance(error, torch.OutOfMemoryError) else "The host's"
    said = first_line(error).rpartition("] ")[2]  # without torch's place in its own code
    return (
        f"{where} memory ran out ({said or type(error).__name__}): lower model.max_tokens_per_micro_batch (auto halves "
        "it by itself), model.generator's kv_memory or sampling.max_tokens, or set model.gradient_checkpointing, and "
        "resume the run from its last checkpoint; python -m lit_grpo fit-check shows what a run needs.\n"
        "(LIT_GRPO_TRACEBACK=1 shows where)"
    )


def _is_gone(error: OSError, folder: Path) -> bool:
    inside = error.filename is not None and Path(str(error.filename)).absolute().is_relative_to(folder.absolute())
    return isinstance(error, FileNotFoundError) and folder != Path() and inside


def quieten() -> None:
    """Silence messages that tell the user nothing; each entry names the cause."""
    # TensorBoard writes in a thread. Its error is raised again by the next write, and reported there.
    threading.excepthook = _quiet_of_writers
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # no worker is forked after tokenizing
    # Lightning uses deprecated names of jsonargparse.
    os.environ.setdefault("JSONARGPARSE_DEPRECATION_WARNINGS", "off")
    silence()


def _quiet_of_writers(failure: threading.ExceptHookArgs) -> None:
    if not (isinstance(failure.exc_value, OSError) and failure.exc_value.errno in (*FULL, errno.ENOENT)):
        threading.__excepthook__(failure)
