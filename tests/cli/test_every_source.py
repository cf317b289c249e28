"""Every command that writes takes every source that is read; and the options of convert do what the commands do."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from every_source import SOURCES, WEIGHTS
from safetensors.torch import load_file, save_file

import ckptfix
from ckptfix import command_table, errors, formats
from ckptfix.cli import commands
from ckptfix.ops import chain, deploy, naming

State = dict[str, torch.Tensor]

STRIPPED = {name.removeprefix("module."): value for name, value in WEIGHTS.items()}
OTHER = {"other": torch.ones(2)}


class Folder:
    """A folder with a source of each kind, each made once, and the further inputs of some commands."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.like, self.other = path / "like.pth", path / "other.pth"
        torch.save(STRIPPED, self.like)
        torch.save(OTHER, self.other)
        self._made: dict[str, Path] = {}

    def source(self, kind: str) -> Path:
        if kind not in self._made:
            folder = self.path / kind
            folder.mkdir()
            self._made[kind] = SOURCES[kind](folder)
        return self._made[kind]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    return Folder(tmp_path_factory.mktemp("sources"))


Verb = Callable[[Folder, Path, Path], Any]
VERBS: dict[str, tuple[Verb, Callable[[State], State]]] = {
    "strip-module": (lambda f, a, b: ckptfix.strip_module(a, b), lambda s: strip(s)),
    "add-module": (lambda f, a, b: ckptfix.add_module(a, b), lambda s: {f"module.{n}": v for n, v in s.items()}),
    "unwrap": (lambda f, a, b: ckptfix.unwrap(a, b), lambda s: strip(s)),
    "rename": (
        lambda f, a, b: ckptfix.rename(a, b, subs=[("fc", "head")]),
        lambda s: {name.replace("fc", "head"): value for name, value in s.items()},
    ),
    "select": (
        lambda f, a, b: ckptfix.select(a, b, drop=["*bias"]),
        lambda s: {name: value for name, value in s.items() if "bias" not in name},
    ),
    "cast": (lambda f, a, b: ckptfix.cast(a, b, "bfloat16"), lambda s: {n: v.bfloat16() for n, v in s.items()}),
    "to-cpu": (lambda f, a, b: ckptfix.to_cpu(a, b), dict),
    "map-location": (lambda f, a, b: ckptfix.map_location(a, b, "cpu"), dict),
    "slim": (lambda f, a, b: ckptfix.slim(a, b), dict),
    "sanitize": (lambda f, a, b: ckptfix.sanitize(a, b), dict),
    "match": (lambda f, a, b: ckptfix.match(a, b, f.like), lambda s: strip(s)),
    "average": (lambda f, a, b: ckptfix.average([a, a], b), dict),
    "merge": (lambda f, a, b: ckptfix.merge([a, f.other], b), lambda s: {**s, **OTHER}),
    "convert": (lambda f, a, b: ckptfix.convert(a, b), dict),
    "extract": (lambda f, a, b: ckptfix.extract(a, b), dict),
    "repair": (lambda f, a, b: ckptfix.repair(a, b), dict),
    "fix": (lambda f, a, b: ckptfix.fix(a, b), lambda s: strip(s)),
    "set-metadata": (lambda f, a, b: ckptfix.set_metadata(a, b, pairs={"license": "mit"}), dict),
}
"""Command -> its call with (further files, IN, OUT), and what it makes of a state dict."""

REFUSED = {
    **{("set-metadata", ".pth", kind): "no metadata pairs" for kind in SOURCES},
    # Only `fix` and `convert` write another format of what `repair` unpacks, and the hint says so.
    **{("repair", ".safetensors", kind): "ckptfix convert" for kind in ("gz", "tar_gz")},
    ("repair", ".pth", "bz"): "ckptfix convert",
    **{("match", suffix, "ranks"): "cannot be reshaped" for suffix in (".pth", ".safetensors")},
}
"""(command, suffix, kind) -> a part of the message or the hint of what remains."""


def strip(state: State) -> State:
    return {name.removeprefix("module."): value for name, value in state.items()}


def tensors(path: Path) -> State:
    """The state dict in an output, with its keys as they are."""
    if path.suffix == ".safetensors":
        return load_file(path)
    made = torch.load(path, weights_only=False)  # an output of this test: some commands keep a whole module
    if isinstance(made, torch.nn.Module):
        return made.state_dict()
    return next((made[name] for name in ("state_dict", "policy.pth", "module") if name in made), made)


def check(folder: Folder, kind: str, verb: str, suffix: str, out: Path) -> None:
    call, wanted = VERBS[verb]
    source = folder.source(kind)
    if (verb, suffix, kind) in REFUSED:
        with pytest.raises(errors.CkptfixError) as caught:
            call(folder, source, out)
        assert REFUSED[verb, suffix, kind] in f"{caught.value.message}{caught.value.hint}"
        assert str(source) in f"{caught.value.path}{caught.value.hint}" and ".ckptfix-" not in str(caught.value.hint)
        assert not out.exists()
        return
    result = call(folder, source, out)
    assert result.exit_code == 0, result.lines
    assert formats.detect(out).suffixes[0] in (".pt", suffix)
    state = ckptfix.load_state_dict(source) if kind == "ranks" else WEIGHTS
    have = tensors(out)
    expected = wanted(dict(state))
    assert set(have) == set(expected) and all(torch.equal(have[name], value) for name, value in expected.items())
    assert not [path for path in out.parent.iterdir() if ".ckptfix" in path.name]


@pytest.mark.sampled(8, test_all=10_000)
@pytest.mark.slow
@pytest.mark.parametrize("kind", SOURCES)
def test_every_command_takes_it(folder: Folder, kind: str, tmp_path: Path) -> None:
    for number, verb in enumerate(VERBS):
        suffix = (".pth", ".safetensors")[(number + list(SOURCES).index(kind)) % 2]
        check(folder, kind, verb, suffix, tmp_path / f"{verb}{suffix}")


@pytest.mark.sampled(0)
@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
@pytest.mark.parametrize("kind", SOURCES)
def test_every_command_takes_it_with_each_suffix(folder: Folder, kind: str, suffix: str, tmp_path: Path) -> None:
    for verb in VERBS:
        check(folder, kind, verb, suffix, tmp_path / f"{verb}{suffix}")


def test_every_command_that_writes_is_in_the_matrix() -> None:
    assert set(VERBS) == {row.name for row in command_table.COMMANDS.values() if row.writes}


def _chain(source: Path, folder: Path, suffix: str) -> Path:
    """What the single commands make, one after the other."""
    ckptfix.convert(source, folder / f"0{suffix}")
    ckptfix.select(folder / f"0{suffix}", folder / f"1{suffix}", drop=["*bias"])
    ckptfix.strip_module(folder / f"1{suffix}", folder / f"2{suffix}", prefix="module")
    ckptfix.cast(folder / f"2{suffix}", folder / f"3{suffix}", "float16")
    return folder / f"3{suffix}"


@pytest.mark.sampled(quick=3)
@pytest.mark.parametrize("kind", ["deepspeed", "ranks", "lightning", "torchscript", "dcp", "hf", "gz", "whole_module"])
def test_convert_makes_what_the_commands_make(folder: Folder, kind: str, tmp_path: Path) -> None:
    source = folder.source(kind)
    out, steps = tmp_path / "out.safetensors", _chain(source, tmp_path, ".safetensors")
    prefix = {} if kind == "ranks" else {"strip_prefix": "module."}
    result = ckptfix.convert(source, out, dtype="fp16", drop=["*bias"], **prefix)  # type: ignore[arg-type]
    assert out.read_bytes() == steps.read_bytes()
    assert [done.command[1] for done in result.steps][-1] == "cast" and result.exit_code == 0
    assert "left out" in str(result) and "cast 1 tensor" in str(result)
    made = ckptfix.convert(source, tmp_path / "out.pth", dtype="fp16", drop=["*bias"], **prefix)  # type: ignore[arg-type]
    state = tensors(tmp_path / "out.pth")
    assert made.exit_code == 0 and not [path for path in tmp_path.iterdir() if ".ckptfix" in path.name]
    wanted = load_file(steps)
    assert set(state) == set(wanted) and all(torch.equal(state[name], value) for name, value in wanted.items())
    assert "error" not in {row.severity for row in ckptfix.doctor(tmp_path / "out.pth").findings}  # as to checksums


@pytest.mark.parametrize("kind", SOURCES)
def test_no_intermediate_file_is_written(
    kind: str, folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chain, "write_aside", lambda *_, **__: pytest.fail("an intermediate file"))
    for suffix in (".pth", ".safetensors"):
        ckptfix.convert(folder.source(kind), tmp_path / f"{kind}{suffix}", dtype="bf16", keep=["*fc*"], unwrap=True)


def test_a_prefix_that_no_key_has_is_an_error(folder: Folder, tmp_path: Path) -> None:
    with pytest.raises(errors.NoSuchTensor, match="no key begins with") as caught:
        ckptfix.convert(folder.source("torchscript"), tmp_path / "out.pth", strip_prefix="modul")
    assert caught.value.near == ("module.",) and "--strip-prefix module." in str(caught.value.hint)
    path = tmp_path / "a.pth"
    torch.save({**WEIGHTS, "criterion.weight": torch.ones(2)}, path)
    with pytest.raises(errors.PartialPrefix) as partial:
        ckptfix.convert(path, tmp_path / "out.safetensors", strip_prefix="module.")
    assert "--drop criterion.weight" in str(partial.value.hint).replace("'", "")
    ckptfix.convert(path, tmp_path / "out.safetensors", strip_prefix="module.", drop=["criterion.*"])
    assert set(load_file(tmp_path / "out.safetensors")) == set(STRIPPED)


def test_at_makes_a_torch_file_of_one_state_dict(folder: Folder, tmp_path: Path) -> None:
    result = ckptfix.convert(folder.source("lightning"), tmp_path / "out.pth", at="state_dict", dtype="fp16")
    state = torch.load(tmp_path / "out.pth", weights_only=True)
    assert set(state) == set(WEIGHTS) and "epoch" in result.left
    whole = ckptfix.convert(folder.source("lightning"), tmp_path / "whole.pth", dtype="fp16")
    assert torch.load(tmp_path / "whole.pth", weights_only=True)["epoch"] == 3 and not whole.left


def test_numbers_that_leave_the_range_are_reported(tmp_path: Path) -> None:
    save_file({"w": torch.tensor([1e6, 1e-9, 1.0])}, tmp_path / "in.safetensors")
    result = ckptfix.convert(tmp_path / "in.safetensors", tmp_path / "out.pth", dtype="fp16")
    assert any(line.startswith("underflow: 1 element") for line in result.lines)
    assert [row.id for row in result.findings] == ["out-of-range"]


def test_the_command_line(folder: Folder, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, out = str(folder.source("deepspeed")), tmp_path / "out.safetensors"
    words = ["convert", source, str(out), "--dtype", "fp16", "--unwrap", "--drop", "*bias", "--json"]
    assert commands.main([*words, "--dry-run"], standalone_mode=False) == 0 and not out.exists()
    capsys.readouterr()
    assert commands.main(words, standalone_mode=False) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["tensors"] == 1 and "optimizer" in found["left_behind"]
    assert [one["argv"][1] for one in found["steps"]] == ["convert", "select", "unwrap", "cast"]
    with pytest.raises(errors.WouldOverwrite):
        ckptfix.convert(source, out, dtype="fp16")
    assert commands.main([*words, "--force"], standalone_mode=False) == 0
    for dtype in ("nope", "fp4"):
        with pytest.raises(errors.Refused, match="cannot cast"):
            ckptfix.convert(source, tmp_path / "x.pth", dtype=dtype)


def test_the_operations_are_rows_of_commands() -> None:
    assert {row.command for row in deploy.OPERATIONS} <= set(VERBS)


def test_what_is_packed_and_damaged_is_not_taken_for_whole(folder: Folder, tmp_path: Path) -> None:
    path = tmp_path / "a.pth.gz"
    path.write_bytes(folder.source("gz").read_bytes()[:-40])
    with pytest.raises(errors.Refused) as caught:
        ckptfix.to_cpu(path, tmp_path / "out.pth")
    assert "ckptfix repair" in str(caught.value.hint) and [one.name for one in tmp_path.iterdir()] == ["a.pth.gz"]


def test_fix_and_select_in_place(folder: Folder, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for kind in ("zip", "legacy", "safetensors"):
        path = tmp_path / f"a{folder.source(kind).suffix}"
        path.write_bytes(before := folder.source(kind).read_bytes())
        assert commands.main(["fix", str(path), "--in-place", "--dry-run"], standalone_mode=False) == 0
        assert path.read_bytes() == before
        assert commands.main(["fix", str(path), "--in-place"], standalone_mode=False) == 0
        assert set(tensors(path)) == set(STRIPPED) and not ckptfix.doctor(path).fixes
        ckptfix.undo(path)
        assert path.read_bytes() == before
    path = tmp_path / "a.pth"
    path.write_bytes(before := folder.source("zip").read_bytes())
    capsys.readouterr()
    assert commands.main(["select", str(path), "-i", "--drop", "*bias"], standalone_mode=False) == 0
    assert "ckptfix slim" in capsys.readouterr().out and list(tensors(path)) == ["module.fc.weight"]
    ckptfix.undo(path)
    assert path.read_bytes() == before
    torch.save({**WEIGHTS, "odd": Path()}, path)
    for source in (path, folder.source("gz"), folder.source("plain_pickle")):
        with pytest.raises(errors.Unsupported, match="writes the file anew"):
            ckptfix.fix(source, in_place=True)


def test_in_place_needs_a_format_that_is_written(folder: Folder) -> None:
    with pytest.raises(errors.Unsupported) as caught:
        ckptfix.to_cpu(folder.source("plain_pickle"), in_place=True)
    assert "name an output" in str(caught.value.hint)


OF_A_FOLDER = ("cast", "fix", "match", "rename", "repair", "sanitize", "select", "set-metadata", "slim", "strip-module")
"""Commands that keep the format of their input: one of each place where an output is planned."""


@pytest.mark.parametrize("verb", OF_A_FOLDER)
def test_a_folder_with_a_configuration_stays_one(verb: str, folder: Folder, tmp_path: Path) -> None:
    """One rule for all: OUT is a folder like IN, unless its suffix is that of a file."""
    source = tmp_path / "model"
    source.mkdir()
    save_file(WEIGHTS, source / "model.safetensors")
    (source / "config.json").write_text('{"model_type": "x", "dtype": "float32"}')
    call, wanted = VERBS[verb]
    out = tmp_path / "out"
    assert call(folder, source, out).exit_code == 0
    assert sorted(path.name for path in out.iterdir()) == ["config.json", "model.safetensors"]
    made, expected = load_file(out / "model.safetensors"), wanted(dict(WEIGHTS))
    assert set(made) == set(expected) and all(torch.equal(made[name], value) for name, value in expected.items())
    dtype = "bfloat16" if verb == "cast" else "float32"
    assert json.loads((out / "config.json").read_text()) == {"model_type": "x", "dtype": dtype}
    with pytest.raises(errors.WouldOverwrite):
        call(folder, source, out)
    call(folder, source, tmp_path / "one.safetensors")
    assert (tmp_path / "one.safetensors").is_file()


FOLDERS = ("deepspeed", "ranks", "dcp", "hf", "hf_bin", "orbax")


def test_every_kind_of_folder_is_in_the_list(folder: Folder) -> None:
    made = (kind for kind in SOURCES if kind != "orbax")
    assert {kind for kind in made if folder.source(kind).is_dir()} == {*FOLDERS} - {"orbax"}


TARGETS = {"zip": ".pth", "legacy": ".pth", "safetensors": ".safetensors", "hf": "", "dcp": ""}
"""Format -> the suffix of an output in a folder of outputs. Those of ranks (megatron, meta) need a model's own keys."""


@pytest.mark.sampled(quick=1)
@pytest.mark.parametrize("kind", FOLDERS)
def test_a_folder_keeps_its_name_in_a_folder_of_outputs(kind: str, folder: Folder, tmp_path: Path) -> None:
    """The digits after a dot are no suffix: run-1.5 and run-1.6 would be one file."""
    source = tmp_path / "run-1.5"
    shutil.copytree(folder.source(kind), source)
    for to, suffix in TARGETS.items():
        out = tmp_path / to
        words = ["convert", "-r", str(source), "--out-dir", str(out), "--to", to]
        assert commands.main(words, standalone_mode=False) == 0, to
        (made,) = out.iterdir()
        assert made.name == f"run-1.5{suffix}" and made.is_dir() == (not suffix)
    for verb in ("cast", "strip-module", "repair", "sanitize", "slim"):
        out = tmp_path / verb
        words = [verb, "-r", str(source), "--out-dir", str(out), *(["--to", "bf16"] if verb == "cast" else [])]
        done = commands.main(words, standalone_mode=False)
        (made,) = out.iterdir()
        assert done == 0 and made.name == ("run-1.5" if made.is_dir() else "run-1.5.pth"), verb


@pytest.mark.parametrize("kind", FOLDERS)
def test_a_name_beside_a_folder_begins_with_its_name(kind: str, folder: Folder, tmp_path: Path) -> None:
    source = tmp_path / "run-1.5"
    shutil.copytree(folder.source(kind), source)
    for word in ("cast", "plain", "zip", "safetensors", "stripped"):
        assert Path(naming.named_beside(source, word)).name.startswith("run-1.5."), word
    for format in formats.FORMATS.values():
        if format.writes:
            name = naming.name_kept(source, format.name, folder=format.folder)
            assert name == f"run-1.5{'' if format.folder else TARGETS[format.name]}"
            beside = Path(naming.named_beside(source, format.name, folder=format.folder)).name
            assert beside.startswith("run-1.5.") and beside.endswith(name.removeprefix("run-1.5") or format.name)


@pytest.mark.sampled(1_000, quick=2)
@pytest.mark.parametrize("kind", SOURCES)
def test_repair_does_not_advise_repair(kind: str, folder: Folder, tmp_path: Path) -> None:
    """The readers of many formats advise it for a file that is cut short; `repair` reads with them too."""
    whole = folder.source(kind)
    names = [path for path in sorted(whole.rglob("*")) if path.is_file()] if whole.is_dir() else [whole]
    refused = 0
    for number, inner in enumerate(names):
        for share in (0.1, 0.6, 0.95):
            source = tmp_path / f"{number}-{share}{whole.suffix}"
            shutil.copytree(whole, source) if whole.is_dir() else shutil.copy(whole, source)
            damaged = source / inner.relative_to(whole) if whole.is_dir() else source
            damaged.write_bytes(inner.read_bytes()[: int(inner.stat().st_size * share)])
            try:
                ckptfix.repair(source, tmp_path / f"out-{source.name}.pth")
            except errors.CkptfixError as error:
                refused += 1
                assert "ckptfix repair" not in str(error.hint), error
    assert refused or kind in MENDED


MENDED = ("torchscript", "ranks")
"""Kinds that `repair` always keeps a part of."""
