"""Starts programs of Millrace from a process that has imported them: a start then takes 0.1 s instead of 3 to 5.

`install()` changes how `subprocess.Popen` starts `python -m millrace…` and `helpers/gpu_compiler.py`: a process per
test worker, which has imported what servers and engines need and has one thread, forks (twice, so that the new process
becomes a child of the one that asked). The new process is what the real start would make: own arguments, environment,
folder, standard streams, passed descriptors, session and signals. It has a starter of its own, for the programs that it
starts.

The real start is for tests marked `fresh` and whatever the fork could not do: a function to run before the program,
variables that libraries read when they are imported, a GPU, whose driver does not survive a fork.
"""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

IMPORTED = (
    *("millrace.engine.build", "millrace.engine.lifetime", "millrace.link.engine_end", "millrace.host.idle_memory"),
    *("millrace.commands.serve", "millrace.serve.app", "millrace.supervise.fronts", "millrace.supervise.reload"),
    *("millrace.supervise.engine_supervisor", "millrace.supervise.model_supervisor", "millrace.supervise.spare_engine"),
    *("millrace.text.tokenizers.hf_tokenizer", "millrace.text.tools.parser", "millrace.text.grammar.compiler"),
    *("aiohttp", "jinja2", "llguidance", "numpy", "prometheus_client", "rich.console", "tokenizers", "torch", "uvloop"),
)
READ_BY_IMPORTS = ("CUDA_", "KMP_", "LANG", "LC_", "LD_", "MALLOC_", "MKL_", "OMP_", "OPENBLAS_", "PYTHON")
READ_BY_IMPORTS += ("TORCH_", "TZ")
"""Beginnings of variables that Python or a library reads once. Triton's are read later: it is not imported here."""
GPU_COMPILER = "helpers.gpu_compiler"
PLACE = 1 << 16
"""Bytes for arguments, and for variables, where the system shows those of a process."""
IGNORABLE = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
SUBREAPER = 36
"""PR_SET_CHILD_SUBREAPER"""

_libc = ctypes.CDLL(None, use_errno=True)
_real_start = subprocess.Popen._execute_child  # type: ignore[attr-defined]


class Starter:
    """The process that forks, as the one that asks sees it."""

    def __init__(self, connection: socket.socket, variables: dict[str, str]) -> None:
        self.connection, self.variables = connection, variables
        self.lock = threading.Lock()

    def start(self, request: dict[str, Any], descriptors: Sequence[int]) -> int:
        """The pid of the new process, which is a child of this one."""
        with self.lock:
            _libc.prctl(SUBREAPER, 1, 0, 0, 0)
            try:
                socket.send_fds(self.connection, [json.dumps(request).encode()], descriptors)
                return int(self.connection.recv(64))
            finally:
                _libc.prctl(SUBREAPER, 0, 0, 0, 0)


current_starter: Starter | None = None
_is_installed = False
_is_on = True


def install() -> None:
    """From now on `subprocess.Popen` starts programs of Millrace in the quick way."""
    global _is_installed
    if not _is_installed and sys.platform == "linux" and not Path("/dev/nvidiactl").exists():
        _is_installed = True
        subprocess.Popen._execute_child = _start  # type: ignore[attr-defined]


def switch(*, on: bool) -> None:
    """Off: everything is started from nothing."""
    global _is_on
    _is_on = on


def _start(
    self: subprocess.Popen[Any],
    args: Any,
    executable: Any,
    preexec_fn: Any,
    close_fds: bool,
    pass_fds: Sequence[int],
    cwd: Any,
    env: Mapping[str, str] | None,
    startupinfo: Any,
    creationflags: Any,
    shell: bool,
    *rest: Any,
) -> None:
    """Takes the place of `Popen._execute_child`."""
    p2cread, _, _, c2pwrite, _, errwrite, _, gid, gids, uid, umask, new_session, group = rest
    variables = dict(os.environ if env is None else env)
    request = {
        "arguments": list(map(os.fspath, args)) if isinstance(args, (list, tuple)) else [],
        "variables": variables,
        "folder": os.getcwd() if cwd is None else os.path.abspath(os.fspath(cwd)),
        "session": new_session,
        "group": group,
        "cores": sorted(os.sched_getaffinity(0)),
        "ignored": [number for number in IGNORABLE if signal.getsignal(number) == signal.SIG_IGN],
        "passed": sorted(pass_fds),
    }
    others = (executable, preexec_fn, gid, gids, uid)
    plain = not shell and close_fds and umask == -1 and all(value is None for value in others)
    starter = _running_starter() if plain and _is_on and _is_ours(request["arguments"]) else None
    if starter is None or not _can_fork(request, starter):
        _real_start(
            *(self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, startupinfo, creationflags, shell),
            *rest,
        )
        return
    sys.audit("subprocess.Popen", sys.executable, args, cwd, env)
    streams = [number if end == -1 else end for number, end in enumerate((p2cread, c2pwrite, errwrite))]
    self.pid = starter.start(request, [*streams, *request["passed"]])
    self._child_created = True  # type: ignore[attr-defined]
    self._close_pipe_fds(*rest[:6])  # type: ignore[attr-defined]


def _is_ours(arguments: list[Any]) -> bool:
    is_module = arguments[:2] == [sys.executable, "-m"]
    return is_module and (arguments[2] == GPU_COMPILER or str(arguments[2]).partition(".")[0] == "millrace")


def _can_fork(request: dict[str, Any], starter: Starter) -> bool:
    variables = request["variables"]
    texts = [*request["arguments"], *variables, *variables.values()]
    if not all(isinstance(text, str) for text in texts) or sum(len(text.encode()) + 2 for text in texts) > PLACE:
        return False
    return os.path.isdir(request["folder"]) and _for_imports(variables) == starter.variables


def _for_imports(variables: Mapping[str, str]) -> dict[str, str]:
    chosen = {name: value for name, value in variables.items() if name.startswith(READ_BY_IMPORTS)}
    chosen.pop("PYTHONPATH", None)  # The new process adds its folders.
    return chosen


def _running_starter() -> Starter | None:
    """Of this process; the first call of a test worker starts it."""
    global current_starter
    if current_starter is None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # The folder of the sources is in the path of a test worker, but not always in that of its children.
        code = f"import sys; sys.path[:0] = {[str(Path(__file__).parents[1])]!r}; import helpers.starter as s; s.main()"
        subprocess.Popen(
            [sys.executable, "-c", code, "x" * PLACE, str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            env={**os.environ, "MILLRACE_PLACE": "x" * PLACE},
            pass_fds=[theirs.fileno()],
        )
        theirs.close()
        current_starter = Starter(ours, _for_imports(os.environ))
    return current_starter


def main() -> None:
    """What the starter runs: imports, then forks for whoever has the other end of its socket."""
    del sys.path[0]
    for name in IMPORTED:
        importlib.import_module(name)
    import gc

    gc.collect()
    gc.freeze()  # Collections in the new processes then leave the shared memory alone.
    if len(os.listdir("/proc/self/task")) > 1:
        raise AssertionError("a process with threads cannot fork safely")
    if "triton" in sys.modules:
        raise AssertionError("Triton reads at its import whether it compiles or interprets")
    connection = socket.socket(fileno=int(sys.argv[-1]))
    request, descriptors = _serve(connection)
    _run(request, descriptors)


def _serve(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Returns only in the new processes."""
    for number in IGNORABLE:
        signal.signal(number, signal.SIG_IGN)
    _show(["starter"], {})
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in range(3):
        os.dup2(nothing, number)
    while True:
        data, descriptors, _, _ = socket.recv_fds(connection, 1 << 20, 64)
        if not data:
            os._exit(0)
        read, write = os.pipe()
        between = os.fork()
        if between == 0:
            new = os.fork()
            if new == 0:
                connection.close()
                os.close(read)
                os.close(write)
                return json.loads(data), list(descriptors)
            os.write(write, str(new).encode())
            os._exit(0)
        os.close(write)
        os.waitpid(between, 0)  # Now the new process is a child of the one that asked.
        connection.send(os.read(read, 64))
        for number in (read, *descriptors):
            os.close(number)


def _run(request: dict[str, Any], descriptors: list[int]) -> None:
    """The program itself, in its process."""
    global current_starter
    if request["session"]:
        os.setsid()
    elif request["group"] != -1:
        os.setpgid(0, request["group"])
    _place_descriptors(descriptors, [0, 1, 2, *request["passed"]])
    for number in IGNORABLE:
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in request["ignored"]:
        signal.signal(number, signal.SIG_IGN)
    os.sched_setaffinity(0, request["cores"])
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["variables"])
    _show(request["arguments"], request["variables"])
    sys.stdin = sys.__stdin__ = os.fdopen(0, closefd=False)
    sys.stdout = sys.__stdout__ = os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.__stderr__ = os.fdopen(2, "w", buffering=1, errors="backslashreplace", closefd=False)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork() == 0:
        ours.close()
        for number in request["passed"]:
            os.close(number)
        request, descriptors = _serve(theirs)
        _run(request, descriptors)
        return
    theirs.close()
    current_starter = Starter(ours, _for_imports(os.environ))
    install()
    module, *arguments = request["arguments"][2:]
    sys.orig_argv = request["arguments"]
    sys.argv = [module, *arguments]
    sys.path[:0] = [request["folder"], *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    sys.modules.pop(module, None)
    _end(_exit_code(module))


def _exit_code(module: str) -> int:
    """Runs the module as the main program."""
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        return 0
    except SystemExit as end:
        if end.code is not None and not isinstance(end.code, int):
            print(end.code, file=sys.stderr)
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except Exception:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        return 1


def _end(code: int) -> NoReturn:
    """What Python does at its end, but for taking apart 1,600 modules, which takes longer than most commands."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
    except OSError:
        code = 120
    os._exit(code & 0xFF)


def _place_descriptors(given: list[int], wanted: list[int]) -> None:
    """Only these stay open."""
    above = max([*given, *wanted]) + 1
    high = [fcntl.fcntl(number, fcntl.F_DUPFD, above) for number in given]
    os.closerange(0, above)
    for number, place in zip(high, wanted, strict=True):
        os.dup2(number, place)
    os.closerange(above, high[-1] + 1)


def _show(arguments: list[str], variables: Mapping[str, str]) -> None:
    """Write them where the system shows those of a process."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    words = [f"{name}={value}" for name, value in variables.items()]
    for (start, end), texts in zip((fields[45:47], fields[47:49]), (arguments, words), strict=True):
        data = "".join(f"{text}\0" for text in texts).encode("utf-8", "surrogateescape")[: int(end) - int(start) - 1]
        ctypes.memset(int(start), 0, int(end) - int(start))
        ctypes.memmove(int(start), data, len(data))
