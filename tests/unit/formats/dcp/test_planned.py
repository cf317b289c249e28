"""A planned folder, read as it will be: the audit notices what no reader of the output would."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ckptfix.checkpoint import ByteRange, Checkpoint, OutputFile, Plan, Segment
from ckptfix.errors import CkptfixError
from ckptfix.formats import open_checkpoint
from ckptfix.formats.dcp import planned
from ckptfix.formats.dcp.write import recode
from ckptfix.io.source import open_source
from ckptfix.io.virtual_files import PlannedFile
from ckptfix.ops.audit import audit
from ckptfix.ops.audit.promise import everything

COUNT = 6


def object_of(tmp_path: Path, name: str = "weight") -> Checkpoint:
    """Tensors of one shape, with a value and a tensor in a list beside them."""
    tensors = {f"{name}.{number}": torch.full((3,), float(number)) for number in range(COUNT)}
    torch.save({"model": tensors, "step": 3, "more": [torch.ones(2)]}, tmp_path / "in.pth")
    return open_checkpoint(tmp_path / "in.pth")


def changed(plan: Plan, change: Callable[[list[Segment], list[int]], None]) -> Plan:
    """The plan after `change` of the segments of its data file; it also gets the positions of the data among them."""
    first, *others = plan.files
    segments = list(first.segments)
    change(segments, [at for at, segment in enumerate(segments) if isinstance(segment, ByteRange)])
    return replace(plan, files=(OutputFile.of(first.path, segments, join=False), *others))


def lost(checkpoint: Checkpoint, plan: Plan) -> tuple[str, ...]:
    return audit(everything(checkpoint), plan, "dcp")[1].lost


def exchange(segments: list[Segment], data: list[int]) -> None:
    segments[data[1]], segments[data[2]] = segments[data[2]], segments[data[1]]


def repeat(segments: list[Segment], data: list[int]) -> None:
    segments[data[1]] = segments[data[2]]


def shift(segments: list[Segment], data: list[int]) -> None:
    where = segments[data[3]]
    assert isinstance(where, ByteRange)
    segments[data[3]] = replace(where, offset=where.offset - 4)


def zeros(segments: list[Segment], data: list[int]) -> None:
    segments[data[4]] = bytes(12)


@pytest.mark.parametrize(
    ("change", "names"),
    [
        (exchange, ("model/weight.1", "model/weight.2")),
        (repeat, ("model/weight.1",)),
        (shift, ("model/weight.3",)),
        (zeros, ("model/weight.4",)),
    ],
)
def test_other_bytes_are_a_loss(tmp_path: Path, change: Callable[..., None], names: tuple[str, ...]) -> None:
    checkpoint = object_of(tmp_path)
    plan = recode(checkpoint, str(tmp_path / "out"))
    assert not lost(checkpoint, plan)
    assert set(names) <= set(lost(checkpoint, changed(plan, change)))


def test_an_item_of_another_form_is_refused(tmp_path: Path) -> None:
    """A byte around the elements of the last item differs from those of the items before it."""
    checkpoint = object_of(tmp_path)

    def break_name(segments: list[Segment], data: list[int]) -> None:
        head = segments[data[COUNT - 1] - 1]
        assert isinstance(head, bytes)
        segments[data[COUNT - 1] - 1] = head.replace(b"FloatStorage", b"FloatStorbge")

    with pytest.raises(CkptfixError):
        lost(checkpoint, changed(recode(checkpoint, str(tmp_path / "out")), break_name))


@pytest.mark.parametrize("name", ["weight", "a/weight", ""])
def test_names_are_those_of_the_object(tmp_path: Path, name: str) -> None:
    checkpoint = object_of(tmp_path, name)
    made = planned.read_planned(recode(checkpoint, str(tmp_path / "out")))
    assert {entry.name for entry in made.entries} == {entry.name for entry in checkpoint.entries}
    assert dict(made.values()) == {"step": 3}


def test_bytes_around_data_are_those_of_the_file(tmp_path: Path) -> None:
    plan = recode(object_of(tmp_path), str(tmp_path / "out"))
    file = PlannedFile(plan.files[0])
    cuts = [*file.starts, file.size]
    with open_source(file) as source:
        for at, segment in enumerate(file.file.segments):
            if isinstance(segment, ByteRange):
                whole = ByteRange(file, cuts[at - 1], cuts[at + 3] - cuts[at - 1])
                data = cuts[at] - whole.offset
                found = file.around(whole, data, segment.length)
                read = source.read(whole.offset, whole.length)
                assert found == read[:data] + read[data + segment.length :]
                assert file.around(replace(whole, offset=whole.offset + 1), data, segment.length) is None
                assert file.around(whole, data + 1, segment.length) is None
