"""Who may read an output, and what a file loses that is replaced."""

from __future__ import annotations

import errno
import os
import shlex
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckptfix.checkpoint import ByteRange, OutputFile, Plan
from ckptfix.io.source import stamp
from ckptfix.io.sources import given_up
from ckptfix.io.write import write_plan


@pytest.fixture(autouse=True)
def umask() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


def made(path: Path, mode: int) -> str:
    path.write_bytes(b"content of some length")
    path.chmod(mode)
    return str(path)


def plan_from(dest: Path, *sources: str) -> Plan:
    return Plan((OutputFile.of(dest, [b"head", *(ByteRange(source, 0, 4) for source in sources)]),))


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ((0o600,), 0o600),
        ((0o640,), 0o640),
        ((0o644,), 0o644),
        ((0o666,), 0o644),
        ((0o444,), 0o644),
        ((0o400,), 0o600),
        ((0o755,), 0o644),
        ((0o644, 0o640), 0o640),
        ((0o644, 0o600, 0o664), 0o600),
        ((0o640, 0o604), 0o600),
    ],
)
def test_a_new_file_is_open_to_those_who_may_read_all_inputs(
    tmp_path: Path, given: tuple[int, ...], expected: int
) -> None:
    sources = [made(tmp_path / str(number), bits) for number, bits in enumerate(given)]
    write_plan(plan_from(tmp_path / "out", *sources))
    assert mode(tmp_path / "out") == expected


def test_an_input_of_which_no_byte_is_copied_counts_too(tmp_path: Path) -> None:
    source = made(tmp_path / "in", 0o600)
    write_plan(plan_from(tmp_path / "out"), inputs={source: stamp(source)})
    assert mode(tmp_path / "out") == 0o600


@pytest.mark.parametrize(("old", "told"), [(0o644, True), (0o640, True), (0o600, False), (0o711, False)])
def test_a_replaced_file_keeps_its_mode_and_it_is_reported_where_more_may_read_it(
    tmp_path: Path, old: int, told: bool
) -> None:
    source = made(tmp_path / "in", 0o600)
    made(tmp_path / "an out", old)
    plan = plan_from(tmp_path / "an out", source)
    found = given_up(plan, ())
    assert [finding.id for finding in found] == ["more-open"] * told
    if told:
        assert f"{old:04o}" in found[0].message and "0600" in found[0].message
        assert shlex.split(str(found[0].fix)) == ["chmod", "600", str(tmp_path / "an out")]
    write_plan(plan, overwrite=True)
    assert mode(tmp_path / "an out") == old


@pytest.mark.parametrize(("others", "said"), [(0, ""), (1, "1 other hard link,"), (2, "2 other hard links,")])
def test_other_hard_links_of_a_replaced_file_are_reported(tmp_path: Path, others: int, said: str) -> None:
    made(tmp_path / "out", 0o600)
    for number in range(others):
        (tmp_path / f"link{number}").hardlink_to(tmp_path / "out")
    plan = plan_from(tmp_path / "out", made(tmp_path / "in", 0o600))
    found = given_up(plan, ())
    assert [(finding.id, finding.severity) for finding in found] == [("links-left", "warning")] * bool(others)
    assert all(said in finding.message for finding in found)
    assert write_plan(plan, overwrite=True, keep_old=lambda path: True)
    assert given_up(plan, ()) == (), "our own link to what is kept is none of the new file's"
    assert all((tmp_path / f"link{number}").read_bytes() == b"content of some length" for number in range(others))


def test_extended_attributes_of_a_replaced_file_are_reported(tmp_path: Path) -> None:
    if not hasattr(os, "setxattr"):
        pytest.skip("no extended attributes on this system")
    made(tmp_path / "out", 0o600)
    try:
        os.setxattr(tmp_path / "out", "user.sha256", b"of the old content")
        os.setxattr(tmp_path / "out", "user.origin", b"elsewhere")
    except OSError as error:
        pytest.skip(f"no extended attributes in this file system: {error.strerror}")
    plan = plan_from(tmp_path / "out", made(tmp_path / "in", 0o600))
    (found,) = given_up(plan, ())
    assert (found.id, found.where) == ("attributes-lost", str(tmp_path / "out"))
    assert "user.origin, user.sha256" in found.message
    write_plan(plan, overwrite=True)
    assert os.listxattr(tmp_path / "out") == []


def test_a_file_system_that_knows_no_attributes_says_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object, **options: object) -> list[str]:
        raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))

    monkeypatch.setattr(os, "listxattr", refuse, raising=False)
    plan = plan_from(tmp_path / "out", made(tmp_path / "in", 0o600))
    made(tmp_path / "out", 0o600)
    assert given_up(plan, ()) == ()


def test_nothing_is_lost_where_nothing_was(tmp_path: Path) -> None:
    assert given_up(plan_from(tmp_path / "out", made(tmp_path / "in", 0o600)), ()) == ()
