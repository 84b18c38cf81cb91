"""Run a Python module on a host of `tests.kits.hosts`: `on_host NAME MODULE ARGUMENTS`.

The process moves into the host's network. SCOREKIT_HIDDEN has the folders, with colons, that the
host does not see: they are empty there. Each host is a machine with a boot id of its own.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import sys
import tempfile
from pathlib import Path
from uuid import NAMESPACE_DNS, uuid5

HIDDEN = "SCOREKIT_HIDDEN"
#: Of unshare(2) and mount(2).
_CLONE_NEWNS, _CLONE_NEWNET = 0x20000, 0x40000000
_MS_BIND, _MS_REC, _MS_SLAVE = 1 << 12, 1 << 14, 1 << 19
_BOOT_ID = "/proc/sys/kernel/random/boot_id"


def enter(name: str, hidden: list[str]) -> None:
    """Move this process, which has one thread, to the host."""
    libc = ctypes.CDLL(None, use_errno=True)

    def call(function: str, *arguments: int | bytes | None) -> None:
        if getattr(libc, function)(*arguments):
            number = ctypes.get_errno()
            raise OSError(number, f"{function}{arguments}: {os.strerror(number)}")

    with open(f"/run/netns/{name}", "rb") as file:
        call("setns", file.fileno(), _CLONE_NEWNET)
    call("unshare", _CLONE_NEWNS)
    call("mount", b"none", b"/", None, _MS_REC | _MS_SLAVE, None)
    for folder in hidden:
        call("mount", b"none", folder.encode(), b"tmpfs", 0, None)
    with tempfile.NamedTemporaryFile("w") as boot_id:
        boot_id.write(f"{uuid5(NAMESPACE_DNS, name)}\n")
        boot_id.flush()
        call("mount", boot_id.name.encode(), _BOOT_ID.encode(), None, _MS_BIND, None)


if __name__ == "__main__":
    host, module, *arguments = sys.argv[1:]
    enter(host, [path for path in os.environ.get(HIDDEN, "").split(":") if path])
    sys.argv = [module, *arguments]
    sys.modules.pop(f"{module}.__main__", None)  # it is loaded anew, as "__main__"
    sys.path[0] = str(Path.cwd())
    runpy.run_module(module, run_name="__main__", alter_sys=True)
