"""Without what libraries say that tells the user nothing."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

# Lightning's tips, its list of devices that are not there, and its "Seed set to".
LOGGERS = [
    logging.getLogger(f"lightning.{name}")
    for name in ("pytorch.utilities.rank_zero", "fabric.utilities.rank_zero", "fabric.utilities.seed")
]
LOGGERS.append(logging.getLogger("httpx"))  # a line for each request to a server, where Ray has logging show them
WARNINGS = (
    # Lightning counts CPU cores for DataLoader workers, of which there are none: rollouts are made just in time.
    ".*does not have many workers.*",
    # Lightning asks torch in a way that torch calls deprecated.
    ".*isinstance\\(treespec, LeafSpec\\).*",
    # vLLM in this process sets torch.distributed up for itself; the run has one process all the same.
    ".*sync_dist=True.*",
    # A run without validation prompts has no validation loader.
    ".*Total length of `list` across ranks is zero.*",
)


def silence() -> None:
    """Silence it from now on, and let each warning be one line that says what it warns of."""
    warnings.formatwarning = _one_line
    for pattern in WARNINGS:
        warnings.filterwarnings("ignore", message=pattern)
    for logger in LOGGERS:
        logger.setLevel(logging.WARNING)


def _one_line(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    """Leave out the place in our code, which says nothing to who reads it."""
    return f"warning: {message}\n"


@contextmanager
def quiet() -> Iterator[None]:
    """Silence it for as long as this lasts."""
    levels, formatting = [logger.level for logger in LOGGERS], warnings.formatwarning
    with warnings.catch_warnings():
        silence()
        try:
            yield
        finally:
            warnings.formatwarning = formatting
            for logger, level in zip(LOGGERS, levels, strict=True):
                logger.setLevel(level)
