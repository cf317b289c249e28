"""Build the wheel and the sdist, and try each where it alone is installed, without torch.

    python tests/release.py [FOLDER]

FOLDER (dist) is emptied first. An environment is made for each of the two; in it every command that works on files
runs on small ones, and on a file of fixtures/, and what needs torch must say which extra to install. At the end stands
what was made, or the first thing that is not as it should be, with exit status 1.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import venv
from collections.abc import Callable
from pathlib import Path

from file_commands import CODES, COMMANDS, arguments

ROOT = Path(__file__).parents[1]
WRAPPED = ROOT / "fixtures" / "zip-data-parallel.pth"
EXTRA = "hint: pip install 'ckptfix[torch]'"
LOAD = "import sys, ckptfix\nckptfix.load_state_dict(sys.argv[1])"


class Wrong(Exception):
    """What was built does not do what it should."""


def run(*command: object, code: int = 0, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run a command that has to end with `code`; it sees no module of this folder."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHONPATH", "VIRTUAL_ENV"))}
    line = [str(word) for word in command]
    done = subprocess.run(line, cwd=cwd, env=clean, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode != code:
        raise Wrong(f"{' '.join(line)}: exit status {done.returncode}, not {code}\n{done.stdout}{done.stderr}")
    return done


def built(folder: Path) -> tuple[Path, Path]:
    """The wheel and the sdist, made in `folder`."""
    shutil.rmtree(folder, ignore_errors=True)
    run(sys.executable, "-m", "build", "--outdir", folder, ROOT)
    (wheel,), (sdist,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    return wheel, sdist


def version_of(wheel: Path) -> str:
    return wheel.name.split("-")[1]


def environment(folder: Path, package: Path) -> Path:
    """The programs of a new environment that has `package` and what it depends on."""
    venv.create(folder, with_pip=True)
    programs = folder / "bin"
    run(programs / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", package)
    return programs


def tried(programs: Path, version: str, folder: Path) -> int:
    """Try what is installed there, with files in `folder`; how many commands ran.

    Raises:
        Wrong: it does not do what it should.
    """
    count = 0

    def ckptfix(*words: object, code: int = 0) -> subprocess.CompletedProcess[str]:
        nonlocal count
        count += 1
        return run(programs / "ckptfix", *words, code=code, cwd=folder)

    def expect(holds: bool, what: str, done: subprocess.CompletedProcess[str]) -> None:
        if not holds:
            raise Wrong(f"{what}\n{done.stdout}{done.stderr}")

    done = run(programs / "python", "-c", "import torch", code=1)
    expect("No module named 'torch'" in done.stderr, "torch is installed", done)
    done = ckptfix("--version")
    expect(done.stdout.splitlines()[:1] == [f"ckptfix {version}"], f"this is not version {version}", done)
    expect("torch not installed" in done.stdout, "--version does not say that torch is missing", done)
    for name in COMMANDS:
        place = folder / name.replace(" ", "-")
        place.mkdir()
        ckptfix(*arguments(name, place), code=CODES.get(name, 0))
    ckptfix("strip-module", WRAPPED, "clean.pth")
    ckptfix("convert", "clean.pth", "clean.safetensors")
    before, after = (json.loads(ckptfix("inspect", file, "--json").stdout) for file in (WRAPPED, "clean.safetensors"))
    names = [[row["name"] for row in found["entries"]] for found in (before, after)]
    expect(sorted(name.removeprefix("module.") for name in names[0]) == sorted(names[1]), f"other names: {names}", done)
    ckptfix("diff", "clean.pth", "clean.safetensors")
    done = run(programs / "python", "-c", LOAD, "clean.pth", code=1, cwd=folder)
    expect(done.stderr.splitlines()[-1] == EXTRA, "a loader does not name the extra", done)
    done = run(programs / "python", "-m", "ckptfix.trainer", "--help", code=2, cwd=folder)
    expect(done.stderr.splitlines()[-1] == EXTRA, "the trainer does not name the extra", done)
    return count


def main(arguments: list[str], say: Callable[[str], None] = print) -> int:
    folder = Path(arguments[0]) if arguments else ROOT / "dist"
    try:
        wheel, sdist = built(folder)
        for package in (wheel, sdist):
            with tempfile.TemporaryDirectory(prefix="ckptfix-") as place:
                programs = environment(Path(place, "environment"), package)
                files = Path(place, "files")
                files.mkdir()
                count = tried(programs, version_of(wheel), files)
            digest = hashlib.sha256(package.read_bytes()).hexdigest()
            size = package.stat().st_size
            say(f"{package}  {size:,} bytes  sha256 {digest}  {count} commands ran without torch")
    except Wrong as error:
        print(f"not as it should be: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
