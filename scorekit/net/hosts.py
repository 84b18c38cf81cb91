"""Host names and addresses."""

from __future__ import annotations

import ipaddress


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
