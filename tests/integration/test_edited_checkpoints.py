"""Checkpoints that were edited, mixed or damaged: each reader refuses them in one sentence, or reads them rightly."""

from __future__ import annotations

import copy
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import lightning.pytorch as pl
import pytest
import torch
from conftest import table_rows
from lightning.pytorch.demos.boring_classes import BoringModel
from safetensors.torch import load_file
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from lit_grpo.checkpoints import FolderIO, read_state
from lit_grpo.cli.command_line import run as lit_grpo_run
from lit_grpo.tools.commands.export import main as export
from lit_grpo.tools.commands.report import main as report
from lit_grpo.tools.evaluation.policies import find_policy
from lit_grpo.tools.finishing.command import main as finish
from tests.task_folders import write_task

REWARD = "def score(completion):\n    return sum(c.isdigit() for c in completion) / max(len(completion), 1)\n"
FIELDS = (
    *("epoch", "global_step", "pytorch-lightning_version", "state_dict", "loops", "callbacks", "optimizer_states"),
    *("lr_schedulers", "PromptDataModule", "format", "policy_version", "told", "logged", "reward_curves"),
    *("hyper_parameters", "learner", "checksums"),
)
WEIGHT = "policy.model.layers.0.self_attn.q_proj.weight"
Checkpoint = dict[str, Any]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, policy_folder: Path) -> Path:
    """A task with a run of four updates, ``whole``, and its checkpoints of updates 2 and 4: files, and folders."""
    folder = write_task(
        tmp_path_factory.mktemp("edited"),
        policy_folder,
        REWARD,
        lr=2e-3,
        trainer={"max_steps": 2},
        model={
            "num_generations": 2,
            "sampling": {"max_tokens": 4},
            "lr_scheduler": {"class_path": "torch.optim.lr_scheduler.LinearLR", "init_args": {"total_iters": 9}},
        },
    )
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.chdir(folder)
        for update in (2, 4):
            resumed = ["--ckpt_path", "last"] if update == 4 else []
            fit("--run.name", "whole", "--trainer.max_steps", str(update), *resumed)
            shutil.copy("runs/whole/checkpoints/last.ckpt", f"{update}.ckpt")
            saved = read_state(Path(f"{update}.ckpt"))
            names = list(saved["state_dict"])
            (optimizer,) = saved["optimizer_states"]
            optimizer["state"] = {names[number]: state for number, state in optimizer["state"].items()}
            for group in optimizer["param_groups"]:
                group["params"] = [names[number] for number in group["params"]]
            FolderIO().save_checkpoint(saved, f"shards-{update}.ckpt")
    return folder


@pytest.fixture(autouse=True)
def _in_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)


def fit(*arguments: str) -> None:
    lit_grpo_run(["fit", "--config", "config.yaml", *arguments])


def resume(path: Path) -> None:
    fit("--run.name", "resumed", "--ckpt_path", str(path), "--trainer.max_steps", "4")


def finished(path: Path) -> None:
    run = path.parent / "run"
    shutil.rmtree(run, ignore_errors=True)
    shutil.copytree("runs/whole", run)
    last = run / "checkpoints" / "last.ckpt"
    last.unlink()
    path.rename(last)
    try:
        report([str(run)])  # which reads no checkpoint
        finish([str(run), "--gguf", "none", "--output", str(path.parent / "finished")])
    finally:
        last.rename(path)


READERS: dict[str, tuple[Callable[[Path], Any], str | None, int]] = {
    "fit": (resume, "runs/resumed/policy", 4),
    "export": (lambda path: export([str(path), str(path.parent / "exported")]), "exported", 2),
    "finish": (finished, "finished", 2),
}
"""The commands, each with the folder of the policy that it writes, and the update of which that policy is."""


def outcome(reader: str, path: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """Return the sentence of a refusal; empty if the command ended well, with the right weights."""
    command, written, update = READERS[reader]
    place = Path(str(written)) if reader == "fit" else path.parent / str(written)
    shutil.rmtree(Path("runs/resumed") if reader == "fit" else place, ignore_errors=True)
    capsys.readouterr()
    try:
        command(path)
    except SystemExit as ended:
        errors = capsys.readouterr().err
        assert ended.code == 2 and not place.exists()
        (said,) = [line for line in errors.splitlines() if line.startswith("error: ")]
        assert path.name in said or "last.ckpt" in said, said
        assert "Traceback" not in errors and len(said) < 600, errors
        return said
    weights = load_file(place / "model.safetensors")
    saved = torch.load(f"{update}.ckpt", weights_only=True)["state_dict"]
    assert all(torch.equal(weights[name], saved[f"policy.{name}"]) for name in weights)
    return ""


def edited(edit: Callable[[Checkpoint], Any], path: Path) -> Path:
    """Load a file, or the state of a folder, edit and save it, as a user of torch does."""
    file = path / "state.pt" if path.is_dir() else path
    saved = torch.load(file, map_location="cpu", weights_only=True)
    edit(saved)
    torch.save(saved, file)
    return path


def set_to(field: str, value: Any) -> Callable[[Checkpoint], Any]:
    return lambda saved: saved.update({field: value})


def remove(field: str) -> Callable[[Checkpoint], Any]:
    return lambda saved: saved.pop(field)


def other_optimizer(saved: Checkpoint) -> None:
    (optimizer,) = saved["optimizer_states"]
    optimizer["state"] = {n: {"momentum_buffer": state["exp_avg"]} for n, state in optimizer["state"].items()}


def in_state(saved: Checkpoint, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    state = next(iter(saved["optimizer_states"][0]["state"].values()))
    state["exp_avg"] = change(state["exp_avg"])


def in_weight(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Checkpoint], Any]:
    return lambda saved: saved["state_dict"].update({WEIGHT: change(saved["state_dict"][WEIGHT])})


EDITS: dict[str, Callable[[Checkpoint], Any]] = {
    **{f"{field} removed": remove(field) for field in FIELDS},
    **{f"{field} = 5": set_to(field, 5) for field in FIELDS},
    **{f"{field} a text": set_to(field, "text") for field in FIELDS},
    **{f"{field} = None": set_to(field, None) for field in FIELDS},
    **{f"{field} a list": set_to(field, []) for field in FIELDS},
    "a field more": set_to("more", [1, 2]),
    "a number as a key": lambda saved: cast("dict[Any, Any]", saved).update({5: 5}),
    "no fit_loop": lambda saved: saved["loops"].pop("fit_loop"),
    "another position in the loop": lambda saved: saved["loops"]["fit_loop"]["epoch_loop.batch_progress"][
        "total"
    ].update(ready=1, completed=1),
    "no rollouts": lambda saved: saved["callbacks"].pop("RolloutScheduler"),
    "another position in the data": lambda saved: saved["PromptDataModule"].update(prompts_consumed=5),
    "an empty history": lambda saved: saved["learner"]["history"].clear(),
    "the optimizer's state is empty": lambda saved: saved["optimizer_states"][0].update(state={}),
    "another optimizer's state": other_optimizer,
    "another learning rate": lambda saved: saved["optimizer_states"][0]["param_groups"][0].update(lr=1.0),
    "a moment of another shape": lambda saved: in_state(saved, lambda one: one.flatten()[:3]),
    "a moment of another dtype": lambda saved: in_state(saved, torch.Tensor.half),
    "no weight": lambda saved: saved["state_dict"].pop(WEIGHT),
    "a number as a weight": in_weight(lambda one: 5),  # pyrefly: ignore[bad-argument-type]
    "a weight of another shape": in_weight(lambda one: one.T.flatten()),
    "a weight of another dtype": in_weight(torch.Tensor.bfloat16),
    "another policy": lambda saved: saved["hyper_parameters"].update(policy="tiny"),
    "another dtype": lambda saved: saved["hyper_parameters"].update(dtype="int8"),
    "adapters": lambda saved: saved["hyper_parameters"].update(lora={"rank": 4}),
    "a value of NumPy that is none": set_to("told", {"lit_grpo.numpy": "f4", "shape": 5, "bytes": 5}),
    "the checksums are a number, and no loops": lambda saved: saved.update(checksums=5, loops={}),
}
"""Edits of what ``torch.load`` gives; all are refused."""
CONTENT: dict[str, Callable[[Checkpoint], Any]] = {
    "NaN in a weight": in_weight(lambda one: one.index_fill(0, torch.tensor(0), float("nan"))),
    "infinity in a moment": lambda saved: in_state(saved, lambda one: one / 0),  # pyrefly: ignore[division-by-zero]
}
"""Edits of the content of tensors in a file."""


@pytest.mark.parametrize("edit", table_rows([*EDITS, *CONTENT], ["loops removed", "another optimizer's state"]))
def test_an_edited_checkpoint_is_refused_by_every_reader(
    edit: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = edited({**EDITS, **CONTENT}[edit], Path(shutil.copy("2.ckpt", tmp_path / "edited.ckpt")))
    if edit != "checksums removed":  # without them no run is resumed, and the policy is that of the checkpoint
        assert all(outcome(reader, path, capsys) for reader in READERS)
        with pytest.raises(ValueError, match=r"edited\.ckpt"):
            find_policy(str(path))
    else:
        assert "it has no field checksums" in outcome("fit", path, capsys)
        assert [outcome(reader, path, capsys) for reader in ("export", "finish")] == ["", ""]


@pytest.mark.nightly
@pytest.mark.parametrize("edit", EDITS)
def test_an_edited_checkpoint_without_checksums_is_not_resumed_and_its_policy_is_right_or_refused(
    edit: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = edited(EDITS[edit], Path(shutil.copy("2.ckpt", tmp_path / "edited.ckpt")))
    edited(lambda saved: saved.pop("checksums", None), path)
    assert outcome("fit", path, capsys)
    if edit not in ("a weight of another dtype", "another policy"):  # which are of another policy, and read as such
        outcome("export", path, capsys)


@pytest.mark.nightly
@pytest.mark.parametrize("edit", EDITS)
def test_an_edited_state_in_a_folder_is_refused_by_every_reader(
    edit: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = edited(EDITS[edit], Path(shutil.copytree("shards-2.ckpt", tmp_path / "edited.ckpt")))
    assert all(outcome(reader, path, capsys) for reader in READERS)


def copied(name: str) -> Callable[[Path, Path], Any]:
    return lambda own, other: shutil.copy(other / name, own / name)


def torn(name: str) -> Callable[[Path, Path], Any]:
    """As a copy in place leaves a file that was interrupted: its beginning is of another update."""

    def mix(own: Path, other: Path) -> None:
        mine, theirs = (own / name).read_bytes(), (other / name).read_bytes()
        end = len(mine) * 4 // 5
        (own / name).write_bytes(theirs[:end] + mine[end:])

    return mix


def without_ids(own: Path, _: Path) -> None:
    """Write a folder as earlier versions did."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr("lit_grpo.checkpoints.folder._Writer.write_data", FileSystemWriter.write_data)
        saved = torch.load(own / "state.pt", weights_only=True)
        tensors = {"state_dict": {WEIGHT: torch.ones(64, 32)}, "optimizer_states": []}
        shutil.rmtree(own)
        FolderIO().save_checkpoint({**saved, **tensors}, own)


MIXTURES: dict[str, tuple[Callable[[Path, Path], Any], str]] = {
    **{f"{name} of another update": (copied(name), "mixes files of two saves") for name in ("state.pt", ".metadata")},
    "a shard file of another update": (copied("__0_0.distcp"), "mixes files of two saves"),
    "the beginning of .metadata of another update": (torn(".metadata"), "is damaged"),
    "the beginning of a shard file of another update": (torn("__0_0.distcp"), "damaged|mixes"),
    "the beginning of state.pt of another update": (torn("state.pt"), "damaged"),
    "no ids": (
        without_ids,
        r"was written by an earlier version of lit_grpo, .* \(resume or export it with that version",
    ),
    "no shard file": (lambda own, _: (own / "__0_0.distcp").unlink(), "lacks 1 of the 1 files"),
    "no .metadata": (lambda own, _: (own / ".metadata").unlink(), "cannot be read"),
    "no state.pt": (lambda own, _: (own / "state.pt").unlink(), "is a folder, but no checkpoint"),
    **{
        f"{name} cut": (lambda own, _, name=name: os.truncate(own / name, (own / name).stat().st_size * 2 // 3), "")
        for name in ("state.pt", ".metadata", "__0_0.distcp")
    },
    **{
        f"{name} empty": (lambda own, _, name=name: os.truncate(own / name, 0), "")
        for name in ("state.pt", ".metadata", "__0_0.distcp")
    },
}


@pytest.mark.parametrize("mixture", table_rows(MIXTURES, ["a shard file of another update", "no ids"]))
@pytest.mark.parametrize("update", table_rows([2, 4], [2]))
def test_a_folder_of_files_of_two_updates_is_refused_by_every_reader(
    update: int, mixture: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mix, sentence = MIXTURES[mixture]
    own, other = (Path(f"shards-{number}.ckpt") for number in (update, 6 - update))
    path = Path(shutil.copytree(own, tmp_path / "mixed.ckpt"))
    mix(path, other)
    for reader in READERS:
        assert re.search(sentence or "error", outcome(reader, path, capsys)), reader
    with pytest.raises(ValueError, match=sentence or r"mixed\.ckpt"):
        find_policy(str(path))


FILES: dict[str, Callable[[Path], Any]] = {
    **{
        f"cut at {part} of 8": lambda path, part=part: os.truncate(path, path.stat().st_size * part // 8)
        for part in range(8)
    },
    "a text": lambda path: path.write_text("policy"),
    "a list": lambda path: torch.save([1, 2], path),
    "a tensor": lambda path: torch.save(torch.ones(3), path),
    "weights alone": lambda path: torch.save(torch.load(path, weights_only=True)["state_dict"], path),
    "of plain Lightning": lambda path: lightning_checkpoint(path),
}


def lightning_checkpoint(path: Path) -> None:
    options: Any = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "accelerator": "cpu"}
    trainer = pl.Trainer(max_steps=1, enable_model_summary=False, default_root_dir=path.parent, **options)
    trainer.fit(BoringModel())
    trainer.save_checkpoint(path)


@pytest.mark.parametrize("kind", table_rows(FILES, ["of plain Lightning"]))
def test_a_file_that_is_no_checkpoint_of_a_run_is_refused_by_every_reader(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = Path(shutil.copy("2.ckpt", tmp_path / "other.ckpt"))
    FILES[kind](path)
    assert all(outcome(reader, path, capsys) for reader in READERS)


@pytest.mark.parametrize("name", table_rows(["2.ckpt", "shards-2.ckpt"], []))
def test_a_checkpoint_that_nobody_edited_is_read_by_every_reader(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also one that torch has loaded and saved again."""
    path = tmp_path / "same.ckpt"
    shutil.copytree(name, path) if Path(name).is_dir() else edited(copy.copy, Path(shutil.copy(name, path)))
    assert [outcome(reader, path, capsys) for reader in READERS] == ["", "", ""]
