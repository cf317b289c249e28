"""A store that never answered is given up soon; one that answered once is asked again and again."""

from __future__ import annotations

import pytest

from ckptfix.errors import WriteFailed
from ckptfix.io.remote import store
from ckptfix.io.remote.store import Passing, retried


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What was waited so far; nothing waits really."""
    waited = [0.0]
    monkeypatch.setattr(store, "_answered", set())
    monkeypatch.setattr("time.sleep", lambda seconds: waited.append(seconds))
    monkeypatch.setattr("time.monotonic", lambda: sum(waited))
    return waited


def unreachable() -> None:
    raise Passing("no connection", unreachable=True)


def test_a_store_that_cannot_be_reached(clock: list[float]) -> None:
    with pytest.raises(WriteFailed, match="no connection") as raised:
        retried("s3://bucket/x.pth", unreachable)
    assert raised.value.hint is not None and "AWS_ENDPOINT_URL" in raised.value.hint
    assert len(clock) == store.FIRST_TRIES and sum(clock) < 1


def test_one_that_lets_connections_wait(clock: list[float]) -> None:
    def slow() -> None:
        clock.append(store.CONNECT_TIMEOUT)
        unreachable()

    with pytest.raises(WriteFailed):
        retried("s3://bucket/x.pth", slow)
    assert sum(clock) < 5


@pytest.mark.parametrize("answered", [True, False])
def test_one_that_is_busy_or_has_answered(clock: list[float], answered: bool) -> None:
    def busy() -> None:
        raise Passing("it is busy", unreachable=answered)

    if answered:
        assert retried("s3://bucket/first.pth", lambda: 1) == 1
    with pytest.raises(WriteFailed, match=f"{store.TRIES} tries"):
        retried("s3://bucket/x.pth", busy)
    assert len(clock) == store.TRIES
