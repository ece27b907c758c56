"""A policy's folder is replaced as a whole, or left as it was."""

import errno
from pathlib import Path

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
