"""Every call to the operating system fails once, at every place where it is made."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from faults.scenarios import OLD, SCENARIOS, SMALLER, complaint, plan, prepare, states, writing

from ckptfix import platform
from ckptfix.errors import CkptfixError
from ckptfix.io import copy
from ckptfix.io import output as io_output
from ckptfix.io.write import write_plan

pytestmark = pytest.mark.slow

CALLS = [
    "copy_file_range", "fchmod", "fchown", "fdatasync", "fstat", "fsync", "link", "open", "pread", "preadv", "replace",
    "sendfile", "stat", "statvfs", "unlink", "write",
]  # fmt: skip

FAULTS: dict[str, tuple[Callable[[], BaseException], bool]] = {
    "EIO": (lambda: OSError(errno.EIO, os.strerror(errno.EIO)), False),
    "ENOSPC": (lambda: OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), False),
    "MemoryError": (MemoryError, False),
    "interrupt before": (KeyboardInterrupt, False),
    "interrupt after": (KeyboardInterrupt, True),
}
"""What is raised, and whether the call has been done by then."""


class Armed:
    """Counts the calls to `os.name` and raises at number `nth`, counted from 0; from there on if `lasting`."""

    def __init__(self, name: str, fault: str, nth: int = -1, *, lasting: bool = False) -> None:
        self.name = name
        self.make, self.after = FAULTS[fault]
        self.nth = nth
        self.lasting = lasting
        self.count = 0
        self.raised = False
        self.spared: list[str] = []
        """First arguments of the calls that were not done: what unlink could not remove has to stay."""
        self.real = getattr(os, name)

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        due = self.count == self.nth or (self.lasting and 0 <= self.nth < self.count)
        self.count += 1
        if due and self.make is KeyboardInterrupt:
            # An interrupt does not come while the signal is held back.
            due = signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
        if due and not self.after:
            self.raised = True
            self.spared.append(arguments[0])
            raise self.make()
        result = self.real(*arguments, **options)
        if due:
            self.raised = True
            raise self.make()
        return result

    @contextmanager
    def in_place(self) -> Iterator[None]:
        setattr(os, self.name, self)
        try:
            yield
        finally:
            setattr(os, self.name, self.real)


def outcome(folder: Path, name: str, armed: Armed) -> str | None:
    """Write the plan of scenario `name` with the fault in place; what is wrong afterwards, or None."""
    scenario = SCENARIOS[name]
    prepare(folder, scenario)
    planned = plan(folder, scenario)
    code, message = 0, ""
    with armed.in_place():
        try:
            write_plan(planned, **writing(scenario))
        except CkptfixError as error:
            code, message = 2, str(error)
        except (KeyboardInterrupt, MemoryError):
            code = 130
        except OSError as error:
            return f"a bare {error!r}"
    if code and not armed.raised:
        return f"failed by itself: {message}"
    if armed.name == "unlink":
        for path in armed.spared:
            Path(path).unlink(missing_ok=True)
    wrong = complaint(folder, scenario, code, message)
    return f"{wrong} ({message})" if wrong else None


@pytest.fixture
def smaller(monkeypatch: pytest.MonkeyPatch) -> None:
    for constant, value in SMALLER.items():
        monkeypatch.setattr(copy, constant, value)
    monkeypatch.setattr(io_output, "SYNC_EVERY", 100_000)


def no_kernel_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "kernel_copies", list)


@pytest.mark.campaign
@pytest.mark.usefixtures("smaller")
@pytest.mark.parametrize("call", [name for name in CALLS if hasattr(os, name)])
@pytest.mark.parametrize("name", SCENARIOS)
def test_one_call_fails(tmp_path: Path, name: str, call: str) -> None:
    count = Armed(call, "EIO")
    assert outcome(tmp_path, name, count) is None
    wrong = []
    for fault in FAULTS:
        for nth in range(count.count):
            found = outcome(tmp_path, name, Armed(call, fault, nth))
            if found:
                wrong.append(f"{fault} at call {nth} of {call}: {found}")
    assert wrong == []


@pytest.mark.campaign
@pytest.mark.usefixtures("smaller")
@pytest.mark.parametrize("call", ["write", "pread", "fsync"])
@pytest.mark.parametrize("fault", ["EIO", "ENOSPC"])
@pytest.mark.parametrize("name", SCENARIOS)
def test_every_call_fails_from_one_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, call: str, fault: str
) -> None:
    no_kernel_copy(monkeypatch)
    count = Armed(call, fault)
    assert outcome(tmp_path, name, count) is None
    assert count.count > 0
    for nth in range(count.count):
        armed = Armed(call, fault, nth, lasting=True)
        assert outcome(tmp_path, name, armed) is None, f"from call {nth} on"
        assert armed.raised


@pytest.mark.campaign
@pytest.mark.usefixtures("smaller")
@pytest.mark.parametrize("call", [name for name in CALLS if hasattr(os, name) and name != "link"])
@pytest.mark.parametrize("name", ["keep", "several keep"])
def test_one_call_fails_where_there_are_no_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, call: str
) -> None:
    def no_link(*arguments: Any) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", no_link)
    test_one_call_fails(tmp_path, name, call)


@pytest.mark.usefixtures("smaller")
def test_the_calls_are_the_ones_that_are_made(tmp_path: Path) -> None:
    """So that the tests above do not pass for want of a call that could fail."""
    counts = {}
    for call in ("copy_file_range", "fchmod", "fsync", "link", "open", "pread", "replace", "stat", "unlink", "write"):
        armed = Armed(call, "EIO")
        assert outcome(tmp_path, "several", armed) is None
        counts[call] = armed.count
    assert min(counts.values()) >= 3


@pytest.mark.parametrize("without_links", [False, True])
def test_what_could_not_be_put_back_is_reported_and_not_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, without_links: bool
) -> None:
    """Two faults: the index cannot take its name, and neither can the old shard take its own again."""
    scenario = SCENARIOS["several"]
    prepare(tmp_path, scenario)
    real = os.replace
    count = 0

    def replace(*arguments: Any) -> None:
        nonlocal count
        count += 1
        if count > 1:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(*arguments)

    def no_link(*arguments: Any) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "replace", replace)
    if without_links:
        monkeypatch.setattr(os, "link", no_link)
    with pytest.raises(CkptfixError) as caught:
        write_plan(plan(tmp_path, scenario), overwrite=True)
    message = str(caught.value)
    assert states(tmp_path, scenario) == ["new", "old", "old"]
    assert f"{tmp_path / 'one'} is already the new file, and the old one could not be restored" in message
    kept = [path for path in tmp_path.iterdir() if path.name.endswith(io_output.TEMP_SUFFIX)]
    assert [path.read_bytes() for path in kept] == ([] if without_links else [OLD])
    assert all(f"it is kept as {path}" in message for path in kept)
    assert str(tmp_path / "two") not in message.partition("; ")[2]


def test_where_the_kept_file_is_that_could_not_be_put_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scenario = SCENARIOS["several keep"]
    prepare(tmp_path, scenario)
    real = os.replace

    def replace(source: str, dest: str) -> None:
        if source.endswith("~") or Path(dest).name == "two":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(source, dest)

    monkeypatch.setattr(os, "replace", replace)
    with pytest.raises(CkptfixError) as caught:
        write_plan(plan(tmp_path, scenario), overwrite=True, keep_old=lambda path: True)
    one, message = tmp_path / "one", str(caught.value)
    assert f"{one} is already the new file, and the old one could not be restored" in message
    assert f"; kept the old {one} as {one}.~2~" in message
    assert states(tmp_path, scenario) == ["new", "old", "old"]
    assert (tmp_path / "one.~2~").read_bytes() == OLD
