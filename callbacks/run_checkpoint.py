"""Checkpoints between two updates: every few updates, at the end, on signals and on errors."""

from __future__ import annotations

import errno
import os
import signal
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.trainer.states import TrainerFn

from lit_grpo.checkpoints import BackgroundIO, CheckpointError, FolderIO, WholeFileIO, settled
from lit_grpo.checks import check_order
from lit_grpo.faults import RankWatch
from lit_grpo.foreign import is_foreign
from lit_grpo.limits import Number, checks_arguments
from lit_grpo.module import GRPOModule
from lit_grpo.plugins import CannotGoOn
from lit_grpo.process.files import FolderLostError, HeldFolder
from lit_grpo.process.terminal import first_line, say, shell
from lit_grpo.process.values import PLAIN, find_foreign
from lit_grpo.ranks import Ranks
from lit_grpo.strategies.fsdp2 import FSDP2Strategy

from .rollout_scheduler import RolloutScheduler

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)


_SAVING = ("state_dict", "on_save_checkpoint")
"""Hooks of callbacks that add to checkpoints."""


class Stopped(SystemExit):
    """A signal ends the run; the exit code of the first rank is 128 plus the signal's number, that of others is 0."""


class RunCheckpoint(pl.Callback):
    """Save the run between two updates, so that it resumes exactly.

    It is saved after the update's row and validation are written. ``last.ckpt`` is the newest checkpoint, and
    ``best.ckpt`` that with the highest ``val/pass@1``. Both are written every few updates and at the end. ``last.ckpt``
    is also written when the run stops: on Ctrl-C, SIGTERM, SIGUSR1 (a scheduler's warning), SIGHUP (the terminal is
    closed, unless nohup is used), or an error.

    Before the first optimizer step of a batch nothing has changed: a signal stops the batch at once, and a resumed run
    samples it again. After that step a signal lets the batch and its validation finish first; a second Ctrl-C stops at
    once and saves nothing. A validation that fails is repeated after resuming. Several ranks always finish the batch,
    and save when all know of the signal; after an error on one of them nothing is saved. The callback is first in the
    list, so that it stops the run before the next rollout.

    Args:
        every_n_updates: Save when the policy's version reaches or passes a multiple of this number; 0 saves at the end
            only.
        folder: Folder of the checkpoints, within the run's folder.
        asynchronous: Write checkpoints while the run goes on, from a copy that takes as much host memory as the
            checkpoint. The next checkpoint, the end, a signal and an error wait until it is written. If it cannot be
            written, the run ends before its next rollout.
    """

    @checks_arguments("checkpoint.")
    def __init__(self, every_n_updates: Number = 50, folder: str = "checkpoints", asynchronous: bool = False) -> None:
        self.every_n_updates = every_n_updates
        self.folder = folder
        self.asynchronous = asynchronous
        self._io: BackgroundIO | None = None
        self._best = float("-inf")
        self._best_is_due = False
        self._newest: tuple[int, str | None] = (0, None)  # version and path of the last checkpoint on the disk
        self._given: tuple[int, str | None] = (0, None)  # of the last one that was given to the writer
        self._phase: Literal["away", "between", "rollout", "update", "trained", "ended"] = "away"
        self._tried = False  # whether the states that checkpoints keep have been looked at
        self._validated = True  # whether the validation after this batch has ended, or there is none
        self._leaves_out = False  # what callbacks would add to a checkpoint and cannot, which else ends the run
        self._requested = 0  # the number of the signal
        self._several = False
        self._watch: RankWatch | None = None
        self._previous: dict[int, Any] = {}
        self._run_folder: HeldFolder | None = None  # on the first rank, if it exists
        self.saved_best: Path | None = None  # in this run, before it was resumed too

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Check the place in the list, and set the writer of checkpoints and the run's folder on all ranks."""
        check_order(trainer, RunCheckpoint, RolloutScheduler)
        # Ranks that torchrun or a scheduler starts do not know the folder if the first rank found its own taken.
        told = Ranks().gather((trainer.default_root_dir, os.getpid(), socket.gethostname()))
        folder, first, _ = told[0]
        trainer._default_root_dir = folder  # pyrefly: ignore[missing-attribute]
        shards = isinstance(trainer.strategy, FSDP2Strategy)
        writer = FolderIO() if shards else WholeFileIO()
        self._io = BackgroundIO(writer) if self.asynchronous else None
        trainer.strategy.checkpoint_io = self._io or writer
        if trainer.world_size > 1:
            children = getattr(trainer.strategy.launcher, "procs", ())
            parent = first if os.getppid() == first else None
            here = {rank: pid for rank, (_, pid, machine) in enumerate(told) if machine == socket.gethostname()}
            here.pop(trainer.global_rank, None)
            self._watch = RankWatch(trainer.global_rank, children, parent, lambda: self._how_to_go_on(trainer), here)

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Stop watching for lost ranks, so that ranks may end one after another, and release the run's folder."""
        if self._watch is not None:
            self._watch.end()
        if self._run_folder is not None:
            self._run_folder.close()
            self._run_folder = None

    def state_dict(self) -> dict[str, Any]:
        return {"best": self._best}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._best = state_dict["best"]

    # ---- every few updates and at the end -------------------------------------------------------------

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        assert isinstance(pl_module, GRPOModule)
        path = trainer.ckpt_path
        self._newest = self._given = (pl_module.policy_version, None if path is None else str(path))
        self._several, self._phase, self._tried = trainer.world_size > 1, "trained", False
        best = self.path(trainer, "best")
        self.saved_best = best if self._best > float("-inf") and settled(best).exists() else None
        folder = Path(trainer.default_root_dir)
        self._run_folder = HeldFolder(folder) if trainer.is_global_zero and folder.exists() else None
        self._listen()

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Save the state after the batch before, if due; then stop if a signal came.

        Raises:
            ValueError: A state that checkpoints will keep cannot be read back; before the first batch.
        """
        assert isinstance(pl_module, GRPOModule)
        self._phase = "between"
        self._end_if_lost(pl_module)
        if not self._tried:
            self._try_states(trainer)
            self._tried = True
        if self._io is not None and not pl_module.ranks.max(float(self._io.is_writing)):
            self._settle(pl_module)  # raises the error of the last write, if any
        with _without_batch(trainer):
            self._save_due(trainer, pl_module.policy_version)
        if self._several:
            self._requested = int(pl_module.ranks.max(float(self._requested)))
        self._phase = "rollout"
        if self._requested:
            self._stop(trainer.global_rank)

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Any) -> None:
        self._phase = "update"

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        assert isinstance(pl_module, GRPOModule)
        self._phase, self._validated = "trained", False
        self._end_if_lost(pl_module)

    def _end_if_lost(self, module: GRPOModule) -> None:
        """End a run whose folder was moved or deleted, on all ranks: loggers and displays would go on without it."""
        held, lost = self._run_folder, False
        if held is not None:
            try:
                lost = not os.path.samestat(held.status, os.stat(held.path))
            except OSError:
                lost = True
        lost = bool(module.ranks.max(float(lost))) if self._several else lost
        if lost and held is not None:
            raise held.error()
        if lost:
            raise FolderLostError("The run's folder was moved or deleted while the run went on, as rank 0 says.")

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Remember whether this validation is the best so far."""
        if trainer.state.fn != TrainerFn.FITTING:
            self._hang_up()
            return
        self._validated = True
        for count in _validation_counts(trainer):  # a repeated validation was started once more than it was finished
            vars(count).update(started=count.ready, processed=count.ready, completed=count.ready)
        score = float(trainer.callback_metrics.get("val/pass@1", float("-inf")))
        if score > self._best:
            self._best, self._best_is_due = score, True

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        assert isinstance(pl_module, GRPOModule)
        self._phase = "ended"
        self._end_if_lost(pl_module)
        self._save_due(trainer, pl_module.policy_version, at_end=True)
        self._settle(pl_module)
        self._phase = "away"
        self._hang_up()

    def _try_states(self, trainer: pl.Trainer) -> None:
        """Refuse what the callbacks, the data and the schedules would put into checkpoints that nothing can read.

        If a callback of the user adds to checkpoints, one is made for it, and not written.
        """
        callbacks: list[pl.Callback] = trainer.callbacks  # pyrefly: ignore[missing-attribute]
        data = trainer.datamodule  # pyrefly: ignore[missing-attribute]
        schedulers = [each.scheduler for each in trainer.lr_scheduler_configs]
        hooks = [one.on_save_checkpoint for one in _of_user(trainer)]
        with _guarded_hooks(trainer):
            for owner in (*callbacks, *schedulers, *([] if data is None else [data])):
                found = find_foreign(owner.state_dict())
                if found is not None:
                    raise ValueError(
                        f"{type(owner).__name__}.state_dict(){found.place} {found}, which no checkpoint can hold; have "
                        f"it return {PLAIN}."
                    )
            if any(getattr(hook, "__func__", None) is not pl.Callback.on_save_checkpoint for hook in hooks):
                trainer._checkpoint_connector.dump_checkpoint(weights_only=False)

    def _save_due(self, trainer: pl.Trainer, version: int, at_end: bool = False) -> None:
        if trainer.fast_dev_run:  # pyrefly: ignore[missing-attribute]
            return
        self._save_best(trainer)
        saved, n = self._given[0], self.every_n_updates
        if version > saved and (at_end or (n and version // n > saved // n)):
            self._save_last(trainer, version)

    def _save_best(self, trainer: pl.Trainer) -> None:
        if self._best_is_due:
            self._best_is_due = False
            self.saved_best = self.path(trainer, "best")
            self._save(trainer, self.saved_best)

    def _save_last(self, trainer: pl.Trainer, version: int) -> None:
        path = self.path(trainer, "last")
        self._save(trainer, path)
        self._given = (version, str(path))
        if self._io is None:
            self._newest = self._given

    def _save(self, trainer: pl.Trainer, path: Path) -> None:
        module = trainer.lightning_module
        assert isinstance(module, GRPOModule)
        self._settle(module)
        with module.phases.of("checkpoint"), _guarded_hooks(trainer, self._leaves_out):
            trainer.save_checkpoint(path, weights_only=False)

    def _settle(self, module: GRPOModule) -> None:
        """Wait until the last checkpoint is on the disk."""
        try:
            if self._io is not None:
                with module.phases.of("checkpoint"):
                    self._io.wait()
        except Exception:
            self._given = self._newest
            raise
        self._newest = self._given

    def path(self, trainer: pl.Trainer, name: str) -> Path:
        moved_to = self._moved_to
        return (moved_to or Path(trainer.default_root_dir)) / self.folder / f"{name}.ckpt"

    @property
    def _is_lost(self) -> bool:
        return self._run_folder is not None and not self._run_folder.is_in_place

    @property
    def _moved_to(self) -> Path | None:
        return self._run_folder.find() if self._run_folder is not None and self._is_lost else None

    # ---- signals and errors ---------------------------------------------------------------------------

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Handle signals outside of fit too, where Lightning would ignore SIGTERM."""
        self._listen()

    on_test_start = on_predict_start = on_validation_start

    def on_test_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._hang_up()

    on_predict_end = on_test_end

    def _listen(self) -> None:
        if threading.current_thread() is threading.main_thread() and not self._previous:
            # nohup makes a process ignore SIGHUP.
            ignored = {signal.SIGHUP} if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else set()
            self._previous = {
                signum: signal.signal(signum, self._on_signal) for signum in SIGNALS if signum not in ignored
            }

    def _hang_up(self) -> None:
        for signum, handler in self._previous.items():
            signal.signal(signum, handler)
        self._previous = {}

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        if self._requested:
            if signum == signal.SIGINT:
                raise KeyboardInterrupt
            return
        self._requested = signum
        if self._phase == "away" or (self._phase == "rollout" and not self._several):
            self._stop()
        say("\nFinishing this update, then saving a checkpoint; press Ctrl-C again to stop without.", flush=True)

    def _stop(self, rank: int = 0) -> None:
        raise Stopped(128 + self._requested if rank == 0 else 0)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Save ``last.ckpt`` if the state is that between two updates, and print how to resume."""
        assert isinstance(pl_module, GRPOModule)
        try:
            self._settle(pl_module)
        except CheckpointError as error:
            say(str(error))
        except RuntimeError:  # a rank is gone; ``exception`` says so too
            pass
        if self._watch is not None:
            self._watch.end(exception)
        phase, self._phase = self._phase, "away"
        is_lost = self._finds_newest(trainer)
        can_save = not isinstance(exception, KeyboardInterrupt)
        can_save = can_save and (is_lost or not isinstance(exception, CheckpointError))
        on_all_ranks = isinstance(exception, Stopped | CannotGoOn | FolderLostError)
        can_save = can_save and (on_all_ranks or not self._several)
        trained = phase == "trained"
        if trained and not self._validated and 0 <= trainer.max_steps <= trainer.global_step and not is_lost:
            can_save = False  # a resumed run would have no update left, and so skip this validation: repeat the update
        can_save = can_save and phase not in ("away", "update")
        can_save = can_save and (pl_module.policy_version > self._newest[0] or is_lost)
        if self._several and isinstance(exception, FolderLostError):  # other ranks do not know where the folder is
            can_save = trainer.strategy.broadcast(can_save)
        self._leaves_out = True
        try:
            if can_save:
                logs: Any = trainer._logger_connector
                if trained and trainer.training and logs._first_loop_iter is not None:  # else the epoch has ended
                    logs.update_train_step_metrics()  # the update's row may not be written yet
                between = nullcontext() if phase == "ended" else _without_batch(trainer, trained, self._validated)
                with between:
                    self._save_or_rescue(trainer, pl_module)
        except (CheckpointError, OSError) as error:
            say(str(error))
        finally:
            self._leaves_out = False
            self._hang_up()
        if phase != "away" and trainer.is_global_zero:
            say(self._how_to_go_on(trainer))

    def _finds_newest(self, trainer: pl.Trainer) -> bool:
        """Return whether the newest checkpoint is lost; if the run's folder was moved, look for it there."""
        version, path = self._newest
        if path is None or settled(Path(path)).exists():
            return False
        moved = self.path(trainer, Path(path).stem)
        if not settled(moved).exists():
            return True
        self._newest = self._given = (version, str(moved))
        return False

    def _save_or_rescue(self, trainer: pl.Trainer, module: GRPOModule) -> None:
        """Save in the run's folder; if that is gone and cannot be made again, in a new folder for temporary files."""
        root = Path(trainer.default_root_dir)
        try:
            if self._is_lost and self._moved_to is None and root.exists():  # it may be of another run
                raise FileExistsError(errno.EEXIST, "something else is in its place", str(root))
            self._save_best(trainer)
            self._save_last(trainer, module.policy_version)
            self._settle(module)
        except (CheckpointError, OSError) as error:
            if self._several or not (self._is_lost or not root.is_dir()):
                raise
            if isinstance(error, CheckpointError):
                say(str(error))
            path = Path(tempfile.mkdtemp(prefix="lit_grpo-")) / "last.ckpt"
            self._save(trainer, path)
            self._settle(module)
            self._newest = (module.policy_version, str(path))

    def _how_to_go_on(self, trainer: pl.Trainer) -> str:
        version, path = self._newest
        if path is None:
            return "Stopped before there was anything to save."
        if not settled(Path(path)).exists():
            return f"Update {version} was saved in {path}, which does not exist any more; it was moved or deleted."
        name, moved_to = shell(run_name(trainer)), self._moved_to
        if moved_to is not None:
            name = f"{shell(moved_to.name)} --run.dir {shell(str(moved_to.parent))}"
        return (
            f"Update {version} is saved; the same command with --run.name {name} --ckpt_path {shell(path)} goes "
            "on from there."
        )


class SavedByRun(ModelCheckpoint):
    """Tells Lightning's Trainer what :class:`RunCheckpoint` saves, and saves nothing itself.

    Lightning asks a ModelCheckpoint for the files that ``ckpt_path="best"`` and ``"last"`` mean, and adds one that
    saves if the Trainer has none. RunCheckpoint cannot be one, because Lightning calls these last.
    """

    def __init__(self, run: RunCheckpoint | None) -> None:
        super().__init__(save_top_k=0)
        self._run = run

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Do nothing, because nothing is saved."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Do nothing."""

    @property
    def best_model_path(self) -> str:
        """The run's ``best.ckpt``."""
        best = None if self._run is None else self._run.saved_best
        if best is None:
            raise ValueError(
                'ckpt_path is "best", but this Trainer has saved no best.ckpt, which is that of its best validation; '
                "give the path of a checkpoint, such as runs/NAME/checkpoints/best.ckpt."
            )
        return str(settled(best))

    @best_model_path.setter
    def best_model_path(self, path: str) -> None:
        """Do nothing: Lightning sets what it saves."""

    def _find_last_checkpoints(self, trainer: pl.Trainer) -> set[str]:
        if self._run is None:
            return set()
        last = settled(self._run.path(trainer, "last"))
        return {str(last)} if last.exists() else set()


def run_name(trainer: pl.Trainer) -> str:
    """Return the run's name with all its parts, as our loggers and Lightning's know it."""
    parts = Path(trainer.default_root_dir).parts
    loggers = [logger for logger in trainer.loggers if not is_foreign(type(logger))]
    names = [Path(str(logger.name)).parts for logger in loggers if logger.name]
    name = next((name for name in names if name and parts[-len(name) :] == name), parts[-1:])
    return "/".join(name)


def _of_user(trainer: pl.Trainer) -> list[pl.Callback]:
    callbacks: list[pl.Callback] = trainer.callbacks  # pyrefly: ignore[missing-attribute]
    return [one for one in callbacks if is_foreign(type(one)) or any(name in vars(one) for name in _SAVING)]


@contextmanager
def _guarded_hooks(trainer: pl.Trainer, leaves_out: bool = False) -> Iterator[None]:
    """Name a user's callback that fails in what it adds to a checkpoint."""
    before = [(vars(one), name, vars(one).get(name)) for one in _of_user(trainer) for name in _SAVING]
    for one in _of_user(trainer):
        for name in _SAVING:
            vars(one)[name] = _guarded(one, name, leaves_out)
    try:
        yield
    finally:
        for attributes, name, value in before:
            attributes.pop(name)
            attributes |= {} if value is None else {name: value}


def _guarded(callback: pl.Callback, name: str, leaves_out: bool) -> Callable[..., Any]:
    hook = getattr(callback, name)

    def call(*arguments: Any) -> Any:
        try:
            return hook(*arguments)
        except Exception as error:  # the user's own code, which may fail in any way
            said = first_line(error)
            said = said if said == type(error).__name__ else f"{type(error).__name__}: {said}"
            sentence = f"{type(callback).__name__}.{name} failed ({said})"
            if not leaves_out:
                raise ValueError(f"{sentence}, so no checkpoint can be written; mend it, or leave it out.") from error
            say(f"{sentence}; the checkpoint is without what it keeps.")
            return {}

    return call


@contextmanager
def _without_batch(trainer: pl.Trainer, trained: bool = False, validated: bool = True) -> Iterator[None]:
    """While saving, count the current batch as not started, or as finished if it has been trained on.

    Otherwise validation would come one batch early after resuming. A validation that has not ended counts as started,
    so that it is repeated.
    """
    progress = trainer.fit_loop.epoch_loop.batch_progress
    counts = (progress.total, progress.current)
    before = [(count, dict(vars(count))) for count in (*counts, *_validation_counts(trainer))]
    was_last = progress.is_last_batch
    for count in counts:
        done = count.ready if trained else count.completed
        vars(count).update(ready=done, started=done, processed=done, completed=done)
    progress.is_last_batch = was_last and trained
    if trained and not validated:
        for count in _validation_counts(trainer):
            vars(count).update(ready=1, started=1, processed=0, completed=0)
    try:
        yield
    finally:
        for count, values in before:
            vars(count).update(values)
        progress.is_last_batch = was_last


def _validation_counts(trainer: pl.Trainer) -> tuple[Any, Any]:
    progress = trainer.fit_loop.epoch_loop.val_loop.batch_progress
    return progress.total, progress.current
