"""Work that grows with its input and no faster: eight times the input costs at most twenty times the CPU seconds."""

from __future__ import annotations

import contextlib
import json
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from builders import Op, Record, Tensor, assemble, build_zip, push, replace, state_dict_ops, tensor_ops, torch_zip

import ckptfix
from ckptfix.errors import CkptfixError, Unsupported
from ckptfix.formats.target import FormatName
from ckptfix.ops import listing

TIMES = 8
MOST = 20
"""A square would be 64; the machine is shared, and a run that is disturbed is taken again."""

DATA = struct.pack("<2f", 1, 2)
WEIGHT = Tensor("0", (2,), 2, location="cuda:0")


def frames(count: int) -> bytes:
    """A frame for each key."""
    parts = [assemble(("PROTO", 4), "EMPTY_DICT", "MARK")]
    for index in range(count):
        body = assemble(*push(f"module.{index}"), *tensor_ops(WEIGHT))
        parts += [assemble(("FRAME", len(body))), body]
    return torch_zip(b"".join((*parts, assemble("SETITEMS", "STOP"))), [DATA])


def dicts(count: int) -> bytes:
    """A mapping of one tensor, many times."""
    mappings = {str(index): state_dict_ops({"module.fc.weight": WEIGHT}) for index in range(count)}
    return torch_zip(assemble(("PROTO", 2), *state_dict_ops(mappings), "STOP"), [DATA])


def records(count: int) -> bytes:
    """Tensors in records of their own."""
    tensors = {f"module.{index}.weight": Tensor(str(index), (2,), 2, location="cuda:0") for index in range(count)}
    return torch_zip(assemble(("PROTO", 2), *state_dict_ops(tensors), "STOP"), [DATA] * count)


def plain(count: int) -> bytes:
    """A safetensors file."""
    places = ((f"module.{index}.weight", [8 * index, 8 * index + 8]) for index in range(count))
    header = {name: {"dtype": "F32", "shape": [2], "data_offsets": place} for name, place in places}
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + DATA * count


def views(count: int) -> bytes:
    """Tensors that lie end to end on one storage."""
    tensors = {str(index): Tensor("0", (1,), count, offset=index) for index in range(count)}
    return torch_zip(assemble(("PROTO", 2), *state_dict_ops(tensors), "STOP"), [bytes(4 * count)])


def optimizers(count: int) -> bytes:
    """As many optimizers as tensors."""
    state = ["EMPTY_DICT", *push("state"), *state_dict_ops({"w": state_dict_ops({"exp_avg": WEIGHT})}), "SETITEM",
             *push("param_groups"), "EMPTY_LIST", "SETITEM"]  # fmt: skip
    mappings = {f"optimizer{index}": list(state) for index in range(count)}
    return torch_zip(assemble(("PROTO", 2), *state_dict_ops(mappings), "STOP"), [DATA])


def phrases(count: int, *, width: Callable[[int], int], given: range = range(0)) -> bytes:
    """Calls as torch writes them where numbers of the memo are large, each of as many columns as `width` says.

    Args:
        given: calls of which a number was given to something else before.
    """
    names: list[list[Op]] = [
        [("GLOBAL", "torch._utils", "_rebuild_tensor_v2")], push("storage"), [("GLOBAL", "torch", "FloatStorage")],
        push("cuda:0"), [("GLOBAL", "collections", "OrderedDict")],
    ]  # fmt: skip
    ops: list[Op] = ["EMPTY_DICT"]
    for number, name in enumerate(names):
        ops += [*name, ("LONG_BINPUT", number), "POP"]
    for index in given:
        ops += ["NONE", ("LONG_BINPUT", 8 * index + 10), "POP"]
    func, storage, kind, place, hooks = (("LONG_BINGET", number) for number in range(len(names)))
    ops.append("MARK")
    for index in range(count):
        put = iter([("LONG_BINPUT", 8 * index + 8 + number) for number in range(8)])
        ops += [*push(f"module.{index}.weight"), next(put), func, "MARK", "MARK", storage, kind, *push("0"), next(put)]
        ops += [place, *push(70_000), "TUPLE", next(put), "BINPERSID", *push(0), *push(1), *push(width(index))]
        ops += ["TUPLE2", next(put), *push(0), *push(1), "TUPLE2", next(put), "NEWFALSE", hooks, "EMPTY_TUPLE"]
        ops += ["REDUCE", next(put), "TUPLE", next(put), "REDUCE", next(put)]
    return torch_zip(assemble(("PROTO", 2), *ops, "SETITEMS", "STOP"), [bytes(280_000)])


def of_many_widths(count: int) -> bytes:
    """Tensors of which no two have one shape."""
    return phrases(count, width=lambda index: index + 1)


def given_before(count: int) -> bytes:
    """Tensors every second of which gives a number that was given before."""
    return phrases(count, width=lambda index: 2, given=range(1, count, 2))


def overlapping(count: int) -> bytes:
    """Directory rows, each for all that follows its header, and no checksum that agrees."""
    size = count * 60
    records = [Record(f"archive/data/{index}", b"x" * 20, crc=5, align=1) for index in range(count)]
    return build_zip([replace(record, size=size // 2, compressed_size=size // 2) for record in records])


def signatures(count: int) -> bytes:
    return b"PK\x03\x04" * (count * 8) + b"archive/data.pkl"


def seconds(work: Callable[[], object]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


def attempt(work: Callable[[], object]) -> None:
    with contextlib.suppress(CkptfixError):
        work()


def to(format: FormatName) -> Callable[[Path], object]:
    return lambda path: ckptfix.convert(path, path.with_name("o"), to=format, dry_run=True)


EACH: dict[str, Callable[[Path], object]] = {
    "add-module": lambda path: ckptfix.add_module(path, path.with_name("o"), dry_run=True),
    "average": lambda path: ckptfix.average([path, path], path.with_name("o"), dry_run=True),
    "cast": lambda path: ckptfix.cast(path, path.with_name("o"), to="bfloat16", dry_run=True),
    "convert to dcp": to("dcp"),
    "convert to hf": to("hf"),
    "convert to legacy": to("legacy"),
    "convert to safetensors": to("safetensors"),
    "convert to zip": to("zip"),
    "diff": lambda path: ckptfix.diff(path, path),
    "digest": ckptfix.digest,
    "doctor": ckptfix.doctor,
    "fix": lambda path: ckptfix.fix(path, path.with_name("o"), dry_run=True),
    "inspect": ckptfix.inspect,
    "ls": lambda path: listing.listed(str(path), check=True),
    "match": lambda path: ckptfix.match(path, path.with_name("o"), like=path, dry_run=True),
    "rename": lambda path: ckptfix.rename(path, path.with_name("o"), subs=[("weight", "w")], dry_run=True),
    "repair": lambda path: ckptfix.repair(path, path.with_name("o"), check_only=True),
    "select": lambda path: ckptfix.select(path, path.with_name("o"), drop=["module.*1.*"], dry_run=True),
    "slim": lambda path: ckptfix.slim(path, path.with_name("o"), dedupe=True, dry_run=True),
    "stats": ckptfix.stats,
    "strip-module": lambda path: ckptfix.strip_module(path, path.with_name("o"), dry_run=True),
    "to-cpu": lambda path: ckptfix.to_cpu(path, path.with_name("o"), dry_run=True),
}
"""What anyone does with a checkpoint of many small tensors."""

VERBS: dict[str, tuple[Callable[[int], bytes], int, Callable[[Path], object]]] = {
    "frames, strip-module": (frames, 1000, lambda path: ckptfix.strip_module(path, path.with_name("o"), dry_run=True)),
    "frames, to-cpu": (frames, 1000, lambda path: ckptfix.to_cpu(path, path.with_name("o"), dry_run=True)),
    "dicts, doctor": (dicts, 500, ckptfix.doctor),
    "dicts, doctor --fast": (dicts, 500, lambda path: ckptfix.doctor(path, fast=True)),
    "dicts, inspect": (dicts, 500, ckptfix.inspect),
    "dicts, strip-module": (
        dicts,
        500,
        lambda path: ckptfix.strip_module(path, path.with_name("o"), dry_run=True),
    ),
    "dicts, add-module": (
        dicts,
        500,
        lambda path: ckptfix.add_module(path, path.with_name("o"), dry_run=True),
    ),
    "dicts, rename": (
        dicts,
        500,
        lambda path: ckptfix.rename(path, path.with_name("o"), subs=[("fc", "net")], dry_run=True),
    ),
    "dicts, fix": (dicts, 200, lambda path: ckptfix.fix(path, path.with_name("o"), dry_run=True)),
    "dicts, repair": (dicts, 200, lambda path: ckptfix.repair(path, path.with_name("o"), check_only=True)),
    "dicts, sanitize": (dicts, 500, lambda path: ckptfix.sanitize(path, path.with_name("o"), dry_run=True)),
    "dicts, cast": (
        dicts,
        100,
        lambda path: ckptfix.cast(path, path.with_name("o"), to="bfloat16", dry_run=True),
    ),
    "dicts, select": (
        dicts,
        200,
        lambda path: ckptfix.select(path, path.with_name("o"), drop=["*.weight"], dry_run=True),
    ),
    "dicts, convert to dcp": (dicts, 200, to("dcp")),
    "views, convert to dcp": (views, 300, to("dcp")),
    "views, slim": (views, 1500, lambda path: ckptfix.slim(path, path.with_name("o"), dry_run=True)),
    "optimizers, doctor": (optimizers, 300, ckptfix.doctor),
    "widths, to-cpu": (
        of_many_widths,
        2000,
        lambda path: ckptfix.to_cpu(path, path.with_name("o"), dry_run=True),
    ),
    "given before, inspect": (given_before, 500, ckptfix.inspect),
    "rows, repair": (overlapping, 1500, lambda path: ckptfix.repair(path, path.with_name("o"), check_only=True)),
    "signatures, repair": (signatures, 5000, lambda path: ckptfix.repair(path, path.with_name("o"), check_only=True)),
}


@pytest.mark.campaign
@pytest.mark.parametrize("name", VERBS)
def test_growth(name: str, tmp_path: Path) -> None:
    grows(*VERBS[name], tmp_path)


@pytest.mark.sampled(0)
@pytest.mark.parametrize("make", [records, plain])
@pytest.mark.parametrize("name", EACH)
def test_growth_of_small_tensors(name: str, make: Callable[[int], bytes], tmp_path: Path) -> None:
    grows(make, 200, EACH[name], tmp_path)


def grows(make: Callable[[int], bytes], count: int, verb: Callable[[Path], object], tmp_path: Path) -> None:
    """Fail if the CPU seconds of `verb` grow faster than its input."""
    small, large = tmp_path / "small.pth", tmp_path / "large.pth"
    small.write_bytes(make(count))
    large.write_bytes(make(count * TIMES))
    attempt(lambda: verb(small))
    ratios = []
    for _ in range(3):
        before = max(min(seconds(lambda: attempt(lambda: verb(small))) for _ in range(2)), 0.005)
        ratios.append(seconds(lambda: attempt(lambda: verb(large))) / before)
        if ratios[-1] < MOST:
            return
    pytest.fail(f"{TIMES} times the input took {ratios} times the CPU")


MEMORY = """
import sys
import ckptfix
from ckptfix.errors import CkptfixError
try:
    ckptfix.repair(sys.argv[1], sys.argv[1] + "o", check_only=True)
except CkptfixError as error:
    print(error)
print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="no /proc here")
def test_memory_of_a_file_of_signatures(tmp_path: Path) -> None:
    """4 MB of local headers' signatures took 1.5 GB."""
    path = tmp_path / "in.pth"
    path.write_bytes(signatures(1 << 17))
    done = subprocess.run([sys.executable, "-c", MEMORY, str(path)], capture_output=True, text=True, check=True)
    assert int(done.stdout.split()[-1]) < 150_000, done.stdout


def test_headers_inside_headers_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "in.pth"
    header = b"PK\x03\x04" + b"\0" * 22 + struct.pack("<HH", 4000, 60_000) + b"name"
    path.write_bytes(header * 20_000 + b"archive/data.pkl" + b"x" * 70_000)
    with pytest.raises(Unsupported, match="local headers"):
        ckptfix.repair(path, tmp_path / "o", check_only=True)
