"""The weight audit at run time: a verb that forgets a tensor, gives it other bytes or launders damage is caught."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import Tensor, assemble, build_zip, state_dict_ops, torch_records
from safetensors.torch import save_file
from torch import nn

import ckptfix
from ckptfix.checkpoint import ByteRange, Derived, OutputFile, Plan, Segment, Storage, tensors
from ckptfix.checkpoint.byte_ranges import Spliced
from ckptfix.errors import CkptfixError, DamagedFile, WouldLoseData
from ckptfix.formats import FORMATS
from ckptfix.formats.safetensors import format as safetensors
from ckptfix.formats.safetensors.ties import share_plan
from ckptfix.io.checksums import Checksums
from ckptfix.io.read import read_chunks
from ckptfix.io.source import open_source
from ckptfix.io.virtual_files import PlannedFile
from ckptfix.ops import audit, writing
from ckptfix.ops.audit import output as law_output
from ckptfix.ops.audit import promise as law_promise
from ckptfix.ops.writing import Result

PACKAGE = Path(ckptfix.__file__).parent
TESTS = Path(__file__).parents[1]


def training(path: Path, **how: Any) -> Path:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    wrapped = nn.DataParallel(model)
    optimizer = torch.optim.Adam(wrapped.parameters())
    wrapped(torch.randn(3, 4)).sum().backward()
    optimizer.step()
    tied = torch.randn(6, 3)
    state = {
        "model": wrapped.state_dict(),
        "optimizer": optimizer.state_dict(),
        "extra": {"a.weight": tied, "b.weight": tied, "c.view": tied[1:3], "d.column": torch.randn(5, 7)[:, 2]},
    }
    torch.save(state, path, **how)
    return path


VERBS: dict[str, Callable[[Path, Path], Result]] = {
    "strip-module": ckptfix.strip_module,
    "to-cpu": ckptfix.to_cpu,
    "rename": lambda source, dest: ckptfix.rename(source, dest, subs=[("weight", "w")]),
    "legacy": lambda source, dest: ckptfix.convert(source, dest, to="legacy"),
    "safetensors": lambda source, dest: ckptfix.convert(source, dest.with_suffix(".safetensors"), at="model"),
    "sanitize": lambda source, dest: ckptfix.sanitize(source, dest, torch="1.5"),
    "weights": lambda source, dest: ckptfix.sanitize(source, dest, keep_only="weights"),
    "slim": lambda source, dest: ckptfix.slim(source, dest, contiguous=True, dedupe=True),
    "no-optimizer": lambda source, dest: ckptfix.slim(source, dest, no_optimizer=True),
    "extract": lambda source, dest: ckptfix.extract(source, dest, at="model"),
    "repair": ckptfix.repair,
}


@pytest.mark.parametrize("verb", VERBS)
def test_a_verb_that_keeps_the_law_counts_every_tensor(tmp_path: Path, verb: str) -> None:
    source = training(tmp_path / "in.pth")
    done = VERBS[verb](source, tmp_path / "out.pth")
    assert done.exit_code == 0 and done.account.lost == ()
    assert done.account.tensors == 31
    assert done.as_dict()["account"]["tensors"] == 31
    if verb not in ("safetensors", "weights", "no-optimizer", "extract"):
        assert done.account.written == 31


@pytest.mark.parametrize("kind", ["zip", "legacy"])
def test_an_edit_that_loses_a_key_is_caught(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    source = training(tmp_path / "in.pth", _use_new_zipfile_serialization=kind == "zip")
    other = torch.load(source)
    del other["model"]["module.0.weight"]
    torch.save(other, tmp_path / "less.pth", _use_new_zipfile_serialization=kind == "zip")
    less = ckptfix.open_checkpoint(tmp_path / "less.pth")

    def plan_edit(checkpoint: Any, edits: Any, dest: str) -> Plan:
        return Plan((OutputFile.of(dest, (ByteRange(less.path, 0, less.size),)),))

    monkeypatch.setattr(audit, "is_copy", lambda plan, promise: False)
    monkeypatch.setitem(FORMATS, kind, replace(FORMATS[kind], plan_edit=plan_edit))
    done = ckptfix.strip_module(source, tmp_path / "out.pth")
    assert done.exit_code == 3
    assert "model/module.0.weight" in done.account.lost
    assert [row.where for row in done.findings if row.id == "lost"] == list(done.account.lost)
    assert any("LOST" in line and "model/module.0.weight" in line for line in done.lines)


def test_other_bytes_under_a_name_are_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.save({"w.a": torch.ones(4), "w.b": torch.zeros(4), "w.c": torch.ones(3)}, tmp_path / "in.pth")
    share = share_plan

    def swapped(entries: Any) -> Any:
        a, b, c = entries
        return share([a, replace(b, storage=a.storage, offset=a.offset), c])

    monkeypatch.setitem(FORMATS, "safetensors", replace(FORMATS["safetensors"], split_ties=swapped))
    done = ckptfix.convert(tmp_path / "in.pth", tmp_path / "out.safetensors")
    assert (done.exit_code, done.account.lost) == (3, ("w.b",))


def test_another_shape_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.save({"w.a": torch.ones(4, 2)}, tmp_path / "in.pth")
    write: Any = safetensors.FORMAT.plan_write

    def flat(entries: Any, dest: str, **rest: Any) -> Plan:
        made: Plan = write([replace(entry, shape=(8,), stride=(1,)) for entry in entries], dest, **rest)
        return made

    monkeypatch.setitem(FORMATS, "safetensors", replace(FORMATS["safetensors"], plan_write=flat))
    done = ckptfix.convert(tmp_path / "in.pth", tmp_path / "out.safetensors")
    assert (done.exit_code, done.account.lost) == (3, ("w.a",))


def test_a_plan_that_cannot_be_read_back_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.save({"w.a": torch.ones(4, 2)}, tmp_path / "in.pth")
    broken = Plan((OutputFile.of(str(tmp_path / "out.safetensors"), [b"\x10\0\0\0\0\0\0\0{not JSON      }"]),))
    instead = replace(FORMATS["safetensors"], plan_write=lambda *_, **__: broken)
    monkeypatch.setitem(FORMATS, "safetensors", instead)
    with pytest.raises(WouldLoseData, match="cannot be read back"):
        ckptfix.convert(tmp_path / "in.pth", tmp_path / "out.safetensors")
    assert not (tmp_path / "out.safetensors").exists()


@pytest.mark.parametrize("kind", ["zip", "legacy"])
def test_the_quick_way_for_edits_sees_what_the_slow_one_sees(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It says yes to each edit, and no to an object with another number, storage, or order in it."""
    source = training(tmp_path / "in.pth", _use_new_zipfile_serialization=kind == "zip")
    slow: list[Any] = []
    monkeypatch.setattr(law_promise, "listed", slow.append)
    plan = ckptfix.strip_module(source, tmp_path / "out.pth").plan
    ckptfix.rename(source, tmp_path / "longer.pth", subs=[("weight", "a_much_longer_name_than_before")])
    assert not slow
    checkpoint = ckptfix.open_checkpoint(source)
    assert audit.keeps_all(checkpoint, plan)
    for change in ("value", "swap", "drop", "shape"):
        state = torch.load(source)
        model = state["model"]
        if change == "value":
            state["optimizer"]["param_groups"][0]["lr"] = 0.5
        if change == "swap":
            model["module.0.bias"], model["module.1.bias"] = model["module.1.bias"], model["module.0.bias"]
        if change == "drop":
            del model["module.2.bias"]
        if change == "shape":
            model["module.0.weight"] = model["module.0.weight"].view(8, 4).t()
        torch.save(state, tmp_path / "other.pth", _use_new_zipfile_serialization=kind == "zip")
        size = (tmp_path / "other.pth").stat().st_size
        made = Plan((OutputFile.of("x.pth", [ByteRange(str(tmp_path / "other.pth"), 0, size)]),))
        assert not audit.keeps_all(checkpoint, made), change


def flipped(path: Path, needle: bytes) -> None:
    data = bytearray(path.read_bytes())
    at = data.index(needle)
    data[at] ^= 1
    path.write_bytes(bytes(data))


@pytest.mark.parametrize("verb", ["legacy", "safetensors", "sanitize"])
def test_damage_does_not_come_out_as_sound(tmp_path: Path, verb: str) -> None:
    """The output has no checksum, or a fresh one: the one of the input is compared while the bytes are copied."""
    source = training(tmp_path / "in.pth")
    weight = torch.load(source)["model"]["module.0.weight"]
    flipped(source, weight.numpy().tobytes())
    with pytest.raises(DamagedFile, match="do not match the CRC-32") as caught:
        VERBS[verb](source, tmp_path / "out.pth")
    assert caught.value.path == str(source) and "ckptfix repair" in (caught.value.hint or "")
    assert [path.name for path in tmp_path.iterdir()] == ["in.pth"]


@pytest.mark.parametrize("verb", ["strip-module", "slim", "extract"])
def test_damage_keeps_the_checksum_that_shows_it(tmp_path: Path, verb: str) -> None:
    source = training(tmp_path / "in.pth")
    weight = torch.load(source)["model"]["module.0.weight"]
    flipped(source, weight.numpy().tobytes())
    VERBS[verb](source, tmp_path / "out.pth")
    assert any(row.id == "bad-crc" for row in ckptfix.doctor(tmp_path / "out.pth").findings)


def test_a_storage_that_is_cut_to_what_is_used_is_compared_whole(tmp_path: Path) -> None:
    base = torch.arange(4096.0)
    torch.save({"a.weight": base[:16].view(4, 4)}, tmp_path / "in.pth")
    flipped(tmp_path / "in.pth", base[1000:1010].numpy().tobytes())
    with pytest.raises(DamagedFile, match="do not match the CRC-32"):
        ckptfix.slim(tmp_path / "in.pth", tmp_path / "out.pth")


@pytest.mark.parametrize("to", ["legacy", "safetensors", "zip"])
def test_a_pickle_that_fails_its_checksum_is_not_converted(tmp_path: Path, to: Any) -> None:
    torch.save({"w.weight": torch.ones(5)}, tmp_path / "in.pth")
    flipped(tmp_path / "in.pth", b"w.weight")
    with pytest.raises(CkptfixError, match="CRC-32"):
        if to == "zip":
            ckptfix.strip_module(tmp_path / "in.pth", tmp_path / "out.pth", prefix="v")
        ckptfix.convert(tmp_path / "in.pth", tmp_path / "out", to=to)


def test_tensors_that_a_verb_leaves_and_does_not_list_are_listed(tmp_path: Path) -> None:
    source = training(tmp_path / "in.pth")
    done = ckptfix.extract(source, tmp_path / "out.pth", at="model")
    listed = [*done.left, *done.account.left]
    assert {name.split("/")[0] for name in listed} == {"optimizer", "extra"}


@pytest.fixture(scope="module")
def rank_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A state dict with a ShardedTensor that lies on another rank; made where no process group is left by others."""
    path = tmp_path_factory.mktemp("rank") / "rank0.pt"
    script = "import pathlib, sys, rank_files; rank_files.sharded(pathlib.Path(sys.argv[1]), elsewhere=True)"
    subprocess.run([sys.executable, "-c", script, path], check=True, cwd=TESTS)
    return path


@pytest.mark.sampled(0, test_all=4)
@pytest.mark.slow
@pytest.mark.parametrize("verb", ["strip-module", "to-cpu", "sanitize", "repair"])
def test_a_tensor_that_lies_on_another_rank_has_nothing_to_lose(tmp_path: Path, rank_file: Path, verb: str) -> None:
    assert [entry.parts for entry in ckptfix.open_checkpoint(rank_file).entries if entry.key == "scale"] == [()]
    done = VERBS[verb](rank_file, tmp_path / "out.pt")
    assert done.account.lost == ()
    assert done.exit_code == (3 if verb == "repair" else 0)  # repair names the class that it leaves out


@pytest.mark.slow
def test_only_one_place_writes_plans() -> None:
    """A verb cannot forget the law: plans are written by `ops.writing` alone."""
    callers: dict[str, set[str]] = {"write_plan": set(), "write_folder": set()}
    for path in PACKAGE.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)) if any(name in text for name in callers) else ():
            name = getattr(node, "attr", None) or getattr(node, "id", None)
            if name in callers:
                callers[name].add(str(path.relative_to(PACKAGE)))
    # A plan for a store goes on to its own writer; git's configuration and records of a fleet hold no tensors.
    others = {"io/write.py", "git/driver.py", "fleet/records.py"}
    assert callers["write_plan"] - others == {"io/folders.py", "ops/writing.py"}
    assert callers["write_folder"] - {"io/folders.py"} == {"ops/writing.py"}
    assert writing.carry_out.__module__ == "ckptfix.ops.writing"


def test_a_planned_file_reads_as_the_file_will(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(bytes(range(200)))
    sums = Checksums([ByteRange(str(tmp_path / "a"), 0, 10)])
    made = Derived(9, lambda: (b"abc", b"defghi"), "made")
    checksum = sums.segment(0, lambda crc: b"1234", b"1234")
    segments = (b"head", ByteRange(str(tmp_path / "a"), 50, 20), made, checksum, b"end")
    whole = b"head" + bytes(range(50, 70)) + b"abcdefghi" + b"1234" + b"end"
    with open_source(PlannedFile(OutputFile.of("planned", segments))) as reader:
        assert reader.size == len(whole)
        for start in range(len(whole)):
            for stop in range(start, len(whole) + 1):
                assert reader.read(start, stop - start) == whole[start:stop]


def test_copies_that_leave_out_a_file_or_a_part_are_no_copy(tmp_path: Path) -> None:
    """A folder of which each file is copied, but one; a file of which the end is cut."""
    (tmp_path / "in").mkdir()
    for number in (1, 2):
        save_file({f"w{number}": torch.ones(4)}, tmp_path / "in" / f"model-0000{number}-of-00002.safetensors")
    checkpoint = ckptfix.open_checkpoint(tmp_path / "in")
    files = [ByteRange(mark.path, 0, mark.stamp.size) for mark in checkpoint.files]
    whole = Plan(tuple(OutputFile.of(tmp_path / "out" / Path(file.path).name, [file]) for file in files))
    promise = law_promise.everything(checkpoint)
    assert audit.is_copy(whole, promise)
    assert not audit.audit(promise, whole, checkpoint.format)[1].lost
    lacking = Plan(whole.files[:-1])
    assert not audit.is_copy(lacking, promise)
    assert audit.audit(promise, lacking, checkpoint.format)[1].lost == ("w2",)
    cut = Plan((*whole.files[:-1], OutputFile.of(whole.files[-1].path, [files[-1].sub(0, files[-1].length - 4)])))
    assert not audit.is_copy(cut, promise)


def test_unpacked_tensors_under_each_others_names_are_caught(tmp_path: Path) -> None:
    tensors = {name: Tensor(str(key), (2,), 2) for key, name in enumerate("ab")}
    records = torch_records(assemble(("PROTO", 2), *state_dict_ops(tensors), "STOP"), [bytes(8), bytes(range(8))])
    (tmp_path / "in.pth").write_bytes(build_zip([replace(record, method=8) for record in records]))
    kept = list(ckptfix.open_checkpoint(tmp_path / "in.pth").entries)
    swapped = [replace(entry, key=key) for entry, key in zip(kept, "ba", strict=True)]
    promise = law_promise.Promise(kept)
    for entries, lost in ((kept, ()), (swapped, ("a", "b"))):
        plan = FORMATS["safetensors"].plan_write(entries, str(tmp_path / "out"))
        assert audit.audit(promise, plan, "safetensors")[1].lost == lost


def test_one_of_many_views_that_is_missing_is_the_one_that_is_named(tmp_path: Path) -> None:
    """What is made of the bytes of its neighbour counts for the neighbour alone."""
    whole = torch.arange(24.0)
    torch.save({name: whole[8 * at : 8 * at + 8] for at, name in enumerate("abc")}, tmp_path / "in.pth")
    kept = list(ckptfix.open_checkpoint(tmp_path / "in.pth").entries)
    made = []
    for entry in (kept[0], kept[2]):
        assert entry.storage is not None and isinstance(entry.storage.data, ByteRange)
        part = entry.storage.data.sub(4 * entry.offset, 32)
        data = Derived(32, lambda part=part: read_chunks(part), "copied", (part,))  # type: ignore[misc]
        storage = replace(entry.storage, key=entry.key, nbytes=32, data=data, crc32=None)
        made.append(replace(entry, offset=0, storage=storage))
    plan = FORMATS["safetensors"].plan_write(made, str(tmp_path / "out"))
    assert audit.audit(law_promise.Promise(kept, names_stay=False), plan, "safetensors")[1].lost == ("b",)


@pytest.mark.parametrize(("start", "end", "copied"), [(0, 0, True), (1, 0, False), (0, 1, False), (1, 1, False)])
def test_a_copy_of_a_part_holds_what_is_in_it(tmp_path: Path, start: int, end: int, copied: bool) -> None:
    """The range that is copied begins and ends with the bytes of the tensor, or within them."""
    torch.save({"a": torch.arange(6.0)}, tmp_path / "in.pth")
    (entry,) = ckptfix.open_checkpoint(tmp_path / "in.pth").entries
    assert isinstance(entry.data, ByteRange)
    data = entry.data.sub(start, entry.data.length - start - end)
    plan = Plan((OutputFile.of(tmp_path / "out", [data]),))
    assert audit.is_copy(plan, law_promise.Promise([entry])) is copied


@pytest.mark.parametrize("left_out", [None, 0, 1])
@pytest.mark.parametrize("format", ["safetensors", "zip"])
def test_each_tensor_that_another_is_cut_into_has_to_be_there(
    tmp_path: Path, format: str, left_out: int | None
) -> None:
    torch.save({"qkv": torch.arange(12.0).view(4, 3), "b": torch.ones(2)}, tmp_path / "in.pth")
    whole, other = ckptfix.open_checkpoint(tmp_path / "in.pth").entries
    assert whole.storage is not None and isinstance(whole.storage.data, ByteRange)
    parts = [
        replace(whole, key=key, shape=(2, 3), storage=replace(
            whole.storage, key=key, nbytes=24, data=whole.storage.data.sub(24 * number, 24), crc32=None))
        for number, key in enumerate("qk")
    ]  # fmt: skip
    promise = law_promise.Promise([whole, other], made={"qkv": parts})
    written = [part for number, part in enumerate(parts) if number != left_out]
    plan = FORMATS[format].plan_write([*written, other], str(tmp_path / "out"))
    assert audit.audit(promise, plan, format)[1].lost == (() if left_out is None else ("qkv",))
    # Bytes that go into none of them are lost too, unless the verb says so itself.
    half = replace(promise, made={"qkv": written})
    assert audit.audit(half, plan, format)[1].lost == (() if left_out is None else ("qkv",))
    assert not audit.audit(replace(half, partly=["qkv"]), plan, format)[1].lost


@pytest.mark.parametrize(
    ("name", "excused", "says", "severity"),
    [
        ("model/fc.weight", False, "a bug in ckptfix", "error"),
        ("model/fc.weight", True, "was in an object that was left out", "warning"),
        ("a/b/()/0", False, "arguments or state of an object", "warning"),
        ("fc.weight/metadata/()state/1/tensor", False, "arguments or state of an object", "warning"),
    ],
)
def test_each_loss_says_whose_it_is(name: str, excused: bool, says: str, severity: str) -> None:
    account = law_promise.Account(lost=(name,), excused=excused)
    (finding,) = account.findings()
    assert (finding.id, finding.where, finding.severity) == ("lost", name, severity)
    assert says in finding.message
    assert f"LOST: {name}" in account.lines()


@pytest.mark.parametrize("suffix", ["pth", "safetensors"])
@pytest.mark.parametrize(
    "verb",
    [
        lambda source, out: ckptfix.cast(source, out, "bfloat16"),
        lambda source, out: ckptfix.average([source, source], out),
    ],
    ids=["cast", "average"],
)
def test_what_takes_the_place_of_each_tensor_is_not_looked_for_among_all(
    tmp_path: Path, suffix: str, verb: Callable[[Path, Path], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    count = 200
    state = {f"layers.{number}.weight": torch.randn(3, 3) for number in range(count)}
    source = tmp_path / f"in.{suffix}"
    (save_file if suffix == "safetensors" else torch.save)(state, source)
    calls = 0
    same_bytes = tensors.same_bytes

    def counted(one: Any, other: Any) -> bool:
        nonlocal calls
        calls += 1
        return same_bytes(one, other)

    monkeypatch.setattr(law_output, "same_bytes", counted)
    verb(source, tmp_path / f"out.{suffix}")
    assert calls <= 4 * count


def test_a_planned_file_is_opened_without_a_look_at_all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    # Each tensor of a planned distributed checkpoint opens the file that it is in.
    asked: list[str] = []

    def is_local(path: str) -> bool:
        asked.append(path)
        return True

    monkeypatch.setattr("ckptfix.io.virtual_files.is_local", is_local)
    planned = PlannedFile(OutputFile.of("planned", [ByteRange(f"in{number}", 0, 4) for number in range(10)]))
    for _ in range(3):
        with open_source(planned) as reader:
            assert not reader.far
    assert len(asked) == 10


class Apart(Spliced):
    """Two ranges of a file, with others between them."""

    def pieces(self, offset: int, length: int) -> Iterator[Segment]:
        assert (offset, length) == (0, 8)
        yield from (ByteRange("in", 100, 4), ByteRange("in", 200, 4))


@pytest.mark.parametrize(("copied", "there"), [([], False), ([100], False), ([200], False), ([100, 200], True)])
def test_a_storage_in_pieces_is_there_where_each_piece_is(copied: list[int], there: bool, tmp_path: Path) -> None:
    save_file({"a": torch.zeros(2)}, tmp_path / "a.safetensors")
    plan = Plan((OutputFile.of(tmp_path / "out", [ByteRange(str(tmp_path / "a.safetensors"), 0, 80)]),))
    out = law_output.PlannedOutput(plan, "safetensors")
    out._sources = [ByteRange("in", offset, 4) for offset in copied]
    whole = Apart("in pieces")
    assert out.holds(Storage("0", "float32", 8, "cpu", ByteRange(whole, 0, 8), None)) is there
