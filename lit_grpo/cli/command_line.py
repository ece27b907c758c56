"""The command line: ``fit``, ``validate``, ``test`` and ``predict``."""

from __future__ import annotations

import os
import sys
import warnings
from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI

from lit_grpo.callbacks import GRPOProgressBar, InterruptCheckpoint
from lit_grpo.cli.errors import InputParser, exit_with, one_sentence
from lit_grpo.cli.settings import check_settings
from lit_grpo.data.module import PromptDataModule
from lit_grpo.module import GRPOModule
from lit_grpo.rewards import RewardError
from lit_grpo.rollout.generator import GenerationError
from lit_grpo.rollout.weights.tensors import WeightSyncError
from lit_grpo.training.defaults import CALLBACKS, CHECKPOINT_DEFAULTS, TRAINER_DEFAULTS
from lit_grpo.training.run_folder import RunConfig, make_loggers, prepare_folder

MISTAKES = (
    ValueError,
    MisconfigurationException,
    RewardError,
    GenerationError,
    WeightSyncError,
    FloatingPointError,
)


class GRPOCLI(LightningCLI):
    """LightningCLI for :class:`GRPOModule` and :class:`PromptDataModule`, with the callbacks in their order."""

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        """Return the subcommand that was asked for, or all of them: the parser of each takes a third of a second."""
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
        parser.set_defaults({f"checkpoint.{name}": value for name, value in CHECKPOINT_DEFAULTS.items()})
        parser.link_arguments("model.policy", "data.policy")
        parser.link_arguments("seed_everything", "model.sampling_seed", compute_fn=int)
        parser.link_arguments("seed_everything", "data.seed", compute_fn=int)

    @property
    def _settings(self) -> Any:
        return self.config if self.subcommand is None else self.config[self.subcommand]

    def _parse_ckpt_path(self) -> None:
        """Leave the command line's settings alone: what a checkpoint was trained with does not override them."""

    def before_instantiate_classes(self) -> None:
        """Check the settings, prepare the run's folder, and point everything that writes at it."""
        settings = self._settings
        check_settings(settings, fits=self.subcommand == "fit")
        settings["weights_only"] = True  # no checkpoint runs code
        run = RunConfig(**settings["run"])
        folder = run.folder.absolute()
        fits = self.subcommand == "fit"
        if fits and int(os.environ.get("LOCAL_RANK", 0)) == 0:
            moved = prepare_folder(folder, resumes=bool(settings.get("ckpt_path")))
            if moved is not None:
                print(f"The earlier run in {folder} is now in {moved}.")
        if not fits:
            self.save_config_callback = None  # the folder keeps the config that it was trained with
        settings["trainer"]["default_root_dir"] = str(folder)
        settings["checkpoint"]["dirpath"] = settings["checkpoint"]["dirpath"] or str(folder / "checkpoints")

    def instantiate_trainer(self, **kwargs: Any) -> Any:
        """Give the trainer the run's loggers, unless the config names others, and its first callbacks."""
        settings = self._settings
        trainer = self._get(self.config_init, "trainer")
        if trainer["logger"] is None:
            kwargs["logger"] = make_loggers(RunConfig(**settings["run"])) if self.subcommand == "fit" else False
        own = trainer["callbacks"] or []
        kwargs["callbacks"] = [InterruptCheckpoint(), *(own if isinstance(own, list) else [own])]
        if trainer["enable_progress_bar"] is not False:
            kwargs["callbacks"].append(GRPOProgressBar())
        return super().instantiate_trainer(**kwargs)

    def before_fit(self) -> None:
        """Validate the policy as it is, so that the curves begin at update 0."""
        settings = self._settings
        if settings["validate_first"] and not settings.get("ckpt_path") and settings["data"]["validation"]:
            self.trainer.validate(self.model, self.datamodule, verbose=False)


def run(args: list[str] | None = None) -> None:
    """Parse and run; a mistake in the input ends the program with one sentence and exit code 2."""
    _quieten()
    try:
        GRPOCLI(
            GRPOModule,
            PromptDataModule,
            args=args,
            seed_everything_default=0,
            save_config_kwargs={"overwrite": True},
            trainer_defaults=TRAINER_DEFAULTS,
            auto_configure_optimizers=False,
            load_from_checkpoint_support=False,
            parser_class=InputParser,
            parser_kwargs={
                "prog": "python -m lit_grpo",
                "allow_abbrev": False,  # a field that is misspelt is not the one that begins so
                "epilog": "Also: python -m lit_grpo simulate --help (plans in pictures, without a model), and "
                "python -m lit_grpo serve --help (a vLLM server for a policy)",
            },
        )
    except MISTAKES as error:
        if os.environ.get("LIT_GRPO_TRACEBACK"):
            raise
        exit_with(f"{one_sentence(str(error))}\n(LIT_GRPO_TRACEBACK=1 shows where)")


def _quieten() -> None:
    """Silence what says nothing to the user; each entry names the cause."""
    import logging

    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # we fork no workers after tokenising
    # Lightning calls jsonargparse by names that are deprecated.
    os.environ.setdefault("JSONARGPARSE_DEPRECATION_WARNINGS", "off")
    # ModelCheckpoint fears that the state after the optimizer step is not what is wanted; it is.
    warnings.filterwarnings("ignore", message=".*Using ModelCheckpoint with manual optimization.*")
    # A resumed run goes on in its own folder.
    warnings.filterwarnings("ignore", message=".*Checkpoint directory .* exists and is not empty.*")
    # Lightning counts CPU cores for DataLoader workers, of which there are none: rollouts are made just in time.
    warnings.filterwarnings("ignore", message=".*does not have many workers.*")
    # Lightning asks torch in a way that torch calls deprecated.
    warnings.filterwarnings("ignore", message=".*isinstance\\(treespec, LeafSpec\\).*")
    # Lightning's tips and its list of devices that are not there.
    for name in ("pytorch", "fabric"):
        logging.getLogger(f"lightning.{name}.utilities.rank_zero").setLevel(logging.WARNING)
    logging.getLogger("lightning.fabric.utilities.seed").setLevel(logging.WARNING)
    # vLLM in this process sets torch.distributed up for itself; the run has one process all the same.
    warnings.filterwarnings("ignore", message=".*sync_dist=True.*")
    # A run without validation prompts has no validation loader.
    warnings.filterwarnings("ignore", message=".*Total length of `list` across ranks is zero.*")
