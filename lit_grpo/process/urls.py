"""Servers of others: the URLs that a user gives, and the API keys, which no text that leaves this process shows."""

from __future__ import annotations

import ipaddress
import os
import re
from functools import cache
from typing import TypeVar
from urllib.parse import urlsplit

T = TypeVar("T")
MASK = "***"
_LEAST_LENGTH = 6
"""Shorter values are no secrets, but words such as EMPTY, which servers without keys are given."""
_KNOWN: dict[str, re.Pattern[str]] = {}


def is_url(name: str) -> bool:
    return name.startswith(("http://", "https://"))


def is_on_loopback(url: str) -> bool:
    """Return whether a URL is of this machine, which no proxy can reach: ``localhost``, 127.x.y.z or ::1."""
    host = urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


def read_secret(variable: str, field: str) -> str:
    """Read an API key from the environment; from then on ``masked`` hides it.

    Raises:
        ValueError: The variable is not set, or its value cannot be sent in a header.
    """
    value = os.environ.get(variable)
    if not value:
        raise ValueError(f"{field} names {variable}, which is not set in the environment; export it.")
    if len(value) >= _LEAST_LENGTH:
        _KNOWN[value] = _spellings(value)
    if not re.fullmatch(r"[!-~]+", value):
        raise ValueError(
            f"{field} names {variable}, whose value has a space, a line end or another character that no header can "
            "hold; export the key alone."
        )
    return value


@cache
def _spellings(value: str) -> re.Pattern[str]:
    """Return a pattern for a text as it is, and with characters written as in JSON, once or several times over."""
    spelled = (rf"(?:\\*{re.escape(each)}|\\+u(?i:{ord(each):04x}))" for each in value)
    return re.compile("".join(spelled))


def masked(value: T) -> T:
    """Return a text with ``***`` in place of each key that was read; lists and dictionaries with all their texts."""
    if not _KNOWN:
        return value
    masks = {
        str: _mask,
        list: lambda values: [masked(each) for each in values],
        tuple: lambda values: tuple(masked(each) for each in values),
        dict: lambda values: {masked(name): masked(each) for name, each in values.items()},
    }
    mask = masks.get(type(value))
    return value if mask is None else mask(value)  # pyrefly: ignore[bad-argument-type, bad-return]


def _mask(text: str) -> str:
    for pattern in _KNOWN.values():
        text = pattern.sub(MASK, text)
    return text
