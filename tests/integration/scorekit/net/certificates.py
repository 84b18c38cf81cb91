"""A certificate that no store knows, for services under https."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

#: Whether `self_signed` can make one.
HAS_OPENSSL = shutil.which("openssl") is not None
_COMMAND = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost"


def self_signed(folder: Path) -> tuple[Path, Path]:
    """Return the files of a certificate of 127.0.0.1 and of its key."""
    certificate, key = folder / "cert.pem", folder / "key.pem"
    names = ["-addext", "subjectAltName=IP:127.0.0.1"]
    files = ["-keyout", str(key), "-out", str(certificate)]
    subprocess.run([*_COMMAND.split(), *names, *files], check=True, capture_output=True)
    return certificate, key
