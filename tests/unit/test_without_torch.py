"""Where torch is not installed: every command on files works, and what needs torch says which extra to install."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import ROOT
from file_commands import CODES, COMMANDS, arguments
from forks import ALL_MODULES, Forks

from ckptfix.errors import MissingExtra
from ckptfix.extras import need_torch

# they share an interpreter
pytestmark = [pytest.mark.xdist_group("without torch"), pytest.mark.sampled(1_000)]  # each row is a rule of its own

NO_TORCH = """
import sys

class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, NoTorch())
"""
RUN = "import sys\nfrom ckptfix.cli import commands\nsys.exit(commands.main(sys.argv[1:], standalone_mode=False))"
HINT = "hint: pip install 'ckptfix[torch]'"


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Of interpreters that find no torch: they run ``sitecustomize`` as they start."""
    folder = tmp_path_factory.mktemp("site")
    (folder / "sitecustomize.py").write_text(NO_TORCH)
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)])}


@pytest.fixture(scope="module")
def bare(environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forks]:
    with Forks(tmp_path_factory.mktemp("out"), ALL_MODULES, environment) as forks:
        yield forks


def test_torch_is_not_there(bare: Forks) -> None:
    done = bare("import torch")
    assert done.code == 1 and "ModuleNotFoundError: No module named 'torch'" in done.stderr


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_on_files(bare: Forks, name: str, tmp_path: Path) -> None:
    line = arguments(name, tmp_path)
    done = bare(RUN, line)
    assert done.code == CODES.get(name, 0), done.stderr
    assert "torch is" not in done.stderr and "Traceback" not in done.stderr
    for word in line:
        if word.startswith(str(tmp_path / "out.")):
            assert Path(word).stat().st_size


EVERY_FIXTURE = """
import sys, tempfile
from pathlib import Path
import ckptfix
for path in sys.argv[2:]:
    with tempfile.TemporaryDirectory(dir=sys.argv[1]) as folder:
        found = ckptfix.inspect(path)
        ckptfix.doctor(path)
        for verb in (ckptfix.to_cpu, ckptfix.unwrap, ckptfix.slim, ckptfix.convert):
            try:
                verb(path, Path(folder) / f"{verb.__name__}{Path(path).suffix}")
            except ckptfix.CkptfixError as error:
                assert not isinstance(error, ImportError), error
    print(path)
"""


@pytest.mark.slow
def test_every_fixture(bare: Forks, tmp_path: Path) -> None:
    files = sorted(str(path) for path in (ROOT / "fixtures").iterdir() if path.suffix in (".pth", ".safetensors"))
    done = bare(EVERY_FIXTURE, [str(tmp_path), *files])
    assert done.stdout.splitlines() == files and len(files) > 20 and not done.code, done.stderr


LOADERS = {
    "load_state_dict": "ckptfix.load_state_dict(path)",
    "load_checkpoint": "ckptfix.load_checkpoint(path)",
    "load_into": "ckptfix.load_into(None, path)",
    "load_optimizer": "ckptfix.load_optimizer(None, path)",
}
RAISED = """
import sys, ckptfix
path = sys.argv[1]
try:
    {call}
except ckptfix.CkptfixError as error:
    print(type(error).__name__, error.name, isinstance(error, ImportError), error, *error.__notes__, sep="|")
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", LOADERS)
def test_a_loader_names_the_extra(bare: Forks, name: str, tmp_path: Path) -> None:
    path = arguments("inspect", tmp_path)[1]
    done = bare(RAISED.format(call=LOADERS[name]), [path])
    assert done.stdout == f"MissingExtra|torch|True|{name} needs torch, which is not installed|{HINT}\n", done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("command", ["match", "doctor", "repair"])
def test_a_model_to_build_names_the_extra(bare: Forks, command: str, tmp_path: Path) -> None:
    path = arguments("inspect", tmp_path)[1]
    output = [] if command == "doctor" else [str(tmp_path / "out.pth")]
    done = bare(RUN_MAIN, [command, path, *output, "--like", "models:Net", "--allow-import"])
    assert done.code == 2
    assert done.stderr == f"building 'models:Net' needs torch, which is not installed\n{HINT}\n"
    assert not (tmp_path / "out.pth").exists()


RUN_MAIN = "from ckptfix.cli import main\nmain()"


@pytest.mark.parametrize("module", ["ckptfix.trainer", "ckptfix.trainer.demo"])
def test_the_trainer_names_the_extra(environment: dict[str, str], module: str) -> None:
    done = subprocess.run([sys.executable, "-m", module, "--help"], env=environment, capture_output=True, text=True)
    assert done.returncode == 2 and not done.stdout
    assert done.stderr == f"ckptfix.trainer: error: the trainer needs torch, which is not installed\n{HINT}\n"


def test_an_import_of_the_trainer_names_the_extra(bare: Forks) -> None:
    done = bare("from ckptfix.trainer.save import CONTAINERS")
    lines = done.stderr.splitlines()
    assert done.code == 1
    assert lines[-2:] == ["ckptfix.errors.MissingExtra: the trainer needs torch, which is not installed", HINT]


@pytest.mark.slow
def test_a_torch_that_does_not_import_says_so_itself(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("import a_module_that_it_lacks")
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="a_module_that_it_lacks") as caught:
        need_torch("a test")
    assert not isinstance(caught.value, MissingExtra)
