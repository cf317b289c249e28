"""Files cut at every length and with every bit flipped: a result or a CkptfixError, and nothing else."""

from __future__ import annotations

import re
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from builders import cuts, flip
from conftest import LONG
from hypothesis import given
from hypothesis import strategies as st
from kinds import KINDS
from property.small_files import DATA, PICKLE, SMALL
from property.survive import EVERYTHING, LISTING, survives

from ckptfix.errors import CkptfixError
from ckptfix.formats import detect, open_checkpoint

SECONDS = 1.0
"""CPU time of one operation."""
MEMORY = 100 << 20
RSS_UNIT = 1 if sys.platform == "darwin" else 1024


@pytest.fixture
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("damage") / "in"


def within_limits(path: Path, data: bytes, operations: tuple[Callable[[Path], None], ...] = LISTING) -> list[str]:
    start = time.process_time()
    messages = survives(path, data, operations)
    assert time.process_time() - start < SECONDS * len(operations), messages
    return messages


@pytest.mark.parametrize("name", SMALL)
def test_the_small_file_is_sound(name: str, place: Path) -> None:
    assert survives(place, SMALL[name], EVERYTHING) == []
    assert open_checkpoint(place).format == name
    assert list(detect(place).check(str(place))) == []


@pytest.mark.campaign
@pytest.mark.parametrize("name", SMALL)
def test_every_cut(name: str, place: Path) -> None:
    """A cut file lists nothing, or says what is missing."""
    for length, data in cuts(SMALL[name]):
        if within_limits(place, data, EVERYTHING) == []:
            assert open_checkpoint(place).findings, f"cut to {length} bytes without a word"


@pytest.mark.campaign
@pytest.mark.parametrize("name", SMALL)
def test_every_bit(name: str, place: Path) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for bit in range(0, len(SMALL[name]) * 8, 1 if LONG else 23):
        within_limits(place, flip(SMALL[name], bit), EVERYTHING)
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * RSS_UNIT < MEMORY


@pytest.mark.campaign
def test_no_flip_of_the_pickle_in_a_zip_passes_silently(place: Path) -> None:
    """torch does not look at the checksum, so a changed shape or name would load."""
    start = SMALL["zip"].index(PICKLE)
    for bit in range(start * 8, (start + len(PICKLE)) * 8):
        place.write_bytes(flip(SMALL["zip"], bit))
        try:
            assert list(detect(place).check(str(place))), f"bit {bit} passes silently"
        except CkptfixError:
            continue


def test_a_flip_in_tensor_data_leaves_the_listing_alone(place: Path) -> None:
    start = SMALL["zip"].index(DATA)
    place.write_bytes(SMALL["zip"])
    wanted = open_checkpoint(place).entries
    for bit in range(start * 8, (start + len(DATA)) * 8):
        place.write_bytes(flip(SMALL["zip"], bit))
        assert open_checkpoint(place).entries == wanted


@pytest.mark.slow
def test_lengths_of_local_headers(place: Path) -> None:
    """Where a record seems to end decides what an edit moves: behind the next one, or before the file's beginning."""
    data = KINDS["quantized"].save(place, "zip").read_bytes()
    headers = [match.start() for match in re.finditer(rb"PK\x03\x04", data)]
    assert len(headers) > 3
    for header in headers:
        for field in (26, 28):  # of the name, of the extra field
            for bit in range((header + field) * 8, (header + field + 2) * 8):
                within_limits(place, flip(data, bit))


@pytest.mark.campaign
@pytest.mark.skipif(not LONG, reason="CKPTFIX_LONG=1 runs the long campaign")
@pytest.mark.parametrize("container", ["zip", "legacy"])
@pytest.mark.parametrize("kind", ["nested", "protocol-4", "quantized", "sparse", "numpy-values", "gone-classes"])
def test_every_bit_and_cut_of_torch_files(kind: str, container: str, place: Path) -> None:
    data = KINDS[kind].save(place, container).read_bytes()
    for bit in range(len(data) * 8):
        within_limits(place, flip(data, bit))
    for _, cut in cuts(data):
        within_limits(place, cut)


SPLICE = st.tuples(
    st.floats(0, 1), st.integers(0, 24), st.one_of(st.binary(max_size=12), st.sampled_from([
        b"\xff" * 4, b"\xff\xff\xff\x7f", b"\x00" * 8, b"PK\x03\x04", b"PK\x05\x06", b"PK\x01\x02", b"data.pkl", b".",
        b"cos\nsystem\n", b"\x93", b"\x80\x04\x95", b"h\x00", b"2", b"(", b"t", b"}", b"R", b"Q", b"\x8a\xff",
        b"\x8b\xff\xff\xff\xff", b"\x8d" + b"\xff" * 8, b'"', b'{"a":', b"[1e999]", b"-1", b"\xed\xa0\x80",
    ])),
)  # fmt: skip
"""Where (as a part of the length), how many bytes go, and what comes."""


@pytest.mark.campaign
@given(st.sampled_from(sorted(SMALL)), st.lists(SPLICE, min_size=1, max_size=4))
def test_random_splices(
    tmp_path_factory: pytest.TempPathFactory, name: str, splices: list[tuple[float, int, bytes]]
) -> None:
    data = SMALL[name]
    for where, gone, new in splices:
        at = int(where * len(data))
        data = data[:at] + new + data[at + gone :]
    within_limits(tmp_path_factory.getbasetemp() / "spliced", data, EVERYTHING)


@pytest.mark.campaign
@given(st.sampled_from(sorted(KINDS.keys() - {"small-view-of-large", "one-tag-for-all", "many-frames"})),
       st.sampled_from(["zip", "legacy"]), st.lists(SPLICE, min_size=1, max_size=3))  # fmt: skip
def test_random_splices_of_torch_files(
    tmp_path_factory: pytest.TempPathFactory, name: str, container: str, splices: list[tuple[float, int, bytes]]
) -> None:
    kind = KINDS[name]
    if container not in kind.containers:
        container = kind.containers[0]
    whole = tmp_path_factory.getbasetemp() / f"{name}-{container}"
    data = (whole if whole.exists() else kind.save(whole, container)).read_bytes()
    for where, gone, new in splices:
        at = int(where * len(data))
        data = data[:at] + new + data[at + gone :]
    within_limits(tmp_path_factory.getbasetemp() / "spliced", data, EVERYTHING)
