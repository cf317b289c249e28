"""Reading of S3 by obstore: the bytes, the facts and the errors that botocore gives, or botocore itself."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from stores import Bucket

from ckptfix.errors import DamagedFile, NoSuchFile
from ckptfix.io.remote import obstore_s3, s3
from ckptfix.io.remote.store import Facts
from ckptfix.io.source import open_source

pytest.importorskip("obstore", reason="obstore is not installed")
pytest.importorskip("botocore", reason="s3fs or boto3 is not installed")
pytestmark = pytest.mark.xdist_group("stores")

DATA = bytes(range(256)) * 4


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    obstore_s3.forget()
    yield
    obstore_s3.forget()


def asked(
    bucket: Bucket, key: str, start: int, length: int, expected: Facts | None = None
) -> tuple[bytes, Facts] | None:
    return obstore_s3.get(bucket.name, key, start, length, expected, dict)


@pytest.mark.slow
@pytest.mark.parametrize(("start", "length"), [(0, 10), (1000, 5000), (1023, 1), (0, 1024)])
def test_it_gives_what_botocore_gives(bucket: Bucket, start: int, length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    bucket.put("a/b.pth", DATA)
    found = asked(bucket, "a/b.pth", start, length)
    assert found is not None and found[0] == DATA[start : start + length]
    monkeypatch.setattr(obstore_s3, "get", lambda *args: None)
    assert s3.STORE.object_of(bucket.url("a/b.pth")).get(start, length, None) == found


@pytest.mark.slow
def test_what_it_cannot_answer_is_asked_again(bucket: Bucket) -> None:
    bucket.put("x.pth", DATA)
    _, facts = s3.STORE.object_of(bucket.url("x.pth")).get(0, 10, None)
    bucket.put("x.pth", DATA + b"more")
    assert asked(bucket, "x.pth", 0, 10, facts) is None and asked(bucket, "x.pth", 5000, 10) is None
    assert asked(bucket, "none.pth", 0, 10) is None
    with pytest.raises(DamagedFile, match="changed"):
        s3.STORE.object_of(bucket.url("x.pth")).get(0, 10, facts)
    with pytest.raises(NoSuchFile):
        open_source(bucket.url("none.pth"))


@pytest.mark.slow
@pytest.mark.sampled(2, test_all=5)
@pytest.mark.parametrize("key", ["a//b", "/a", "a/./b", "../a", "a b", "\xe9", "%41", "a?b", "a#b", "a*b"])
def test_a_key_that_may_be_spelled_otherwise_is_not_its_own(bucket: Bucket, key: str) -> None:
    assert asked(bucket, key, 0, 10) is None and not bucket.traffic.requests


def test_where_the_keys_are_elsewhere_botocore_finds_them(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    bucket.put("x.pth", DATA)
    assert asked(bucket, "x.pth", 0, 10) is not None
    obstore_s3.forget()
    assert obstore_s3.get(bucket.name, "x.pth", 0, 10, None, lambda: {"profile": "mine"}) is None
    for name, value in (("AWS_PROFILE", "mine"), ("AWS_SECRET_ACCESS_KEY", ""), ("AWS_CONFIG_FILE", __file__)):
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            obstore_s3.forget()
            assert asked(bucket, "x.pth", 0, 10) is None, name


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_process_asks_botocore(bucket: Bucket) -> None:
    """The threads of obstore are not in it: a request would wait for ever."""
    bucket.put("x.pth", DATA)
    assert asked(bucket, "x.pth", 0, 10) is not None
    child = os.fork()
    if not child:
        os._exit(0 if asked(bucket, "x.pth", 0, 10) is None else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
