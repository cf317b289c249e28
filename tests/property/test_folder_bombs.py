"""Pickles in folders that unfold to more than they are: one error that names the file, in bounded memory and time."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from builders import torch_zip

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="no /proc here"),
]

MEGABYTES = 150
SECONDS = 30

CHILD = """
import json, sys, time
import ckptfix
from ckptfix.errors import CkptfixError
rows = {}
for path in sys.argv[1:]:
    for verb in (ckptfix.inspect, ckptfix.doctor, lambda path: ckptfix.convert(path, path + ".out.pth", dry_run=True)):
        try:
            verb(path)
            rows.setdefault(path, []).append("")
        except CkptfixError as error:
            rows.setdefault(path, []).append(str(error))
peak = next(int(line.split()[1]) >> 10 for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(json.dumps([rows, peak, time.process_time(), "torch" in sys.modules]))
"""


def laughs(make: Callable[[Any], Any]) -> bytes:
    """Sixty containers, each of which holds the one before it ten times."""
    value: Any = make(["ha"])
    for _ in range(60):
        value = make([value] * 10)
    return pickle.dumps(value, 2)


def keys(values: list[Any]) -> dict[str, Any]:
    return dict(zip("abcdefghij", values, strict=False))


def long(code: bytes, size: int) -> bytes:
    return b"\x80\x04" + code + size.to_bytes(8, "little") + b"x."


BOMBS: dict[str, bytes] = {
    "lists": laughs(list),
    "tuples": laughs(tuple),
    "dicts": laughs(keys),
    "deep lists": b"\x80\x02" + b"]" * 50_000 + b"a" * 49_999 + b".",
    "deep tuples": b"\x80\x02)" + b"\x85" * 125_000 + b".",
    "deep dicts": b"\x80\x02" + b"}K\x00" * 50_000 + b"N" + b"s" * 50_000 + b".",
    "marks": b"\x80\x02" + b"(" * 250_000 + b"t" * 250_000 + b".",
    "a memo": b"\x80\x02]" + b"r\xff\xff\xff\xff" * 50_000 + b"j\xff\xff\xff\xff" * 50_000 + b"0" * 50_000 + b".",
    "no end": b"\x80\x02" + b"".join(b"Nr" + (n * 4999).to_bytes(4, "little") + b"0" for n in range(50_000)),
    "one long string": b"\x80\x02(X\x00\x00\x01\x00" + b"x" * 65536 + b"q\x00" + b"h\x00" * 200_000 + b"t.",
    "a declared string": long(b"\x8d", 1 << 60),
    "a declared frame": long(b"\x95", 1 << 60),
    "declared bytes": long(b"\x8e", (1 << 64) - 1),
    "a declared number": b"\x80\x02\x8b\xff\xff\xff\x7fx.",
    "a long number": b"\x80\x02I" + b"9" * 300_000 + b"\n.",
}


def of_metadata(bomb: bytes, folder: Path) -> str:
    (folder / ".metadata").write_bytes(bomb)
    (folder / "__0_0.distcp").write_bytes(b"x" * 64)
    return str(folder)


def of_zero(bomb: bytes, folder: Path) -> str:
    (folder / "latest").write_text("global_step1")
    (folder / "global_step1").mkdir()
    for name in ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt"):
        (folder / "global_step1" / name).write_bytes(torch_zip(bomb))
    return str(folder)


def measured(paths: list[str]) -> dict[str, list[str]]:
    """What each of three verbs says of each path, in one process, which stays small."""
    done = subprocess.run(
        [sys.executable, "-c", CHILD, *paths], capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    rows: dict[str, list[str]]
    rows, peak, seconds, loaded = json.loads(done.stdout)
    assert peak < MEGABYTES and seconds < SECONDS * len(paths) and not loaded
    return rows


LONG_ONES = ("deep lists", "deep tuples", "deep dicts", "marks", "a memo", "no end")
"""The largest bombs: a torch zip is read by the same machine as `.metadata`."""


@pytest.mark.sampled(1, test_all=10_000)
@pytest.mark.parametrize(("make", "names"), [
    pytest.param(of_metadata, tuple(BOMBS), id="metadata"),
    pytest.param(of_zero, tuple(name for name in BOMBS if name not in LONG_ONES), id="zero"),
    pytest.param(of_zero, LONG_ONES, id="zero, long ones", marks=pytest.mark.campaign),
])  # fmt: skip
def test_bombs_are_refused_by_name(
    make: Callable[[bytes, Path], str], names: tuple[str, ...], tmp_path: Path
) -> None:
    paths: dict[str, str] = {}
    for number, name in enumerate(names):
        bomb = BOMBS[name]
        folder = tmp_path / str(number)
        folder.mkdir()
        paths[make(bomb, folder)] = name
    for path, said in measured(list(paths)).items():
        name = paths[path]
        assert said[2], f"{name}: convert takes it"
        assert path in said[2], f"{name}: {said[2]}"
        assert len(said[2]) < 2000 and "a bug in ckptfix" not in said[2], name
