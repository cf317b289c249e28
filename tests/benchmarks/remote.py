"""What crosses the network for a checkpoint in a bucket, counted at the server: ``python tests/benchmarks/remote.py``.

The store is localbucket, on this machine: so it is requests and bytes that are measured, and not seconds. The files
are of any size, and sparse. Exit status: 1 where a row is above its limit.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from stores import Traffic, environment, local_bucket

MB = 1_000_000
SIZE = 2_147_483_648
TENSORS = 100_000
REQUESTS, BESIDE, EDIT = 5, MB, 12 * MB
"""Limits: requests for one file, bytes beside its header (or directory and pickle), bytes of an edit, both ways."""


@dataclass(frozen=True, slots=True)
class Row:
    """A command, and its limits.

    Attributes:
        words: with ``{in}`` and ``{out}``.
        most: bytes, both ways.
        requests: at most so many.
    """

    what: str
    words: tuple[str, ...]
    most: int
    requests: int | None = REQUESTS


def zipped(path: Path, tensors: int, size: int) -> int:
    """A torch file whose tensors are holes; returns the bytes of its directory and its pickle."""
    import zipfile

    import torch

    state = {f"module.layers.{number}.weight": torch.empty(size // tensors // 4) for number in range(tensors)}
    with torch.serialization.skip_data():
        torch.save(state, path)
    with zipfile.ZipFile(path) as archive:
        pickle = next(row.file_size for row in archive.infolist() if row.filename.endswith("/data.pkl"))
        return path.stat().st_size - archive.start_dir + pickle


def safetensors(path: Path, tensors: int, size: int) -> int:
    """The same as safetensors; returns the bytes of its header."""
    each = size // tensors // 4 * 4
    rows = {
        f"module.layers.{number}.weight": {
            "dtype": "F32", "shape": [each // 4], "data_offsets": [number * each, (number + 1) * each],
        }
        for number in range(tensors)
    }  # fmt: skip
    header = json.dumps(rows).encode()
    header += b" " * (-len(header) % 8)
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + each * tensors)
    return len(header)


def rows(name: str, described: int, *, many: bool) -> Iterator[Row]:
    """The commands on the file `name`, whose header takes `described` bytes."""
    place, beside = f"s3://bucket/{name}", described + BESIDE
    yield Row(f"inspect {name}", ("inspect", place), beside)
    yield Row(f"doctor --fast {name}", ("doctor", "--fast", place), beside)
    if not many:
        yield Row(f"diff --keys-only {name}", ("diff", "--keys-only", place, place), beside)
        yield Row(f"strip-module {name}", ("strip-module", place, f"s3://bucket/out-{name}"), EDIT, None)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python tests/benchmarks/remote.py", description=__doc__)
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()), help="for some 4 GB of objects")
    parser.add_argument("--scale", type=float, default=1.0, help="of sizes and numbers")
    chosen = parser.parse_args()
    chosen.dir.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(dir=chosen.dir))
    try:
        with local_bucket(folder) as (url, traffic):
            os.environ |= environment(url)
            return measured(folder, traffic, chosen.scale)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def measured(folder: Path, traffic: Traffic, scale: float) -> int:
    from ckptfix.cli import commands

    bucket = folder / "bucket"
    bucket.mkdir()
    size, tensors = int(SIZE * scale), int(TENSORS * scale)
    missed = False
    print("| job | requests | MB up | MB down | at most | |", "|---|---|---|---|---|---|", sep="\n")
    for name, make, count in (
        ("model.pth", zipped, 256), ("model.safetensors", safetensors, 256),
        ("many.pth", zipped, tensors), ("many.safetensors", safetensors, tensors),
    ):  # fmt: skip
        described = make(bucket / name, count, size)
        for row in rows(name, described, many=count != 256):
            traffic.clear()
            said = io.StringIO()
            with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
                code = commands.main(list(row.words), standalone_mode=False)
            if code not in (0, 1):
                print(said.getvalue(), file=sys.stderr)
                return 2
            good = traffic.up + traffic.down <= row.most
            good = good and (row.requests is None or traffic.requests <= row.requests)
            missed |= not good
            limit = f"{row.most / MB:.1f} MB" + (f", {row.requests} requests" if row.requests else "")
            cells = (row.what, str(traffic.requests), f"{traffic.up / MB:.2f}", f"{traffic.down / MB:.2f}", limit)
            print("|", " | ".join((*cells, "reached" if good else "missed")), "|", flush=True)
        for path in bucket.iterdir():
            path.unlink()
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
