"""Packages that come with an extra."""

from __future__ import annotations

from importlib import util


def require(package: str, sentence: str) -> None:
    """Check that a package is installed.

    Args:
        package: As it is imported.
        sentence: Error message with the setting that needs the package and the extra to install: ``model.lora needs
            peft; install the extra lit_grpo[lora].``

    Raises:
        ValueError: It is not installed; its message is the sentence.
    """
    if util.find_spec(package) is None:
        raise ValueError(sentence)
