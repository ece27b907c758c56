import os
import pickle
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from lit_grpo.checkpoints import (
    CheckpointError,
    FolderIO,
    WholeFileIO,
    check_folder,
    fault_of,
    put_in_place,
    read,
    read_state,
    settled,
)

CHECKPOINT = {
    "state_dict": {"embedding": torch.arange(6.0).view(2, 3), "scale": torch.ones(2, dtype=torch.bfloat16)},
    "optimizer_states": [
        {
            "state": {"scale": {"step": torch.tensor(3.0), "exp_avg": torch.full((2,), 0.5)}},
            "param_groups": [{"lr": 0.1, "params": ["scale"]}],
        }
    ],
    "policy_version": 3,
}
CHECKPOINT["state_dict"]["head"] = CHECKPOINT["state_dict"]["embedding"]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    FolderIO().save_checkpoint(CHECKPOINT, tmp_path / "checkpoints" / "last.ckpt")
    return tmp_path / "checkpoints" / "last.ckpt"


def test_a_folder_is_read_as_one_device_would_have_written_it(path: Path) -> None:
    saved = read(path)
    assert saved["policy_version"] == 3 and list(saved["state_dict"]) == ["embedding", "scale", "head"]
    assert torch.equal(saved["state_dict"]["embedding"], torch.arange(6.0).view(2, 3))
    assert saved["state_dict"]["scale"].dtype == torch.bfloat16
    assert saved["state_dict"]["head"] is saved["state_dict"]["embedding"]
    (optimizer,) = saved["optimizer_states"]
    assert optimizer["param_groups"] == [{"lr": 0.1, "params": [0]}]
    assert optimizer["state"][0]["step"] == 3 and optimizer["state"][0]["exp_avg"].tolist() == [0.5, 0.5]
    assert "optimizer_states" not in read(path, only=("state_dict",))
    shapes = {name: tuple(tensor.shape) for name, tensor in read_state(path)["state_dict"].items()}
    assert shapes == {"embedding": (2, 3), "scale": (2,), "head": (2, 3)}
    assert sorted(file.name for file in path.iterdir()) == [".metadata", "__0_0.distcp", "state.pt"]


@pytest.mark.parametrize("before", ["file", "folder"])
def test_a_kill_while_a_folder_takes_its_place_leaves_the_one_before(
    before: str, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    new = path.with_name("new.ckpt")
    path.rename(new)
    torch.save({"policy_version": 2}, path) if before == "file" else FolderIO().save_checkpoint(CHECKPOINT, path)

    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(Path, "replace", killed)
        put_in_place(new, path)
    assert not path.exists() and read(settled(path))["policy_version"] == (2 if before == "file" else 3)
    put_in_place(new, path)
    assert settled(path) == path and [file.name for file in path.parent.iterdir()] == ["last.ckpt"]


NO_CHECKPOINTS = {
    "a pipe": (os.mkfifo, "is a pipe, which is not replaced"),
    "a link": (lambda path: path.symlink_to("mine"), "is a symbolic link, which is not replaced"),
    "a folder of other files": (lambda path: (path / "photos").mkdir(parents=True), "so it is no checkpoint"),
}


@pytest.mark.parametrize("kind", NO_CHECKPOINTS)
@pytest.mark.parametrize("writer", [WholeFileIO, FolderIO])
def test_a_checkpoint_replaces_nothing_that_is_none(kind: str, writer: Any, tmp_path: Path) -> None:
    make, said = NO_CHECKPOINTS[kind]
    (tmp_path / "mine").write_text("mine")
    make(place := tmp_path / "last.ckpt")
    before = place.lstat()
    with pytest.raises(CheckpointError, match=said):
        writer().save_checkpoint(CHECKPOINT, place)
    assert place.lstat()[:2] == before[:2] and (tmp_path / "mine").read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["last.ckpt", "mine"]


class Harmful:
    def __reduce__(self) -> Any:
        return os.mkdir, ("harm",)


def test_a_folder_that_cannot_be_read_is_a_sentence_and_runs_nothing(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    check_folder(path)
    shard = path / "__0_0.distcp"
    whole = shard.read_bytes()
    shard.write_bytes(whole[:100])
    with pytest.raises(ValueError, match=r"lacks 1 of the 1 files that ranks .*, such as __0_0\.distcp; copy"):
        check_folder(path)
    shard.unlink()
    with pytest.raises(ValueError, match=r"last\.ckpt' lacks 1 of the 1 files"):
        read(path)
    shard.write_bytes(whole)
    (path / ".metadata").write_bytes(pickle.dumps(Harmful()))
    with pytest.raises(ValueError, match=r"is damaged: its \.metadata cannot be read \(UnpicklingError\); copy all"):
        check_folder(path)
    assert not Path("harm").exists()
    (path / "state.pt").unlink()
    with pytest.raises(ValueError, match=r"is a folder, but no checkpoint \(it has no state\.pt\); give"):
        check_folder(path)


def test_shards_of_another_save_are_refused_before_and_while_they_are_read(path: Path, tmp_path: Path) -> None:
    """Two saves of equal states differ too, and whatever file of one is copied to the other."""
    FolderIO().save_checkpoint(CHECKPOINT, tmp_path / "other.ckpt")
    assert fault_of(path) is None
    for file in sorted((tmp_path / "other.ckpt").iterdir()):
        mixed = Path(shutil.copytree(path, tmp_path / f"mixed-{file.name}.ckpt"))
        shutil.copy(file, mixed / file.name)
        assert re.match(r"is damaged, or mixes files of two saves", str(fault_of(mixed)))
    with pytest.raises(ValueError, match=r"cannot read checkpoint .*A shard of the checkpoint is of another save"):
        read(tmp_path / "mixed-__0_0.distcp.ckpt")
    listed = tmp_path / "other.ckpt" / ".metadata"
    flipped = bytearray(listed.read_bytes())
    flipped[len(flipped) // 2] ^= 1
    listed.write_bytes(flipped)
    with pytest.raises(ValueError, match=r"its \.metadata cannot be read"):
        read(tmp_path / "other.ckpt")
