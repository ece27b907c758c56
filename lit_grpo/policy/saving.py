"""A policy's folder that is whole or not there."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError


@contextmanager
def written_as_a_whole(folder: Path) -> Iterator[Path]:
    """Give a folder beside ``folder`` to write to; its files take their places once all of them are on the disk.

    Raises:
        ValueError: There was no room for them, or they may not be written; what was in ``folder`` is as it was.
    """
    aside = folder.with_name(f".{folder.name}.writing")
    try:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        yield aside
        for path in sorted(aside.rglob("*")):
            place = folder / path.relative_to(aside)
            if path.is_file():
                place.parent.mkdir(parents=True, exist_ok=True)
                path.replace(place)
    except (OSError, SafetensorError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ValueError(
            f"The policy could not be written to {folder} ({reason}), and what was there has been left as it was; make "
            "room, and take it out of the run's last checkpoint with python -m lit_grpo export."
        ) from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)
