"""A checkout of an earlier commit, for benchmarks that compare with it."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.report import ROOT, note


@contextmanager
def earlier_commit(commit: str) -> Iterator[Path | None]:
    """Check a commit out to `before` in a temporary folder with room for results; None where the commit is not here."""
    with tempfile.TemporaryDirectory() as made:
        before = Path(made) / "before"
        before.mkdir()
        archive = subprocess.run(["git", "archive", commit], cwd=ROOT, capture_output=True)
        if archive.returncode:
            note(f"Commit {commit} is not here, so that there is nothing to compare with.")
            yield None
            return
        subprocess.run(["tar", "-x"], cwd=before, input=archive.stdout, check=True)
        yield before
