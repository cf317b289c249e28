"""Nothing that runs code is in what sanitize, extract and repair write, wherever it was: generated places for it.

Other classes are in no output of sanitize, and in one of extract only where its findings name them; repair gives back
what was saved, and keeps them.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from builders import Tensor, assemble, push, state_dict_ops, torch_zip, written
from conftest import in_turn
from kinds import KINDS
from property.gadget_places import DANGEROUS, FOREIGN, GADGETS, called, places

import ckptfix
from ckptfix.errors import CkptfixError
from ckptfix.ops.writing import Result

VERBS = ("sanitize", "extract", "repair")
PARTS = 40
"""A short run tries one of so many places,"""
MOST = 2
"""and at most so many of one file, since that of `many-frames` alone has 20,000."""

LARGE = 300_000
CASES = [
    (kind, container, gadget)
    for kind in sorted(KINDS)
    for container in KINDS[kind].containers
    for gadget in GADGETS
]  # fmt: skip
EVERYWHERE = {"bare", "subclass"}
"""Kinds that are tried at every place outside the object."""


def says(result: Result, name: str) -> bool:
    return any(name in f"{row.where} {row.message}" for row in result.findings) or name in "".join(result.lines)


def left(verb: str, path: Path, gadget: str) -> str:
    """What is wrong with what `verb` makes of the file; "" for nothing."""
    out = path.with_name("out.pth")
    out.unlink(missing_ok=True)
    module, name = GADGETS[gadget][:2]
    try:
        result = getattr(ckptfix, verb)(path, out)
    except CkptfixError as error:
        return str(error) if "bug in ckptfix" in str(error) else ""
    # With a dot it is a word in the text of a version of a module: a pickle names a global in two strings.
    if name.encode() not in out.read_bytes().replace(f"{module}.{name}".encode(), b""):
        return ""
    if gadget == "foreign" and (verb == "repair" or (verb == "extract" and says(result, name))):
        return ""
    return f"{name} is in the output, exit code {result.exit_code}"


@pytest.mark.sampled(12, quick=3, test_all=42)
@pytest.mark.parametrize(("kind", "container", "gadget"), CASES, ids=map("-".join, CASES))
def test_no_place_keeps_it(kind: str, container: str, gadget: str, tmp_path: Path) -> None:
    source = KINDS[kind].save(tmp_path / "source.pth", container)
    if source.stat().st_size > LARGE:
        pytest.skip("as many places as any other, and more bytes to write for each")
    every = list(places(source, container, gadget))
    beside = [case for case in every if " for " not in case[0]] if kind in EVERYWHERE else []
    wrong = []
    parts = max(PARTS, -(-len(every) // MOST))
    for place, data in [*in_turn(every, CASES.index((kind, container, gadget)), parts), *beside]:
        path = written(tmp_path / "in.pth", data())
        wrong += [f"{verb}, {place}: {what}" for verb in VERBS if (what := left(verb, path, gadget))]
    assert not wrong


def test_the_places_are_seen(tmp_path: Path) -> None:
    """The judge finds what a copy keeps."""
    source = KINDS["bare"].save(tmp_path / "source.pth")
    every = list(places(source, "zip", "dangerous"))
    assert len(every) > 50 and all(DANGEROUS[1].encode() in data() for _, data in every)


class TestHiddenBeside:
    """What sanitize says of what it does not write."""

    @pytest.mark.parametrize("container", ["zip", "legacy"])
    def test_a_clean_file_is_still_copied(self, container: str, tmp_path: Path) -> None:
        path = KINDS["state-dict"].save(tmp_path / "in.pth", container)
        ckptfix.sanitize(path, tmp_path / "out.pth")
        assert (tmp_path / "out.pth").read_bytes() == path.read_bytes()

    def test_data_that_begins_like_a_pickle_is_data(self, tmp_path: Path) -> None:
        """As the state of an engine, which some libraries keep as bytes of a pickle in a tensor."""
        bytes_of_it = torch.frombuffer(bytearray(assemble(("PROTO", 2)) + called("foreign") + b"."), dtype=torch.uint8)
        torch.save({"w": torch.ones(2), "_extra_state": bytes_of_it}, tmp_path / "in.pth")
        result = ckptfix.sanitize(tmp_path / "in.pth", tmp_path / "out.pth")
        assert result.exit_code == 0
        assert torch.equal(torch.load(tmp_path / "out.pth")["_extra_state"], bytes_of_it)

    def test_what_it_leaves_out_is_named(self, tmp_path: Path) -> None:
        source = KINDS["bare"].save(tmp_path / "source.pth")
        data = dict(places(source, "zip", "dangerous"))["behind STOP"]
        result = ckptfix.sanitize(written(tmp_path / "in.pth", data()), tmp_path / "out.pth")
        assert result.exit_code == 3 and says(result, "os.system")
        assert torch.load(tmp_path / "out.pth").keys() == torch.load(source).keys()
        assert not {"error", "warning"} & {row.severity for row in ckptfix.doctor(tmp_path / "out.pth").findings}

    def test_bytes_that_hold_one_are_left_out(self, tmp_path: Path) -> None:
        held = assemble(("PROTO", 2)) + called("dangerous") + b"."
        ops = state_dict_ops({"w": Tensor("0", (2,), 2), "raw": push(held), "fine": push(b"\x80 bytes")})
        pickle = assemble(("PROTO", 4), *ops, "STOP")
        path = written(tmp_path / "in.pth", torch_zip(pickle, [bytes(8)]))
        result = ckptfix.sanitize(path, tmp_path / "out.pth")
        assert result.exit_code == 3 and says(result, "os.system")
        assert torch.load(tmp_path / "out.pth").keys() == {"w", "fine"}


def test_extract_names_the_classes_that_it_keeps(tmp_path: Path) -> None:
    source = KINDS["dtensor"].save(tmp_path / "source.pth")
    result = ckptfix.extract(source, tmp_path / "out.pth")
    kept = [row for row in result.findings if row.id == "foreign-global"]
    assert kept and all(row.severity == "warning" for row in kept)
    assert all(row.where.rpartition(".")[2].encode() in (tmp_path / "out.pth").read_bytes() for row in kept)


def test_extract_leaves_the_tensor_out_and_names_it(tmp_path: Path) -> None:
    wrapper = [
        ("GLOBAL", "torch._utils", "_rebuild_wrapper_subclass"), "MARK", ("GLOBAL", *DANGEROUS),
        ("GLOBAL", "torch", "float32"), *push((2,)), *push((1,)), *push(0), ("GLOBAL", *FOREIGN), *push("cpu"),
        *push(False), "TUPLE", "REDUCE",
    ]  # fmt: skip
    ops = state_dict_ops({"w": Tensor("0", (2,), 2), "x": wrapper})
    path = written(tmp_path / "in.pth", torch_zip(assemble(("PROTO", 2), *ops, "STOP"), [bytes(8)]))
    result = ckptfix.extract(path, tmp_path / "out.pth")
    assert result.exit_code == 3 and "x" in result.left
    assert any(row.id == "not-taken" and "os.system" in row.message for row in result.findings)
    assert torch.load(tmp_path / "out.pth").keys() == {"w"}
