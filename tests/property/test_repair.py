"""What repair keeps of files that were cut at every length and changed at every bit, against the intact file."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from builders import Record, Tensor, assemble, build_zip, flip, state_dict_ops
from compare import tensor_bytes
from conftest import LONG
from property.hostile_files import hostile_files
from property.small_files import SMALL
from property.wrecks import fixture, survivors

from ckptfix.errors import CkptfixError
from ckptfix.ops import repair

pytestmark = pytest.mark.campaign

NAMED = {
    "legacy": SMALL["legacy"],
    "safetensors": SMALL["safetensors"],
    "zip": build_zip(
        [
            Record("a/data.pkl", assemble(("PROTO", 2), *state_dict_ops({
                "x": Tensor("0", (2,), 2), "y": Tensor("1", (3,), 3), "tied": Tensor("1", (1,), 3, offset=1), "n": 1,
            }), "STOP")),
            Record("a/data/0", b"\x01" * 8),
            Record("a/byteorder", b"little"),
            Record("a/data/1", b"\x02" * 12),
            Record("a/version", b"3\n"),
        ]
    ),
}  # fmt: skip
FIXTURES = (
    *("zip-training.pth", "zip-tied.pth", "zip-protocol-4.pth", "zip-state-dict.pth", "legacy-training.pth"),
    *("legacy-tied.pth", "trainer-dp-training.pth", "trainer-dp-training-legacy.pth"),
    "safetensors-data-parallel.safetensors",
)


def loaded(path: Path) -> dict[str, torch.Tensor]:
    """Address -> tensor, of whatever is in the file."""
    with open(path, "rb") as file:
        head = file.read(9)
    if head[8:9] == b"{":
        value: Any = safetensors.torch.load_file(path)
    else:
        value = torch.load(path, map_location="cpu", weights_only=False)
    found: dict[str, torch.Tensor] = {}
    _collect(value, "", found)
    return found


def _collect(value: Any, at: str, found: dict[str, torch.Tensor]) -> None:
    if isinstance(value, torch.Tensor):
        found[at] = value
        return
    rows: Any = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else ()
    for key, one in rows:
        _collect(one, f"{at}/{key}" if at else str(key), found)


def equal(a: Mapping[str, torch.Tensor], b: Mapping[str, torch.Tensor]) -> bool:
    """Bit for bit, over the names of `a`."""
    return all(
        name in b
        and one.dtype == b[name].dtype
        and one.shape == b[name].shape
        and tensor_bytes(one) == tensor_bytes(b[name])
        for name, one in a.items()
    )


def kept_at(folder: Path, data: bytes, cut: int) -> tuple[set[str], set[str]]:
    """Names kept and lost at a cut; nothing at all where it is refused."""
    path = folder / "cut"
    path.write_bytes(data[:cut])
    try:
        result = repair.repair(path, None, check_only=True)
    except CkptfixError:
        return set(), set()
    lost = {loss.name for loss in result.losses if loss.name != "data.pkl"}
    assert result.exit_code == (3 if result.losses else 0)
    assert lost <= {finding.where for finding in result.findings}, "a lost tensor is not named"
    return set(result.kept), lost


def check_cuts(folder: Path, data: bytes, step: int) -> int:
    """Compare the kept set with the oracle's at every `step`-th cut, and load the output where it changes."""
    original = folder / "whole"
    original.write_bytes(data)
    values = loaded(original)
    object_end, ends = survivors(data)
    assert set(ends) == set(values) and ends, "the oracle sees other tensors than torch"
    turns = {end + delta for end in (*ends.values(), object_end) for delta in (-1, 0)}
    before: set[str] = set()
    cuts = sorted({*range(0, len(data) + 1, step), *(turn for turn in turns if turn <= len(data)), len(data)})
    for cut in cuts:
        expected = {name for name, end in ends.items() if end <= cut and object_end <= cut}
        kept, lost = kept_at(folder, data, cut)
        assert kept == expected, f"cut at {cut}: kept {sorted(kept)}, and whole are {sorted(expected)}"
        assert not kept or lost == set(ends) - expected, f"cut at {cut}: lost {sorted(lost)}"
        assert before <= kept, f"cut at {cut}: a longer file keeps less"
        if kept != before and (len(data) < 20_000 or LONG or len(kept) % 8 == 0 or cut == len(data)):
            out = folder / "out"
            result = repair.repair(folder / "cut", out, force=True)
            again = loaded(out)
            assert set(again) == expected and equal(again, values)
            assert set(result.kept) == expected
            once_more = repair.repair(out, folder / "twice", force=True)
            assert once_more.exit_code == 0 and set(once_more.kept) == expected, "its own output is not intact"
        before = kept
    return len(cuts)


@pytest.mark.parametrize("name", NAMED)
def test_every_cut_of_a_small_file(tmp_path: Path, name: str) -> None:
    data = NAMED[name]
    assert check_cuts(tmp_path, data, 1 if LONG else 5) > len(data) // 6


@pytest.mark.parametrize("name", FIXTURES)
def test_cuts_of_files_that_torch_wrote(tmp_path: Path, name: str) -> None:
    data = fixture(name)
    check_cuts(tmp_path, data, 1 if LONG else max(len(data) // 12, 1))


def test_cuts_of_a_larger_file(tmp_path: Path) -> None:
    """200 kB, cut at every 97th byte: 2,100 cuts in the long run."""
    torch.manual_seed(0)
    generator = random.Random(0)
    value = {f"layer{index}.weight": torch.randn(generator.randrange(1, 4500)) for index in range(23)}
    value["half"] = torch.randn(300).half()
    torch.save({"epoch": 3, "model": value}, tmp_path / "large.pth")
    data = (tmp_path / "large.pth").read_bytes()
    assert 180_000 < len(data) < 260_000
    check_cuts(tmp_path, data, 97 if LONG else 97 * 23)


@pytest.mark.parametrize("name", NAMED)
def test_every_flipped_bit(tmp_path: Path, name: str) -> None:
    """A tensor that is kept is the original one, wherever a checksum covers it; else it is lost, and named."""
    data = NAMED[name]
    original = tmp_path / "whole"
    original.write_bytes(data)
    values = loaded(original)
    path, out = tmp_path / "flipped", tmp_path / "out"
    summed = name == "zip"
    whole = refused = partly = 0
    for bit in range(0, len(data) * 8, 1 if LONG else 43):
        path.write_bytes(flip(data, bit))
        try:
            result = repair.repair(path, out, force=True)
        except CkptfixError:
            refused += 1
            continue
        if result.losses:
            partly += 1
        if not summed:
            continue
        if any(loss.name == "data.pkl" for loss in result.losses):
            assert all(len(key.split("_")) == 2 for key in result.kept)
            raw = {key: bytes(one.untyped_storage()) for key, one in loaded(out).items()}
            stored = {bytes(one.untyped_storage()) for one in values.values()}
            assert set(raw.values()) <= stored, f"bit {bit}: other bytes"
            continue
        again = loaded(out)
        assert equal(again, values), f"bit {bit} changed a tensor without a word"
        assert {*again, *(loss.name for loss in result.losses)} == set(values), f"bit {bit}: a tensor went unnamed"
        whole += not result.losses
    if summed:
        assert whole and partly and not refused, "headers help each other; only what is inside a record can be lost"


def test_hostile_files_are_repaired_or_refused(tmp_path: Path) -> None:
    """No other error comes out, and nothing is left beside the output; the deep and the many are in the long run."""
    path = tmp_path / "in"
    tried = 0
    for index, (name, data) in enumerate(hostile_files().items()):
        if not LONG and (index % 3 or len(data) > 200_000 or "deep" in name):
            continue
        path.write_bytes(data)
        tried += 1
        with suppress(CkptfixError):
            repair.repair(path, tmp_path / "out", force=True)
        assert {one.name for one in tmp_path.iterdir()} <= {"in", "out"}, name
    assert tried > 20


def test_mutants_are_repaired_or_refused(tmp_path: Path) -> None:
    generator = random.Random(0)
    sources = [*NAMED.values(), *map(fixture, FIXTURES)]
    signatures = (b"PK\x03\x04", b"PK\x07\x08", b"PK\x01\x02", b"\xff" * 4, b"\0" * 4)
    path = tmp_path / "in"
    for _ in range(20_000 if LONG else 300):
        data = bytearray(generator.choice(sources))
        for _ in range(generator.randrange(1, 6)):
            at, other = generator.randrange(len(data) + 1), generator.randrange(len(data) + 1)
            match generator.randrange(6):
                case 0:
                    data[at : at + 1] = generator.randbytes(1)
                case 1:
                    del data[at : at + generator.randrange(200)]
                case 2:
                    data[at:at] = generator.randbytes(generator.randrange(100))
                case 3:
                    data[at : at + 64] = data[other : other + 64]
                case 4:
                    data[at : at + 4] = generator.choice(signatures)
                case _:
                    data += generator.choice(sources)[: generator.randrange(3000)]
        path.write_bytes(data)
        with suppress(CkptfixError):
            repair.repair(path, None, check_only=True, fill=generator.choice((None, "zeros", "nan")))


def directories_that_mislead() -> Iterator[tuple[str, bytes]]:
    """An archive of four storages alike in size, with the places of its directory and of its headers exchanged."""
    state = {f"t{key}": Tensor(str(key), (2,), 2) for key in range(4)}
    records = [
        Record("a/data.pkl", assemble(("PROTO", 2), *state_dict_ops(state), "STOP")),
        *(Record(f"a/data/{key}", bytes([0, 0, 128, 63 + key] * 2)) for key in range(4)),
        Record("a/version", b"3\n"),
    ]
    good = build_zip(records)
    rows = [match.start() for match in re.finditer(b"PK\x01\x02", good)]
    places = [good[row + 42 : row + 46] for row in rows]

    def placed(order: Sequence[int]) -> bytes:
        data = bytearray(good)
        for row, place in zip(rows, order, strict=True):
            data[row + 42 : row + 46] = places[place]
        return bytes(data)

    for row, place in itertools.product(range(len(rows)), repeat=2):
        order = list(range(len(rows)))
        order[row] = place
        yield f"row {row} at {place}", placed(order)
        order[place] = row
        yield f"rows {row} and {place} exchanged", placed(order)
    yield "all rows moved on by one", placed([0, 2, 3, 4, 1, 5])
    for key, (length, by) in itertools.product(range(5), [(26, -1), (26, 1), (28, -4), (28, 4)]):
        start = good.rindex(b"PK\x03\x04", 0, good.index(records[key].data))
        changed = good[start + length] + by
        yield (
            f"length {length} of a header by {by}",
            good[: start + length] + bytes([changed % 256]) + good[start + length + 1 :],
        )
    for name in ("a/data/1", "a/data/3"):
        yield f"the row of {name} called 0", good[: rows[0]] + good[rows[0] :].replace(name.encode(), b"a/data/0")


def test_repair_says_where_torch_reads_other_values_than_those_that_it_keeps(tmp_path: Path) -> None:
    """torch follows the directory and compares no checksums; repair goes by those. Where both read, and not alike."""
    told = 0
    for what, data in directories_that_mislead():
        path, out = tmp_path / "in.pth", tmp_path / "out.pth"
        path.write_bytes(data)
        try:
            result = repair.repair(path, out, force=True)
        except CkptfixError:
            continue
        try:
            read = loaded(path)
        except Exception:
            # torch refuses it, and anything may come of that.
            continue
        said = any(finding.id == "misread" for finding in result.findings)
        same = equal(loaded(out), read)
        assert said or same or result.exit_code == 3, what
        assert not (said and same and result.exit_code == 0), what
        told += said
    assert told > 20
