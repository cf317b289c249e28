"""Checkpoints on a web server: what it is asked, and what becomes of its faults."""

from __future__ import annotations

import io
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from property.verbs import run_command
from stores import WebServer, _Web

import ckptfix
from ckptfix import fleet
from ckptfix.errors import CkptfixError, DamagedFile, NoSuchFile, NotPermitted, Refused, Unsupported, WriteFailed
from ckptfix.io.remote import clients, http
from ckptfix.io.remote import file as remote_file
from ckptfix.io.source import open_source, shares_open_files, threads

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.xdist_group("stores")

Tensors = dict[str, Any]


@pytest.fixture(scope="module")
def tensors() -> Tensors:
    torch.manual_seed(1)
    return {f"module.layer{number}.weight": torch.randn(300, 400) for number in range(4)}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory, tensors: Tensors) -> dict[str, Path]:
    """The same tensors in three containers."""
    from safetensors.torch import save_file

    folder = tmp_path_factory.mktemp("files")
    made = {kind: folder / f"model.{kind}" for kind in ("pth", "legacy.pth", "safetensors")}
    torch.save(tensors, made["pth"])
    torch.save(tensors, made["legacy.pth"], _use_new_zipfile_serialization=False)
    save_file(tensors, made["safetensors"])
    return made


def run(*words: str) -> tuple[int | None, str, str]:
    outcome = run_command(words)
    assert not outcome.failure
    return outcome.code, outcome.stdout, outcome.stderr


HEADERS = [("inspect",), ("inspect", "--json"), ("ls",), ("doctor", "--fast"), ("diff", "--keys-only")]


@pytest.mark.parametrize("kind", ["pth", "safetensors"])
def test_verbs_of_headers_ask_for_headers(web: WebServer, files: dict[str, Path], kind: str) -> None:
    url = web.put(f"model.{kind}", files[kind])
    for verb in HEADERS:
        web.traffic.clear()
        code, _, err = run(*verb, url, *([str(files[kind])] if verb[0] == "diff" else []))
        assert code in (0, 1) and not err, (verb, err)
        assert web.traffic.requests <= 5, (verb, web.traffic.calls)
        assert web.traffic.down <= 300_000, (verb, web.traffic.calls)


@pytest.fixture(scope="module")
def far_apart() -> bytes:
    """A legacy file of which each storage is further from the next than one request reads."""
    file = io.BytesIO()
    tensors = {f"{number}": torch.ones(60_000) for number in range(12)}
    torch.save(tensors, file, _use_new_zipfile_serialization=False)
    return file.getvalue()


def test_of_a_legacy_file_the_pickles_alone_are_read(web: WebServer, far_apart: bytes, tmp_path: Path) -> None:
    (tmp_path / "model.pth").write_bytes(far_apart)
    url = web.put("model.pth", far_apart)
    for verb in HEADERS:
        web.traffic.clear()
        code, out, err = run(*verb, url, *([str(tmp_path / "model.pth")] if verb[0] == "diff" else []))
        assert code in (0, 1) and not err, (verb, err)
        assert web.traffic.requests <= 5 and web.traffic.down <= 1_300_000, (verb, web.traffic.calls)
        assert verb[0] != "doctor" or "pickles (and no counts of storages)" in out
    assert ckptfix.load_state_dict(url)["7"].sum() == 60_000


@pytest.mark.parametrize("change", ["other count", "cut", "longer"])
def test_a_legacy_file_whose_counts_are_wrong(web: WebServer, far_apart: bytes, change: str) -> None:
    """The size has to be what the pickle says; `doctor` without --fast compares each count."""
    count = (60_000).to_bytes(8, "little")
    other = far_apart.replace(count, (59_999).to_bytes(8, "little")) if change == "other count" else far_apart
    url = web.put("model.pth", {"cut": other[:-5], "longer": other + b"more"}.get(change, other))
    _, out, _ = run("doctor", url)
    wanted = {"other count": "bad-storage", "cut": "truncated", "longer": "trailing-bytes"}[change]
    assert f"[{wanted}]" in out, out
    _, out, _ = run("doctor", "--fast", url)
    assert (f"[{wanted}]" in out) == (change != "other count"), out


def test_a_long_pickle_and_directory_are_one_request_each(web: WebServer, tmp_path: Path) -> None:
    torch.save({f"a.rather.long.name.of.a.layer.{number}": torch.zeros(1) for number in range(3000)}, tmp_path / "x")
    url = web.put("x.pth", tmp_path / "x")
    assert ckptfix.inspect(url).tensors == 3000
    assert web.traffic.requests <= 4


@pytest.mark.sampled(quick=1)
@pytest.mark.parametrize("kind", ["pth", "legacy.pth", "safetensors"])
def test_every_reader_takes_a_url(
    web: WebServer, files: dict[str, Path], tensors: Tensors, kind: str, tmp_path: Path
) -> None:
    url = web.put(f"model.{kind}", files[kind])
    loaded = ckptfix.load_state_dict(url)
    assert all(torch.equal(loaded[name.removeprefix("module.")], tensor) for name, tensor in tensors.items())
    model = torch.nn.ModuleDict({f"layer{number}": torch.nn.Linear(400, 300, bias=False) for number in range(4)})
    ckptfix.load_into(model, Path(url))  # pathlib makes one slash of two
    assert torch.equal(model["layer2"].weight, tensors["module.layer2.weight"])
    assert ckptfix.diff(url, files[kind]).same
    assert run("digest", url)[1] == run("digest", str(files[kind]))[1]
    assert run("stats", url)[0] == 0
    assert ckptfix.doctor(url).exit_code() == ckptfix.doctor(files[kind]).exit_code()
    for source in (url, files[kind]):
        ckptfix.strip_module(source, tmp_path / f"{source == url}", force=True)
    assert (tmp_path / "True").read_bytes() == (tmp_path / "False").read_bytes()


@pytest.mark.slow
def test_data_comes_in_parallel_ranges(web: WebServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_file, "RANGE", 1 << 20)
    torch.save({"w": torch.arange(3 << 20)}, tmp_path / "x")
    url = web.put("x.pth", tmp_path / "x")
    assert torch.equal(ckptfix.load_state_dict(url)["w"], torch.arange(3 << 20))
    size = (tmp_path / "x").stat().st_size
    assert size <= web.traffic.down <= size + 300_000
    assert 20 <= web.traffic.requests <= 40


class Times:
    """Answers the first requests for data (or all requests) in its own way."""

    def __init__(self, count: int, answer: Callable[[_Web], object]) -> None:
        self.left, self.answer = count, answer

    def __call__(self, handler: _Web, path: str) -> bool:
        if self.left <= 0:
            return False
        self.left -= 1
        self.answer(handler)
        return True


def silent(handler: _Web) -> None:
    handler.connection.recv(1)  # returns when the client has left


PASSING: dict[str, Callable[[_Web], object]] = {
    "503": lambda handler: handler.reply(503, b"busy"),
    "429, and when": lambda handler: handler.reply(429, b"", {"Retry-After": "0.01"}),
    "502": lambda handler: handler.reply(502, b""),
    "a reset": lambda handler: handler.reply(206, b"x" * 5000, {"Content-Range": "bytes 0-4999/99999"}, cut=100),
    "nothing at all": lambda handler: handler.connection.close(),
    "silence": silent,
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", PASSING)
def test_what_passes_is_tried_again(
    web: WebServer, files: dict[str, Path], fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http, "TIMEOUT", 0.5 if fault == "silence" else 60)
    url = web.put("model.pth", files["pth"])
    web.fault = Times(2, PASSING[fault])
    assert ckptfix.diff(url, files["pth"]).same
    assert web.fault.left == 0


FINAL: dict[str, tuple[Callable[[_Web], object], type[CkptfixError], str]] = {
    "404": (lambda handler: handler.reply(404, b""), NoSuchFile, "no such file"),
    "403": (lambda handler: handler.reply(403, b""), NotPermitted, "403"),
    "500, always": (lambda handler: handler.reply(500, b""), WriteFailed, r"500.*6 tries"),
    "another part": (
        lambda handler: handler.reply(206, b"x" * 10, {"Content-Range": "bytes 5-14/99999"}),
        *(DamagedFile, "the wrong part"),
    ),
    "a part of what": (lambda handler: handler.reply(206, b"x" * 10), DamagedFile, "without its range"),
    "of what size": (
        lambda handler: handler.reply(206, b"x" * 131072, {"Content-Range": "bytes 0-131071/*"}),
        *(Unsupported, "report its size"),
    ),
    "packed": (lambda handler: handler.reply(200, b"x", {"Content-Encoding": "gzip"}), Unsupported, "compresses it"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FINAL)
def test_what_does_not_pass_is_one_clear_error(web: WebServer, files: dict[str, Path], fault: str) -> None:
    answer, kind, words = FINAL[fault]
    url = web.put("model.pth", files["pth"])
    web.fault = Times(99, answer)
    with pytest.raises(kind, match=words) as raised:
        ckptfix.inspect(url)
    assert str(raised.value).startswith(f"{url}: ")
    code, _, err = run("inspect", url)
    assert code == 2 and url in err and "Traceback" not in err


def test_a_file_that_changes_meanwhile_is_refused(web: WebServer, files: dict[str, Path]) -> None:
    url = web.put("model.pth", files["pth"])
    for condition in (True, False):
        seen = 0

        def change(handler: _Web, path: str, condition: bool = condition) -> bool:
            nonlocal seen
            seen += 1
            if seen > 1:
                web.tags[path] = '"another"'
            if not condition:
                del handler.headers["If-Match"]  # a server that knows no conditions
            return False

        web.put("model.pth", files["pth"])
        web.fault = change
        with pytest.raises(DamagedFile, match="it changed while it was read"):
            ckptfix.digest(url)


def test_a_server_without_ranges(web: WebServer, files: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    url = web.put("model.pth", files["pth"])
    web.ranges = False
    assert ckptfix.inspect(url).tensors == 4  # small enough to be taken whole
    monkeypatch.setattr(http, "WHOLE", 1000)
    with pytest.raises(Unsupported, match=r"sends only whole files, and this one has .* bytes") as raised:
        ckptfix.inspect(url)
    assert raised.value.hint == f"download it first: curl -fLO {url}"


def test_an_empty_file(web: WebServer) -> None:
    assert run("doctor", web.put("model.pth", b""))[0] == 1


def test_redirects_are_followed_and_the_password_stays(web: WebServer, files: dict[str, Path]) -> None:
    web.put("there.pth", files["pth"])
    other = web.url.replace("127.0.0.1", "localhost")

    def away(handler: _Web, path: str) -> bool:
        if path != "/here.pth":
            return False
        handler.reply(302, b"", {"Location": f"{other}/there.pth"})
        return True

    web.fault = away
    assert ckptfix.inspect(web.url.replace("//", "//me:word@") + "/here.pth").tensors == 4
    assert [row.get("Authorization") for row in web.seen[:2]] == ["Basic bWU6d29yZA==", None]


SIGNED = "?X-Amz-Credential=AKIA0&X-Amz-Signature=abc123"


@pytest.mark.parametrize(
    "words",
    [("inspect",), ("inspect", "--json"), ("ls", "--json"), ("doctor", "--json"), ("digest",), ("diff", "--keys-only")],
)
def test_no_secret_is_ever_shown(
    web: WebServer, files: dict[str, Path], words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CKPTFIX_DEBUG", "1")
    web.put("model.pth", files["pth"])
    for name in ("model.pth", "none.pth"):
        url = f"{web.url}/{name}{SIGNED}".replace("//", "//me:secret@")
        code, out, err = run(*words, url, *([str(files["pth"])] if words[0] == "diff" else []))
        assert code == 2 if name == "none.pth" else code in (0, 1)
        assert name == "model.pth" or f"{web.url}/{name}" in out + err
        assert not any(secret in out + err for secret in ("secret", "abc123", "AKIA0", "X-Amz"))
    asked = [path for _, path, _, _ in web.traffic.calls]
    assert all(path.endswith(SIGNED) for path in asked), asked
    assert web.seen[-1]["Authorization"].startswith("Basic ")


def test_records_hold_no_secret(web: WebServer, files: dict[str, Path], tmp_path: Path) -> None:
    web.put("model.pth", files["pth"])
    with ckptfix.recording():
        ckptfix.convert(f"{web.url}/model.pth{SIGNED}", tmp_path / "a.safetensors")
    assert b"abc123" not in (tmp_path / "a.safetensors").read_bytes()


@pytest.mark.slow
def test_many_inputs_in_processes_know_the_secret(web: WebServer, files: dict[str, Path], tmp_path: Path) -> None:
    urls = []
    for number in range(2):
        web.put(f"{number}.pth", files["pth"])
        urls.append(f"{web.url}/{number}.pth{SIGNED}")
    code, out, err = run("strip-module", *urls, "--out-dir", str(tmp_path), "--jobs", "2", "--json")
    assert code == 0, err
    assert {Path(json.loads(line)["output"]).name for line in out.splitlines()} == {"0.pth", "1.pth"}
    assert "abc123" not in out + err
    assert all(path.endswith(SIGNED) for _, path, _, _ in web.traffic.calls)


def test_what_is_only_read_is_not_written(web: WebServer, files: dict[str, Path], tmp_path: Path) -> None:
    url = web.put("model.pth", files["pth"])
    refused: list[Callable[[], object]] = [
        lambda: ckptfix.strip_module(files["pth"], f"{web.url}/out.pth"),
        lambda: ckptfix.strip_module(url, in_place=True),
        lambda: ckptfix.undo(url),
    ]
    for call in refused:
        with pytest.raises(Refused) as raised:
            call()
        assert raised.value.hint
    assert not list(tmp_path.iterdir())


def test_an_output_that_is_not_named_stands_here(
    web: WebServer, files: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    url = web.put("model.pth", files["pth"])
    assert run("fix", url)[0] == 0
    assert [path.name for path in tmp_path.iterdir()] == ["model.fixed.pth"]


def test_a_missing_client_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> object:
        raise ModuleNotFoundError(name=name)

    monkeypatch.setattr(clients, "import_module", missing)
    monkeypatch.setattr(clients, "_is_there", lambda package: False)
    for url, install in {
        "s3://b/x.pth": "pip install 'ckptfix[s3]'",
        "gs://b/x.pth": "pip install 'ckptfix[remote]' gcsfs",
        "az://b/x.pth": "pip install 'ckptfix[remote]' adlfs",
        "hf://o/r/x.pth": "pip install 'ckptfix[remote]' huggingface_hub",
    }.items():
        with pytest.raises(ckptfix.CkptfixError, match="which is not installed") as raised:
            ckptfix.inspect(url)
        assert raised.value.hint == install


def test_names_of_files_that_are_here(files: dict[str, Path]) -> None:
    assert ckptfix.inspect(f"file://{files['pth']}").path == str(files["pth"])
    assert run("inspect", f"file://{files['pth']}")[0] == 0


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_any_reads_in_any_threads_give_the_bytes(web: WebServer, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"HEAD": 700, "MARGIN": 300, "NEAR": 90, "RANGE": 2000, "KEPT": 20_000}.items():
        monkeypatch.setattr(remote_file, name, value)
    data = random.Random(seed).randbytes(200_000)
    url = web.put("x", data)

    def look(number: int) -> None:
        draw = random.Random(f"{seed} {number}")
        with open_source(url) as source:
            for _ in range(10):
                offset = draw.randrange(len(data))
                length = min(draw.choice((1, 50, 400, 5000, 60_000)), len(data) - offset)
                step = draw.choice((100, 1000, 7000))
                pieces = source.chunks(offset, length, step) if draw.random() < 0.5 else (source.read(offset, length),)
                assert b"".join(pieces) == data[offset : offset + length]

    with shares_open_files(), threads(4) as pool:
        for done in [pool.submit(look, number) for number in range(4)]:
            done.result()


@pytest.mark.slow
def test_plans_and_records_of_fleets_hold_no_secret(web: WebServer, files: dict[str, Path], tmp_path: Path) -> None:
    """However an option has its URL; a plan with a secret, written by hand, asks with it and records none."""
    urls = [f"{web.put(name, files['pth'])}{SIGNED}".replace("//", "//me:pa55w0rd@") for name in ("a.pth", "b.pth")]
    for words in (["--like", urls[1]], [f"--like={urls[1]}"]):
        code, out, err = run("fleet", "plan", urls[0], "--", "doctor", *words)
        assert code == 0, err
        assert "a plan holds no secrets: 1 job" in err
        assert not any(secret in out + err for secret in ("pa55w0rd", "abc123"))
    for words in (["-o", f"{urls[1]}{{name}}"], [f"-o{urls[1]}{{name}}"], [f"-fo{urls[1]}{{name}}"]):
        code, out, err = run("fleet", "plan", urls[0], "--", "to-cpu", *words)
        assert not any(secret in out + err for secret in ("pa55w0rd", "abc123")), words
    (made,) = fleet.plan([urls[0]], ["doctor", f"--like={urls[1]}"])
    assert not any(secret in made.line() for secret in ("pa55w0rd", "abc123"))
    plan = tmp_path / "plan.jsonl"
    argv = ["doctor", urls[0], "--fast"]
    plan.write_text(json.dumps({"input": urls[0], "identity": None, "output": None, "bytes": 1, "argv": argv}) + "\n")
    web.traffic.clear()
    code, out, err = run("fleet", "run", str(plan), "--json", "--jobs", "1")
    assert code in (0, 1), err
    assert web.traffic.calls and all(path.endswith(SIGNED) for _, path, _, _ in web.traffic.calls)
    records = [path.read_text() for path in Path(f"{plan}.d").rglob("*") if path.is_file()]
    assert len(records) >= 1
    assert not any(secret in text for secret in ("pa55w0rd", "abc123") for text in (out, err, *records))


def test_a_mistyped_scheme_shows_no_secret() -> None:
    code, out, err = run("inspect", f"htps://me:pa55w0rd@host/a.pth{SIGNED}")
    assert code == 2
    assert "htps://host/a.pth: no such file" in err
    assert not any(secret in out + err for secret in ("pa55w0rd", "abc123"))
