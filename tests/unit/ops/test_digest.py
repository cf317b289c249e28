"""Digests of tensors: what is hashed, what does not change it, and what a check by them says."""

from __future__ import annotations

import hashlib
import struct
import subprocess
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from builders import Tensor, assemble, state_dict_ops, torch_zip, written

import ckptfix
from ckptfix.errors import CkptfixError, MissingExtra, NoSuchFile, Refused
from ckptfix.ops.digest import Digests, manifest
from ckptfix.ops.digest.compare import compare
from ckptfix.ops.digest.tensors import Digest

DTYPES = (
    *("float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "uint16", "uint32"),
    *("uint64", "bool", "complex64", "complex128", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz"),
    *("float8_e5m2fnuz", "float8_e8m0fnu"),
)


def expected(tensor: torch.Tensor) -> str:
    """As the documentation says, by torch and hashlib alone."""
    plain = tensor.detach().cpu().contiguous()
    raw = plain.reshape(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b""
    dtype, shape = str(tensor.dtype).removeprefix("torch."), ",".join(map(str, tensor.shape))
    return hashlib.sha256(f"ckptfix-tensor-1 {dtype} {shape}\n".encode() + raw).hexdigest()


def digests(path: Path, **options: Any) -> dict[str, str]:
    return {row.name: row.digest for row in ckptfix.digest(path, **options).entries}


def rich() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    raw = torch.randint(0, 256, (48,), dtype=torch.uint8)
    found = {name: raw.view(getattr(torch, name)).clone() for name in DTYPES if name != "bool"}
    base = torch.randn(40, 30)
    shared = torch.randn(7)
    return {
        **found,
        "bool": raw > 100,
        "scalar": torch.tensor(3.5),
        "empty": torch.zeros(0, 3),
        "column": base[:, 3],
        "transposed": base.t(),
        "part": base[5:9],
        "tied": shared,
        "also": shared,
        "expanded": torch.ones(1, 4).expand(3, 4),
        "large": torch.randn(300, 300),
    }


@pytest.mark.parametrize("legacy", [False, True])
def test_the_bits_are_those_of_torch(tmp_path: Path, legacy: bool) -> None:
    whole = rich()
    torch.save(whole, tmp_path / "in.pth", _use_new_zipfile_serialization=not legacy)
    assert digests(tmp_path / "in.pth") == {name: expected(tensor) for name, tensor in whole.items()}


def test_containers_shards_and_names_do_not_change_it(tmp_path: Path) -> None:
    whole = {name: tensor for name, tensor in rich().items() if name != "complex128"}
    torch.save(
        {"model": whole, "optimizer": {"state": {0: {"m": torch.ones(9)}}, "param_groups": []}}, tmp_path / "in.pth"
    )
    copies = [tmp_path / name for name in ("a.safetensors", "b", "c", "d.pth", "e.pth")]
    ckptfix.convert(tmp_path / "in.pth", copies[0])
    ckptfix.convert(tmp_path / "in.pth", copies[1], to="hf", shard_size=20_000)
    ckptfix.convert(tmp_path / "in.pth", copies[2], to="dcp")
    ckptfix.convert(copies[0], copies[3])
    ckptfix.add_module(tmp_path / "in.pth", copies[4])
    totals = set()
    for copy in copies:
        done = ckptfix.digest(copy, check=tmp_path / "in.pth")
        assert done.check is not None and done.check.verified and not done.exit_code, done.lines
        assert done.check.left_out == ({} if copy.name in ("c", "e.pth") else {"optimizer": 1})
        if done.check.left_out:
            totals.add(done.unnamed)
    assert len(totals) == 1


def test_byte_order_and_compression_do_not_change_it(tmp_path: Path) -> None:
    values = (1.5, -2.0, 3e9)
    pickle = assemble(("PROTO", 2), *state_dict_ops({"w": Tensor("0", (3,), 3)}), "STOP")
    for order, sign in (("big", ">"), ("little", "<")):
        raw = struct.pack(f"{sign}3f", *values)
        path = written(tmp_path / f"{order}.pth", torch_zip(pickle, [raw], byteorder=order))
        assert digests(path) == {"w": expected(torch.tensor(values))}


def test_what_is_not_dense_has_a_digest_too(tmp_path: Path) -> None:
    quantized = torch.quantize_per_tensor(torch.arange(6.0).reshape(2, 3), 0.5, 3, torch.qint8)
    other = torch.quantize_per_tensor(torch.arange(6.0).reshape(2, 3) * 2, 1.0, 3, torch.qint8)
    assert torch.equal(quantized.int_repr(), other.int_repr())
    sparse = torch.eye(3).to_sparse()
    torch.save({"q": quantized, "o": other, "s": sparse, "n": torch.eye(3)}, tmp_path / "in.pth")
    found = digests(tmp_path / "in.pth")
    assert len(set(found.values())) == 4
    torch.save({"q2": quantized, "s2": sparse}, tmp_path / "again.pth")
    assert set(digests(tmp_path / "again.pth").values()) == {found["q"], found["s"]}


def test_what_moved_changed_came_and_is_missing(tmp_path: Path) -> None:
    old = {"a": torch.ones(2), "b": torch.zeros(2), "c": torch.ones(3), "d": torch.ones(5)}
    new = {"a": torch.ones(2), "b": torch.ones(2) * 2, "see": torch.ones(3), "e": torch.ones(6)}
    torch.save(old, tmp_path / "old.pth")
    torch.save(new, tmp_path / "new.pth")
    done = ckptfix.digest(tmp_path / "new.pth", check=tmp_path / "old.pth")
    check = done.check
    assert check is not None and not check.verified and done.exit_code == 1
    assert [(row.old, row.new) for row in check.moved] == [("c", "see")]
    assert (check.same, check.changed, check.missing, check.added) == (1, ("b",), ("d",), ("e",))
    flipped = bytearray((tmp_path / "old.pth").read_bytes())
    flipped[flipped.index(struct.pack("<f", 1.0))] ^= 1
    (tmp_path / "flipped.pth").write_bytes(flipped)
    assert ckptfix.digest(tmp_path / "flipped.pth", check=tmp_path / "old.pth").exit_code == 1


def test_ties_that_came_or_went_are_no_difference() -> None:
    one, both = [Digest("a", "1")], [Digest("a", "1"), Digest("b", "1")]
    assert compare(one, both, "x").verified and compare(both, one, "x").verified
    swapped = compare([Digest("a", "2"), Digest("b", "1")], [Digest("a", "1"), Digest("b", "2")], "x")
    assert swapped.verified and {(row.old, row.new) for row in swapped.moved} == {("a", "b"), ("b", "a")}


@pytest.fixture
def small(tmp_path: Path) -> Path:
    torch.save({"m": {"w": torch.ones(2), "v": torch.zeros(3)}, "o": {"x": torch.ones(4)}}, tmp_path / "small.pth")
    return tmp_path / "small.pth"


def test_a_manifest_of_tensors(small: Path, tmp_path: Path) -> None:
    out = tmp_path / "small.tensors"
    done = ckptfix.digest(small, manifest=out, algorithm="blake2b")
    assert out.read_text() == done.manifest and done.manifest.startswith("# ckptfix-tensor-1 blake2b\n")
    again = ckptfix.digest(small, check=out)
    assert again.algorithm == "blake2b" and again.exit_code == 0
    ckptfix.convert(small, tmp_path / "m.safetensors", at="m")
    assert ckptfix.digest(tmp_path / "m.safetensors", check=out).check.left_out == {"o": 1}  # type: ignore[union-attr]
    with pytest.raises(CkptfixError):
        ckptfix.digest(small, manifest=out)
    ckptfix.digest(small, manifest=out, force=True)
    out.write_text(out.read_text() + "nonsense\n")
    with pytest.raises(CkptfixError, match="not a line"):
        ckptfix.digest(small, check=out)


def test_the_two_digests_of_the_set(small: Path, tmp_path: Path) -> None:
    done = ckptfix.digest(small)
    body = done.manifest.split("\n", 1)[1].splitlines()
    named = hashlib.sha256("".join(f"{line}\n" for line in sorted(body)).encode()).hexdigest()
    unnamed = hashlib.sha256("".join(f"{line}\n" for line in sorted(line[:64] for line in body)).encode()).hexdigest()
    assert (done.named, done.unnamed) == (named, unnamed)
    torch.save({"m": {"v2": torch.zeros(3), "w2": torch.ones(2)}, "o": {"x": torch.ones(4)}}, tmp_path / "new.pth")
    new = ckptfix.digest(tmp_path / "new.pth")
    assert new.unnamed == done.unnamed and new.named != done.named


def test_one_mapping(small: Path) -> None:
    assert digests(small, at="m") == {"w": expected(torch.ones(2)), "v": expected(torch.zeros(3))}


def sha256sum(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["sha256sum", *words], cwd=folder, capture_output=True, text=True, check=False)


def test_files_as_sha256sum_has_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = ["a.bin", "with space", "back\\slash", "new\nline"]
    for number, name in enumerate(names):
        Path(name).write_bytes(bytes(range(number * 50)))
    Path("folder").mkdir()
    Path("folder/b").write_bytes(b"b")
    ours = "".join(ckptfix.digest(name, whole_files=True).manifest for name in [*names, "folder"])
    theirs = sha256sum(tmp_path, *names, "folder/b").stdout
    assert ours == theirs
    for text in (theirs, sha256sum(tmp_path, "--tag", *names).stdout, sha256sum(tmp_path, "-b", *names).stdout):
        Path("SUMS").write_text("# a comment\n" + text)
        assert ckptfix.digest(check="SUMS").exit_code == 0
    Path("a.bin").write_bytes(b"x")
    Path("with space").unlink()
    check = ckptfix.digest(check="SUMS").check
    assert check is not None and (check.changed, check.missing) == (("a.bin",), ("with space",))
    assert ckptfix.digest("back\\slash", check="SUMS").exit_code == 0
    with pytest.raises(Refused, match="does not list it"):
        ckptfix.digest("folder/b", check="SUMS")


def test_files_of_a_hub_cache(tmp_path: Path) -> None:
    content, small = b"weights" * 1000, b"{}"
    sha256 = hashlib.sha256(content).hexdigest()
    git = hashlib.sha1(b"blob %d\0" % len(small) + small).hexdigest()
    repo = tmp_path / "models--a--b"
    for folder in ("blobs", "snapshots/rev"):
        (repo / folder).mkdir(parents=True)
    for name, data, digest in (("model.safetensors", content, sha256), ("config.json", small, git)):
        (repo / "blobs" / digest).write_bytes(data)
        (repo / "snapshots/rev" / name).symlink_to(f"../../blobs/{digest}")
    for place in (repo, repo / "snapshots/rev", repo / "snapshots/rev/model.safetensors"):
        done = ckptfix.digest(place, hub=True)
        assert done.check is not None and done.check.verified and done.check.same == len(done.entries)
    (repo / "blobs" / sha256).write_bytes(content[:-1])
    check = ckptfix.digest(repo / "snapshots/rev", hub=True).check
    assert check is not None and check.changed == (str(repo / "snapshots/rev/model.safetensors"),) and check.same == 1
    local = tmp_path / "local"
    (local / ".cache/huggingface/download").mkdir(parents=True)
    (local / "m.safetensors").write_bytes(content)
    (local / ".cache/huggingface/download/m.safetensors.metadata").write_text(f"rev\n{sha256}\n1.0\n")
    assert ckptfix.digest(local, hub=True).exit_code == 0
    with pytest.raises(Refused, match="named by its digest"):
        ckptfix.digest(written(tmp_path / "x", b"x"), hub=True)


def test_options_that_do_not_go_together(small: Path, tmp_path: Path) -> None:
    with pytest.raises(TypeError):
        ckptfix.digest()
    with pytest.raises(Refused):
        ckptfix.digest(check=small)
    with pytest.raises(Refused):
        ckptfix.digest(small, check=small, whole_files=True)
    with pytest.raises(NoSuchFile):
        ckptfix.digest(small, check=tmp_path / "none")


def test_blake3_where_it_is_installed(small: Path) -> None:
    try:
        from blake3 import blake3  # type: ignore[import-not-found,unused-ignore]
    except ModuleNotFoundError:
        with pytest.raises(MissingExtra):
            ckptfix.digest(small, algorithm="blake3")
        return
    raw = b"ckptfix-tensor-1 float32 2\n" + torch.ones(2).numpy().tobytes()
    assert digests(small, algorithm="blake3")["m/w"] == blake3(raw).hexdigest()


def test_a_damaged_file_has_no_digests(tmp_path: Path) -> None:
    safetensors.torch.save_file({"w": torch.ones(3000)}, tmp_path / "in.safetensors")
    raw = (tmp_path / "in.safetensors").read_bytes()
    (tmp_path / "cut.safetensors").write_bytes(raw[:-5])
    with pytest.raises(CkptfixError):
        ckptfix.digest(tmp_path / "cut.safetensors")


def test_a_view_without_end_is_refused(tmp_path: Path) -> None:
    endless = assemble(("PROTO", 2), *state_dict_ops({"w": Tensor("0", (1 << 40,), 1, stride=(0,))}), "STOP")
    path = written(tmp_path / "endless.pth", torch_zip(endless, [bytes(4)]))
    with pytest.raises(Refused, match="without end"):
        ckptfix.digest(path)


def test_text_and_repr(small: Path) -> None:
    done = ckptfix.digest(small)
    assert isinstance(done, Digests) and str(done) == done.manifest.rstrip("\n")
    assert repr(done) == f"<Digests: {str(small)!r}, 3 tensors, sha256>"
    assert "m/w" in done._repr_html_()
    assert manifest.found(str(small)) is None
