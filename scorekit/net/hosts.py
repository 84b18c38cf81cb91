"""Host names and addresses."""

from __future__ import annotations

import ipaddress
import re

_HOST_NAME = re.compile(r"[\w-]+(?:\.[\w-]+)*")


def is_address(name: str) -> bool:
    """Return whether a host is named by its IP address."""
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def is_loopback(host: str) -> bool:
    """Return True if a host name or address belongs to this machine alone."""
    return ipaddress.ip_address(host).is_loopback if is_address(host) else host == "localhost"


def host_names(text: str) -> tuple[str, ...]:
    """Return the names in a list with commas, as they are compared.

    Raises ValueError if a part of it is neither a name nor an address."""
    names = tuple(part.strip().lower().rstrip(".") for part in text.split(",") if part.strip())
    for name in names:
        if not (_HOST_NAME.fullmatch(name) or is_address(name)):
            raise ValueError(f"{name!r} is no host name. Give it as in judge.example")
    return names
