"""Silencing the messages of libraries that tell the user nothing."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from lit_grpo.process.packages import MISSING_KERNELS
from lit_grpo.process.terminal import visible

LEVELS = {
    # Lightning's tips, its list of missing devices, and its "Seed set to".
    "lightning.pytorch.utilities.rank_zero": logging.WARNING,
    "lightning.fabric.utilities.rank_zero": logging.WARNING,
    "lightning.fabric.utilities.seed": logging.WARNING,
    # With Ray, it logs a line for each request to a server.
    "httpx": logging.WARNING,
    # peft imports bitsandbytes, which on a CPU fails to load a kernel for four bits, asked for or not.
    "bitsandbytes.backends.cpu.ops": logging.ERROR,
}
LOGGERS = [logging.getLogger(name) for name in LEVELS]
OF_KERNELS = logging.getLogger("transformers.integrations.hub_kernels")
OF_CONFIGS = logging.getLogger("transformers.configuration_utils")
WARNINGS = (
    # Lightning recommends DataLoader workers; there are none, because rollouts are made just in time.
    ".*does not have many workers.*",
    # Lightning calls a deprecated function of torch.
    ".*isinstance\\(treespec, LeafSpec\\).*",
    # vLLM in this process sets up torch.distributed for itself, although the run has one process.
    ".*sync_dist=True.*",
    # doctor and fit-check give LightningCLI other arguments than those of the process.
    "LightningCLI's args parameter is intended.*",
    # A run without validation prompts has no validation loader.
    ".*Total length of `list` across ranks is zero.*",
)


def silence() -> None:
    """Silence these messages from now on, and print each other warning once, in one line.

    Python itself forgets what it has told whenever a library changes a filter.
    """
    told: set[str] = set()

    def one_line(
        message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
    ) -> str:
        """Leave out the place in our code, which tells the user nothing."""
        text = f"warning: {visible(str(message))}\n"
        is_new = text not in told
        told.add(text)
        return text if is_new else ""

    warnings.formatwarning = one_line
    for pattern in WARNINGS:
        warnings.filterwarnings("ignore", message=pattern)
    for logger in LOGGERS:
        logger.setLevel(LEVELS[logger.name])
    OF_KERNELS.addFilter(MISSING_KERNELS)
    OF_CONFIGS.addFilter(_is_of_a_policy)


def _is_of_a_policy(record: logging.LogRecord) -> bool:
    """Keep back what transformers says of an Idefics3Config without arguments, which it makes to print any other."""
    return "(between 0 and 31999), got 128002" not in record.getMessage()


@contextmanager
def quiet() -> Iterator[None]:
    """Silence these messages for the code within."""
    levels, formatting = [logger.level for logger in LOGGERS], warnings.formatwarning
    with warnings.catch_warnings():
        silence()
        try:
            yield
        finally:
            warnings.formatwarning = formatting
            OF_KERNELS.removeFilter(MISSING_KERNELS)
            OF_CONFIGS.removeFilter(_is_of_a_policy)
            for logger, level in zip(LOGGERS, levels, strict=True):
                logger.setLevel(level)
