"""Check the number of usable processors and that child processes end with their parent."""

from __future__ import annotations

import ast
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from scorekit.processes import same_modules, usable_cpus
from testing.servers import alive, wait_until

ROOT = Path(__file__).parents[3]
EXCEPTIONS = {
    "services/retriever/index/reader.py",  # a thread may start it: it ends with its pipe
    "tests/kits/forked.py",  # its servers end with their pipe
    "tests/kits/stubborn.py",  # its child is ended by nothing
}
BY_POPEN = """
import subprocess, sys, time
from scorekit.processes import end_with_parent
sleeper = [sys.executable, "-c", "import time; time.sleep(600)"]
child = subprocess.Popen(sleeper, start_new_session=True, preexec_fn=end_with_parent())
print(child.pid, flush=True)
time.sleep(600)
"""
BY_POOL = """
import os, sys, time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from scorekit.processes import end_worker_with_parent
if __name__ == "__main__":
    with ProcessPoolExecutor(1, get_context("spawn"), end_worker_with_parent) as pool:
        print(pool.submit(os.getpid).result(), flush=True)
        time.sleep(600)
"""


def test_at_least_one_cpu_is_usable():
    assert usable_cpus() >= 1


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux ends them")
@pytest.mark.parametrize("code", [BY_POPEN, BY_POOL], ids=["popen", "pool"])
def test_a_child_ends_when_its_parent_is_killed(tmp_path, code):
    script = tmp_path / "parent.py"
    script.write_text(code)
    parent = subprocess.Popen(
        [sys.executable, str(script)],
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    try:
        assert alive(child)
        parent.kill()
        parent.wait()
        wait_until(lambda: not alive(child))
    finally:
        if alive(child):
            os.kill(child, signal.SIGKILL)
        parent.stdout.close()


def test_a_child_imports_ours_in_place_of_a_package_of_that_name_in_the_folder(
    tmp_path, monkeypatch
):
    for name in ("services", "of_the_user"):
        (tmp_path / f"{name}.py").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(ROOT), *sys.path, ""])
    code = "import services, of_the_user; print(services.__file__)"
    command = [sys.executable, "-c", code]
    child = subprocess.run(command, env=os.environ | same_modules(), stdout=-1, check=True)
    assert child.stdout.decode().strip() == str(ROOT / "services/__init__.py")


def test_every_process_that_is_started_ends_with_its_parent():
    starts, without = 0, set()
    packages = (
        "scorekit",
        "services",
        "trainer",
        "synth",
        "demo",
        "bench",
        "evidence",
        "testing",
        "tests/kits",
    )
    for path in (file for package in packages for file in (ROOT / package).rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        names = ("Popen", "create_subprocess_exec")
        for node in ast.walk(ast.parse(text)) if any(name in text for name in names) else ():
            name = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            # The fork server of the tests ends its processes with the one who asks.
            if name.endswith(names) and name not in ("forked.Popen", "_Popen"):
                starts += 1
                if not any(keyword.arg == "preexec_fn" for keyword in node.keywords):
                    without.add(path.relative_to(ROOT).as_posix())
    assert starts > 5
    assert without == EXCEPTIONS
