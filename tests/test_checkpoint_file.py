import errno
from pathlib import Path
from typing import Any

import pytest
import torch

from lit_grpo.checkpoints import CheckpointError, WholeFileIO


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
