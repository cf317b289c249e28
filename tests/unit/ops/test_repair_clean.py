"""Repair makes a file loadable, so that it must not make a hostile one loadable: what runs code is never in OUT."""

from __future__ import annotations

import pickletools
import zipfile
from pathlib import Path
from typing import Any

import hidden
import pytest
import torch
from builders import Tensor, assemble, legacy, push, replace, state_dict_ops, tensor_ops, torch_zip, written
from unit.ops.test_hidden_globals import HOW, NAME, dangers

import ckptfix
from ckptfix.errors import CkptfixError
from ckptfix.io.read import read_chunks
from ckptfix.ops.doctor import examine as doctor


def globals_in(path: Path) -> set[str]:
    """Every global that any record of a file names, read by another program than ours."""
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            streams = [archive.read(name) for name in archive.namelist() if not name.startswith("archive/data/")]
    else:
        streams = [path.read_bytes()]
    found: set[str] = set()
    for data in streams:
        found |= {str(arg) for code, arg, _ in _opcodes(data) if code.name in ("GLOBAL", "INST")}
        found |= {"STACK_GLOBAL" for code, _, _ in _opcodes(data) if code.name == "STACK_GLOBAL"}
        assert b"posix" not in data
    return found


def _opcodes(data: bytes) -> Any:
    try:
        yield from pickletools.genops(data)
    except ValueError:
        return


@pytest.mark.slow
@pytest.mark.sampled(40)
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("layer", [*hidden.LAYERS, "folder"])
def test_what_runs_code_is_left_out_and_named(layer: str, how: str, tmp_path: Path) -> None:
    path = hidden.wrapped(tmp_path, layer, how)
    done = ckptfix.repair(path, tmp_path / "out.pth")
    assert done.exit_code == 3
    assert done.kept == ("w",)
    assert NAME[how] in "\n".join(row.message for row in done.findings)
    assert not {"posix system", "builtins eval", "builtins getattr", "STACK_GLOBAL"} & globals_in(tmp_path / "out.pth")
    assert not dangers(doctor.examine(tmp_path / "out.pth"))
    with torch.serialization.safe_globals([__import__("argparse").Namespace]):
        loaded = torch.load(tmp_path / "out.pth", weights_only=True)
    assert loaded["w"].tolist() == [1, 2]


@pytest.mark.parametrize("layer", [*hidden.LAYERS, "folder"])
def test_a_harmless_one_is_repaired_as_ever(layer: str, tmp_path: Path) -> None:
    done = ckptfix.repair(hidden.wrapped(tmp_path, layer, ""), tmp_path / "out.pth")
    assert (done.exit_code, done.kept) == (0, ("w",))
    assert torch.load(tmp_path / "out.pth")["w"].tolist() == [1, 2]


@pytest.mark.sampled(40)
@pytest.mark.parametrize("how", ["", *HOW])
@pytest.mark.parametrize("layer", [*hidden.LAYERS, "folder"])
def test_a_file_without_a_tensor_is_refused_and_nothing_is_written(layer: str, how: str, tmp_path: Path) -> None:
    path = hidden.wrapped(tmp_path, layer, how, tensor=False)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(CkptfixError, match=r"without tensors|no tensor"):
        ckptfix.repair(path, tmp_path / "out.pth")
    assert sorted(tmp_path.iterdir()) == before


def saved(tmp_path: Path, items: dict[str, Any], *after: Any) -> Path:
    return written(tmp_path / "in.pth", torch_zip(hidden.pickle_of(items, *after), [hidden.DATA]))


def test_a_call_whose_value_is_thrown_away_goes_too(tmp_path: Path) -> None:
    pickle = assemble(("PROTO", 2), *hidden.SYSTEM, "POP", *state_dict_ops({"w": hidden.WEIGHT}), "STOP")
    done = ckptfix.repair(written(tmp_path / "in.pth", torch_zip(pickle, [hidden.DATA])), tmp_path / "out.pth")
    assert done.exit_code == 3 and "posix.system" in done.findings[0].message
    assert "posix system" not in globals_in(tmp_path / "out.pth")


def test_a_tensor_that_such_a_call_holds_is_lost_and_named(tmp_path: Path) -> None:
    call = [("GLOBAL", "posix", "system"), *tensor_ops(hidden.WEIGHT), "TUPLE1", "REDUCE"]
    path = saved(tmp_path, {"w": hidden.WEIGHT, "x": call})
    before = ckptfix.inspect(path)
    assert len(before.entries) == 2
    done = ckptfix.repair(path, tmp_path / "out.pth")
    assert done.exit_code == 3
    assert [loss.name for loss in done.losses] == [before.entries[1].name]
    assert done.kept == ("w",)


def test_the_functions_a_namespace_holds_go_and_the_namespace_stays(tmp_path: Path) -> None:
    space = [*hidden.NAMESPACE, "EMPTY_DICT", "MARK", *push("lr"), *push(1), *push("bad"), *hidden.SYSTEM, "SETITEMS"]
    done = ckptfix.repair(saved(tmp_path, {"w": hidden.WEIGHT, "args": [*space, "BUILD"]}), tmp_path / "out.pth")
    assert done.exit_code == 3
    with torch.serialization.safe_globals([__import__("argparse").Namespace]):
        assert vars(torch.load(tmp_path / "out.pth")["args"]) == {"lr": 1}


def test_what_a_user_saved_stays_as_it_was(tmp_path: Path) -> None:
    """An honest training checkpoint: repair gives back what was saved; sanitize is what takes it out."""
    space = [*hidden.NAMESPACE, "EMPTY_DICT", *push("lr"), *push(1), "SETITEM", "BUILD"]
    path = saved(tmp_path, {"w": hidden.WEIGHT, "args": space})
    path.write_bytes(path.read_bytes()[:-40])
    done = ckptfix.repair(path, tmp_path / "out.pth")
    assert done.exit_code == 0
    assert "argparse Namespace" in globals_in(tmp_path / "out.pth")


@pytest.mark.parametrize("how", [how for how in HOW if how != hidden.SIBLING])
def test_a_legacy_file_too(how: str, tmp_path: Path) -> None:
    items = {"w": replace(hidden.WEIGHT, legacy=True), "x": list(hidden.PAYLOADS[how][1])}
    data = legacy(hidden.pickle_of(items), [("0", 2, hidden.DATA)])
    done = ckptfix.repair(written(tmp_path / "in.pth", b"junk" + data), tmp_path / "out.pth")
    assert done.exit_code == 3 and done.kept == ("w",)
    assert b"posix" not in (tmp_path / "out.pth").read_bytes()
    assert not dangers(doctor.examine(tmp_path / "out.pth"))


@pytest.mark.parametrize("layer", ["gzip", "bzip2", "xz", "tar", "zip-in-zip", "gzip-of-zip"])
def test_the_plan_of_a_dry_run_can_be_read_and_then_leaves_nothing(layer: str, tmp_path: Path) -> None:
    path = hidden.wrapped(tmp_path, layer, "")
    done = ckptfix.repair(path, tmp_path / "out.pth", dry_run=True)
    assert done.plan is not None
    (file,) = done.plan.files
    data = b"".join(
        piece if isinstance(piece, bytes) else b"".join(read_chunks(piece)) for piece in file.segments
    )
    assert len(data) == file.nbytes
    assert torch.load(written(tmp_path / "again.pth", data))["w"].tolist() == [1, 2]
    del done, file
    assert sorted(row.name for row in tmp_path.iterdir()) == ["again.pth", "model.pth"]


def test_what_is_written_leaves_no_folder_even_while_its_result_lives(tmp_path: Path) -> None:
    done = ckptfix.repair(hidden.wrapped(tmp_path, "gzip", ""), tmp_path / "out.pth")
    assert done.written
    assert sorted(row.name for row in tmp_path.iterdir()) == ["model.pth", "out.pth"]


def test_a_tensor_whose_value_in_a_mapping_runs_code_is_named(tmp_path: Path) -> None:
    run = assemble(*push("true"), "TUPLE1", "REDUCE")
    rows = [*tensor_ops(Tensor("1", (2,), 2)), b"cposix\nsystem\n" + run]
    pickle = assemble(("PROTO", 2), "EMPTY_DICT", "MARK", *push("w"), *tensor_ops(Tensor("0", (2,), 2)), *rows,
                      "SETITEMS", "STOP")  # fmt: skip
    path, out = tmp_path / "in.pth", tmp_path / "out.pth"
    path.write_bytes(torch_zip(pickle, [bytes(8), bytes(8)]))
    result = ckptfix.repair(path, out)
    assert result.exit_code == 3
    assert [loss.name for loss in result.losses] == ["()key"]
    assert result.account is None or not result.account.lost
    assert b"posix" not in out.read_bytes()


def test_a_tensor_whose_value_in_a_mapping_is_no_tensor_is_named(tmp_path: Path) -> None:
    broken = [("GLOBAL", "torch._utils", "_rebuild_tensor_v2"), *push("no arguments"), "REDUCE"]
    rows = [*tensor_ops(Tensor("0", (2,), 2)), *broken, *push("b"), *tensor_ops(Tensor("1", (2,), 2))]
    pickle = assemble(("PROTO", 2), "EMPTY_DICT", "MARK", *rows, "SETITEMS", "STOP")
    path, out = tmp_path / "in.pth", tmp_path / "out.pth"
    path.write_bytes(torch_zip(pickle, [bytes(8), bytes(8)]))
    result = ckptfix.repair(path, out)
    assert sorted(loss.name for loss in result.losses) == ["()key", "<Call>"]
    assert (result.exit_code, result.kept) == (3, ("b",))
    assert result.account is None or not result.account.lost


class Quantized:
    """A call of `_rebuild_qtensor` with these parameters of a quantizer."""

    def __init__(self, *quantizer: object) -> None:
        self.quantizer = quantizer

    def __reduce__(self) -> tuple[Any, ...]:
        storage = torch.storage.TypedStorage(2, dtype=torch.qint8, device="cpu")  # type: ignore[no-untyped-call]
        return torch._utils._rebuild_qtensor, (storage, 0, (2,), (1,), self.quantizer, False, {})


@pytest.mark.parametrize(
    "quantizer",
    [
        (torch.per_tensor_affine,),
        (torch.per_tensor_affine, 0.5, 1, 2),
        (torch.per_tensor_affine, "0.5", 1),
        (torch.per_channel_affine, torch.ones(2), torch.zeros(2)),
        ("per_tensor_affine", 0.5, 1),
        (torch.nn.Linear, 0.5, 1),
    ],
)
@pytest.mark.parametrize("zipped", [True, False])
def test_a_tensor_whose_quantizer_no_torch_can_make_is_lost_and_named(
    quantizer: tuple[object, ...], zipped: bool, tmp_path: Path
) -> None:
    path, out = tmp_path / "in.pth", tmp_path / "out.pth"
    torch.save({"fc.weight": torch.ones(2), "x": Quantized(*quantizer)}, path, _use_new_zipfile_serialization=zipped)
    assert "bad-tensor" in {finding.id for finding in doctor.examine(path).findings}
    result = ckptfix.repair(path, out)
    assert ([loss.name for loss in result.losses], result.exit_code) == (["x"], 3)
    assert set(torch.load(out)) == {"fc.weight"}
    assert "bad-tensor" not in {finding.id for finding in doctor.examine(out).findings}
