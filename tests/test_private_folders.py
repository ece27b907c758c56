"""Folders of weights and servers: private, swept when their owner is dead, and never somebody else's."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from lit_grpo.process import files
from lit_grpo.process.files import PrivateFolder, is_private
from lit_grpo.rollout.weights.files import weights_folder

OWNER = """
import sys, time
from lit_grpo.rollout.weights.files import weights_folder
with weights_folder(sys.argv[1]) as folder:
    (folder / "weights.safetensors").write_text("much")
    print(folder, flush=True)
    time.sleep(600)
"""


def start_owner(parent: Path) -> tuple[subprocess.Popen[str], Path]:
    """A process with weights on their way in a folder."""
    owner = subprocess.Popen([sys.executable, "-c", OWNER, str(parent)], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    return owner, Path(owner.stdout.readline().strip())


def test_a_folder_is_private_and_goes_with_its_use(tmp_path: Path) -> None:
    with weights_folder(str(tmp_path)) as folder, weights_folder(str(tmp_path)) as other:
        assert folder.parent == tmp_path and folder != other
        assert is_private(folder)
        assert folder.stat().st_mode & 0o777 == 0o700
    assert not list(tmp_path.iterdir())
    kept = PrivateFolder("lit_grpo_vllm_", str(tmp_path))
    assert kept.path.is_dir()
    del kept
    assert not list(tmp_path.iterdir())


def test_what_a_killed_process_left_is_swept_and_what_a_living_one_has_is_not(tmp_path: Path) -> None:
    owner, left = start_owner(tmp_path)
    try:
        with weights_folder(str(tmp_path)):
            assert (left / "weights.safetensors").read_text() == "much"  # it still lives
        owner.send_signal(signal.SIGSTOP)
        with weights_folder(str(tmp_path)):
            assert left.exists()  # it may go on
        other = PrivateFolder("lit_grpo_vllm_", str(tmp_path))
    finally:
        owner.kill()
        owner.wait()
    PrivateFolder("lit_grpo_vllm_", str(tmp_path))
    assert left.exists()  # of another kind
    with weights_folder(str(tmp_path)) as folder:
        assert sorted(tmp_path.iterdir()) == sorted([folder, other.path])


def test_what_others_have_planted_is_neither_followed_nor_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    victim = tmp_path / "victim"
    victim.mkdir(mode=0o700)
    (victim / ".owner").write_text("")
    (victim / "precious").write_text("")
    (tmp_path / "lit_grpo_weights_link").symlink_to(victim)
    open_to_all = tmp_path / "lit_grpo_weights_open"
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    (open_to_all / ".owner").write_text("")
    with weights_folder(str(tmp_path)):
        pass
    assert (victim / "precious").exists() and (victim / ".owner").exists() and open_to_all.exists()
    open_to_all.chmod(0o700)
    own = os.getuid()
    monkeypatch.setattr(files.os, "getuid", lambda: own + 1)  # it is another user's
    with weights_folder(str(tmp_path)):
        pass
    assert open_to_all.exists()
    monkeypatch.undo()
    with weights_folder(str(tmp_path)):
        pass
    assert (victim / "precious").exists() and not open_to_all.exists()  # it was ours, and nobody's any more


def test_only_a_folder_of_this_user_for_this_user_is_private(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    assert is_private(tmp_path) and not is_private(tmp_path / "missing")
    (tmp_path / "file").touch(mode=0o600)
    (tmp_path / "link").symlink_to(tmp_path)
    assert not is_private(tmp_path / "file") and not is_private(tmp_path / "link")
