"""Memory of the KV cache: from the user's setting to a number of tokens."""

from __future__ import annotations

import re
from typing import Literal

_UNITS = {"kib": 2**10, "mib": 2**20, "gib": 2**30}
_AMOUNT = re.compile(r"(\d+(?:\.\d+)?)\s*([kmg]ib|%)", re.IGNORECASE)


class MemoryAmount:
    """An amount of memory: ``"2.5GiB"``, a share of what is free such as ``"60%"``, or ``"auto"``.

    Args:
        text: Amount as the user writes it.
        field: Name of the setting, for messages.

    Raises:
        ValueError: It is none of these, or nothing.
    """

    def __init__(self, text: str, field: str = "kv_memory") -> None:
        self.text = text.strip()
        self.kind: Literal["auto", "share", "bytes"] = "auto"
        self.amount = 0.0
        if self.text.lower() == "auto":
            return
        match = _AMOUNT.fullmatch(self.text)
        if match is None or not float(match[1]):
            raise ValueError(
                f"{field} must be an amount such as '2.5GiB' or '512MiB', a share of the free memory such as "
                f"'60%', or 'auto', not {text!r}."
            )
        number, unit = float(match[1]), match[2].lower()
        if unit == "%" and number > 100:
            raise ValueError(f"{field} can be at most 100% of the free memory, not {text!r}.")
        self.kind = "share" if unit == "%" else "bytes"
        self.amount = number / 100 if unit == "%" else number * _UNITS[unit]

    def bytes(self, free_bytes: int, update_bytes: int) -> int:
        """Return the bytes that keys and values may take.

        Args:
            free_bytes: What is free now, with the model in place.
            update_bytes: What the update will take beside them; ``auto`` leaves that, and a tenth of the rest.
        """
        if self.kind == "bytes":
            return int(self.amount)
        if self.kind == "share":
            return int(self.amount * free_bytes)
        return int(0.9 * max(free_bytes - update_bytes, 0))
