"""Packages that come with an extra, and those with kernels for a policy's layers."""

from __future__ import annotations

import logging
import re
from importlib import util


def require(package: str, sentence: str) -> None:
    """Check that a package is installed.

    Args:
        package: Name of the package, as it is imported.
        sentence: Error message with the setting that needs the package and the extra to install: ``model.lora needs
            peft; install the extra lit_grpo[lora].``

    Raises:
        ValueError: It is not installed; its message is the sentence.
    """
    if util.find_spec(package) is None:
        raise ValueError(sentence)


class MissingKernels(logging.Filter):
    """Keeps back transformers' messages, one for each function that it computes in plain torch for want of a package.

    A CPU needs none of these packages; on a GPU one sentence names them all.
    """

    _PATTERN = re.compile(r"falling back to its reference PyTorch implementation because `(.+?)` is not installed")

    def __init__(self) -> None:
        super().__init__()
        self.packages: dict[str, None] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Note the package of such a message, and let every other message pass."""
        found = self._PATTERN.search(record.getMessage())
        if found is not None:
            self.packages[found[1]] = None
        return found is None

    def sentence(self, name: str, device: str) -> str | None:
        """Return what to tell the user of a run, if the kernels that are missing would make it faster.

        Args:
            name: The policy's class. Some tokens have gone through it.
            device: The kind of device that it computes on.
        """
        if device == "cpu" or not self.packages:
            return None
        return (
            f"Some layers of {name} are computed in plain PyTorch, which is exact, but on a GPU more than ten times "
            f"slower than their kernels; install them with: pip install {' '.join(self.packages)}."
        )


MISSING_KERNELS = MissingKernels()
