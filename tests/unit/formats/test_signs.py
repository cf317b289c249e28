"""Signs of formats: what detection asks before it imports a format must not contradict the format itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckptfix import formats
from ckptfix.formats import HEAD, signs
from ckptfix.io.source import Source

FOLDER = Path(__file__).parents[3] / "fixtures"
FIXTURES = sorted(path for path in FOLDER.iterdir() if path.suffix not in (".json", ".py"))
HEADS = (
    *(b"", b"PK\x03\x04", b"PK\x03\x04" + bytes(600), b"\x80", b"\x80\x02}.", b"\x80\x05" + bytes(30)),
    *(bytes(8) + b"{}", bytes(8) + b" \n{", bytes(7) + b"{", b"L119547037146038801333356L\n.", b"{" * 600),
    b"\x80\x02\x8a\n" + signs.MAGIC_BYTES + b".",
)


def test_rows_are_what_their_formats_state() -> None:
    for name, row in formats._ROWS.items():
        format = row.imported()
        assert (format.name, format.folder, format.suffixes) == (name, row.folder, row.suffixes)


@pytest.mark.parametrize("path", FIXTURES, ids=lambda path: path.name)
def test_a_format_shows_its_sign(path: Path) -> None:
    with path.open("rb") as file:
        head = file.read(HEAD)
    assert any(signed(path, head, path.stat().st_size).values())


@pytest.mark.parametrize("head", HEADS)
def test_odd_beginnings(tmp_path: Path, head: bytes) -> None:
    for name in ("in.pth", "in.safetensors"):
        (tmp_path / name).write_bytes(head)
        signed(tmp_path / name, head, len(head))


def signed(path: Path, head: bytes, size: int) -> dict[str, int]:
    """The scores of a file; every format with one shows its sign."""
    seen = signs.Beginning(str(path), head, size)
    rows = {name: row for name, row in formats._ROWS.items() if not row.folder}
    scores = {name: row.imported().score(str(path), head, size) for name, row in rows.items()}
    assert {name for name, score in scores.items() if score} <= {name for name, row in rows.items() if row.sign(seen)}
    return scores


def test_a_plain_folder_shows_no_sign(tmp_path: Path) -> None:
    (tmp_path / "model.pth").write_bytes(b"")
    assert not any(row.sign(signs.Beginning(str(tmp_path), b"", 0)) for row in formats._ROWS.values() if row.folder)
    gone = signs.Beginning(str(tmp_path / "gone"), b"", 0)
    assert gone.names is None and formats._ROWS["ranks"].sign(gone)
    (tmp_path / "Model_RANK0.pt").write_bytes(b"")
    assert formats._ROWS["ranks"].sign(signs.Beginning(str(tmp_path), b"", 0))


def test_a_directory_is_searched_once(monkeypatch: pytest.MonkeyPatch) -> None:
    searched: list[Source] = []

    def raw_directory(reader: Source) -> bytes:
        searched.append(reader)
        return b"x/constants.pkl"

    monkeypatch.setattr(signs, "raw_directory", raw_directory)
    path = FOLDER / "zip-tied.pth"
    seen = signs.Beginning(str(path), path.read_bytes()[:HEAD], path.stat().st_size)
    assert seen.has_record("constants.pkl") and not seen.has_record("archive_format") and len(searched) == 1
