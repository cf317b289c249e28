"""Checkpoints in buckets: read, written by parts, edited by copies inside the store; nothing is left behind."""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from property.verbs import run_command
from stores import Bucket

import ckptfix
from ckptfix.checkpoint import ByteRange, OutputFile
from ckptfix.checkpoint.byte_ranges import segment_length
from ckptfix.errors import CkptfixError, DamagedFile, NoSuchFile, Refused, WouldOverwrite, WriteFailed
from ckptfix.io.remote import multipart, upload
from ckptfix.io.remote.multipart import Copy, Upload, parts_of
from ckptfix.io.source import open_source, shares_open_files
from ckptfix.urls import as_path

torch = pytest.importorskip("torch")
pytest.importorskip("botocore", reason="s3fs or boto3 is not installed")
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("stores")]

MB = 1 << 20


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A file of some 17 MB in two containers, and what strip-module makes of it."""
    from safetensors.torch import save_file

    folder = tmp_path_factory.mktemp("large")
    tensors = {f"module.layer{number}": torch.randn(2 * MB) for number in range(2)}
    torch.save({"state_dict": tensors, "epoch": 3}, folder / "model.pth")
    save_file(tensors, folder / "model.safetensors")
    for suffix in ("pth", "safetensors"):
        ckptfix.strip_module(folder / f"model.{suffix}", folder / f"stripped.{suffix}")
    return {path.name: path for path in folder.iterdir()}


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    """A folder of shards with their index."""
    torch.save({f"module.layer{number}": torch.full((300,), float(number)) for number in range(6)}, tmp_path / "x.pth")
    ckptfix.convert(tmp_path / "x.pth", tmp_path / "shards", to="hf", shard_size=3000)
    return tmp_path / "shards"


def put_folder(bucket: Bucket, folder: Path, name: str) -> str:
    for path in folder.iterdir():
        bucket.put(f"{name}/{path.name}", path.read_bytes())
    return bucket.url(name)


def run(*words: str) -> tuple[int | None, str, str]:
    outcome = run_command(words)
    assert not outcome.failure
    return outcome.code, outcome.stdout, outcome.stderr


class TestEdits:
    @pytest.mark.parametrize("suffix", ["pth", "safetensors"])
    def test_bytes_stay_in_the_store(self, bucket: Bucket, large: dict[str, Path], suffix: str) -> None:
        given = {"Metadata": {"owner": "me"}, "ContentType": "application/x-torch", "StorageClass": "STANDARD_IA"}
        url = bucket.put("in", large[f"model.{suffix}"].read_bytes(), Tagging="a=b%2Fc", **given)
        result = ckptfix.strip_module(url, bucket.url("out"))
        assert bucket.traffic.up + bucket.traffic.down <= 11 * MB
        assert any("the store copied" in line for line in result.lines)
        assert bucket.get("out") == large[f"stripped.{suffix}"].read_bytes()
        now = bucket.client.head_object(Bucket=bucket.name, Key="out")
        assert {name: now[name] for name in given} == given
        tags = bucket.client.get_object_tagging(Bucket=bucket.name, Key="out")["TagSet"]
        assert tags == [{"Key": "a", "Value": "b/c"}]
        assert not bucket.uploads()

    def test_onto_itself(self, strict_bucket: Bucket, large: dict[str, Path]) -> None:
        url = strict_bucket.put("in", large["model.pth"].read_bytes())
        with pytest.raises(WouldOverwrite, match="the output is the input"):
            ckptfix.strip_module(url, url)
        ckptfix.strip_module(url, url, force=True)
        assert strict_bucket.get("in") == large["stripped.pth"].read_bytes()
        assert not strict_bucket.uploads()

    def test_the_object_must_not_change_meanwhile(
        self, strict_bucket: Bucket, large: dict[str, Path], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        url = strict_bucket.put("in", large["model.pth"].read_bytes())
        send = upload.Uploader._send

        def change(*args: Any) -> None:
            strict_bucket.put("in", large["model.safetensors"].read_bytes())
            send(*args)

        monkeypatch.setattr(upload.Uploader, "_send", change)
        with pytest.raises(DamagedFile, match="it changed while it was read"):
            ckptfix.strip_module(url, strict_bucket.url("out"))
        assert strict_bucket.keys() == ["in"] and not strict_bucket.uploads()

    def test_a_store_that_cannot_copy_streams(self, bucket: Bucket, large: dict[str, Path]) -> None:
        assert bucket.app is not None
        bucket.app.fault = lambda environ: (
            ("501 Not Implemented", b"<Error><Code>NotImplemented</Code></Error>")
            if "HTTP_X_AMZ_COPY_SOURCE" in environ
            else None
        )
        url = bucket.put("in", large["model.pth"].read_bytes())
        result = ckptfix.strip_module(url, bucket.url("out"))
        assert any("the store did not copy ranges" in line for line in result.lines)
        assert bucket.get("out") == large["stripped.pth"].read_bytes() and not bucket.uploads()


class TestWriting:
    def test_another_container(self, bucket: Bucket, large: dict[str, Path], tmp_path: Path) -> None:
        ckptfix.convert(large["model.pth"], tmp_path / "x.safetensors", drop_unsupported=True)
        ckptfix.convert(large["model.pth"], bucket.url("x.safetensors"), drop_unsupported=True)
        assert bucket.get("x.safetensors") == (tmp_path / "x.safetensors").read_bytes()

    def test_no_object_is_replaced_unasked(
        self, bucket: Bucket, large: dict[str, Path], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        bucket.put("out", b"old")
        with pytest.raises(WouldOverwrite, match="exists"):
            ckptfix.strip_module(large["model.pth"], bucket.url("out"))
        small = {"w": torch.zeros(2)}
        torch.save(small, large["model.pth"].with_name("small.pth"))
        publish = upload.Uploader.publish

        def late(self: upload.Uploader) -> None:
            bucket.put("new", b"another")
            publish(self)

        monkeypatch.setattr(upload.Uploader, "publish", late)
        for name in ("model.pth", "small.pth"):
            bucket.client.delete_object(Bucket=bucket.name, Key="new")
            with pytest.raises(WouldOverwrite, match="appeared while it was being written"):
                ckptfix.to_cpu(large["model.pth"].with_name(name), bucket.url("new"))
            assert bucket.get("new") == b"another" and bucket.get("out") == b"old" and not bucket.uploads()

    @pytest.mark.parametrize("stop", ["503", "interrupt", "source"])
    def test_a_failure_leaves_nothing(
        self, bucket: Bucket, large: dict[str, Path], stop: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        assert bucket.app is not None
        puts = 0

        def fault(environ: Mapping[str, Any]) -> tuple[str, bytes] | None:
            nonlocal puts
            puts += environ["REQUEST_METHOD"] == "PUT"
            return ("503 Slow Down", b"") if stop == "503" and environ["REQUEST_METHOD"] == "PUT" and puts > 1 else None

        kind: type[BaseException] = WriteFailed
        if stop == "interrupt":
            kind = KeyboardInterrupt

            def settled(*args: object) -> None:
                raise KeyboardInterrupt

            monkeypatch.setattr(upload, "_settled", settled)
        if stop == "source":
            read = upload._read

            def broken(part: Upload, saw: Any) -> Iterator[bytes]:
                yield next(read(part, saw))
                raise WriteFailed("an I/O error", path="x")

            monkeypatch.setattr(upload, "_read", broken)
        bucket.app.fault = fault
        with pytest.raises(kind):
            ckptfix.strip_module(large["model.pth"], bucket.url("out"))
        bucket.app.fault = None
        assert not bucket.uploads() and not bucket.keys()

    def test_a_bucket_that_is_not_there(self, bucket: Bucket, large: dict[str, Path]) -> None:
        for call in (ckptfix.inspect, lambda url: ckptfix.strip_module(large["model.pth"], url)):
            with pytest.raises(CkptfixError) as raised:
                call("s3://none-of-that-name/x.pth")
            assert str(raised.value).startswith("s3://none-of-that-name/x.pth: ")
        with pytest.raises(CkptfixError, match="does not name an object"):
            ckptfix.strip_module(large["model.pth"], "s3://bucket")


class TestFolders:
    def test_data_comes_first_and_the_index_last(self, bucket: Bucket, shards: Path, tmp_path: Path) -> None:
        url = put_folder(bucket, shards, "in/model")
        ckptfix.strip_module(url, bucket.url("out/model"))
        made = [path.partition("?")[0] for method, path, _, _ in bucket.traffic.calls if method == "PUT"]
        assert len(made) > 2 and made[-1].endswith("/model.safetensors.index.json")
        ckptfix.strip_module(shards, tmp_path / "local")
        local = {path.name: path.read_bytes() for path in (tmp_path / "local").iterdir()}
        assert {name: bucket.get(f"out/model/{name}") for name in local} == local
        assert ckptfix.diff(bucket.url("out/model"), shards, strip="module").same
        with pytest.raises(WouldOverwrite):
            ckptfix.strip_module(url, bucket.url("out/model"))
        ckptfix.convert(url, bucket.url("out/model"), to="hf", shard_size=10**6, force=True)
        assert bucket.below("out/") == ["out/model/model.safetensors"]  # the other files have gone

    def test_headers_of_a_folder(self, bucket: Bucket, shards: Path) -> None:
        url = put_folder(bucket, shards, "deep/model")
        count = len(list(shards.iterdir()))
        for words in (("inspect",), ("doctor", "--fast"), ("ls",)):
            bucket.traffic.clear()
            assert run(*words, f"{url}/")[0] in (0, 1)
            assert bucket.traffic.requests == count + 1, bucket.traffic.calls

    def test_the_state_of_the_trainer_is_read_once(self, bucket: Bucket, shards: Path) -> None:
        (shards / "trainer_state.json").write_text('{"global_step": 7}')
        url = put_folder(bucket, shards, "deep/model")
        bucket.traffic.clear()
        code, out, _ = run("ls", url, "--json")
        assert code == 0 and json.loads(out)["step"] == 7
        paths = [path.partition("?")[0] for _, path, *_ in bucket.traffic.calls]
        assert len(paths) == len(set(paths)) == len(list(shards.iterdir())) + 1, paths

    def test_a_name_that_is_not_there_is_asked_for_once(self, bucket: Bucket) -> None:
        bucket.traffic.clear()
        assert run("inspect", bucket.url("none.pth"))[0] == 2
        gets = [path for _, path, *_ in bucket.traffic.calls if path.startswith("/bucket/none.pth")]
        assert 1 <= len(gets) <= 2, "by obstore, and by botocore for the error"

    def test_an_object_written_below_a_listed_folder_is_found(self, bucket: Bucket, shards: Path) -> None:
        url = put_folder(bucket, shards, "runs/a/model")
        name = next(path.name for path in shards.iterdir() if path.suffix == ".safetensors")
        with shares_open_files():
            assert as_path(bucket.url("runs")).is_dir()
            made = bucket.url("runs/b/c/new.safetensors")
            with pytest.raises(NoSuchFile):
                open_source(made)
            ckptfix.strip_module(f"{url}/{name}", made)
            assert as_path(made).is_file() and open_source(made).size

    def test_patterns_and_trees(self, bucket: Bucket, shards: Path, tmp_path: Path) -> None:
        put_folder(bucket, shards, "runs/a/model")
        for name in ("a/last.pth", "b/last.pth", "b/old.pth"):
            bucket.put(f"runs/{name}", (tmp_path / "x.pth").read_bytes())
        for words, count in {
            ("s3://bucket/runs/*/last.pth",): 2,
            ("s3://bucket/runs/**/*.pth",): 3,
            ("-r", "s3://bucket/runs"): 4,
        }.items():
            code, out, _ = run("inspect", *words, "--json")
            assert code == 0 and len(out.splitlines()) == count
        code, _, _ = run("strip-module", "s3://bucket/runs/*/last.pth", "--out-dir", "s3://bucket/made")
        assert code == 0 and bucket.below("made/") == ["made/a/last.pth", "made/b/last.pth"]

    def test_of_a_distributed_checkpoint_the_metadata_is_read(self, bucket: Bucket, tmp_path: Path) -> None:
        torch.save({f"{number}": torch.ones(60_000) for number in range(20)}, tmp_path / "model.pth")
        ckptfix.convert(tmp_path / "model.pth", tmp_path / "step", to="dcp")
        url = put_folder(bucket, tmp_path / "step", "step")
        for verb in (("inspect",), ("doctor", "--fast"), ("ls",), ("diff", "--keys-only", url)):
            bucket.traffic.clear()
            outcome = run_command((*verb, url))
            assert outcome.code == 0, outcome.stdout
            assert bucket.traffic.requests <= 5 and bucket.traffic.down < MB, (verb, bucket.traffic.calls)
            assert verb[0] != "doctor" or "metadata (and no items)" in outcome.stdout
        (name,) = (path.name for path in (tmp_path / "step").glob("*.distcp"))
        data = bytearray((tmp_path / "step" / name).read_bytes())
        data[:60_000] = bytes(60_000)
        bucket.put(f"step/{name}", bytes(data))
        assert "bad-tensor" in run_command(("doctor", url)).stdout
        assert "bad-tensor" not in run_command(("doctor", "--fast", url)).stdout

    def test_one_model_in_a_folder(self, bucket: Bucket, tmp_path: Path) -> None:
        torch.save({"w": torch.ones(3)}, tmp_path / "model.pth")
        bucket.put("run/model.pth", (tmp_path / "model.pth").read_bytes())
        bucket.put("run/config.json", b"{}")
        assert json.loads(run("inspect", bucket.url("run"), "--json")[1])["path"] == bucket.url("run/model.pth")

    def test_a_distributed_checkpoint(self, bucket: Bucket, tmp_path: Path) -> None:
        dcp: Any = pytest.importorskip("torch.distributed.checkpoint")
        dcp.save({"module.w": torch.arange(5.0)}, checkpoint_id=str(tmp_path / "step"))
        url = put_folder(bucket, tmp_path / "step", "step")
        assert ckptfix.diff(url, tmp_path / "step").same
        ckptfix.strip_module(url, bucket.url("plain"))
        assert bucket.traffic.calls[-1][1].startswith("/bucket/plain/.metadata")
        assert run("convert", bucket.url("plain"), bucket.url("plain.safetensors"))[0] == 0
        assert ckptfix.load_state_dict(bucket.url("plain.safetensors"))["w"].tolist() == [0, 1, 2, 3, 4]


def test_what_a_bucket_cannot_is_refused_by_name(bucket: Bucket, shards: Path, tmp_path: Path) -> None:
    url = bucket.put("x.pth", (tmp_path / "x.pth").read_bytes())
    folder = put_folder(bucket, shards, "model")
    for call in (
        lambda: ckptfix.strip_module(url, in_place=True),
        lambda: ckptfix.undo(url),
        lambda: ckptfix.strip_module(folder, bucket.url("out"), link=True),
        lambda: ckptfix.strip_module(folder, folder, force=True),
    ):
        with pytest.raises(Refused) as raised:
            call()
        assert raised.value.hint


def test_any_other_store_through_fsspec(shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fsspec = pytest.importorskip("fsspec")
    files = fsspec.filesystem("memory")
    files.store.clear()
    ckptfix.strip_module(tmp_path / "x.pth", "memory://a/x.pth")
    ckptfix.strip_module(tmp_path / "x.pth", tmp_path / "y.pth")
    assert files.cat("/a/x.pth") == (tmp_path / "y.pth").read_bytes()
    ckptfix.strip_module(shards, "memory://a/shards")
    assert ckptfix.diff("memory://a/shards", shards, strip="module").same
    with pytest.raises(WouldOverwrite):
        ckptfix.strip_module(shards, "memory://a/shards")

    def broken(*args: object, **named: object) -> object:
        raise WriteFailed("no")

    monkeypatch.setattr("ckptfix.io.remote.upload.open_source", broken)
    with pytest.raises(WriteFailed):
        ckptfix.strip_module(tmp_path / "x.pth", "memory://a/none.pth")
    assert not files.exists("/a/none.pth") and files.exists("/a/x.pth")
    files.store.clear()


def sizes_of(part: Upload | Copy) -> tuple[int, ...]:
    return part.sizes if isinstance(part, Upload) else (part.where.length,)


class TestParts:
    @pytest.mark.parametrize("seed", range(40))
    def test_they_are_the_file(self, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
        """On a small scale: at least 50 bytes, at most 500 copied, at most 40 parts."""
        for name, value in {"LEAST": 50, "LONGEST": 500, "COPIED": 300, "PART": 80, "MOST_PARTS": 40}.items():
            monkeypatch.setattr(multipart, name, value)
        draw = random.Random(seed)
        data = bytes(draw.randrange(256) for _ in range(5000))
        segments: list[bytes | ByteRange] = []
        for _ in range(draw.randrange(1, 60)):
            length = draw.choice((1, 10, 49, 50, 99, 120, 700))
            start = draw.randrange(5000 - length)
            far = ByteRange(draw.choice(("s3://b/x", "local")), start, length)
            segments.append(far if draw.random() < 0.6 else data[start : start + length])
        file = OutputFile.of("s3://b/out", segments)
        made = parts_of(file, lambda where: where.path.startswith("s3:"))
        sizes = [size for part in made for size in sizes_of(part)]
        assert len(sizes) <= 40
        assert all(size >= 50 for size in sizes[:-1])
        copies = [part.where for part in made if isinstance(part, Copy)]
        assert all(where.length <= 500 and where.path == "s3://b/x" for where in copies)
        read = b"".join(self._bytes(part, data) for part in made)
        assert read == b"".join(
            data[piece.offset : piece.end] if isinstance(piece, ByteRange) else piece for piece in segments
        )

    def _bytes(self, part: Upload | Copy, data: bytes) -> bytes:
        if isinstance(part, Copy):
            return data[part.where.offset : part.where.end]
        assert sum(part.sizes) == sum(map(segment_length, part.segments))
        return b"".join(
            data[one.offset : one.end] if isinstance(one, ByteRange) else one
            for one in part.segments
            if isinstance(one, bytes | ByteRange)
        )

    def test_any_size_has_few_parts(self) -> None:
        size = 5 << 40
        (head, *copies) = parts_of(
            OutputFile.of("s3://b/out", [b"x" * 100, ByteRange("s3://b/in", 64, size)]), lambda where: True
        )
        sizes = [size for part in copies for size in sizes_of(part)]
        assert sizes_of(head) == (5 * MB,) and len(copies) < 10_000 and max(sizes) <= 5 << 30
        (sent,) = parts_of(OutputFile.of("s3://b/out", [ByteRange("x", 0, size)]), lambda where: False)
        assert len(sizes_of(sent)) <= 10_000 and sum(sizes_of(sent)) == size


def test_fix_asks_the_bucket_for_no_name_of_a_step(bucket: Bucket, tmp_path: Path) -> None:
    torch.save({"model": {"module.w": torch.ones(3)}, "args": argparse.Namespace(lr=1)}, tmp_path / "ddp.pth")
    source = bucket.put("runs/ddp.pth", (tmp_path / "ddp.pth").read_bytes())
    bucket.traffic.clear()
    words = ckptfix.doctor(source).fix
    assert words is not None and words[1:] == ("fix", source, bucket.url("runs/ddp.fixed.pth"))
    for out in (str(tmp_path / "out.pth"), words[3]):
        code, said, errors = run("fix", source, out)
        assert (code, errors) == (0, "") and "strip-module: stripped 1 key" in said
    assert not [path for _, path, *_ in bucket.traffic.calls if "plain" in path or "stripped" in path]
    assert torch.load(tmp_path / "out.pth", weights_only=True)["model"].keys() == {"w"}
    assert bucket.get("runs/ddp.fixed.pth") == (tmp_path / "out.pth").read_bytes()
