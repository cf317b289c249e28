"""Whole pickled modules whose code is gone: the extracted state dict is the living module's own."""

from __future__ import annotations

import importlib
import io
import shutil
import struct
import sys
import types
import warnings
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gone_models
import pytest
import torch
from architectures import clip, convnext, gpt, llama, lstm, mobilenet, resnet, transformer, unet, vgg, vit
from builders import Tensor, assemble, push, tensor_ops, torch_zip, written
from compare import assert_same
from safetensors.torch import load_file
from torch import nn
from watch import watched

import ckptfix
from ckptfix import errors
from ckptfix.formats.torch import module as torch_module
from ckptfix.pickles import Call, Dict, Global, Text

HOUSES: tuple[types.ModuleType, ...] = (
    *(vgg, resnet, mobilenet, unet, convnext, gpt, llama, clip, vit, transformer, lstm),
)


@contextmanager
def source_of(folder: Path) -> Iterator[types.ModuleType]:
    """The models, in a module of their own that is nowhere afterwards: no file, no module."""
    name = "ckptfix_tests_gone_models"
    path = folder / f"{name}.py"
    shutil.copy(gone_models.__file__, path)
    sys.path.insert(0, str(folder))
    try:
        yield importlib.import_module(name)
    finally:
        sys.path.remove(str(folder))
        del sys.modules[name]
        path.unlink()
        shutil.rmtree(folder / "__pycache__", ignore_errors=True)
        importlib.invalidate_caches()


def saved(folder: Path, which: str, container: str, **how: Any) -> tuple[Path, Any]:
    """A whole module in a file, and the state dict that it had while it lived."""
    path = folder / "whole.pth"
    with warnings.catch_warnings(), source_of(folder) as source:
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        model = source.MODELS[which]()
        if which == "lazy":
            model(torch.ones(2, 4))
        if which != "strided":
            source.fill(model)
        torch.save(model, path, _use_new_zipfile_serialization=container == "zip", **how)
        return path, model.state_dict()


def reread(state: Any) -> Any:
    """A state dict after torch.save and torch.load: what the extracted file must load as."""
    stream = io.BytesIO()
    torch.save(state, stream)
    stream.seek(0)
    return torch.load(stream, weights_only=True)


@pytest.mark.slow
@pytest.mark.parametrize("container", ["zip", "legacy"])
@pytest.mark.parametrize("which", list(gone_models.MODELS))
def test_the_state_dict_of_a_module_whose_code_is_gone(tmp_path: Path, which: str, container: str) -> None:
    path, wanted = saved(tmp_path, which, container)
    result = ckptfix.extract(path, tmp_path / "out.pth")
    assert result.exit_code == 0 and result.tensors == len(wanted)
    found = torch.load(tmp_path / "out.pth", weights_only=True)
    # Order, values, dtypes, strides, offsets, ties and _metadata are compared.
    assert_same(reread(wanted), found)
    assert dict(found._metadata) == dict(wanted._metadata)


@pytest.mark.parametrize("which", ["tied", "buffers", "containers"])
@pytest.mark.parametrize("to", ["legacy", "safetensors"])
def test_other_formats_hold_the_same(tmp_path: Path, which: str, to: Any) -> None:
    path, wanted = saved(tmp_path, which, "zip")
    ckptfix.extract(path, tmp_path / "out", to=to)
    if to == "legacy":
        assert_same(reread(wanted), torch.load(tmp_path / "out", weights_only=True))
        return
    found = load_file(tmp_path / "out")
    loaded = ckptfix.load_state_dict(tmp_path / "out")
    assert list(loaded) == list(wanted) and set(found) <= set(wanted)
    assert all(torch.equal(loaded[name], tensor) for name, tensor in wanted.items())


@pytest.mark.sampled(quick=2)
@pytest.mark.parametrize("protocol", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("container", ["zip", "legacy"])
def test_every_protocol(tmp_path: Path, protocol: int, container: str) -> None:
    path, wanted = saved(tmp_path, "tied", container, pickle_protocol=protocol)
    ckptfix.extract(path, tmp_path / "out.pth")
    assert_same(reread(wanted), torch.load(tmp_path / "out.pth", weights_only=True))


def test_it_loads_strictly_into_a_fresh_model(tmp_path: Path) -> None:
    for which in ("tied", "buffers", "lstm", "encoder", "containers"):
        path, wanted = saved(tmp_path, which, "zip")
        ckptfix.extract(path, tmp_path / "out.pth", force=True)
        fresh = gone_models.MODELS[which]()
        fresh.load_state_dict(torch.load(tmp_path / "out.pth", weights_only=True), strict=True)
        assert all(torch.equal(tensor, wanted[name]) for name, tensor in fresh.state_dict().items())


@pytest.mark.sampled(0, test_all=1)
@pytest.mark.slow
def test_architectures_in_two_styles_each(tmp_path: Path) -> None:
    styles = [(house.__name__, style) for house in HOUSES for family in _families(house) for style in family.styles[:2]]
    assert len(styles) > 20 and len({house for house, _ in styles}) >= 10
    for number, (_, style) in enumerate(styles):
        torch.manual_seed(number)
        model = style.build(1)
        torch.save(model, tmp_path / "whole.pth", _use_new_zipfile_serialization=bool(number % 2))
        ckptfix.extract(tmp_path / "whole.pth", tmp_path / "out.pth", force=True)
        found = torch.load(tmp_path / "out.pth", weights_only=True)
        wanted = model.state_dict()
        assert_same(reread(wanted), found)
        assert dict(found._metadata) == dict(wanted._metadata), style.name


def _families(house: types.ModuleType) -> list[Any]:
    from architectures.family import Family

    found = [value for value in vars(house).values() if isinstance(value, Family)]
    return found or [row for value in vars(house).values() if isinstance(value, tuple | list) for row in value
                     if isinstance(row, Family)]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("which", ["tied", "buffers", "containers", "compiled", "traced by fx"])
def test_load_into_reads_the_same(tmp_path: Path, which: str) -> None:
    path, wanted = saved(tmp_path, which, "zip")
    fresh = gone_models.MODELS[which]()
    report = ckptfix.load_into(fresh, path)
    found = fresh.state_dict()
    assert list(found) == list(wanted) and report.path == str(path)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_a_big_endian_module_to_every_format(tmp_path: Path) -> None:
    tensor = tensor_ops(Tensor("0", (3,), 3))
    parts = [*push("_parameters"), "EMPTY_DICT", *push("w"), *tensor, "SETITEM"]
    parts += [*push("_buffers"), "EMPTY_DICT", *push("_modules"), "EMPTY_DICT"]
    root = [("GLOBAL", "a", "B"), "EMPTY_TUPLE", "NEWOBJ", "EMPTY_DICT", "MARK", *parts, "SETITEMS", "BUILD"]
    pickle = assemble(("PROTO", 2), *root, "STOP")
    path = written(tmp_path / "big.pth", torch_zip(pickle, [struct.pack(">3f", 1, 2, 3)], byteorder="big"))
    for to in ("zip", "legacy", "safetensors"):
        ckptfix.extract(path, tmp_path / "out", to=to, force=True)
        found = load_file(tmp_path / "out") if to == "safetensors" else torch.load(tmp_path / "out", weights_only=True)
        assert found["w"].tolist() == [1, 2, 3]


def test_class_sources_in_old_legacy_files(tmp_path: Path) -> None:
    """torch before 1.6 pickled a class as a persistent id with its source text."""
    parts = {"training": True, "_parameters": {}, "_buffers": {}, "_modules": {}}
    pid = [*push("module"), ("GLOBAL", "lost", "Net"), *push("lost.py"), *push("class Net: 1/0"), "TUPLE", "BINPERSID"]
    state: list[Any] = ["EMPTY_DICT", "MARK"]
    for name, value in parts.items():
        state += [*push(name), *(["NEWTRUE"] if value is True else ["EMPTY_DICT"])]
    root = ["MARK", *pid, "EMPTY_TUPLE", "NEWOBJ", *state, "SETITEMS", "BUILD"]
    graph = ckptfix.open_checkpoint(written(tmp_path / "a.pth", torch_zip(assemble(("PROTO", 2), *root, "STOP"), [])))
    ((at, node),) = torch_module.modules(graph)
    module = torch_module.read_module(node)
    assert (at, module.cls, module.tensors) == ("", "lost.Net", ())


def test_nothing_is_imported_and_nothing_is_run(tmp_path: Path) -> None:
    path, _ = saved(tmp_path, "tied", "zip")
    known = set(sys.modules)
    # What ckptfix itself imports late is imported by now.
    ckptfix.extract(path, tmp_path / "first.pth")
    with watched("import", "exec", "compile", "pickle.find_class", "subprocess.Popen", "os.system") as events:
        ckptfix.extract(path, tmp_path / "out.pth")
    seen = [f"{event} {arguments[0]!r:.60}" for event, arguments in events]
    assert not [row for row in seen if "pickle" in row or "gone" in row or "exec" in row or "compile" in row], seen
    assert not any("gone_models" in name for name in set(sys.modules) - known)


def test_what_pickles_itself_is_named_and_the_rest_is_taken(tmp_path: Path) -> None:
    with source_of(tmp_path) as source:
        torch.save(source.WithSecret(), tmp_path / "whole.pth")
    result = ckptfix.extract(tmp_path / "whole.pth", tmp_path / "out.pth")
    assert result.exit_code == 3
    (finding,) = [row for row in result.findings if row.id == "not-taken"]
    assert finding.where == "inner" and "Secret" in finding.message
    with zipfile.ZipFile(tmp_path / "whole.pth") as archive:
        pickle = archive.read("whole/data.pkl")
    assert finding.offset is not None and chr(pickle[finding.offset]) in "R\x81", "the opcode that makes it"
    assert list(torch.load(tmp_path / "out.pth")) == ["first.weight", "first.bias"]


def test_packed_weights_are_named(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = nn.Sequential(nn.Linear(2, 2), nn.Conv1d(1, 2, 2))
        packed = torch.ao.quantization.quantize_dynamic(model, {nn.Linear})  # type: ignore[no-untyped-call]
        torch.save(packed, tmp_path / "whole.pth")
    result = ckptfix.extract(tmp_path / "whole.pth", tmp_path / "out.pth")
    assert result.exit_code == 3
    assert {row.where for row in result.findings if row.id == "not-taken"} == {"0", "0._packed_params"}
    assert list(torch.load(tmp_path / "out.pth")) == ["1.weight", "1.bias"]


def test_tensors_of_every_kind_are_written_again(tmp_path: Path) -> None:
    model = nn.Module()
    model.register_buffer("quantized", torch.quantize_per_tensor(torch.rand(2, 3), 0.5, 1, torch.qint8))
    scales = torch.tensor([0.5, 0.25])
    channels = torch.quantize_per_channel(torch.rand(2, 3), scales, torch.zeros(2), 0, torch.quint8)
    model.register_buffer("channels", channels)
    model.register_buffer("sparse", torch.eye(3).to_sparse())
    model.register_buffer("rows", torch.eye(3).to_sparse_csr())
    model.register_buffer("conjugate", torch.rand(2, dtype=torch.complex64).conj())
    model.register_parameter("weight", nn.Parameter(torch.rand(2)))
    for container in (True, False):
        torch.save(model, tmp_path / "whole.pth", _use_new_zipfile_serialization=container)
        for to in ("zip", "legacy"):
            ckptfix.extract(tmp_path / "whole.pth", tmp_path / "out.pth", to=to, force=True)
            found = torch.load(tmp_path / "out.pth", weights_only=True)
            assert_same(reread(model.state_dict()), found)
    with pytest.raises(errors.WouldLoseData, match="4 of 6"):
        ckptfix.extract(tmp_path / "whole.pth", tmp_path / "out.safetensors")
    result = ckptfix.extract(tmp_path / "whole.pth", tmp_path / "out.safetensors", drop_unsupported=True)
    assert result.exit_code == 3 and len(result.lost) == 4
    found = load_file(tmp_path / "out.safetensors")
    assert set(found) == {"weight", "conjugate"}
    assert torch.equal(found["conjugate"], model.state_dict()["conjugate"].resolve_conj())


ROWS: dict[str, tuple[str, Any]] = {
    "8": ("No module named", ModuleNotFoundError),
    "9": ("Can't get attribute 'Net' on|has no attribute 'Net'", AttributeError),
    "10": ("'GELU' object has no attribute 'approximate'", AttributeError),
    "44": ("has no attribute 'eval'|Expected state_dict to be dict-like", (AttributeError, TypeError)),
    "55": ("TorchScript archive|torch.jit.load", RuntimeError),
}
"""Row of the catalogue of errors -> what torch says, and as what."""


@pytest.mark.parametrize("row", ["8", "9", "10", "44", "55"])
def test_rows_of_the_catalogue_fail_in_torch_and_load_when_extracted(tmp_path: Path, row: str) -> None:
    path = tmp_path / "bad.pth"
    message, kind = ROWS[row]
    fresh: nn.Module = nn.Sequential(nn.Linear(2, 3), nn.GELU())
    wanted = {name: tensor.clone() for name, tensor in fresh.state_dict().items()}
    with pytest.raises(kind, match=message), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _fail(row, path, fresh)
    ckptfix.extract(path, tmp_path / "out.pth")
    with torch.no_grad():
        fresh[0].weight.zero_()  # type: ignore[index]
    fresh.load_state_dict(torch.load(tmp_path / "out.pth", weights_only=True), strict=True)
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in fresh.state_dict().items())


def _fail(row: str, path: Path, model: nn.Module) -> None:
    """Make the file of a row, and use it as users do."""
    if row == "10":
        # As Upsample of before 1.5, whose missing attribute torch 2 fills in by now; GELU of before 1.12 is left.
        del model[1].__dict__["approximate"]  # type: ignore[index]
        torch.save(model, path)
        model[1].approximate = "none"  # type: ignore[index]
        torch.load(path, weights_only=False)(torch.ones(1, 2))
    elif row == "55":
        torch.jit.script(model).save(path)  # type: ignore[no-untyped-call]
        torch.load(path)
    elif row == "44":
        torch.save(model, path)
        loaded = torch.load(path, weights_only=False)
        nn.Sequential(nn.Linear(2, 3)).load_state_dict(loaded)
    else:
        house = types.ModuleType("models_of_row")
        exec("from torch import nn\nclass Net(nn.Sequential):\n    pass\n", house.__dict__)
        sys.modules["models_of_row"] = house
        try:
            torch.save(house.Net(*model.children()), path)
            if row == "9":
                del house.Net
                torch.load(path, weights_only=False)
        finally:
            del sys.modules["models_of_row"]
        torch.load(path, weights_only=False)


def _module(**parts: Any) -> Call:
    """A pickled module of these parts."""
    node = Call(Global("lost", "Net", 0), (), "NEWOBJ", 7)
    node.state = Dict()
    node.state.items = [(Text(name), value) for name, value in parts.items()]
    return node


def _dict(**items: Any) -> Dict:
    made = Dict()
    made.items = [(Text(name), value) for name, value in items.items()]
    return made


def _cycle() -> Call:
    node = _module(_parameters=_dict(), _buffers=_dict())
    assert isinstance(node.state, Dict)
    node.state.items.append((Text("_modules"), _dict(again=node)))
    return node


def _deep(levels: int) -> Call:
    node = _module(_parameters=_dict(), _buffers=_dict(), _modules=_dict())
    for _ in range(levels):
        node = _module(_parameters=_dict(), _buffers=_dict(), _modules=_dict(inner=node))
    return node


def _doubling(levels: int) -> Call:
    node = _module(_parameters=_dict(), _buffers=_dict(), _modules=_dict())
    for _ in range(levels):
        node = _module(_parameters=_dict(), _buffers=_dict(), _modules=_dict(left=node, right=node))
    return node


def _tensor() -> Call:
    return Call(Global("torch._utils", "_rebuild_tensor_v2", 0), (), "REDUCE", 3)


def _collision() -> Call:
    inner = _module(_parameters=_dict(b=_tensor()), _buffers=_dict(), _modules=_dict())
    return _module(_parameters=_dict(**{"a.b": _tensor()}), _buffers=_dict(), _modules=_dict(a=inner))


HOSTILE: dict[str, tuple[Any, type[errors.CkptfixError], str]] = {
    "cycle": (_cycle, errors.BadPickle, "contains itself"),
    "modules a list": (lambda: _module(_parameters=_dict(), _modules=[1]), errors.BadPickle, "is not a mapping"),
    "modules an int": (lambda: _module(_parameters=_dict(), _modules=4), errors.BadPickle, "_modules is not a mapping"),
    "a parameter that is text": (
        lambda: _module(_parameters=_dict(w="x"), _modules=_dict()), errors.BadPickle, "not a tensor but str",
    ),
    "a buffer that is a call": (
        lambda: _module(_parameters=_dict(), _buffers=_dict(w=Call(Global("os", "system", 0), ("x",), "REDUCE", 0))),
        errors.BadPickle, "not a tensor but os.system",
    ),
    "a module that is a number": (lambda: _module(_parameters=_dict(), _modules=_dict(a=5)), errors.BadPickle, "int"),
    "1,002 deep": (lambda: _deep(1_002), errors.Unsupported, "1,000 deep"),
    "two to the 40th": (lambda: _doubling(40), errors.Unsupported, "never end"),
    "one name twice": (_collision, errors.KeyConflict, "two tensors"),
}  # fmt: skip


@pytest.mark.sampled(3, test_all=10_000)
@pytest.mark.slow
@pytest.mark.parametrize("case", list(HOSTILE))
def test_hostile_modules_give_one_error(case: str) -> None:
    make, kind, words = HOSTILE[case]
    with pytest.raises(kind, match=words):
        torch_module.read_module(make())


def test_dtypes_that_torch_loads_from_no_legacy_file(tmp_path: Path) -> None:
    model = nn.Module()
    model.register_buffer("small", torch.rand(2).to(torch.float8_e5m2))
    torch.save(model, tmp_path / "whole.pth")
    ckptfix.extract(tmp_path / "whole.pth", tmp_path / "out.pth")
    assert_same(reread(model.state_dict()), torch.load(tmp_path / "out.pth", weights_only=True))
    with pytest.raises(errors.WouldLoseData, match="legacy"):
        ckptfix.extract(tmp_path / "whole.pth", tmp_path / "old.pth", to="legacy")


@pytest.mark.sampled(0, test_all=1)
@pytest.mark.slow
def test_a_file_of_modules_100_000_deep(tmp_path: Path) -> None:
    empty = [*push("_parameters"), "EMPTY_DICT", *push("_buffers"), "EMPTY_DICT", *push("_modules")]
    begin = [("GLOBAL", "a", "B"), "EMPTY_TUPLE", "NEWOBJ", "EMPTY_DICT", "MARK", *empty, "EMPTY_DICT", *push("m")]
    ops = [("PROTO", 2), *begin * 100_000, "EMPTY_DICT", *["SETITEM", "SETITEMS", "BUILD"] * 100_000, "STOP"]
    path = written(tmp_path / "deep.pth", torch_zip(assemble(*ops), []))
    with pytest.raises(errors.Unsupported, match="1,000 deep"):
        ckptfix.extract(path, tmp_path / "out.pth")


def test_a_hostile_file_gives_one_error(tmp_path: Path) -> None:
    parts = [*push("_parameters"), "EMPTY_DICT", *push("w"), *push(4), "SETITEM", *push("_modules"), "EMPTY_DICT"]
    root = [("GLOBAL", "a", "B"), "EMPTY_TUPLE", "NEWOBJ", "EMPTY_DICT", "MARK", *parts, "SETITEMS", "BUILD"]
    path = written(tmp_path / "a.pth", torch_zip(assemble(("PROTO", 2), *root, "STOP"), []))
    with pytest.raises(errors.BadPickle) as caught:
        ckptfix.extract(path, tmp_path / "out.pth")
    assert caught.value.path == str(path) and caught.value.where == "w" and not (tmp_path / "out.pth").exists()


def test_a_storage_among_the_tensors_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "in.pt"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        storage = torch.ones(2).storage()  # type: ignore[no-untyped-call]
        torch.save({"fc.weight": torch.ones(2, 2), "fc.bias": storage}, path)
    with pytest.raises(errors.WouldLoseData, match="a bare storage"):
        ckptfix.extract(path, tmp_path / "out.pth")
