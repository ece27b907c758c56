"""Runs with hooks of others that raise, or change what belongs to the whole process."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import lightning.pytorch as pl
import pytest
import torch
from conftest import table_rows
from hand_made import weights_of
from lightning.pytorch.callbacks import DeviceStatsMonitor, ModelCheckpoint
from lightning.pytorch.loggers import Logger
from test_foreign import OF_MAIN, OF_PROCESS, OF_THREAD, values

import lit_grpo
from lit_grpo.foreign import owner_of
from lit_grpo.plugins import Plugin

EARLY = (
    *("requirement", "check", "setup", "rewards", "on_policy_start", "on_train_start", "observes", "numbers"),
    *("state_dict", "on_fit_start", "on_train_epoch_start"),
    *("name", "version", "save_dir", "experiment", "log_graph"),
)
"""Hooks that raise from the first call on; the others raise once a batch has been learned from."""
PLUGIN = (
    *("requirement", "check", "setup", "rewards", "on_policy_start", "on_train_start", "observes", "numbers"),
    *("state_dict", "waits_in_time", "on_rollout_start", "on_requests", "on_step", "on_completion", "on_group"),
    *("on_idle", "on_rollout_end", "prompt_chance", "first_round", "next_round", "shared_round", "batch_size"),
    *("on_batch_start", "add_members", "metrics", "on_update_end", "on_batch", "on_minibatch"),
    *("loss", "on_gradient", "on_optimizer_step"),
)
CALLBACK = (
    *("setup", "on_fit_start", "on_train_start", "on_train_epoch_start", "on_train_batch_start", "on_before_backward"),
    *("on_after_backward", "on_before_optimizer_step", "on_train_batch_end", "state_dict"),
    *("on_validation_start", "on_validation_epoch_start", "on_validation_batch_start", "on_validation_batch_end"),
    *("on_validation_epoch_end", "on_validation_end", "on_train_epoch_end", "on_train_end", "on_fit_end", "teardown"),
)
LOGGER = (
    *("log_metrics", "log_graph", "save", "finalize", "after_save_checkpoint"),
    *("name", "version", "save_dir", "group_separator", "experiment"),
)
"""What Lightning asks of a logger: five methods, and five properties."""
ENDING = ("name", "version", "save_dir", "experiment")
"""Parts of a logger that are asked for before the first batch, and whose errors end the run there."""


class Silent(Logger):
    """A logger that keeps nothing, and has an ``experiment``, which Lightning's base class has not."""

    name = property(lambda _: "mine")
    version = property(lambda _: "")
    experiment = property(lambda _: {})

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        pass

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        pass

    def finalize(self, status: str) -> None:
        """Do nothing; Lightning's own saves, within this hook."""


KINDS: dict[str, tuple[type[Any], tuple[str, ...]]] = {
    "plug-in": (Plugin, PLUGIN),
    "callback": (pl.Callback, CALLBACK),
    "logger": (Silent, LOGGER),
}
ROWS = [{"prompt": f"{number}+1="} for number in range(6)]


class Of:
    """The deed of the hooks of :func:`made`, and whether a batch has been learned from."""

    learned = False
    do: ClassVar[Any] = staticmethod(lambda: None)


def do(what: Callable[[], Any]) -> None:
    Of.do = staticmethod(what)


class Learning(pl.Callback):
    def on_train_batch_end(self, *_: Any, **__: Any) -> None:
        Of.learned = True


def made(base: type[Any], *hooks: str) -> type[Any]:
    """Return a class, at the path ``guarded.Mine``, whose hooks do what :class:`Of` says, and then what those of
    ``base`` do.
    """

    def hook_of(hook: str, original: Any) -> Any:
        def called(*arguments: Any, **named: Any) -> Any:
            if hook in hooks and (Of.learned or hook in EARLY):
                Of.do()
            return original.__get__(*arguments) if isinstance(original, property) else original(*arguments, **named)

        called.__name__ = hook
        return property(called) if isinstance(original, property) else called

    also = ("on_batch_start",) if base is Plugin else ()
    body = {hook: hook_of(hook, getattr(base, hook)) for hook in dict.fromkeys((*hooks, *also))}
    kind = type("Mine", (base,), body | {"__module__": "guarded"})
    vars(sys.modules["guarded"])["Mine"] = kind
    return kind


@pytest.fixture(autouse=True)
def _guarded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "guarded", type(sys)("guarded"))
    Of.learned = False
    do(lambda: None)


def reward(completion: str) -> float:
    return float(len(completion) % 3)


def train(policy: Path, folder: Path, kind: str, *hooks: str, score: Any = reward) -> Any:
    mine = made(KINDS[kind][0], *hooks)
    trainer: dict[str, Any] = {"accelerator": "cpu", "enable_progress_bar": False, "val_check_interval": 1}
    asking = [ModelCheckpoint(every_n_train_steps=1), DeviceStatsMonitor()]  # Lightning's callbacks that ask a logger
    trainer |= {"callbacks": [Learning(), *{"callback": [mine()], "logger": asking}.get(kind, [])]}
    trainer |= {"logger": [mine()], "log_every_n_steps": 1} if kind == "logger" else {"logger": False}
    rollout = {"plugins": ["guarded.Mine"]} if kind == "plug-in" else {}
    return lit_grpo.train(
        str(policy),
        ROWS,
        score,
        max_steps=3,
        batch_size=2,
        num_generations=2,
        validation=ROWS[:1],
        sampling={"max_tokens": 4},
        dir=str(folder),
        trainer=trainer,
        callbacks={"rollout": rollout, "checkpoint": {"every_n_updates": 1}, "rollout_timeline": None},
    )


def broken() -> None:
    raise KeyError("broken")


ALL = [(kind, hook) for kind, (_, hooks) in KINDS.items() for hook in hooks]
QUICK = [("plug-in", "on_minibatch"), ("logger", "save_dir")]


@pytest.mark.parametrize(("kind", "hook"), table_rows(ALL, QUICK))
def test_a_hook_that_raises_is_named_and_what_was_learned_is_saved(
    kind: str, hook: str, tmp_path: Path, policy_folder: Path
) -> None:
    do(broken)
    saved = tmp_path / "grpo" / "checkpoints" / "last.ckpt"
    if kind == "logger" and hook not in ENDING:
        with pytest.warns() as caught:
            train(policy_folder, tmp_path, kind, hook)
        told = f"Mine failed in {hook} (KeyError: 'broken')"
        asker = (
            f"DeviceStatsMonitor failed in on_train_batch_end (logger guarded.Mine, hook {hook}: KeyError: 'broken')"
        )
        assert any(told in str(each.message) or asker in str(each.message) for each in caught)
        assert torch.load(saved, weights_only=True)["global_step"] == 3
        return
    wrapped = (kind, hook) == ("callback", "state_dict")  # the sentence says that no checkpoint can be written
    with pytest.raises(ValueError if wrapped else KeyError) as raised:
        train(policy_folder, tmp_path, kind, hook)
    assert owner_of(raised.value) == f"{kind} guarded.Mine, hook {hook}"
    if hook not in EARLY:
        assert torch.load(saved, weights_only=True)["global_step"] >= 1


def change_all() -> None:
    for change in (OF_PROCESS | OF_THREAD | OF_MAIN).values():
        change()


LISTENING = ("on_rollout_start", "on_requests", "on_step", "on_completion", "metrics", "on_update_end", "loss")
CHANGING = [(kind, hook) for kind, hook in ALL if hook not in ("setup", "check")]
CHANGING += [(kind, "all") for kind in KINDS]


@pytest.mark.parametrize(("kind", "hook"), table_rows(CHANGING, [("callback", "all")]))
def test_what_a_hook_changes_for_the_whole_process_changes_no_weight(
    kind: str, hook: str, tmp_path: Path, policy_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = list[str]()  # not by way of the filters of warnings, which other threads of this process change too
    monkeypatch.setattr("lit_grpo.foreign.warn", told.append)
    several = LISTENING if kind == "plug-in" else tuple(each for each in KINDS[kind][1] if each != "setup")
    hooks = several if hook == "all" else (hook,)  # of a plug-in those that do not decide the same
    plain = train(policy_folder, tmp_path / "plain", kind, *hooks)
    do(change_all)
    Of.learned, before = False, values()
    changed = train(policy_folder, tmp_path / "changed", kind, *hooks)
    assert values() == before
    assert torch.equal(weights_of(changed.module), weights_of(plain.module))
    for each in hooks:  # vLLM in this process has made torch.set_num_threads do nothing
        sentence = f"{kind} guarded.Mine, hook {each}: it changes torch.set_float32_matmul_precision"
        assert any(sentence in one for one in told), (each, told)
