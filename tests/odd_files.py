"""Paths that are no files, or have no end, for tests of readers."""

import os
from pathlib import Path

NO_FILES = ("a pipe", "a folder", "a link to nothing", "a link to itself", "/dev/zero")


def make_no_file(kind: str, path: Path) -> None:
    """Make one of :data:`NO_FILES`, or ``5 GiB``, which is a file without content."""
    match kind:
        case "a pipe":
            os.mkfifo(path)
        case "a folder":
            path.mkdir()
        case "a link to nothing":
            path.symlink_to("nowhere")
        case "a link to itself":
            path.symlink_to(path.name)
        case "/dev/zero":
            path.symlink_to("/dev/zero")
        case _:
            with path.open("wb") as file:
                file.truncate(5 * 2**30)
