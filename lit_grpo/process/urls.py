"""Questions about addresses that a user gives."""

from __future__ import annotations

import ipaddress
from urllib.parse import urlsplit


def is_url(name: str) -> bool:
    """Whether a name is the address of a server, and no path, id or name of anything else."""
    return name.startswith(("http://", "https://"))


def is_on_loopback(url: str) -> bool:
    """Whether a URL is of this machine, which no proxy can reach: ``localhost``, 127.x.y.z or ::1."""
    host = urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")
