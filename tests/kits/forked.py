"""Starts Python commands in processes that are forked from one that has loaded their modules.

To load torch, transformers or FastAPI takes longer than most commands that a test runs. `Popen` and
`run` are subprocess's, for `python -m MODULE` and `python -c CODE`. Two servers fork all processes
of a test session: one what needs torch, and one all else, in a fifth of the time. They load a
package's modules when the package is first asked for. A test of the start itself (light imports,
torchrun, signals while loading) uses subprocess instead.

A child has the file descriptors, the folder and the variables of the one who asks, and ends as any
Python does. If the one who asks is killed, or the session ends, the child is killed.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import gc
import importlib
import inspect
import json
import os
import re
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import types
import weakref
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).parents[2]
#: A package, and what its commands load, directly or late. No module may start a thread.
LOADED = {
    "trainer": [
        "scorekit",  # it silences a library
        "accelerate",
        "aiohttp",
        "anyio._backends._asyncio",
        "httpcore",
        "scorekit.images",
        "matplotlib.backends.backend_svg",
        "matplotlib.pyplot",
        "peft",
        "safetensors.torch",
        "torch.distributed.fsdp",
        "transformers.models.auto.modeling_auto",
        "transformers.models.llama.modeling_llama",
        "trl.trainer.grpo_trainer",
        "trainer.chat.cli",
        "trainer.roleplay.cli",
        "trainer.roleplay.commands",
        "trainer.roleplay.training.run",
        "trainer.runs.results",
        "trainer.search.cli",
        "trainer.search.commands",
        "trainer.search.evaluation.run",
        "trainer.search.training.train",
        "trainer.sft.commands",
        "trainer.sft.run",
        "trainer.tasks",
        "trainer.translation.commands",
        "trainer.translation.evaluation.run",
        "trainer.translation.train",
        "tests.kits.trainer.runs",
        "tests.kits.trainer.search_answers",
    ],
    "synth": [
        "langcodes.language_lists",
        "matplotlib.backends.backend_svg",
        "matplotlib.pyplot",
        "pyarrow.parquet",
        "synth.__main__",
        "synth.pairs",
        "synth.run",
    ],
    "services": [
        "scorekit.server.fake",
        "scorekit.server.run",
        "scorekit.server.settings",
        "services.judge.model",
        "services.retriever.command",
        "services.retriever.index.worker",
        "redis",
    ],
    "scorekit": ["scorekit.__main__", "scorekit.client", "scorekit.server.fake"],
}
#: Modules of the charts in a run's report. To draw them takes most of the time of a short run.
CHARTS = ["trainer.runs.evaluation.pages", "trainer.translation.evaluation.report"]
#: The folder with the sockets of the fork servers, in the environment of the session's processes.
_ADDRESS = "FORK_SERVERS_OF_TESTS"
_LIGHT, _TORCH = "light", "torch"
#: What Python and libraries look at when they are loaded: another value needs another process.
_AT_START = ("PYTHON", "LC_", "LANG", "OMP_", "MKL_")
_AT_START_OF_TORCH = ("HF_", "TORCH_", "TRANSFORMERS_")  # no other server loads huggingface_hub
_UNBUFFERED = "PYTHONUNBUFFERED"
#: These have their effect later. Ray sets the second one when it is imported.
_LATER = (_UNBUFFERED, "PYTHONBREAKPOINT")
_LONGEST_REQUEST = 2**17
_MOST_FILES = 16
_PR_SET_PDEATHSIG = 1  # of prctl(2)
_PIPES = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
#: Processor time of the processes that this one has had forked by servers that are none of its
#: children, and that have ended. Those of its children count as its own already.
seconds_of_ended = 0.0
_owner: int | None = None  # the process that has started the servers


# ---- the side of the tests


def start_servers() -> None:
    """Start the fork servers of this test session; they end with this process. They load nothing
    yet.

    Processes that this one starts use the same servers.
    """
    folder = Path(tempfile.mkdtemp(prefix="forks-"))
    alive, ends_with_this = os.pipe()
    servers = [_start_server(folder / name, alive) for name in (_LIGHT, _TORCH)]
    os.close(alive)
    os.environ[_ADDRESS] = str(folder)
    global _owner
    _owner = os.getpid()

    def end() -> None:
        if os.getpid() == _owner:  # and no process that this one has forked
            os.close(ends_with_this)
            for server in servers:
                server.wait()

    atexit.register(end)


def _start_server(address: Path, alive: int) -> subprocess.Popen[bytes]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(address))
        listener.listen(128)
        return subprocess.Popen(
            [sys.executable, "-m", __name__, str(listener.fileno()), str(alive)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            cwd=ROOT,
            # pyarrow's allocator starts a thread otherwise. The streams have buffers, also where
            # the shell asks for none: a child gives them up if its own variable says so.
            env=os.environ | {"JE_ARROW_MALLOC_CONF": "background_thread:false", _UNBUFFERED: ""},
            pass_fds=(listener.fileno(), alive),
            start_new_session=True,
        )


class Popen(subprocess.Popen):
    """A `subprocess.Popen` whose process is forked. Its command is Python with `-m` or `-c`.

    charts: whether the reports of training runs have their charts.
    torch: whether a process that is no trainer's needs torch.
    Raises ValueError for what a forked process cannot have: another program, options of Python,
    variables that are looked at when Python or a library starts.
    """

    def __init__(
        self, args: Sequence[str], *, charts: bool = True, torch: bool = False, **options: Any
    ) -> None:
        self._charts, self._torch = charts, torch
        self._server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        super().__init__(args, **options)

    def _execute_child(self, *arguments: Any, **named: Any) -> None:
        # subprocess has made the pipes, and wraps its ends in files afterwards.
        start = inspect.signature(subprocess.Popen._execute_child)  # type: ignore[attr-defined]
        option = start.bind(self, *arguments, **named).arguments
        request = _request(option, self._torch) | {"charts": self._charts}
        pipes = (("p2cread", 0), ("c2pwrite", 1), ("errwrite", 2))
        inherited = [fd if (fd := option[name]) != -1 else number for name, number in pipes]
        inherited += request["files"]
        server = _TORCH if "trainer" in request["packages"] else _LIGHT
        try:
            self._server.connect(os.path.join(os.environ[_ADDRESS], server))
            message = json.dumps(request).encode()
            if len(message) > _LONGEST_REQUEST:
                raise ValueError("the command and its variables are too long for the fork server")
            socket.send_fds(self._server, [message], inherited)
            answer = json.loads(self._server.recv(_LONGEST_REQUEST) or b"{}")
            if "pid" not in answer:
                raise RuntimeError(answer.get("error", "the fork server has ended"))
        finally:
            self._close_pipe_fds(  # type: ignore[attr-defined]
                *(option[name] for name in _PIPES)
            )
        self.pid = answer["pid"]
        self._child_created = True

    def _internal_poll(self, *_: Any, **__: Any) -> int | None:
        return self._code_within(0)

    def _wait(self, timeout: float | None) -> int:
        code = self._code_within(timeout)
        if code is None:
            assert timeout is not None
            raise subprocess.TimeoutExpired(self.args, timeout)
        return code

    def _code_within(self, timeout: float | None) -> int | None:
        """Return the exit code if the process ends within so many seconds; None: in any time."""
        if self.returncode is None:
            self._server.settimeout(timeout)
            try:
                message = self._server.recv(_LONGEST_REQUEST)
            except (BlockingIOError, TimeoutError):
                return None
            self._server.close()
            # Without an answer the server was killed, and with it the child.
            end = json.loads(message or b'{"code": -9, "seconds": 0}')
            self.returncode = int(end["code"])
            global seconds_of_ended
            if os.getpid() != _owner:
                seconds_of_ended += end["seconds"]
        return self.returncode


def run(
    args: Sequence[str],
    *,
    input: str | bytes | None = None,
    capture_output: bool = False,
    timeout: float | None = None,
    check: bool = False,
    charts: bool = True,
    **options: Any,
) -> subprocess.CompletedProcess[Any]:
    """Run a command as `subprocess.run` does, in a forked process. See `Popen`."""
    if capture_output:
        options["stdout"] = options["stderr"] = subprocess.PIPE
    if input is not None:
        options["stdin"] = subprocess.PIPE
    with Popen(args, charts=charts, **options) as process:
        try:
            out, errors = process.communicate(input, timeout=timeout)
        except BaseException:
            process.kill()
            raise
    done = subprocess.CompletedProcess(args, process.wait(), out, errors)
    if check:
        done.check_returncode()
    return done


@contextlib.contextmanager
def modules_forked() -> Iterator[None]:
    """Let the block fork all that `testing.processes` starts: the services of demos."""
    from testing import processes

    def start_module(
        *args: str, log: Path | None = None, env: Mapping[str, str] | None = None
    ) -> Popen:
        with log.open("wb") if log else contextlib.nullcontext() as output:
            return Popen(
                [sys.executable, "-m", *args],
                stdout=output,
                stderr=None if output is None else subprocess.STDOUT,
                env=processes.child_environment() | dict(env or {}),
                start_new_session=True,
                torch=True,
            )

    original, processes.start_module = processes.start_module, start_module
    try:
        yield
    finally:
        processes.start_module = original


def _request(option: Mapping[str, Any], torch: bool) -> dict[str, Any]:
    """Return what the server needs of subprocess's arguments. Raises ValueError."""
    python, kind, *words = map(os.fspath, option["args"])
    refused = ("executable", "preexec_fn", "shell")
    if python != sys.executable or kind not in ("-m", "-c") or any(map(option.get, refused)):
        raise ValueError(f"only a plain Python with -m or -c can be forked, not {option['args']}")
    packages = _packages(kind, words) + ["trainer"] * torch
    at_start = _AT_START + _AT_START_OF_TORCH * ("trainer" in packages)
    environment = dict(os.environ if option["env"] is None else option["env"])
    for name in sorted(environment.keys() | os.environ.keys()):
        differs = environment.get(name) != os.environ.get(name)
        if differs and name.startswith(at_start) and name not in _LATER:
            raise ValueError(f"{name} has its effect when Python starts: use subprocess")
    return {
        "kind": kind,
        "words": words,
        "packages": packages,
        "files": list(option["pass_fds"]),
        "environment": environment,
        "folder": os.path.abspath(option["cwd"] or os.curdir),
        "session": bool(option["start_new_session"]),
    }


def _packages(kind: str, words: list[str]) -> list[str]:
    """Return the module's package; for a code or a module of the tests, those that it names."""
    package = words[0].partition(".")[0]
    if kind == "-m" and package != "tests":
        return [package]
    return ["services", *re.findall(rf"\b({'|'.join(LOADED)})\b", " ".join(words[:3]))]


class Command:
    """A running `python -m MODULE ARGUMENTS` of several ranks, similar to a `subprocess.Popen`.

    environment: all its variables, except those that a start of several processes adds.
    ranks: as many processes as torchrun would start, in one group. If one fails, the others are
    ended.
    charts: whether a report has its charts.
    output: a file or a pipe with a name that takes both streams; `communicate` then returns none.
    """

    def __init__(
        self,
        module: str,
        *arguments: str,
        environment: dict[str, str],
        ranks: int = 1,
        charts: bool = False,
        output: Path | None = None,
    ) -> None:
        self.args = [sys.executable, "-m", module, *arguments]
        self._folder = tempfile.TemporaryDirectory()
        names = [Path(self._folder.name) / name for name in ("out", "errors")]
        self._streams = [] if output else names
        port = _free_port()
        self.processes: list[Popen] = []
        for rank in range(ranks):
            group = {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(ranks),
                "LOCAL_WORLD_SIZE": str(ranks),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
            }
            with contextlib.ExitStack() as opened:
                files = [opened.enter_context(open(output or name, "ab")) for name in names]
                process = Popen(
                    self.args,
                    charts=charts,
                    env=environment | (group if ranks > 1 else {}),
                    cwd=ROOT,
                    stdin=subprocess.DEVNULL,
                    stdout=files[0],
                    stderr=files[1],
                )
            self.processes.append(process)

    @property
    def returncode(self) -> int | None:
        """Return the first exit code that is not 0; None while a process runs."""
        codes = [process.poll() for process in self.processes]
        failed = [code for code in codes if code]
        return failed[0] if failed else None if None in codes else 0

    def poll(self) -> int | None:
        """Return the exit code or None, like `Popen.poll`."""
        return self.returncode

    def send_signal(self, number: int, rank: int = 0) -> None:
        """Send a signal to one of the processes, if it runs."""
        self.processes[rank].send_signal(number)

    def kill(self) -> None:
        """Send SIGKILL to all."""
        for process in self.processes:
            process.kill()

    def communicate(self, timeout: float = 300) -> tuple[str, str]:
        """Wait for the end, and return what was written. Raises TimeoutExpired, with all killed."""
        deadline = time.monotonic() + timeout
        try:
            while self.returncode is None:
                if time.monotonic() > deadline:
                    raise subprocess.TimeoutExpired(self.args, timeout)
                running = next(p for p in self.processes if p.returncode is None)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    running.wait(0.05)
            for process in self.processes:  # as torchrun ends what one of them has left
                process.terminate()
            for process in self.processes:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(30)
        finally:
            self.kill()
            for process in self.processes:
                process.wait()
        texts = [path.read_text(encoding="utf-8") for path in self._streams] or ["", ""]
        self._folder.cleanup()
        return texts[0], texts[1]


def completed(
    module: str,
    *arguments: str,
    environment: dict[str, str],
    ranks: int = 1,
    charts: bool = False,
) -> subprocess.CompletedProcess[str]:
    """Run a command like `subprocess.run` with captured output."""
    command = Command(module, *arguments, environment=environment, ranks=ranks, charts=charts)
    out, errors = command.communicate()
    code = command.returncode
    assert code is not None
    return subprocess.CompletedProcess(command.args, code, out, errors)


def _free_port() -> str:
    from testing.processes import free_port

    return str(free_port())


# ---- the side of the server


class _Server:
    """The process that forks. `serve` returns only in a child, with what the child shall run."""

    def __init__(self, listener: int, alive: int) -> None:
        self._listener = socket.socket(fileno=listener)
        self._alive = alive
        self._clients: dict[int, socket.socket] = {}  # by the child's process id
        self._loaded: set[str] = set()
        self._wakeups, self._woken = os.pipe()
        os.set_blocking(self._woken, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # so that the line below hears of it
        signal.set_wakeup_fd(self._woken, warn_on_full_buffer=False)
        self._selector = selectors.DefaultSelector()
        for file in (self._listener, self._wakeups, self._alive):
            self._selector.register(file, selectors.EVENT_READ)

    def serve(self) -> dict[str, Any]:
        while True:
            for key, _ in self._selector.select():
                if key.fileobj == self._alive:  # the session has ended
                    for pid in self._clients:
                        os.kill(pid, signal.SIGKILL)
                    address = Path(self._listener.getsockname())
                    address.unlink()
                    with contextlib.suppress(OSError):  # the other server has not ended yet
                        address.parent.rmdir()
                    sys.exit()
                if key.fileobj == self._wakeups:
                    os.read(self._wakeups, 4096)
                    self._report_ends()
                elif key.fileobj == self._listener:
                    request = self._answer(self._listener.accept()[0])
                    if request is not None:
                        return request
                elif key.data in self._clients:  # a client has gone
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(key.data, signal.SIGKILL)
                    self._selector.unregister(key.fileobj)

    def _report_ends(self) -> None:
        while self._clients:
            pid, status, used = os.wait4(-1, os.WNOHANG)
            if not pid:
                return
            end = {
                "code": os.waitstatus_to_exitcode(status),
                "seconds": used.ru_utime + used.ru_stime,
            }
            client = self._clients.pop(pid)
            with contextlib.suppress(KeyError):
                self._selector.unregister(client)
            with contextlib.suppress(OSError):
                client.send(json.dumps(end).encode())
            client.close()

    def _answer(self, client: socket.socket) -> dict[str, Any] | None:
        """Fork. Return the request in the child, None in the server."""
        message, files, _, _ = socket.recv_fds(client, _LONGEST_REQUEST, _MOST_FILES)
        if not message:
            client.close()
            return None
        request = json.loads(message)
        if problem := next(filter(None, map(self._load, request["packages"])), None):
            client.send(json.dumps({"error": problem}).encode())
            client.close()
            for file in files:
                os.close(file)
            return None
        server = os.getpid()
        if pid := os.fork():
            for file in files:
                os.close(file)
            self._clients[pid] = client
            self._selector.register(client, selectors.EVENT_READ, pid)
            client.send(json.dumps({"pid": pid}).encode())
            return None
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != server:
            os._exit(1)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._selector.close()
        for opened in (self._listener, client, *self._clients.values()):
            opened.close()
        for number in (self._wakeups, self._woken, self._alive):
            os.close(number)
        numbers = [0, 1, 2, *request["files"]]
        # All go above their later numbers first, so that none is written over.
        above = [fcntl.fcntl(file, fcntl.F_DUPFD, max(numbers) + 1) for file in files]
        for file in files:
            os.close(file)
        for number, file in zip(numbers, above, strict=True):
            os.dup2(file, number)
            os.close(file)
        return request

    def _load(self, package: str) -> str | None:
        """Load the package's modules at its first command. Return a problem or None."""
        if package in LOADED and package not in self._loaded:
            for module in LOADED[package]:
                try:
                    importlib.import_module(module)
                except Exception as error:
                    return f"{module} cannot be loaded: {error!r}"
            self._loaded.add(package)
            _leave_out_exit_handlers()
            gc.collect()
            gc.freeze()  # to look through it in a child would copy its memory
        threads = len(os.listdir("/proc/self/task"))
        return f"a module of LOADED starts a thread ({threads} run)" if threads > 1 else None


def _leave_out_exit_handlers() -> None:
    """Leave out what a child need not do when it ends: torch takes 75 ms to take itself apart."""
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        finalizer.atexit = False
    if dynamo := sys.modules.get("torch._dynamo.utils"):
        atexit.unregister(dynamo.dump_compile_times)


def _become(request: dict[str, Any]) -> None:
    """Run the command in this process, which was forked for it."""
    if request["session"]:
        os.setsid()
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    if os.environ.get(_UNBUFFERED):
        sys.stdout.reconfigure(write_through=True)  # type: ignore[union-attr]
    for name in () if request["charts"] else CHARTS:
        vars(importlib.import_module(name))["chart_image"] = lambda *arguments: None
    if request["kind"] == "-m":
        sys.path[0] = request["folder"]
        sys.argv = request["words"]
        sys.modules.pop(f"{sys.argv[0]}.__main__", None)  # it is loaded anew, as "__main__"
        runpy.run_module(request["words"][0], run_name="__main__", alter_sys=True)
        return
    code, *sys.argv[1:] = request["words"]
    sys.path[0], sys.argv[0] = "", "-c"
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    exec(compile(code, "<string>", "exec"), vars(main))


def _exit_code(error: BaseException) -> int:
    """Return the code with which Python ends after this error, which is printed as Python does."""
    if isinstance(error, SystemExit):
        if error.code is None or isinstance(error.code, int):
            return (error.code or 0) & 0xFF
        print(error.code, file=sys.stderr)
    else:
        sys.excepthook(type(error), error, error.__traceback__)
    return 1


def _main() -> NoReturn:
    request = _Server(*map(int, sys.argv[1:])).serve()
    code, interrupted = 0, False
    try:
        _become(request)
    except BaseException as error:
        code, interrupted = _exit_code(error), isinstance(error, KeyboardInterrupt)
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    if interrupted:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(code)  # to take all modules apart would take half a second


if __name__ == "__main__":
    _main()
