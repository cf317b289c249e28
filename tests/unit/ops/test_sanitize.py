"""sanitize: every conversion against torch itself, on both containers, and on objects made to hurt."""

from __future__ import annotations

import argparse
import collections
import dataclasses
import datetime
import decimal
import enum
import fractions
import functools
import logging
import os
import pathlib
import re
import sys
import types
import uuid
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import pytest
import torch
from builders import Op, Tensor, assemble, legacy, push, state_dict_ops, tensor_ops, torch_zip, written
from conftest import RealFile
from watch import watched

import ckptfix
from ckptfix.errors import KeyConflict, Refused, Unsupported
from ckptfix.formats.plain.convert import Converter
from ckptfix.formats.plain.report import ConversionSettings
from ckptfix.formats.torch.common import pickled_object
from ckptfix.ops.sanitize import SanitizeResult, sanitize
from ckptfix.pickles import Call, Dict, parse


class Colour(enum.Enum):
    RED = "red"


class Word(str):
    pass


class Point(NamedTuple):
    x: int
    y: int


class Attributes(dict[str, Any]):
    """A dict that has its items as attributes too, as several libraries have one."""

    def __init__(self, **items: Any) -> None:
        super().__init__(**items)
        self.__dict__.update(items)


class Slotted:
    __slots__ = ("a", "b")

    def __init__(self) -> None:
        self.a, self.b = 1, [2]


@dataclasses.dataclass
class Config:
    lr: float = 0.1
    held: Any = None


@pytest.fixture(params=["zip", "legacy"])
def container(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def save(value: Any, path: Path, container: str, protocol: int = 2) -> Path:
    torch.save(value, path, pickle_protocol=protocol, _use_new_zipfile_serialization=container == "zip")
    return path


def cleaned(path: Path, **options: Any) -> tuple[SanitizeResult, Any]:
    """The result, and what torch loads of it with weights_only=True."""
    result = sanitize(path, path.with_name("out.pt"), force=True, **options)
    return result, torch.load(path.with_name("out.pt"), weights_only=True)


def refused(path: Path, message: str) -> None:
    """torch does not load the file, and says so."""
    with pytest.raises(Exception, match=message):
        torch.load(path, weights_only=True)


VALUES: list[tuple[Any, Any]] = [
    (numpy.int64(3), 3),
    (numpy.float32(0.5), 0.5),
    (numpy.float16(0.25), 0.25),
    (numpy.bool_(True), True),
    (numpy.complex64(1 + 2j), 1 + 2j),
    (numpy.str_("word"), "word"),
    (numpy.bytes_(b"raw"), b"raw"),
    (numpy.dtype("float32"), "float32"),
    (numpy.float32, "float32"),
    (numpy.array(["ab", "c"]), ["ab", "c"]),
    (numpy.array([[1, "a"], [None, 2.5]], dtype=object), [[1, "a"], [None, 2.5]]),
    (argparse.Namespace(lr=0.1, inner=argparse.Namespace(a=1)), {"lr": 0.1, "inner": {"a": 1}}),
    (types.SimpleNamespace(a=[1]), {"a": [1]}),
    (pathlib.PurePosixPath("/a/b"), "/a/b"),
    (pathlib.PurePosixPath("a") / "b", "a/b"),
    (pathlib.PureWindowsPath("C:/a/b"), "C:\\a\\b"),
    (pathlib.Path("x/y"), str(pathlib.Path("x/y"))),
    (Colour.RED, "red"),
    (Word("text"), "text"),
    (Point(1, 2), (1, 2)),
    (Attributes(a=1, b=2), {"a": 1, "b": 2}),
    (Slotted(), {"a": 1, "b": [2]}),
    (Config(), {"lr": 0.1, "held": None}),
    (datetime.datetime(2020, 1, 2, 3, 4, 5, 6), "2020-01-02T03:04:05.000006"),
    (datetime.datetime(2020, 1, 2, tzinfo=datetime.UTC), "2020-01-02T00:00:00+00:00"),
    (datetime.date(1999, 12, 31), "1999-12-31"),
    (datetime.time(23, 59, 1), "23:59:01"),
    (datetime.timedelta(days=1, seconds=2, microseconds=500_000), 86402.5),
    (decimal.Decimal("1.50"), "1.50"),
    (fractions.Fraction(1, 3), "1/3"),
    (uuid.UUID("12345678-1234-5678-1234-567812345678"), "12345678-1234-5678-1234-567812345678"),
    (re.compile("a+"), "a+"),
    (range(1, 9, 3), [1, 4, 7]),
    (range(10**12), f"range({hex(0)}, {hex(10**12)}, {hex(1)})"),
    (slice(1, None), [1, None, None]),
    (collections.deque([1, 2], maxlen=5), [1, 2]),
    (collections.defaultdict(list, a=[1]), {"a": [1]}),
    (collections.Counter("aab"), collections.Counter("aab")),
    (frozenset({1, 2}), {1, 2}),
    ({1, "a"}, {1, "a"}),
    (1 + 2j, 1 + 2j),
    (b"\xff\x00", b"\xff\x00"),
    (b"", b""),
    (bytearray(b"ab"), bytearray(b"ab")),
    (10**700, hex(10**700)),
    (-(10**30), -(10**30)),
    (..., "..."),
    ({numpy.int64(7): 1, pathlib.PurePosixPath("k"): 2}, {7: 1, "k": 2}),
    ({(numpy.int64(1), "a"): 1}, {(1, "a"): 1}),
    (torch.Size([2, 3]), torch.Size([2, 3])),
    (torch.float16, torch.float16),
]


NUMBERED = [f"{number}-{type(value).__name__}" for number, (value, _) in enumerate(VALUES)]


@pytest.mark.parametrize(("value", "plain"), VALUES, ids=NUMBERED)
def test_an_object_becomes_its_closest_plain_value(
    tmp_path: Path, container: str, value: Any, plain: Any
) -> None:
    weight = torch.arange(3.0)
    for protocol in (2, 4):
        path = save({"w": weight, "v": value}, tmp_path / "in.pt", container, protocol)
        result, found = cleaned(path)
        assert result.exit_code == 0 and not result.dropped
        assert torch.equal(found["w"], weight)
        assert found["v"] == plain and type(found["v"]) is type(plain)


ARRAYS: list[tuple[Any, bool]] = [
    *((numpy.arange(6).astype(kind).reshape(2, 3), True) for kind in ("f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1")),
    *((numpy.arange(6).astype(kind).reshape(3, 2), True) for kind in (">f4", ">i8", "c8", ">c16", "?")),
    *((numpy.asfortranarray(numpy.arange(24.0).reshape(2, 3, 4)), True), (numpy.array(3.5), True)),
    *((numpy.zeros((0, 4), "f4"), True), (numpy.arange(12.0).reshape(3, 4)[:, ::2], True)),
    *((numpy.array([1, 2**16 - 1], "u2"), False), (numpy.array([2**32 - 1], ">u4"), False)),
]


@pytest.mark.parametrize(("array", "exact"), ARRAYS, ids=[f"{row[0].dtype}-{row[0].shape}" for row in ARRAYS])
def test_an_array_becomes_a_tensor_of_its_dtype(tmp_path: Path, container: str, array: Any, exact: bool) -> None:
    for protocol in (2, 5):
        path = save({"a": array, "same": array}, tmp_path / "in.pt", container, protocol)
        refused(path, "Weights only load failed")
        result, found = cleaned(path)
        native = array.astype(array.dtype.newbyteorder("="))
        assert torch.equal(found["a"], torch.from_numpy(native.copy()).to(found["a"].dtype))
        if exact or container == "zip":
            assert str(found["a"].dtype) == f"torch.{native.dtype.name}"
        else:
            assert found["a"].dtype == torch.int64 and "int64 tensor" in result.lines[0]
        assert found["a"].data_ptr() == found["same"].data_ptr()


def test_a_structured_array_becomes_a_dict_of_its_columns(tmp_path: Path, container: str) -> None:
    array = numpy.array([(1, 2.5), (3, 4.5)], dtype=[("i", ">i4"), ("f", "f8")])
    _, found = cleaned(save({"a": array}, tmp_path / "in.pt", container))
    assert found["a"]["i"].tolist() == [1, 3] and found["a"]["f"].tolist() == [2.5, 4.5]


def numpy_array(shape: tuple[int, ...], data: bytes) -> list[Op]:
    """The opcodes of an int8 array under numpy 1's names (ERRORS 45 is about numpy 2's)."""
    dtype: list[Op] = [("GLOBAL", "numpy", "dtype"), *push(("i1", False, True)), "REDUCE"]
    dtype += [*push((3, "|", None, None, None, -1, -1, 0)), "BUILD"]
    made: list[Op] = [("GLOBAL", "numpy.core.multiarray", "_reconstruct"), "MARK", ("GLOBAL", "numpy", "ndarray")]
    made += [*push((0,)), *push("b"), "TUPLE", "REDUCE", "MARK", *push(1), *push(shape), *dtype, "NEWFALSE"]
    return [*made, ("SHORT_BINBYTES", data), "TUPLE", "BUILD"]


@pytest.mark.parametrize("shape", [(4,), (10**9, 10**9), (10**9, 0), (-1,), (2, 2)])
def test_an_array_that_lies_about_its_bytes_is_left_out(tmp_path: Path, shape: tuple[int, ...]) -> None:
    ops: list[Op] = ["EMPTY_DICT", "MARK", *push("a"), *numpy_array(shape, b"abc"), *push("n"), *push(1), "SETITEMS"]
    path = written(tmp_path / "in.pt", torch_zip(assemble(("PROTO", 3), *ops, "STOP")))
    result, found = cleaned(path)
    assert found == {"n": 1} and result.exit_code == 3 and "array" in result.dropped[0].why


DROPPED: list[tuple[Any, str]] = [
    (os.path.join, "function or a class"),
    (Config, "function or a class"),
    (functools.partial(int, base=2), "function"),
    (logging.getLogger("x"), "returns"),
    (ValueError("x"), "returns"),
    (numpy.longdouble(1) if numpy.dtype("longdouble").itemsize != 8 else os.path.join, ""),
]


@pytest.mark.parametrize(("value", "why"), DROPPED, ids=[str(row[0])[:20] for row in DROPPED])
def test_what_no_plain_value_stands_for_is_named(tmp_path: Path, container: str, value: Any, why: str) -> None:
    path = save({"w": torch.ones(2), "in": [1, value], "v": value}, tmp_path / "in.pt", container)
    result, found = cleaned(path)
    assert result.exit_code == 3
    assert {loss.where for loss in result.dropped} == {"in/1", "v"} and why in result.dropped[0].why
    assert found["in"] == [1, None] and set(found) == {"w", "in"}


def test_ties_and_shared_objects_stay(tmp_path: Path, container: str) -> None:
    weight = torch.arange(6.0)
    shared = Config(held=weight)
    value = {"w": weight, "view": weight[2:4], "p": torch.nn.Parameter(weight), "one": shared, "two": shared}
    _, found = cleaned(save(value, tmp_path / "in.pt", container))
    assert found["one"] is found["two"]
    assert found["w"].data_ptr() == found["p"].data_ptr() == found["one"]["held"].data_ptr()
    found["w"][2] = 9
    assert found["view"][0] == 9 and type(found["p"]) is torch.nn.Parameter


def test_a_module_inside_keeps_the_versions_of_its_hooks(tmp_path: Path, container: str) -> None:
    model = torch.nn.Sequential(torch.nn.utils.spectral_norm(torch.nn.Linear(2, 2)))
    _, found = cleaned(save({"model": model, "epoch": 1}, tmp_path / "in.pt", container))
    assert found["model"]._metadata["0"]["spectral_norm"] == {"weight.version": 1}


def test_a_state_dict_keeps_its_order_and_metadata(tmp_path: Path, container: str) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    path = save({"m": model.state_dict(), "x": numpy.int64(1)}, tmp_path / "in.pt", container)
    _, found = cleaned(path)
    assert type(found["m"]) is OrderedDict and list(found["m"]) == list(model.state_dict())
    assert found["m"]._metadata == model.state_dict()._metadata  # type: ignore[attr-defined]


@pytest.fixture
def omegaconf(monkeypatch: pytest.MonkeyPatch) -> Iterator[types.ModuleType]:
    """Classes with the names and the state of omegaconf 2's, which is not installed."""
    modules = {name: types.ModuleType(name) for name in ("omegaconf", "omegaconf.dictconfig", "omegaconf.nodes")}
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    home = modules["omegaconf"]
    for name, place in (("DictConfig", "omegaconf.dictconfig"), ("AnyNode", "omegaconf.nodes")):
        made = type(name, (), {"__module__": place})
        setattr(modules[place], name, made)
        setattr(home, name, made)
    yield home


def test_an_omegaconf_becomes_what_it_holds(
    tmp_path: Path, container: str, omegaconf: types.ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, node = omegaconf.DictConfig(), omegaconf.AnyNode()
    node.__dict__.update(_val=0.1, _parent=config, _metadata=None)
    config.__dict__.update(_content={"lr": node, "name": "${model}"}, _parent=None, _flags_cache={})
    path = save({"hyper_parameters": config, "w": torch.ones(1)}, tmp_path / "in.pt", container)
    monkeypatch.undo()
    with pytest.raises(ModuleNotFoundError):
        torch.load(path, weights_only=False)
    result, found = cleaned(path)
    assert found["hyper_parameters"] == {"lr": 0.1, "name": "${model}"} and result.exit_code == 0
    assert result.lines[0].startswith("hyper_parameters: omegaconf.dictconfig.DictConfig -> dict")


def test_a_module_inside_gives_way_to_its_state_dict(tmp_path: Path, container: str) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU(), torch.nn.BatchNorm1d(3))
    result, found = cleaned(save({"model": model, "epoch": 1}, tmp_path / "in.pt", container))
    assert result.exit_code == 3 and result.dropped[0].where == "model"
    assert list(found["model"]) == list(model.state_dict())
    assert all(torch.equal(found["model"][name], value) for name, value in model.state_dict().items())
    torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU(), torch.nn.BatchNorm1d(3)).load_state_dict(found["model"])
    sanitize(save(model, tmp_path / "whole.pt", container), tmp_path / "x.pt")
    assert list(torch.load(tmp_path / "x.pt", weights_only=True)) == list(model.state_dict())


def test_only_the_weights(tmp_path: Path, container: str) -> None:
    value = {
        "model": {"fc.weight": torch.ones(2), "fc.bias": torch.zeros(2)},
        "optimizer": {"state": {0: {"m": torch.ones(9)}}, "param_groups": [{"lr": 0.1}]},
        "epoch": 3,
        "loss": torch.nn.functional.relu,
    }
    result, found = cleaned(save(value, tmp_path / "in.pt", container), keep_only="weights")
    assert result.exit_code == 0 and set(found) == {"model"} and set(found["model"]) == {"fc.weight", "fc.bias"}
    assert {loss.where for loss in result.dropped} == {"optimizer", "epoch", "loss"}
    with pytest.raises(Refused):
        sanitize(save({"a": 1}, tmp_path / "none.pt", container), tmp_path / "x.pt", keep_only="weights")


def test_a_clean_file_is_copied_byte_for_byte(tmp_path: Path, container: str) -> None:
    path = save({"w": torch.ones(2), "n": [1, (2.5, None, "x")]}, tmp_path / "in.pt", container)
    result, _ = cleaned(path)
    assert (tmp_path / "out.pt").read_bytes() == path.read_bytes() and "identical" in result.lines[0]
    again = sanitize(tmp_path / "out.pt", tmp_path / "again.pt")
    assert again.exit_code == 0 and not again.changes


def python2(*items: Op, container: str) -> bytes:
    """A file as Python 2 wrote it: byte strings, and a tensor under a key that is not ASCII."""
    tensor = Tensor("0", (2,), 2, legacy=container == "legacy")
    pickle = assemble(("PROTO", 2), "EMPTY_DICT", "MARK", *items, *push("w"), *tensor_ops(tensor), "SETITEMS", "STOP")
    data = bytes(8)
    return torch_zip(pickle, [data]) if container == "zip" else legacy(pickle, [("0", 2, data)])


@pytest.mark.parametrize(("encoding", "key"), [(None, "\xe9t\xe9"), ("latin-1", "\xe9t\xe9"), ("cp1251", "йtй")])
def test_strings_of_python_2(tmp_path: Path, container: str, encoding: str | None, key: str) -> None:
    raw = b"\xe9t\xe9"
    items: list[Op] = [("SHORT_BINSTRING", raw), *push(1), ("BINSTRING", b"long" * 100), ("STRING", "ascii")]
    path = written(tmp_path / "in.pt", python2(*items, container=container))
    refused(path, "codec can't decode|Unsupported operand|Weights only")
    result, found = cleaned(path, encoding=encoding)
    assert result.exit_code == 0 and found[key] == 1 and found["long" * 100] == "ascii" and set(found) >= {"w", key}


def test_an_unknown_encoding_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Unsupported):
        sanitize(save({}, tmp_path / "in.pt", "zip"), tmp_path / "x.pt", encoding="klingon")


def test_two_keys_never_become_one(tmp_path: Path, container: str) -> None:
    path = save({"a": 1, pathlib.PurePosixPath("a"): 2}, tmp_path / "in.pt", container)
    with pytest.raises(KeyConflict):
        sanitize(path, tmp_path / "out.pt")
    assert not (tmp_path / "out.pt").exists()


def test_an_object_that_holds_itself_is_cut_there(tmp_path: Path, container: str) -> None:
    config = Config()
    config.held = [config]
    around: list[Any] = []
    around.append(around)
    result, found = cleaned(save({"c": config, "l": around}, tmp_path / "in.pt", container))
    assert found["c"] == {"lr": 0.1, "held": [None]} and result.dropped[0].where == "c/held/0"
    assert found["l"][0] is found["l"]


FOO = b"c__main__\nFoo\n)\x81"


def laughing(holder: Op, closing: list[Op]) -> list[Op]:
    """200 levels, each of which holds the one below ten times."""
    ops: list[Op] = [holder]
    for index in range(1, 200):
        ops += [("BINPUT", index), holder, *closing[:-1], "MARK", *[("BINGET", index)] * 10, "APPENDS"]
        ops += closing[-1:]
    return ops


HOSTILE: dict[str, list[Op]] = {
    "lists": [*["EMPTY_LIST"] * 20_000, *["APPEND"] * 19_999],
    "tuples": ["NONE", *["TUPLE1"] * 20_000],
    "objects": [*[FOO] * 20_000, *["BUILD"] * 19_999],
    "laughs": laughing("EMPTY_LIST", []),
    "laughing objects": laughing(FOO, ["EMPTY_LIST", "BUILD"]),
}


@pytest.mark.sampled(2, test_all=10_000)
@pytest.mark.slow
@pytest.mark.parametrize("name", HOSTILE)
def test_depth_and_sharing_cost_what_the_file_does(name: str) -> None:
    graph = parse(assemble(("PROTO", 2), *HOSTILE[name], "STOP"))
    converter = Converter(ConversionSettings())
    assert converter.run(graph.root) is not None
    assert len(converter.done) <= 2 * len(graph.data) and len(converter.report.losses) <= len(graph.data)


def test_nothing_is_imported_or_called(tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    ops: list[Op] = ["EMPTY_DICT", "MARK", *push("a"), b"cos\nsystem\n", *push(f"touch {marker}"), "TUPLE1", "REDUCE"]
    ops += [*push("b"), b"cnowhere_at_all\nThing\n)\x81", "EMPTY_DICT", *push("x"), *push(1), "SETITEM", "BUILD"]
    ops += [*push("c"), b"csubprocess\nPopen\n", *push(f"touch {marker}"), "TUPLE1", "REDUCE", "SETITEMS"]
    path = written(tmp_path / "in.pt", torch_zip(assemble(("PROTO", 2), *ops, "STOP")))
    sanitize(path, tmp_path / "first.pt")
    with watched("import", "exec", "compile", "os.system", "subprocess", "pickle") as seen:
        result = sanitize(path, tmp_path / "out.pt")
    assert not seen and not marker.exists() and result.exit_code == 3
    assert torch.load(tmp_path / "out.pt", weights_only=True) == {"b": {"x": 1}}


def test_a_file_of_the_corpus_loads_afterwards(real_file: RealFile, tmp_path: Path) -> None:
    if real_file.container not in ("zip", "legacy"):
        pytest.skip("no torch pickle")
    out = tmp_path / "out.pt"
    try:
        result = ckptfix.sanitize(real_file.path, out)
    except Refused as error:
        assert "whole module" in error.message and "extract" in str(error.hint)
        return
    torch.load(out, weights_only=True, map_location="cpu")
    if any("_modules" in row.at.split("/") for row in ckptfix.open_checkpoint(real_file.path).state_dicts):
        ckptfix.extract(real_file.path, tmp_path / "extracted.pt")
        assert ckptfix.diff(out, tmp_path / "extracted.pt").same  # of a whole module, the state dict is written
        return
    before = {entry.name: entry for entry in ckptfix.open_checkpoint(real_file.path).entries}
    after = {entry.name: entry for entry in ckptfix.open_checkpoint(out).entries}
    assert set(before) <= set(after)
    if result.changes:
        told = ckptfix.diff(real_file.path, out)
        assert not told.only_a and not told.changed and not told.sharing
    else:
        assert out.read_bytes() == real_file.path.read_bytes()


@pytest.mark.parametrize(("version", "rebuilt"), [
    ("1.5", {"_rebuild_tensor_v2", "_rebuild_parameter"}),
    ("2.0", {"_rebuild_tensor_v2", "_rebuild_parameter", "_rebuild_parameter_with_state"}),
])  # fmt: skip
def test_an_old_torch_gets_calls_that_it_knows(
    tmp_path: Path, container: str, version: str, rebuilt: set[str]
) -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    tagged = torch.nn.Parameter(torch.zeros(2))
    tagged.note = "x"  # type: ignore[attr-defined]
    value: dict[str, Any] = {"w": torch.arange(4.0), "p": parameter, "t": tagged, "n": numpy.int64(3)}
    path = save(value, tmp_path / "in.pt", container)
    result, found = cleaned(path, torch=version)
    assert result.format == ("legacy" if version < "1.6" else container)
    assert all(torch.equal(found[name], value[name]) for name in ("w", "p", "t")) and found["n"] == 3
    graph = pickled_object(ckptfix.open_checkpoint(tmp_path / "out.pt")).graph
    assert {node.name for node in graph.globals if node.name.startswith("_rebuild")} == rebuilt
    assert result.exit_code == (0 if version >= "2.0" else 3)


@pytest.mark.parametrize(("dtype", "version"), [
    (torch.complex64, "1.5"), (torch.uint16, "2.2"), (torch.float8_e5m2, "2.0"),
])  # fmt: skip
def test_a_dtype_that_the_version_lacks_is_refused_by_name(tmp_path: Path, dtype: torch.dtype, version: str) -> None:
    path = save({"model": {"w": torch.ones(2).to(dtype)}}, tmp_path / "in.pt", "zip")
    with pytest.raises(Unsupported) as caught:
        sanitize(path, tmp_path / "out.pt", torch=version)
    assert caught.value.where is not None and caught.value.where.startswith("model/w")
    assert str(dtype).removeprefix("torch.") in caught.value.message


def test_tensors_are_moved_and_not_loaded(tmp_path: Path) -> None:
    path = save({"w": torch.zeros(1 << 20), "n": numpy.int64(1)}, tmp_path / "in.pt", "zip")
    result = sanitize(path, tmp_path / "out.pt")
    assert sum(len(segment) for segment in result.plan.files[0].segments if isinstance(segment, bytes)) < 3000


def test_a_state_dict_of_a_foreign_mapping_stays_one(tmp_path: Path) -> None:
    ops = [("GLOBAL", "gone", "StateDict"), "EMPTY_TUPLE", "NEWOBJ", "MARK", *push("fc.weight")]
    ops += [*tensor_ops(Tensor("0", (2,), 2)), "SETITEMS", "EMPTY_DICT", *push("_metadata"), *push({"": 1}), "SETITEM"]
    path = written(tmp_path / "in.pt", torch_zip(assemble(("PROTO", 2), *ops, "BUILD", "STOP"), [bytes(8)]))
    _, found = cleaned(path)
    assert type(found) is OrderedDict and found._metadata == {"": 1}  # type: ignore[attr-defined]
    assert list(found) == ["fc.weight"]


def test_a_safetensors_file_has_nothing_to_sanitize(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file({"w": torch.ones(2)}, tmp_path / "in.safetensors")
    result = sanitize(tmp_path / "in.safetensors", tmp_path / "out.safetensors")
    assert "nothing to do" in result.lines[0] and result.exit_code == 0
    assert (tmp_path / "out.safetensors").read_bytes() == (tmp_path / "in.safetensors").read_bytes()
    with pytest.raises(Unsupported, match="nothing to sanitize"):
        sanitize(tmp_path / "in.safetensors", tmp_path / "other.safetensors", torch="1.5")


def test_state_dict_ops_are_what_this_file_thinks() -> None:
    pickle = assemble(("PROTO", 2), *state_dict_ops({"w": Tensor("0", (2,), 2)}), "STOP")
    made = Converter(ConversionSettings()).run(parse(pickle).root)
    assert isinstance(made, (Call, Dict)) and made.items is not None and made.items[0][0] == "w"


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("ordered", [False, True])
def test_keep_only_weights_of_a_model_at_the_root(tmp_path: Path, container: str, flat: bool, ordered: bool) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    state = model.state_dict() if ordered else dict(model.state_dict())
    own = dict(state)
    rows = {f"optimizer.state.{kind}.{name}": torch.ones(4, 4) for kind in ("exp_avg", "exp_avg_sq") for name in own}
    nested = {"state": {0: {"exp_avg": own["0.weight"]}}, "param_groups": [{"lr": 0.1, "params": [0]}]}
    state.update(rows if flat else {"optimizer": nested})
    state["epoch"] = 3
    result, found = cleaned(save(state, tmp_path / "in.pt", container), keep_only="weights")
    assert result.exit_code == 0 and set(found) == set(own)
    assert all(torch.equal(found[name], tensor) for name, tensor in own.items())
    assert getattr(found, "_metadata", None) == getattr(state, "_metadata", None)


def test_a_tensor_outside_the_weights_is_left_out(tmp_path: Path, container: str) -> None:
    weight = torch.ones(2)
    value = {"seen": torch.zeros(3), "first": [weight], "model": {"fc.weight": weight, "fc.bias": torch.zeros(2)}}
    _, found = cleaned(save(value, tmp_path / "in.pt", container), keep_only="weights")
    assert set(found["model"]) == {"fc.weight", "fc.bias"} and "seen" not in found
