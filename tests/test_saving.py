"""A policy's folder is replaced as a whole, or left as it was."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest
from safetensors import SafetensorError

from lit_grpo.policy.saving import written_as_a_whole


def files(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


def test_files_take_their_places_beside_those_that_are_not_of_the_policy(tmp_path: Path) -> None:
    folder = tmp_path / "policy"
    folder.mkdir()
    (folder / "notes.txt").write_text("mine")
    (folder / "config.json").write_text("old")
    with written_as_a_whole(folder) as aside:
        (aside / "adapter").mkdir()
        (aside / "adapter" / "weights").write_text("1")
        (aside / "config.json").write_text("new")
        assert files(folder) == {"notes.txt": "mine", "config.json": "old"}
    assert files(folder) == {"notes.txt": "mine", "config.json": "new", "adapter/weights": "1"}
    assert [path.name for path in tmp_path.iterdir()] == ["policy"]


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), SafetensorError("No space left")])
def test_a_full_disk_leaves_the_folder_as_it_was(tmp_path: Path, error: Exception) -> None:
    folder = tmp_path / "policy"
    folder.mkdir()
    (folder / "config.json").write_text("old")
    with pytest.raises(ValueError, match=r"could not be written to .*policy \(No space left.* make room"):  # noqa: SIM117
        with written_as_a_whole(folder) as aside:
            (aside / "config.json").write_text("half of")
            raise error
    assert files(folder) == {"config.json": "old"}
    assert [path.name for path in tmp_path.iterdir()] == ["policy"]


@pytest.mark.parametrize("name", ["config.json", "model-00001-of-00002.safetensors"])
@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("notes.txt"), lambda path: path.mkdir()])
def test_what_is_no_file_is_not_replaced_and_nothing_else_is(name: str, make: Any, tmp_path: Path) -> None:
    folder = tmp_path / "policy"
    folder.mkdir()
    for each in ("notes.txt", "model.safetensors", "generation_config.json"):
        (folder / each).write_text("old")
    make(folder / name)
    kind = (folder / name).lstat()
    with pytest.raises(ValueError, match=f"{name} is .*, which is not replaced"), written_as_a_whole(folder) as aside:
        for each in ("config.json", "generation_config.json"):
            (aside / each).write_text("new")
    assert files(folder) | {name: ""} == {name: "", **dict.fromkeys(("notes.txt", "model.safetensors"), "old"),
                                          "generation_config.json": "old"}  # fmt: skip
    assert (folder / name).lstat()[:2] == kind[:2] and [path.name for path in tmp_path.iterdir()] == ["policy"]


def test_a_place_that_is_no_folder_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    os.mkfifo(folder := tmp_path / "policy")
    with pytest.raises(ValueError, match="policy is a pipe, and not a folder"), written_as_a_whole(folder):
        pytest.fail("the policy is written")
