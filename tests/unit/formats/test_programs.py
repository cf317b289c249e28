"""TorchScript archives and exported programs as checkpoints: every command that reads has torch's own values."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import Record, build_zip
from click.testing import CliRunner, Result
from compare import tensor_bytes
from forks import Forks
from json_contract import checked
from ranges import read_exact
from torch import Tensor, nn

import ckptfix
from ckptfix import errors
from ckptfix.checkpoint import ByteRange
from ckptfix.cli import commands
from ckptfix.formats import FORMATS, detect, open_checkpoint

pytestmark = pytest.mark.filterwarnings("ignore")


class Net(nn.Module):
    """Tied weights, buffers, several dtypes, a parameter in columns, and a constant of the code."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.body = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
        self.one = nn.Linear(4, 3, bias=False)
        self.other = nn.Linear(4, 3, bias=False)
        self.other.weight = self.one.weight
        self.short = nn.Parameter(torch.randn(5).bfloat16())
        self.turned = nn.Parameter(torch.randn(3, 2).t())
        self.register_buffer("count", torch.tensor([1, 2, 3]))
        self.register_buffer("mask", torch.tensor([True, False]))
        self.register_buffer("wide", torch.randn(2, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        rest = self.short.sum() + self.turned.sum()
        rest = rest + self.count.sum() + self.mask.sum() + self.wide.sum()  # type: ignore[operator]
        found: Tensor = self.one(self.body(x)) + self.other(self.body(x)) + torch.tensor([1.0, 2.0, 3.0])
        return found * rest


def scripted(path: Path, made: nn.Module) -> None:
    torch.jit.script(made).save(path)  # type: ignore[no-untyped-call]


def traced(path: Path, made: nn.Module) -> None:
    torch.jit.trace(made, torch.ones(2, 3)).save(path)  # type: ignore[no-untyped-call]


def frozen(path: Path, made: nn.Module) -> None:
    torch.jit.freeze(torch.jit.script(made)).save(path)


def exported(path: Path, made: nn.Module) -> None:
    torch.export.save(torch.export.export(made, (torch.ones(2, 3),)), path)


def run(*arguments: object) -> Result:
    """A command line, whose JSON is checked."""
    words = [str(argument) for argument in arguments]
    result = CliRunner().invoke(commands, words)
    if "--json" in words:
        checked(result)
    return result


Save = Callable[[Path, nn.Module], None]
SAVES: dict[str, Save] = {"scripted": scripted, "traced": traced, "exported": exported}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Each program of `Net`, and the file of its state dict."""
    made = tmp_path_factory.mktemp("programs")
    net = Net().eval()
    for name, save in (SAVES | {"frozen": frozen}).items():
        save(made / f"{name}.pt2", net)
    torch.save(net.state_dict(), made / "state.pth")
    return made


@pytest.fixture(params=SAVES)
def program(request: pytest.FixtureRequest, folder: Path) -> Path:
    return folder / f"{request.param}.pt2"


def test_entries_are_those_of_the_state_dict(program: Path) -> None:
    wanted = Net().state_dict()
    checkpoint = open_checkpoint(program)
    assert checkpoint.format == detect(program).name and FORMATS[checkpoint.format].program
    found = {entry.key: entry for entry in checkpoint.entries}
    assert found.keys() == wanted.keys()
    for key, value in wanted.items():
        entry = found[key]
        assert (entry.at, entry.dtype, entry.kind) == ("", str(value.dtype).removeprefix("torch."), "dense")
        assert (entry.shape, entry.stride, entry.location) == (tuple(value.shape), value.stride(), "cpu")
        assert not entry.requires_grad and not entry.parameter
        assert entry.storage is not None and isinstance(entry.storage.data, ByteRange)
        assert entry.storage.data.path == str(program)
        if entry.is_contiguous:
            assert read_exact(entry.data) == tensor_bytes(value), key
    assert found["one.weight"].storage == found["other.weight"].storage


@pytest.mark.slow
def test_commands_say_of_it_what_they_say_of_the_state_dict(program: Path, folder: Path) -> None:
    state = folder / "state.pth"
    assert ckptfix.diff(program, state).same and ckptfix.diff(state, program).exit_code == 0
    ours = {row["name"]: row for row in json.loads(run("stats", "--json", program).stdout)["entries"]}
    theirs = {row["name"]: row for row in json.loads(run("stats", "--json", state).stdout)["entries"]}
    assert ours == theirs and len(ours) == len(Net().state_dict())
    assert sorted(run("digest", program).stdout.splitlines()) == sorted(run("digest", state).stdout.splitlines())
    inspection, plain = ckptfix.inspect(program), ckptfix.inspect(state)
    assert (inspection.parameters, inspection.nbytes, inspection.dtypes, inspection.devices) == (
        plain.parameters, plain.nbytes, plain.dtypes, plain.devices,
    )  # fmt: skip
    assert inspection.weights_only == "it is a program" and not inspection.globals
    shown = run("ls", program).stdout
    assert detect(program).name in shown and f"{plain.parameters}" in shown


def test_a_changed_value_is_a_difference(program: Path, tmp_path: Path, folder: Path) -> None:
    net = Net()
    with torch.no_grad():
        net.short[2] += 1
    torch.save(net.state_dict(), tmp_path / "other.pth")
    result = ckptfix.diff(program, tmp_path / "other.pth")
    assert [row.name_a for row in result.changed] == ["short"]


def test_it_is_loaded_and_converted(program: Path, tmp_path: Path) -> None:
    wanted = Net().state_dict()
    for name in ("out.pth", "out.safetensors"):
        done = ckptfix.convert(program, tmp_path / name)
        assert done.exit_code == 0 and not done.account.lost
        assert ckptfix.diff(program, tmp_path / name).same
    for found in (torch.load(tmp_path / "out.pth"), ckptfix.load_checkpoint(program), ckptfix.load_state_dict(program)):
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[key], value) for key, value in wanted.items())
    repaired = ckptfix.repair(program, tmp_path / "repaired.pth")
    assert repaired.exit_code == 0 and ckptfix.diff(program, tmp_path / "repaired.pth").same


def test_versions_of_modules_go_along(folder: Path, tmp_path: Path) -> None:
    ckptfix.convert(folder / "scripted.pt2", tmp_path / "out.pth")
    found = torch.load(tmp_path / "out.pth", weights_only=True)
    assert dict(found._metadata) == dict(Net().state_dict()._metadata)  # type: ignore[attr-defined]


def test_what_is_left_out_is_named(folder: Path, tmp_path: Path) -> None:
    for name in ("traced", "exported"):
        done = ckptfix.convert(folder / f"{name}.pt2", tmp_path / f"{name}.pth")
        assert [row.where for row in done.findings if row.id == "left-behind"] == ["constants"]
        assert done.lines[-1] == "left behind: constants"


def test_a_frozen_module_is_its_constants(folder: Path, tmp_path: Path) -> None:
    path = folder / "frozen.pt2"
    checkpoint = open_checkpoint(path)
    assert {entry.at for entry in checkpoint.entries} == {"constants"} and checkpoint.entries
    ckptfix.extract(path, tmp_path / "out.pth", at="constants")
    wanted = torch.load(tmp_path / "out.pth", weights_only=True)
    assert [entry.key for entry in checkpoint.entries] == list(wanted)
    held = {tensor_bytes(value) for value in wanted.values()}
    assert {tensor_bytes(value) for key, value in Net().state_dict().items() if key.startswith("one")} <= held
    assert ckptfix.diff(path, tmp_path / "out.pth").same
    assert ckptfix.inspect(path).tensors == len(wanted)
    ours = json.loads(run("stats", "--json", path, "--at", "constants").stdout)["entries"]
    theirs = json.loads(run("stats", "--json", tmp_path / "out.pth").stdout)["entries"]
    assert [{**row, "name": ""} for row in ours] == [{**row, "name": ""} for row in theirs]


def lazily(kind: str) -> Tensor:
    numbers = torch.randn(3, 2, dtype=torch.complex64).conj()
    return numbers if kind == "conj" else numbers.imag


@pytest.mark.parametrize("kind", ["conj", "neg"])
def test_lazy_operations_are_those_of_torch(tmp_path: Path, kind: str) -> None:
    class Lazy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("z", lazily(kind))

        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = x * self.z.abs().sum()  # type: ignore[operator]
            return found

    made: Any = Lazy()
    assert made.z.is_conj() or made.z.is_neg()
    if kind == "conj":  # of the other, torch writes the storage with a wrong dtype, and does not load it
        torch.jit.script(made).save(tmp_path / "net.pt")
    torch.export.save(torch.export.export(made, (torch.ones(1),)), tmp_path / "net.pt2")
    for path in sorted(tmp_path.iterdir()):
        loaded: Any = torch.export.load(path) if path.suffix == ".pt2" else torch.jit.load(path)  # type: ignore[no-untyped-call]
        wanted = (loaded.state_dict if path.suffix == ".pt2" else loaded.state_dict())["z"]
        torch.save({"z": wanted}, tmp_path / "state.pth")
        assert ckptfix.diff(path, tmp_path / "state.pth").same, path
        assert torch.equal(ckptfix.load_state_dict(path)["z"], wanted)
        ckptfix.extract(path, tmp_path / "out.pth", force=True)
        assert torch.equal(torch.load(tmp_path / "out.pth")["z"], wanted)


EDITS: dict[str, Callable[[Path, Path], Any]] = {
    "strip_module": ckptfix.strip_module,
    "add_module": ckptfix.add_module,
    "unwrap": ckptfix.unwrap,
    "to_cpu": ckptfix.to_cpu,
    "slim": ckptfix.slim,
    "cast": lambda path, out: ckptfix.cast(path, out, to="float16"),
    "select": lambda path, out: ckptfix.select(path, out, keep=["one*"]),
    "rename": lambda path, out: ckptfix.rename(path, out, subs=[("one", "two")]),
    "map_location": lambda path, out: ckptfix.map_location(path, out, "cuda:1"),
    "match": lambda path, out: ckptfix.match(path, out, like=path),
    "in place": lambda path, out: ckptfix.add_module(path, in_place=True),
}


@pytest.mark.slow
@pytest.mark.parametrize("verb", EDITS)
def test_an_edit_writes_a_torch_file_of_its_weights(folder: Path, tmp_path: Path, verb: str) -> None:
    for name in ("scripted", "exported", "frozen"):
        path, out = folder / f"{name}.pt2", tmp_path / f"{name}.pth"
        if verb == "in place":
            with pytest.raises(errors.Unsupported, match="does not write it") as caught:
                EDITS[verb](path, out)
            assert caught.value.path == str(path) and not list(tmp_path.iterdir())
        elif name != "frozen":  # the constants of a frozen program have other keys
            EDITS[verb](path, out)
            assert ckptfix.open_checkpoint(out).format == "zip"


def test_it_is_not_written(tmp_path: Path, folder: Path) -> None:
    for name in ("torchscript", "exported-program"):
        with pytest.raises(errors.Unsupported, match=f"ckptfix reads the format {name}, but does not write it"):
            ckptfix.convert(folder / "state.pth", tmp_path / "out", to=name)  # type: ignore[arg-type]


PROBE = """
import json, sys
from ckptfix.cli import commands
code = commands.main(sys.argv[1:], standalone_mode=False)
print(json.dumps([code, "torch" in sys.modules]), file=sys.stderr)
"""


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["inspect", "stats", "diff", "digest", "ls", "doctor", "convert"])
def test_no_command_imports_torch(forks: Forks, folder: Path, tmp_path: Path, verb: str) -> None:
    for name in ("scripted", "exported"):
        more = [folder / "state.pth"] if verb == "diff" else [tmp_path / f"{name}.safetensors"] * (verb == "convert")
        done = forks(PROBE, [verb, str(folder / f"{name}.pt2"), *map(str, more)])
        code, imported = json.loads(done.stderr.splitlines()[-1])
        assert not imported and not code, done.stderr


def rewritten(source: Path, dest: Path, change: Callable[[str, bytes], bytes | None]) -> Path:
    """The zip `source` with other bytes in some records, or without them."""
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(dest, "w") as new:
        for name in old.namelist():
            if (data := change(name, old.read(name))) is not None:
                new.writestr(name, data)
    return dest


def test_a_flipped_bit_of_what_describes_the_tensors_is_found(folder: Path, tmp_path: Path) -> None:
    """A key that is changed so would be another key, without any other trace."""
    for name, record in (("scripted", "data.pkl"), ("exported", "weights_config.json"), ("frozen", "constants.pkl")):
        data = bytearray((folder / f"{name}.pt2").read_bytes())
        with zipfile.ZipFile(folder / f"{name}.pt2") as archive:
            row = next(row for row in archive.infolist() if row.filename.endswith(record))
        key = {"scripted": b"turned", "exported": b"turned", "frozen": b"FloatStorage"}[name]
        place = data.index(key, row.header_offset)
        data[place] ^= 2
        (tmp_path / "bad.pt2").write_bytes(data)
        with pytest.raises(errors.DamagedFile, match="CRC-32") as caught:
            ckptfix.inspect(tmp_path / "bad.pt2")
        assert caught.value.where == row.filename and caught.value.path == str(tmp_path / "bad.pt2")
        with pytest.raises(errors.DamagedFile):
            ckptfix.extract(tmp_path / "bad.pt2", tmp_path / "out.pth", at="constants" if name == "frozen" else None)


def test_a_damaged_class_is_found(folder: Path, tmp_path: Path) -> None:
    """The text of a class says which attributes are parameters, and in what order."""
    data = (folder / "scripted.pt2").read_bytes()
    with zipfile.ZipFile(folder / "scripted.pt2") as archive:
        row = next(row for row in archive.infolist() if row.filename.endswith("test_programs.py"))
    names, extra = data[row.header_offset + 26], data[row.header_offset + 28]
    at = row.header_offset + 30 + names + extra + row.compress_size // 2
    (tmp_path / "bad.pt").write_bytes(data[:at] + bytes([data[at] ^ 255]) + data[at + 1 :])
    with pytest.raises(errors.CkptfixError) as caught:
        ckptfix.inspect(tmp_path / "bad.pt")
    assert caught.value.path == str(tmp_path / "bad.pt")
    with pytest.raises(errors.CkptfixError):
        ckptfix.repair(tmp_path / "bad.pt", tmp_path / "out.pth")
    assert not (tmp_path / "out.pth").exists()


def test_damaged_data_is_found(program: Path, tmp_path: Path) -> None:
    data = bytearray(program.read_bytes())
    data[data.index(tensor_bytes(Net().short))] ^= 1
    (tmp_path / "bad.pt2").write_bytes(data)
    assert not ckptfix.diff(program, tmp_path / "bad.pt2").same
    with pytest.raises(errors.DamagedFile):
        ckptfix.convert(tmp_path / "bad.pt2", tmp_path / "out.safetensors")


@pytest.mark.parametrize("keep", [0.3, 0.7, 0.95])
def test_a_truncated_program_is_refused(program: Path, tmp_path: Path, keep: float) -> None:
    data = program.read_bytes()
    (tmp_path / "cut.pt2").write_bytes(data[: int(len(data) * keep)])
    for verb in (ckptfix.inspect, ckptfix.digest):
        with pytest.raises(errors.CkptfixError) as caught:
            verb(tmp_path / "cut.pt2")
        assert caught.value.path == str(tmp_path / "cut.pt2")


HOSTILE: dict[str, list[Record]] = {
    "no module": [Record("p/data.pkl", b"\x80\x02}."), Record("p/constants.pkl", b"\x80\x02).")],
    "code in the pickle": [
        Record("p/data.pkl", b"\x80\x02cposix\nsystem\nX\x04\0\0\0true\x85R."),
        Record("p/constants.pkl", b"\x80\x02)."),
    ],
    "no data.pkl": [Record("p/constants.pkl", b"\x80\x02).")],
    "two archives": [Record("p/constants.pkl", b"\x80\x02)."), Record("q/constants.pkl", b"\x80\x02).")],
    "no models": [Record("p/archive_format", b"pt2")],
    "two models": [
        Record("p/archive_format", b"pt2"),
        *(Record(f"p/data/weights/{name}_weights_config.json", b'{"config": {}}') for name in "ab"),
    ],
    "no JSON": [Record("p/archive_format", b"pt2"), Record("p/data/weights/a_weights_config.json", b"{" * 9000)],
    "a path": [
        Record("p/archive_format", b"pt2"),
        Record(
            "p/data/weights/a_weights_config.json",
            b'{"config": {"w": {"path_name": "../../x", "use_pickle": false, "tensor_meta": {"layout": 7, "dtype": 7,'
            b'"sizes": [], "strides": [], "storage_offset": {"as_int": 0},'
            b'"device": {"type": "cpu", "index": null}}}}}',
        ),
    ],
}  # fmt: skip


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_archive_is_refused_by_name(tmp_path: Path, case: str) -> None:
    path = tmp_path / "net.pt2"
    path.write_bytes(build_zip(HOSTILE[case]))
    for verb in ("inspect", "stats", "digest"):
        done = run(verb, path)
        assert done.exit_code == 2 and str(path) in done.stderr and "Traceback" not in done.stderr, done.stderr
    assert ckptfix.doctor(path).findings


def test_a_tensor_that_cannot_be_read_is_a_finding(folder: Path, tmp_path: Path) -> None:
    def sparse(name: str, data: bytes) -> bytes:
        if not name.endswith("weights_config.json"):
            return data
        config = json.loads(data)
        config["config"]["short"]["use_pickle"] = True
        return json.dumps(config).encode()

    path = rewritten(folder / "exported.pt2", tmp_path / "net.pt2", sparse)
    found = ckptfix.inspect(path)
    assert [(row.id, row.where) for row in found.findings if row.severity == "error"] == [("bad-tensor", "short")]
    with pytest.raises(errors.CkptfixError, match="short"):
        ckptfix.convert(path, tmp_path / "out.pth")


def test_a_program_without_tensors(tmp_path: Path) -> None:
    torch.jit.script(nn.ReLU()).save(tmp_path / "net.pt")  # type: ignore[no-untyped-call]
    assert ckptfix.inspect(tmp_path / "net.pt").tensors == 0
