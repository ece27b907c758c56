import errno
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from made_runs import make_checkpoint

from lit_grpo.checkpoints import BackgroundIO, CheckpointError, DamagedError, FolderIO, WholeFileIO, read
from lit_grpo.cli.parsing.refusals import check_ckpt_path


def test_a_full_disk_leaves_the_checkpoint_before_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, files = tmp_path / "checkpoints" / "last.ckpt", WholeFileIO()
    files.save_checkpoint({"version": 1}, path)

    def half(checkpoint: Any, file: Any) -> None:
        file.write(b"half of it")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(torch, "save", half)
    with pytest.raises(CheckpointError, match=r"last\.ckpt could not be written \(No space left on device\)"):
        files.save_checkpoint({"version": 2}, path)
    assert torch.load(path)["version"] == 1
    assert [file.name for file in path.parent.iterdir()] == ["last.ckpt"]


class Held(WholeFileIO):
    """Writes once it is let, and fails where it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.may_write, self.begun, self.fails = threading.Event(), 0, False

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        self.begun += 1
        assert self.may_write.wait(120)
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
    second.join(120)
    io.wait()
    assert torch.load(tmp_path / "last.ckpt")["version"] == 2
    writer.fails = True
    io.save_checkpoint({"version": 3}, tmp_path / "last.ckpt")
    with pytest.raises(CheckpointError, match="no room"):
        io.wait()
    io.wait()
    assert io.load_checkpoint(tmp_path / "last.ckpt")["version"] == 2
    io.teardown()


def test_after_a_run_it_writes_at_once(tmp_path: Path) -> None:
    io = BackgroundIO(WholeFileIO())
    io.save_checkpoint({"version": 1}, tmp_path / "last.ckpt")
    io.teardown()
    assert torch.load(tmp_path / "last.ckpt")["version"] == 1
    io.save_checkpoint({"version": 2}, tmp_path / "mine.ckpt")  # as a user does with the trainer
    assert torch.load(tmp_path / "mine.ckpt")["version"] == 2


def assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    tensors = ("state_dict", "optimizer_states")
    torch.testing.assert_close([one[name] for name in tensors], [other[name] for name in tensors], rtol=0, atol=0)
    assert {**one, **dict.fromkeys(tensors)} == {**other, **dict.fromkeys(tensors)}


def flips(file: Path, number: int) -> Iterator[None]:
    """Flip one bit of a file after another; at the end it is as it was."""
    written, drawn = file.read_bytes(), random.Random(0)
    for bit in (drawn.randrange(8 * len(written)) for _ in range(number)):
        flipped = bytearray(written)
        flipped[bit // 8] ^= 1 << bit % 8
        file.write_bytes(flipped)
        yield
    file.write_bytes(written)


def test_of_flipped_bits_none_lets_other_weights_be_loaded(tmp_path: Path) -> None:
    path, files, loaded = tmp_path / "last.ckpt", WholeFileIO(), 0
    files.save_checkpoint(make_checkpoint(), path)
    whole = torch.load(path)
    for _ in flips(path, 60):
        for load in (files.load_checkpoint, lambda path: check_ckpt_path(str(path), fits=True)):
            try:
                found = load(path) or torch.load(path)
            except DamagedError as error:
                assert "last.ckpt' is" in str(error) and "damaged" in str(error)
                continue
            loaded += 1
            assert_same(found, whole)
    assert loaded < 20  # flips of what no reader uses, such as the times in an archive


def test_flipped_bits_in_shards_are_found(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    FolderIO().save_checkpoint(make_checkpoint(), path)
    check_ckpt_path(str(path), fits=True)
    whole = read(path)
    for file in (path / "state.pt", path / "__0_0.distcp"):
        for _ in flips(file, 30):
            try:
                check_ckpt_path(str(path), fits=True)
            except DamagedError as error:
                assert "damaged" in str(error)
                continue
            assert_same(read(path), whole)


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
def test_weights_that_are_no_numbers_are_refused_and_the_whole_checkpoint_beside_is_named(
    tmp_path: Path, number: float
) -> None:
    files = WholeFileIO()
    files.save_checkpoint(make_checkpoint(version=2), tmp_path / "best.ckpt")
    collapsed = make_checkpoint(version=6)
    collapsed["state_dict"]["bias"][-1] = number
    for name in ("last", "older"):
        files.save_checkpoint(collapsed, tmp_path / f"{name}.ckpt")
    for load in (files.load_checkpoint, lambda path: check_ckpt_path(str(path), fits=False)):
        with pytest.raises(
            DamagedError,
            match=r"last\.ckpt' holds NaN .* weight bias, .*; give '\S+best\.ckpt', which is undamaged and of update 2",
        ):
            load(tmp_path / "last.ckpt")


@pytest.mark.parametrize(
    ("version", "sentence"),
    [
        ("99.0.0", r"was written with Lightning 99\.0\.0, .*; install"),
        ("none", "is damaged .*'none'"),
        (7j, "is damaged"),
    ],
)
def test_a_lightning_that_is_later_or_none_is_named(tmp_path: Path, version: Any, sentence: str) -> None:
    torch.save({**make_checkpoint(), "pytorch-lightning_version": version}, tmp_path / "last.ckpt")
    with pytest.raises(DamagedError, match=sentence):
        check_ckpt_path(str(tmp_path / "last.ckpt"), fits=True)
