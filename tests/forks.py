"""Scripts in fresh interpreters, forked from one that has imported only what the test says.

A fork costs a few milliseconds, where an interpreter that imports the same costs some hundred.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

SERVER = """
import json, os, socket, sys
exec(sys.argv[1], {})
jobs = socket.socket(fileno=int(sys.argv[2]))

def run(job, files):
    for number, file in enumerate(files):
        os.dup2(file, number)
    for file in (*files, jobs.fileno()):
        os.close(file)
    for number, name in (1, "stdout"), (2, "stderr"):
        old = getattr(sys, name)
        new = open(number, "w", 1 if number == 2 else -1, old.encoding, old.errors, closefd=False)
        setattr(sys, name, new)
        setattr(sys, f"__{name}__", new)
    os.chdir(job["folder"])
    os.environ.update(job["environment"])
    sys.argv = ["-c", *job["arguments"]]
    code = 1
    try:
        exec(job["script"], {"__name__": "__main__"})
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)

while True:
    message, files, _, _ = socket.recv_fds(jobs, 1 << 20, 3)
    if not message:
        break
    child = os.fork()
    if not child:
        run(json.loads(message), files)
    for file in files:
        os.close(file)
    jobs.send(b"%d" % os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""

OUR_MODULES = """
import importlib, pkgutil

def walk(name):
    for module in pkgutil.iter_modules(importlib.import_module(name).__path__, f"{name}."):
        if module.name not in ("ckptfix.__main__", "ckptfix.trainer"):
            (walk if module.ispkg else importlib.import_module)(module.name)

walk("ckptfix")
"""
"""Imports every module of ckptfix that the commands may import; for the `first` of `Forks`."""

ALL_MODULES = f"import ml_dtypes, numpy{OUR_MODULES}"
"""Imports all that the commands do without torch."""

MAIN = "from ckptfix.__main__ import main; main()"
"""The console script, as a script for `Forks`."""

WITHOUT_PROGRESS = f"from ckptfix.cli.shared import progress; progress.PATIENCE = 3600.0; {MAIN}"
"""The console script on a terminal, where a busy machine would show how far it is."""


TORCHRUN = """
import signal
signal.alarm(300)
from torch.distributed.run import main
main()
"""
"""torchrun, as a script for `Forks`; the processes that it starts are interpreters of their own."""


@dataclass(frozen=True)
class Done:
    """How a script ended: its exit code (negative, the signal that ended it), and what it wrote."""

    code: int
    stdout: str
    stderr: str


class Forks:
    """An interpreter that runs scripts, each in a fork of its own.

    Args:
        folder: for what the scripts write to stdout and stderr.
        first: what the interpreter runs before any fork, such as imports that all scripts share.
        environment: of the interpreter; by default this process's.
    """

    def __init__(self, folder: Path, first: str = "", environment: Mapping[str, str] | None = None) -> None:
        self._stdout, self._stderr = folder / "stdout", folder / "stderr"
        self._jobs, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._server = subprocess.Popen(
                [sys.executable, "-c", SERVER, first, str(theirs.fileno())],
                env=dict(os.environ if environment is None else environment),
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
            )

    def __enter__(self) -> Forks:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._jobs.close()
        self._server.wait(60)

    def __call__(
        self,
        script: str,
        arguments: Sequence[object] = (),
        *,
        folder: Path | None = None,
        environment: Mapping[str, str] | None = None,
        stdout: int | None = None,
        stderr: int | None = None,
        encoding: str = "utf-8",
    ) -> Done:
        """Run `script` with ``sys.argv[1:]`` as given, in `folder`, by default the current one.

        Args:
            environment: variables that it has beside the interpreter's.
            stdout, stderr: descriptors to write to, instead of to what is returned.
            encoding: of what it writes.
        """
        job = {
            "script": script,
            "arguments": [os.fspath(word) if isinstance(word, Path) else str(word) for word in arguments],
            "folder": os.fspath(folder or Path.cwd()),
            "environment": dict(environment or {}),
        }
        with _opened(os.devnull, os.O_RDONLY) as nothing, _written(self._stdout) as out, _written(self._stderr) as err:
            files = [nothing, out if stdout is None else stdout, err if stderr is None else stderr]
            socket.send_fds(self._jobs, [json.dumps(job).encode()], files)
        answer = self._jobs.recv(64)
        assert answer, f"the interpreter ended with {self._server.wait(60)}"
        return Done(int(answer), self._stdout.read_text(encoding), self._stderr.read_text(encoding))


@contextmanager
def _opened(path: str | Path, flags: int) -> Iterator[int]:
    file = os.open(path, flags, 0o600)
    try:
        yield file
    finally:
        os.close(file)


def _written(path: Path) -> AbstractContextManager[int]:
    return _opened(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
