import errno
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from lit_grpo.checkpoints import BackgroundIO, CheckpointError, WholeFileIO


def test_a_full_disk_leaves_the_checkpoint_before_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, files = tmp_path / "checkpoints" / "last.ckpt", WholeFileIO()
    files.save_checkpoint({"version": 1}, path)

    def half(checkpoint: Any, file: Any) -> None:
        file.write(b"half of it")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(torch, "save", half)
    with pytest.raises(CheckpointError, match=r"last\.ckpt could not be written \(No space left on device\)"):
        files.save_checkpoint({"version": 2}, path)
    assert torch.load(path) == {"version": 1}
    assert [file.name for file in path.parent.iterdir()] == ["last.ckpt"]


def test_a_checkpoint_is_written_beside_the_one_before_whatever_tmpdir_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "absent"))
    WholeFileIO().save_checkpoint({"version": 1}, tmp_path / "last.ckpt")
    assert torch.load(tmp_path / "last.ckpt") == {"version": 1}


class Held(WholeFileIO):
    """Writes once it is let, and fails where it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.may_write, self.begun, self.fails = threading.Event(), 0, False

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        self.begun += 1
        assert self.may_write.wait(10)
        if self.fails:
            raise CheckpointError("no room")
        super().save_checkpoint(checkpoint, path)


def test_what_is_written_beside_the_run_is_what_was_when_it_was_saved(tmp_path: Path) -> None:
    writer, path = Held(), tmp_path / "last.ckpt"
    io = BackgroundIO(writer)
    weight, lengths = torch.ones(1000), [1, 2]
    tied = {"embed": weight.detach(), "head": weight.detach(), "half": weight[:500], "other": torch.ones(1000)}
    io.save_checkpoint({"state_dict": tied, "buffer": {"lengths": lengths, "step": torch.tensor(3.0)}}, path)
    weight.zero_()
    lengths.append(3)
    assert io.is_writing and not path.exists()
    writer.may_write.set()
    io.wait()
    assert not io.is_writing
    saved = torch.load(path, weights_only=True)
    assert saved["buffer"] == {"lengths": [1, 2], "step": 3.0}
    assert all(value.eq(1).all() for value in saved["state_dict"].values())
    tensors = saved["state_dict"].values()
    assert len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == 3  # what is tied is kept once
    io.teardown()


def test_a_checkpoint_waits_for_the_one_before_and_a_failure_is_told_once(tmp_path: Path) -> None:
    writer = Held()
    io = BackgroundIO(writer)
    io.save_checkpoint({"version": 1}, tmp_path / "last.ckpt")
    second = threading.Thread(target=io.save_checkpoint, args=({"version": 2}, tmp_path / "last.ckpt"))
    second.start()
    second.join(0.2)
    assert second.is_alive() and writer.begun == 1
    writer.may_write.set()
    second.join(10)
    io.wait()
    assert torch.load(tmp_path / "last.ckpt") == {"version": 2}
    writer.fails = True
    io.save_checkpoint({"version": 3}, tmp_path / "last.ckpt")
    with pytest.raises(CheckpointError, match="no room"):
        io.wait()
    io.wait()
    assert io.load_checkpoint(tmp_path / "last.ckpt") == {"version": 2}
    io.teardown()


def test_after_a_run_it_writes_at_once(tmp_path: Path) -> None:
    io = BackgroundIO(WholeFileIO())
    io.save_checkpoint({"version": 1}, tmp_path / "last.ckpt")
    io.teardown()
    assert torch.load(tmp_path / "last.ckpt") == {"version": 1}
    io.save_checkpoint({"version": 2}, tmp_path / "mine.ckpt")  # as a user does with the trainer
    assert torch.load(tmp_path / "mine.ckpt") == {"version": 2}
