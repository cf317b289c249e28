"""Every command that doctor prints runs as printed, wherever the file is, and fixes what it was printed for."""

from __future__ import annotations

import os
import re
import zlib
from itertools import product
from pathlib import Path

import pytest
from conftest import LONG
from real.cases import TABLE, build_threads, shared_thread, thread_case
from real.files import SHARED
from real.printed import KINDS, Case, Places, faults
from threads.threads import Thread

KNOWN: tuple[tuple[str, str, str], ...] = (
    (
        "attacks/hand/wrapper.pth", "doctor finds .*bad-call",
        "sanitize exits with 3 and says CANNOT BE LOADED: the call stays, and only its harm is gone",
    ),
    (
        "corpus/unitreerobotics+unitree_rl_gym/deploy/pre_train/g1/motion.pt", "doctor finds .*unexpected-keys",
        "a program is compared with a model once its weights are extracted",
    ),
    (
        "shared 01_peft_default", "doctor finds .*adapter-names",
        "the message is of load_state_dict, which wants .default; PeftModel.from_pretrained does not read such keys",
    ),
    (
        "attacks/hand/meta-dtype.pth", "doctor finds .*bad-call",
        "as for wrapper.pth",
    ),
    (
        "attacks/hand/np-zero-dim.pth", "names-prefixed",
        "x is an array that becomes a tensor only in the plain file, and no prefix is on all keys then",
    ),
    (
        "pytorch/pytorch/issues/102999", "load_into",
        "load_into knows a parametrization by its module, and a module made of the keys has none",
    ),
)  # fmt: skip
"""(case, what is wrong, why that is right or not to be helped)."""


@pytest.fixture(scope="session")
def threads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The cases of shared/threads, made once."""
    folder = tmp_path_factory.mktemp("threads")
    build_threads(folder)
    return folder


@pytest.fixture
def places(kind: str, tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Places:
    """An empty current folder, and the server that the kind of source needs."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr(os, "fsync", lambda _: None)
    bucket = request.getfixturevalue("bucket") if kind == "s3" else None
    web = request.getfixturevalue("web") if kind == "https" else None
    return Places(tmp_path / "here", bucket, web)


PAIRS = [
    (name, kind)
    for name, kind in product(TABLE, KINDS)
    if LONG or zlib.crc32(f"{name} {kind}".encode()) % (2 if kind == "file" else 20) == 0
]
"""Half of the cases as a file, and a twentieth from the other sources; all of them, in campaigns, take five minutes."""


@pytest.mark.sampled(8, quick=1, test_all=24)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "kind"), PAIRS)
def test_the_commands_run_as_printed(
    name: str, kind: str, places: Places, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    row = TABLE[name]
    if isinstance(row, Thread):
        case = thread_case(row, tmp_path)
    elif isinstance(row, str):
        case = shared_thread(row, request.getfixturevalue("threads"))
    else:
        case = Case(row)
    known = [what for known, what, _ in KNOWN if known == name]
    wrong = [fault for fault in faults(case, kind, places) if not any(re.search(what, fault) for what in known)]
    assert not wrong, "\n".join(wrong)


def test_the_shared_cases_are_there() -> None:
    """Without them, the test above has only fixtures and the table of threads."""
    if not SHARED.is_dir():
        pytest.skip("../shared is absent")
    kinds = [name.split("/")[0].split(" ")[0] for name in TABLE]
    assert {"fixtures", "corpus", "frameworks", "attacks", "shared"} <= set(kinds)
