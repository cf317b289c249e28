"""Scripts in fresh interpreters, forked from one that has imported only what the test says.

A fork costs a few milliseconds, where an interpreter that imports the same costs some hundred.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO

SERVER = """
import json, os, sys
exec(sys.argv[1], {})

def run(job):
    for number, path in ((1, job["stdout"]), (2, job["stderr"])):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
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

for line in iter(sys.stdin.readline, ""):
    child = os.fork()
    if not child:
        run(json.loads(line))
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


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
        self._server = subprocess.Popen(
            [sys.executable, "-c", SERVER, first],
            env=dict(os.environ if environment is None else environment),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> Forks:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pipe(self._server.stdin).close()
        self._server.wait(60)
        self._pipe(self._server.stdout).close()

    def __call__(self, script: str, arguments: Sequence[str] = ()) -> Done:
        job = {"script": script, "arguments": [*arguments], "stdout": str(self._stdout), "stderr": str(self._stderr)}
        print(json.dumps(job), file=self._pipe(self._server.stdin), flush=True)
        answer = self._pipe(self._server.stdout).readline()
        assert answer, f"the interpreter ended with {self._server.wait(60)}"
        return Done(int(answer), self._stdout.read_text("utf-8"), self._stderr.read_text("utf-8"))

    @staticmethod
    def _pipe(pipe: IO[str] | None) -> IO[str]:
        assert pipe is not None
        return pipe
