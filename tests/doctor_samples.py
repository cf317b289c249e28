"""Files for findings of `doctor` that are not load errors: id -> how to make a file that has it."""

from __future__ import annotations

import io
import json
import lzma
import struct
import tarfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import builders
import numpy
import rank_files
import torch
import zero_files
from array_files import onnx_model, onnx_tensor
from builders import Record, Tensor, assemble, build_zip, push, state_dict_ops, torch_records

Build = Callable[[Path], Path]
DATA = struct.pack("<2f", 1, 2)
WEIGHT = Tensor("0", (2,), 2)
CALL: list[Any] = [("GLOBAL", "os", "system"), *push("true"), "TUPLE1", "REDUCE"]


@dataclass(frozen=True)
class Sample:
    """A file that has the finding `id`; `like` are the names and shapes of a model to compare it with."""

    id: str
    build: Build
    like: dict[str, list[int]] | None = None


SAMPLES: list[Sample] = []


def pickle_of(items: dict[str, Any], *after: Any) -> bytes:
    return assemble(("PROTO", 2), *state_dict_ops(items), "STOP", *after)


def records(items: dict[str, Any] | None = None, storages: list[bytes] | None = None) -> list[Record]:
    return torch_records(pickle_of(items or {"fc.weight": WEIGHT}), [DATA] if storages is None else storages)


def put(id: str, data: bytes, name: str = "model.pth", like: dict[str, list[int]] | None = None) -> None:
    SAMPLES.append(Sample(id, lambda folder: builders.written(folder / name, data), like))


def changed(id: str, record: str, **fields: Any) -> None:
    """An archive of which the record `record` is otherwise."""
    rows = [replace(row, **fields) if row.name == f"archive/{record}" else row for row in records()]
    put(id, build_zip(rows))


def zipped(id: str, *extra: Record) -> None:
    put(id, build_zip([*records(), *extra]))


def tensors(id: str, rows: list[tuple[str, str, tuple[int, ...], bytes]], **options: Any) -> None:
    options.setdefault("metadata", {"format": "pt"})
    put(id, builders.safetensors(rows, **options), "model.safetensors")


def floats(*values: float) -> bytes:
    return struct.pack(f"<{len(values)}f", *values)


def plain_tar() -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        archive.addfile(tarfile.TarInfo("model.pth"))
    return buffer.getvalue()


put("text-file", b"see the other link\n" * 3)
put("gguf-file", b"GGUF" + struct.pack("<IQQ", 3, 0, 0), "model.gguf")
put("tar-archive", plain_tar())
put("other-framework", onnx_model(onnx_tensor("w", numpy.ones(3, "f4"))), "model.onnx")
put("other-archive", b"7z\xbc\xaf\x27\x1c" + bytes(40))
put("compressed", lzma.compress(b"x" * 100))
put("exported-program", build_zip([Record("m/archive_format", b"pt2"), Record("m/data/x", b"1")]), "model.pt2")
put("bare-data-pkl", pickle_of({"fc.weight": WEIGHT}), "data.pkl")
put("unknown-format", b"\xf7\xf1\xf2\xf3" * 50)
put("junk-before", build_zip(records(), prepend=b"header " * 10))
put("junk-before", build_zip(records(), prepend=b"header " * 10, based_on_prepended=True))
put("text-mode", build_zip(records()).replace(b"\n", b"\r\n") + b"\r\n" * 20)
put("no-checksums", build_zip([replace(row, crc=0) for row in records()]))
put("big-endian", build_zip(torch_records(pickle_of({"w": WEIGHT}), [DATA], byteorder="big")))
put("damaged", build_zip(torch_records(pickle_of({"w": WEIGHT}), [DATA], byteorder="middle")))
put("no-version", build_zip(torch_records(pickle_of({"w": WEIGHT}), [DATA], version=None)))
put("bad-pickle", builders.torch_zip(assemble(("PROTO", 2), *CALL, b"\xff"), [DATA]))
put("dangerous-global", builders.torch_zip(pickle_of({"w": WEIGHT, "x": CALL}), [DATA]))
put("unsupported-opcode", builders.torch_zip(builders.framed(*state_dict_ops({"w": WEIGHT})), [DATA]))
put("stacked-pickles", builders.torch_zip(pickle_of({"w": WEIGHT}, ("PROTO", 2), *CALL, "STOP"), [DATA]))
put("bytes-after-stop", builders.torch_zip(pickle_of({"w": WEIGHT}, b"\0" * 30), [DATA]))
nested = assemble(("PROTO", 2), *CALL, "STOP")
put("nested-pickle", builders.torch_zip(pickle_of({"w": WEIGHT, "x": [("BINBYTES", nested)]}), [DATA]))
put("hidden-pickle", builders.torch_zip(pickle_of({"w": WEIGHT}), [DATA, nested]))
put("unused-record", builders.torch_zip(pickle_of({"w": WEIGHT}), [DATA, b"\1" * 100]))
deep: list[Any] = push(1)
for _ in range(1500):
    deep = ["EMPTY_DICT", *push("a"), *deep, "SETITEM"]
put("memory-bomb", builders.torch_zip(pickle_of({"w": replace(WEIGHT, shape=(2**62,), stride=(0,))}), [DATA]))
put("bad-call", builders.torch_zip(pickle_of({"w": WEIGHT, "x": [
    ("GLOBAL", "collections", "OrderedDict"), *push(5), "REDUCE"]}), [DATA]))  # fmt: skip
put("too-deep", builders.torch_zip(pickle_of({"w": WEIGHT, "x": deep}), [DATA]))
put("bad-storage", builders.legacy(pickle_of({"w": replace(WEIGHT, legacy=True)}), [("0", -1, DATA)]))
put("partial-prefix", builders.torch_zip(pickle_of({"module.w": WEIGHT, "v": WEIGHT}), [DATA]))
put("optimizer-state", builders.torch_zip(
    pickle_of({"model": state_dict_ops({"w": WEIGHT}), "opt": [
        "EMPTY_DICT", "MARK", *push("state"), "EMPTY_DICT", *push(0), *state_dict_ops({"exp_avg": WEIGHT}), "SETITEM",
        *push("param_groups"), *push([{"params": [0]}]), "SETITEMS"]}), [DATA]))  # fmt: skip
put("doubtful-model", builders.torch_zip(
    pickle_of({"a.weight": WEIGHT, "x": state_dict_ops({"q": replace(WEIGHT, key="1", shape=(9,), numel=9)})}),
    [DATA, floats(*range(9))],
))  # fmt: skip
two = [replace(WEIGHT, shape=(2,), numel=3), replace(WEIGHT, shape=(2,), numel=3, offset=1)]
put("shared-memory", builders.torch_zip(pickle_of({"a": two[0], "b": two[1]}), [floats(1, 2, 3)]))
nan = float("nan")
put("nan-values", builders.torch_zip(pickle_of({"w": WEIGHT}), [floats(nan, 1)]))
put("infinite-values", builders.torch_zip(pickle_of({"w": WEIGHT}), [floats(-float("inf"), 1)]))
wide = Tensor("0", (64, 64), 4096)
put("all-zero", builders.torch_zip(pickle_of({"w": wide}), [bytes(16384)]))
put("zero-tail", builders.torch_zip(pickle_of({"w": wide}), [b"\x3f" * 8100 + bytes(16384 - 8100)]))
put("old-spelling", builders.torch_zip(pickle_of({"n.gamma": WEIGHT, "n.beta": WEIGHT}), [DATA]))
put("averaged-keys", builders.torch_zip(pickle_of({"n.weight": WEIGHT, "ema.n.weight": WEIGHT}), [DATA]))
put("deflate-bomb", build_zip([
    replace(row, data=bytes(1 << 24), method=8) if row.name.endswith("data/0") else row
    for row in records({"w": Tensor("0", (1 << 22,), 1 << 22)})]))  # fmt: skip

changed("odd-name", "byteorder", name="archive/../byteorder")
changed("bad-local-header", "data/0", local_name="archive/data/1")
changed("bad-crc", "data/0", crc=7)
changed("encrypted-record", "data/0", flags=0x809)
changed("unknown-compression", "data/0", method=12)
changed("hidden-bytes", "data/0", gap=b"x" * 40)
changed("misaligned-storage", "data/0", extra=b"")
zipped("duplicate-record", Record("archive/data/0", DATA))
zipped("case-variant", Record("archive/DATA/0", DATA))
zipped("stray-record", Record("archive/notes.txt", b"hello"))

tensors("misaligned-data", [("w", "F32", (2,), DATA)], align=1, metadata={"format": "pt", "a": "b"})
entry = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
tensors("hole", [], header={"w": {**entry, "data_offsets": [4, 12]}}, tail=DATA + b"\0" * 4)
tensors("overlap", [], header={"a": entry, "b": {**entry, "data_offsets": [4, 12]}}, tail=DATA + b"\0" * 4)
tensors("leading-bytes", [], header=b' {"w":' + json.dumps(entry).encode() + b"}", tail=DATA)
tensors("nul-padding", [], header=b'{"w":' + json.dumps(entry).encode() + b"}\0\0\0", tail=DATA)
again = b'"w":' + json.dumps(entry).encode()
tensors("duplicate-key", [], header=b"{" + again + b"," + again + b"}", tail=DATA)
tensors("unknown-field", [], header={"w": {**entry, "extra": 1}}, tail=DATA)
tensors("bad-directory", [], header=b"{not json}", tail=DATA)

put("no-names-match", builders.torch_zip(pickle_of({"w": WEIGHT}), [DATA]), like={"a.b": [3, 3], "c": [4]})
put("missing-keys", builders.torch_zip(pickle_of({"w": WEIGHT}), [DATA]), like={"w": [2], "fc.v": [2]})
put("unexpected-keys", builders.torch_zip(pickle_of({"w": WEIGHT, "fc.v": WEIGHT}), [DATA]), like={"w": [2]})


def sample(id: str) -> Callable[[Build], Build]:
    def add(build: Build) -> Build:
        SAMPLES.append(Sample(id, build))
        return build

    return add


@sample("torch-tar")
def torch_tar(folder: Path) -> Path:
    import torch
    from other_pickles import torch_tar

    return builders.written(folder / "model.pth.tar", torch_tar({"fc.weight": torch.ones(2)}))


whole = builders.torch_zip(pickle_of({"w": replace(WEIGHT, storage_class="LongStorage")}), [DATA * 2])
put("dtype-mismatch", whole, like={"w": [2]})


@sample("numpy-weights")
def arrays_by_name(folder: Path) -> Path:
    torch.save({"model": {"fc.weight": numpy.ones((2, 3), "float32")}}, folder / "model.pth")
    return folder / "model.pth"


@sample("no-checkpoint")
def a_folder(folder: Path) -> Path:
    (folder / "runs").mkdir()
    builders.written(folder / "runs" / "log.txt", b"x")
    return folder / "runs"


def sharded(folder: Path, rows: dict[str, str], total: int = 8, text: bytes | None = None) -> Path:
    """An index beside one shard that holds `w`."""
    shard = builders.safetensors([("w", "F32", (2,), DATA)], metadata={"format": "pt"})
    builders.written(folder / "m-00001-of-00001.safetensors", shard)
    index = json.dumps({"metadata": {"total_size": total}, "weight_map": rows}).encode()
    return builders.written(folder / "m.safetensors.index.json", index if text is None else text)


@sample("distributed-shard")
def two_archives(folder: Path) -> Path:
    return builders.written(folder / "renamed.bin", 2 * build_zip(records()))


@sample("one-rank")
def a_slice(folder: Path) -> Path:
    said = {"format": "pt", "DCP_SHARDING_INFO": json.dumps({"w": {"saved_offsets": [2]}})}
    return builders.written(
        folder / "model.safetensors", builders.safetensors([("w", "F32", (2,), DATA)], metadata=said)
    )


@sample("peft-adapter")
def an_adapter(folder: Path) -> Path:
    (folder / "run").mkdir()
    builders.written(folder / "run" / "adapter_config.json", json.dumps({"base_model_name_or_path": "a/b"}).encode())
    weights = builders.safetensors([("w.lora_A.weight", "F32", (2,), DATA)], metadata={"format": "pt"})
    return builders.written(folder / "run" / "adapter_model.safetensors", weights).parent


def lora(*keys: str) -> bytes:
    rows = [(key, "F32", (2,), DATA) for key in keys]
    return builders.safetensors(rows, metadata={"format": "pt"})


@sample("adapter")
def an_adapter_of_kohya(folder: Path) -> Path:
    content = lora("lora_unet_w.lora_down.weight", "lora_unet_w.lora_up.weight")
    return builders.written(folder / "style.safetensors", content)


@sample("adapter-incomplete")
def an_adapter_without_its_configuration(folder: Path) -> Path:
    return builders.written(folder / "x.safetensors", lora("w.lora_A.weight", "w.lora_B.weight"))


@sample("adapter-names")
def an_adapter_with_its_name_in_the_keys(folder: Path) -> Path:
    content = lora("base_model.model.w.lora_A.default.weight", "base_model.model.w.lora_B.default.weight")
    return builders.written(folder / "x.safetensors", content)


@sample("adapter-base")
def a_base_in_a_model_of_peft(folder: Path) -> Path:
    return builders.written(folder / "x.safetensors", lora("w.base_layer.weight"))


@sample("deepspeed-folder")
def zero(folder: Path) -> Path:
    for expert in range(2):
        builders.written(folder / f"layer_3_expert_{expert}_mp_rank_00_model_states.pt", build_zip(records()))
    return folder


@sample("missing-rank")
def without_a_rank(folder: Path) -> Path:
    (zero_files.example(2, 3).save(folder) / "zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
    return folder


@sample("other-save")
def two_steps(folder: Path) -> Path:
    run = zero_files.example(2, 2)
    inner, other = run.save(folder), replace(run, step=9).save(folder / "other")
    name = "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    (other / name).replace(inner / name)
    return folder


@sample("ranks-unverified")
def files_from_buffers(folder: Path) -> Path:
    zero_files.from_buffers(zero_files.example(2, 3).save(folder))
    return folder


@sample("model-steps")
def a_model_of_another_step(folder: Path) -> Path:
    run = zero_files.example(2, 2)
    inner, other = run.save(folder), replace(run, step=9).save(folder / "other")
    (other / "mp_rank_00_model_states.pt").replace(inner / "mp_rank_00_model_states.pt")
    return folder


@sample("ranks-differ")
def running_means(folder: Path) -> Path:
    for rank in range(2):
        rank_files.dtensors(folder / f"model_rank{rank}.pt", rank, {"bn.mean": torch.tensor([1.0, float(rank)])})
    return folder


@sample("flat-parameters")
def one_row(folder: Path) -> Path:
    for rank in range(2):
        torch.save({"_flat_param": torch.ones(5)}, folder / f"model_rank{rank}.pt")
    return folder


@sample("no-masters")
def without_optimizer(folder: Path) -> Path:
    for path in zero_files.example(2, 2).save(folder).glob("*_optim_states.pt"):
        path.unlink()
    return folder


SHARD = "m-00001-of-00001.safetensors"
OTHER_SHARD = "m-00002-of-00002.safetensors"


@sample("shard-path")
def escaping(folder: Path) -> Path:
    return sharded(folder, {"w": SHARD, "v": "../other.safetensors"})


@sample("bad-index")
def not_json(folder: Path) -> Path:
    return sharded(folder, {}, text=b'{"weight_map": {"w": 1}}')


@sample("extra-shard")
def one_more(folder: Path) -> Path:
    builders.written(folder / "m-00002-of-00002.safetensors", builders.safetensors([("v", "F32", (2,), DATA)]))
    return sharded(folder, {"w": SHARD})


@sample("other-model")
def whole_beside_shards(folder: Path) -> Path:
    builders.written(folder / "m.safetensors", builders.safetensors([("v", "F32", (2,), DATA)]))
    return sharded(folder, {"w": SHARD})


@sample("index-mismatch")
def index_mismatch(folder: Path) -> Path:
    other = builders.safetensors([("v", "F32", (2,), DATA)], metadata={"format": "pt"})
    builders.written(folder / OTHER_SHARD, other)
    return sharded(folder, {"w": OTHER_SHARD, "v": SHARD}, total=16)


@sample("missing-tensors")
def missing_tensors(folder: Path) -> Path:
    return sharded(folder, {"w": SHARD, "v": SHARD})


@sample("doubled-tensors")
def doubled_tensors(folder: Path) -> Path:
    index = sharded(folder, {"w": SHARD, "v": OTHER_SHARD}, total=24)
    rows = [("v", "F32", (2,), DATA), ("w", "F32", (2,), DATA)]
    builders.written(folder / OTHER_SHARD, builders.safetensors(rows, metadata={"format": "pt"}))
    return index


@sample("one-shard")
def one_shard(folder: Path) -> Path:
    index = json.dumps({"weight_map": {"w": OTHER_SHARD, "v": "m-00001-of-00002.safetensors"}}).encode()
    builders.written(folder / "m.safetensors.index.json", index)
    return builders.written(folder / OTHER_SHARD, builders.safetensors([("w", "F32", (2,), DATA)]))


@sample("no-index")
def no_index(folder: Path) -> Path:
    sharded(folder, {}).unlink()
    return folder


@sample("missing-slices")
def missing_slices(folder: Path) -> Path:
    metadata = {"format": "pt", "DCP_SHARDING_INFO": json.dumps({"w": {"saved_offsets": [2]}})}
    shard = builders.safetensors([("w", "F32", (2,), DATA)], metadata=metadata)
    builders.written(folder / "shard-00002-m-00001-of-00001.safetensors", shard)
    return folder


@sample("index-total")
def wrong_total(folder: Path) -> Path:
    return sharded(folder, {"w": SHARD}, total=9)


def saved(id: str, make: Callable[[], Any]) -> None:
    """What torch.save writes of an object."""

    def build(folder: Path) -> Path:
        torch.save(make(), folder / "model.pth")
        return folder / "model.pth"

    SAMPLES.append(Sample(id, build))


def jagged() -> Any:
    return torch.nested.nested_tensor([torch.zeros(2), torch.ones(3)], layout=torch.jagged)


saved("tensor-class", lambda: {"n": jagged(), "fc.weight": torch.ones(3)})
saved("no-data", lambda: {"fc.weight": torch.ones(3), "fc.bias": torch.empty(3, device="meta")})
saved(
    "quantized",
    lambda: {"fc.weight": torch.ones(4, 4).to(torch.float8_e4m3fn), "fc.weight_scale_inv": torch.ones(1, 1)},
)
