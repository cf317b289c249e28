"""Files that are not checkpoints are identified by type; each is made here by its own library or by hand."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import pickle
import random
import subprocess
import tarfile
import tracemalloc
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

import builders
import numpy
import pytest
import torch

from ckptfix.errors import CkptfixError, UnknownFormat
from ckptfix.formats import open_checkpoint
from ckptfix.formats.foreign import kinds

OID = "4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393"
POINTER = f"version https://git-lfs.github.com/spec/v1\noid sha256:{OID}\nsize 1340616616\n"


def described(path: Path) -> tuple[str, str]:
    """What `formats.foreign` says about a file, and its hint."""
    with open(path, "rb") as file:
        head = file.read(4096)
    _, what, hint = kinds.describe(str(path), head, path.stat().st_size)
    return what, hint or ""


def zip_of(members: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return buffer.getvalue()


def tar_of(*names: str, form: int = tarfile.USTAR_FORMAT) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=form) as archive:
        for name in names:
            member = tarfile.TarInfo(name)
            member.size = 700
            archive.addfile(member, io.BytesIO(bytes(700)))
    return buffer.getvalue()


def npy() -> bytes:
    buffer = io.BytesIO()
    numpy.save(buffer, numpy.zeros((2, 3), "float32"))
    return buffer.getvalue()


def saved(legacy: bool) -> bytes:
    buffer = io.BytesIO()
    torch.save({"w": torch.zeros(2)}, buffer, _use_new_zipfile_serialization=not legacy)
    return buffer.getvalue()


def nested_program() -> bytes:
    """A TorchScript archive that was zipped again; a program as torch writes it is read."""
    return zip_of({"again/net/data.pkl": b".", "again/net/constants.pkl": b"."})


def data_pkl() -> bytes:
    return zipfile.ZipFile(io.BytesIO(saved(False))).read("archive/data.pkl")


def framed(word: bytes) -> bytes:
    """The beginning of a pickle of protocol 4 that pushes `word`."""
    return b"\x80\x04\x95\x40\0\0\0\0\0\0\0\x8c" + bytes([len(word)]) + word + b"\x94"


LONG = "very/" * 30 + "long.pth"

Content = bytes | Callable[[], bytes]


def sample(name: str, content: Content, *words: str, hint: str = "") -> object:
    """A file, what its sentence says, and what its hint says."""
    return pytest.param(name, content, words, hint, id=name)


NOTHING = [
    sample("empty.pth", b"", "an empty file", hint="repeat"),
    sample("zeros.pth", bytes(9000), "9000 zero bytes", hint="again"),
    sample("hollow.pth", bytes(5000) + b"x" * 9000, "overwritten with zeros", hint="again"),
    sample("unknown.bin", b"\xde\xad\xbe\xef\1\2\3\4\5", "not a format", "de ad be ef 01 02 03 04"),
]
ANSWERS = [
    sample("p.pth", POINTER.encode(), "git-lfs pointer", "1,340,616,616", OID, hint="git lfs pull --include=p.pth"),
    sample("an old.pth", b"version https://hawser.github.com/spec/v1\n", "git-lfs pointer", hint="'an old.pth'"),
    sample("page.pth", b"\n<!DOCTYPE html><title>Drive\n - Virus scan</title>", '("Drive - Virus scan")', hint="link"),
    sample("page2.pth", b"<html>\xff\xfe", "a web page (HTML)", hint="link"),
    sample("page3.pth", b"<html><title>\x1b[2J\xff", "\\x1b[2J"),
    sample("s3.pth", b"<?xml?><Error><Code>AccessDenied</Code></Error>", "XML", "AccessDenied", hint="server"),
    sample("a.xml", b"<?xml version='1.0'?><model/>", "an XML document"),
    sample("json.pth", b'{"error": "Repository not found"}', 'JSON message: "Repository not found"', hint="server"),
    sample("data.json", b'{"a": [1, 2]}', "a JSON file"),
    sample("list.json", b'[{"a": 1}]', "a JSON file"),
    sample("long.json", json.dumps(list(range(5000))).encode(), "a JSON file"),
    sample("deep.json", b"[" * 4000, "a JSON file"),
    sample("tf_model.h5.index.json", b'{"weight_map": {"a": "b"}}', "index of a sharded checkpoint", hint="convert"),
    sample("text.pth", b"Entry not found", 'a text file that begins "Entry not found"', hint="server"),
    sample("utf8.txt", ("\u043a\u043b\u044e\u0447 " * 1000).encode(), "a text file"),
]
PACKED = [
    sample("a.gz", lambda: gzip.compress(b"\0\1\2\3" * 99), "gzip", "does not know", hint="gunzip -c a.gz > OUT"),
    sample("cut.gz", lambda: gzip.compress(saved(False))[:12], "gzip-compressed data", hint="gunzip"),
    sample("zip.gz", lambda: gzip.compress(saved(False)), "inside is a torch checkpoint", hint="gunzip"),
    sample("legacy.gz", lambda: gzip.compress(saved(True)), "inside is a torch checkpoint (legacy)", hint="gunzip"),
    sample("tar.gz", lambda: gzip.compress(tar_of("a.pth")), "gzip", "inside is a tar archive", hint="tar -xf tar.gz"),
    sample("pickle.gz", lambda: gzip.compress(pickle.dumps({"a": 1}, 4)), "a plain pickle (protocol 4)", hint="gunzip"),
    sample("a.bz2", lambda: bz2.compress(pickle.dumps([1], 2)), "bzip2", "a plain pickle (protocol 2)", hint="bunzip2"),
    sample("a.xz", lambda: lzma.compress(tar_of("a")), "xz", "a tar archive", hint="tar -xf"),
    sample("a.zlib", lambda: zlib.compress(pickle.dumps([1])), "zlib", "joblib"),
    sample("a.zst", b"\x28\xb5\x2f\xfd\x04\x00", "zstd-compressed data", hint="zstd -d"),
    sample("a.7z", b"7z\xbc\xaf\x27\x1c\0\4", "7z", hint="7z x"),
    sample("a.rar", b"Rar!\x1a\x07\x01\0", "RAR", hint="unrar x"),
]
MODELS = [
    sample("a.ggml", b"tjgg\3\0\0\0", "GGML", "ggjt", hint="llama.cpp"),
    sample("a.onnx", b"\x08\x07\x12\x07pytorch\x1a\x052.1.0", "an ONNX model (IR version 7)", hint="onnx"),
    sample("b.onnx", b"\x08\x08\x3a\x90\x10\x0a\x20", "an ONNX model (IR version 8)", hint="onnx"),
    sample("a.h5", b"\x89HDF\r\n\x1a\n" + bytes(40), "HDF5", hint="[hdf5]"),
    sample("keras.h5", b"\x89HDF\r\n\x1a\n" + bytes(40) + b"keras_version", "a Keras model (HDF5)", hint="[hdf5]"),
    sample("user.h5", b"user" * 128 + b"\x89HDF\r\n\x1a\n", "HDF5", hint="[hdf5]"),
    sample("a.index", b"\0\0\x0a" * 30 + b"\x57\xfb\x80\x8b\x24\x75\x47\xdb", "index of a TensorFlow", hint="damaged"),
    sample("m.data-00000-of-00001", b"\xb1\xc2\xfe" * 30, "data of a TensorFlow checkpoint", hint=".index"),
    sample("saved_model.pb", b"\x08\x01\x1a\xff\xfe\xfd\x80\x81", "SavedModel"),
    sample("a.params", b"\x12\x01" + bytes(20), "MXNet", hint="mxnet"),
    sample("a.xml", b'<?xml version="1.0"?>\n<net name="m" version="11">', "OpenVINO", hint="openvino"),
    sample("a.tflite", b"\x1c\0\0\0TFL3", "TensorFlow Lite"),
    sample("a.png", b"\x89PNG\r\n\x1a\n\0\0", "PNG"),
    sample("a.jpg", b"\xff\xd8\xff\xe0", "JPEG"),
    sample("a.so", b"\x7fELF\2\1\1", "ELF"),
]
PICKLES = [
    sample(
        "p4.pkl", lambda: pickle.dumps({"a": 1}, 4), "a plain pickle (protocol 4), not written by torch", hint="trust"
    ),
    sample("p2.pkl", lambda: pickle.dumps({"a": 1}, 2), "(protocol 2)", hint="trust"),
    sample("p0.pkl", lambda: pickle.dumps({"a": 1}, 0), "(protocol 0 or 1)", hint="trust"),
    sample("p0 class.pkl", lambda: pickle.dumps(pickle.Pickler, 0), "(protocol 0 or 1)", hint="trust"),
    sample("numpy.pkl", lambda: pickle.dumps([numpy.ones(2), {1j}]), "plain pickle", "of NumPy arrays", hint="trust"),
    sample("a.joblib", framed(b"joblib.numpy_pickle"), "a joblib pickle (protocol 4)", hint="trust"),
    sample("data.pkl", data_pkl, "without their data: the data.pkl of a checkpoint", hint="zip -0 -r"),
    sample(".metadata", framed(b"torch.distributed.checkpoint.metadata"), "(DCP)", hint="ckptfix convert"),
]
ARCHIVES = [
    sample("script.pt", nested_program, "a TorchScript program", hint="torch.jit.load('script.pt')"),
    sample("a.pt2", lambda: zip_of({"p/archive_format": b"pt2"}), "(.pt2)", hint="torch.export.load"),
    sample(
        "again.zip",
        lambda: zip_of({"outer/model/data.pkl": b".", "outer/model/data/0": b"", "__MACOSX/._outer": b""}),
        "a torch checkpoint that was unpacked and zipped again, with the macOS Finder's __MACOSX files",
        hint="zip -0 -r",
    ),
    sample("flat.zip", lambda: zip_of({"data.pkl": b".", "data/0": b""}), "zipped again", hint="zip -0 -r"),
    sample("a.docx", lambda: zip_of({"[Content_Types].xml": b"", "word/document.xml": b""}), "an office document"),
    sample("a.keras", lambda: zip_of({"config.json": b"{}", "model.weights.h5": b""}), "(.keras)", hint="[hdf5]"),
    sample("a.mar", lambda: zip_of({"MAR-INF/MANIFEST.json": b"{}", "m.pth": b""}), "TorchServe", hint="unzip"),
    sample("a.jar", lambda: zip_of({"META-INF/MANIFEST.MF": b""}), "Java"),
    sample(
        "a.zip",
        lambda: zip_of({f"{n}.txt": b"" for n in range(9)} | {"m.pth": b""}),
        "a zip archive of m.pth, 0.txt, 1.txt, 2.txt and 6 more",
        hint="unzip a.zip",
    ),
    sample("no.zip", lambda: zip_of({}), "a zip archive without files"),
    sample("cut.pth", lambda: saved(False)[:300], "a damaged zip archive that torch.save wrote", hint="again"),
    sample("cut.zip", lambda: zip_of({"a": bytes(500)})[:300], "a damaged zip archive (", hint="again"),
    sample("ansi.zip", lambda: zip_of({"\x1b[2J": b""}), "\\x1b[2J"),
    sample("junk.zip", lambda: b"\1junk" + zip_of({"a": b"b"}), "with 5 other bytes before it", hint="tail -c +6 "),
    sample("junk.pth", lambda: b"\1junk" + saved(False), "with 5 other bytes before it", hint="tail -c +6 "),
    sample("a.tar", lambda: tar_of("b", "m.pth"), "a tar archive of m.pth, b", hint="tar -xf a.tar"),
    sample("gnu.tar", lambda: tar_of(LONG, "b.pth", form=tarfile.GNU_FORMAT), "a tar archive of", "b.pth"),
    sample("pax.tar", lambda: tar_of(LONG, "b.pth", form=tarfile.PAX_FORMAT), "a tar archive of", "b.pth"),
]


@pytest.mark.sampled(1_000)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch.jit
@pytest.mark.parametrize(
    ("name", "content", "words", "hint"), [*NOTHING, *ANSWERS, *PACKED, *MODELS, *PICKLES, *ARCHIVES]
)
def test_names_the_file(
    name: str, content: Content, words: tuple[str, ...], hint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path(name).write_bytes(content if isinstance(content, bytes) else content())
    what, advice = described(Path(name))
    for word in words:
        assert word in what
    assert hint in advice
    assert bool(advice) >= bool(hint)
    assert what.isprintable()
    assert len(what) < 300
    with pytest.raises(CkptfixError) as caught:
        open_checkpoint(name).entries  # noqa: B018
    if isinstance(caught.value, UnknownFormat):
        assert (caught.value.message, caught.value.hint or "") == (what, advice)


def test_the_way_past_bytes_before_a_zip_works(tmp_path: Path) -> None:
    path = tmp_path / "junk.pth"
    path.write_bytes(b"\1junk" + saved(False))
    hint = described(path)[1]
    subprocess.run(hint.partition(": ")[2], shell=True, check=True, cwd=tmp_path)
    assert [entry.key for entry in open_checkpoint(tmp_path / "FIXED.pth").entries] == ["w"]


@pytest.mark.parametrize(
    ("files", "words", "hint"),
    [
        ((), "an empty folder", ""),
        (("a.txt",), "a folder without checkpoints", ""),
        (("b.pth", "a.txt"), "it holds b.pth", "name a file"),
        (("data.pkl", "data/0", "version"), "that was unzipped", "zip -0 -r"),
        (("archive/data.pkl", "archive/data/0"), "that was unzipped", "zip -0 -r"),
        ((".metadata", "__0_0.distcp"), "a distributed checkpoint (DCP)", ""),
        (("tf_model.h5.index.json", "tf_model-00001-of-00002.h5"), "a sharded checkpoint of another", "convert"),
        (("saved_model.pb", "variables/variables.index"), "SavedModel", ""),
        (
            ("global_step9/mp_rank_00_model_states.pt", "global_step10/mp_rank_00_model_states.pt"),
            "DeepSpeed", "global_step10 OUT.pth",
        ),
    ],
)
def test_names_the_folder(files: tuple[str, ...], words: str, hint: str, tmp_path: Path) -> None:
    for name in files:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"")
    _, what, advice = kinds.describe(str(tmp_path), b"", 0)
    assert words in what
    assert hint in (advice or "")
    with pytest.raises(UnknownFormat):
        open_checkpoint(tmp_path)


def test_the_way_back_from_an_unzipped_checkpoint_works(tmp_path: Path) -> None:
    folder = tmp_path / "my model"
    with zipfile.ZipFile(io.BytesIO(saved(False))) as archive:
        archive.extractall(folder)
    hint = kinds.describe(str(folder), b"", 0).hint
    assert hint is not None
    command = hint.partition(" makes it")[0]
    assert "cd" in command
    if subprocess.run(["which", "zip"], capture_output=True, check=False).returncode:
        pytest.skip("no zip program here")
    subprocess.run(command, shell=True, check=True, capture_output=True)
    assert torch.equal(torch.load(folder / "archive.pth")["w"], torch.zeros(2))


def test_a_loop_of_tar_headers_ends(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    path.write_bytes(tar_of(*map(str, range(3000))))
    assert "and 996 more" in described(path)[0]


@pytest.mark.slow
def test_a_gzip_bomb_is_not_unpacked(tmp_path: Path) -> None:
    path = tmp_path / "bomb.gz"
    path.write_bytes(gzip.compress(bytes(1 << 26)))
    tracemalloc.start()
    described(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_whatever_the_bytes_there_is_an_answer(tmp_path: Path) -> None:
    """Every cut and many damaged bytes of every sample."""
    path = tmp_path / "x"
    dice = random.Random(1)
    for parameter in [*PACKED, *MODELS, *PICKLES, *ARCHIVES, *ANSWERS]:
        content = parameter.values[1]  # type: ignore[attr-defined]
        data = content if isinstance(content, bytes) else content()
        mutants = [data[:size] for size in range(0, min(len(data), 600), 23)]
        mutants += [builders.flip(data, dice.randrange(len(data) * 8)) for _ in range(20)]
        for mutant in mutants:
            path.write_bytes(mutant)
            what, _ = described(path)
            assert what
            assert what.isprintable()


def test_a_file_that_vanishes_is_described_by_its_head(tmp_path: Path) -> None:
    assert kinds.describe(str(tmp_path / "gone"), b"\x80\x04}.", 4).what.startswith("a plain pickle")
    assert kinds.describe(str(tmp_path / "gone"), b"PK\x03\x04" + bytes(40), 44).what.startswith("a damaged zip")
    assert kinds.describe(str(tmp_path / "gone"), tar_of("a")[:4096], 10240).what.startswith("a tar archive")


def test_an_old_torch_tar_that_lacks_a_file(tmp_path: Path) -> None:
    (tmp_path / "old.tar").write_bytes(tar_of("sys_info", "pickle", "storages"))
    assert "before torch 0.1.10 (a tar archive), without its file 'tensors'" in described(tmp_path / "old.tar")[0]
