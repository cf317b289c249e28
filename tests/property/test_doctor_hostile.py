"""Hostile files under doctor: each flagged, none executed, quickly and in little memory; and threats by number."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from builders import Record, build_zip, replace, torch_records
from property.hostile import WEIGHT_DATA, gadgets
from property.hostile_files import hostile_files

import ckptfix

pytestmark = [pytest.mark.campaign, pytest.mark.xdist_group("hostile files under doctor")]

SECONDS = 4.0
MEMORY = 100 << 20
TESTS = Path(__file__).parents[1]

GADGETS = [name for name, _, _ in gadgets()]

THREATS: dict[int, str] = {
    1: "zip-global-os.system",
    2: "zip-global-inspect.getattr_static",
    3: "zip-stack-global-at-0",
    4: "zip-stack-global-of-ints",
    5: "zip-global-torch._utils.os.system",
    6: "zip-global-__builtin__.eval",
    7: "zip-payload-then-broken",
    8: "zip-stacked",
    9: "zip-pickle-in-bytes",
    11: "old-magic-by-reduce",
    14: "zip-frame-straddle",
    15: "zip-ext1",
    16: "zip-next-buffer",
    17: "zip-unknown-opcode-ff",
    18: "zip-build-os.system",
    19: "zip-setitem-on-tensor",
    20: "zip-torch-allocator",
    21: "zip-persid-negative",
    22: "zip-tensor-beyond",
    23: "zip-tensor-numel",
    24: "zip-popped-os.system",
    65: "safetensors-header-duplicate",
    66: "safetensors-entry-hole",
    67: "safetensors-entry-dtype",
    71: "safetensors-entry-offsets-beyond",
}
"""Threat -> a sample of it that doctor must flag."""

REASONS: dict[int, str] = {
    10: "content decides, never the suffix: scenarios 11-renamed",
    12: "a tar is named and not read: doctor_samples torch-tar",
    13: "7z and gzip are named: doctor_samples other-archive, scenarios 7-gzipped",
    25: "as CPython or an error: tests/property/test_hostile.py, run by the parser alone",
    26: "names are escaped: tests/cli/test_doctor.py",
    **dict.fromkeys(range(27, 42), "bounded by parser and directory reader: test_time_and_memory, all samples"),
    42: "doctor_samples bad-local-header",
    43: "as 44, and by CRC: doctor_samples bad-crc",
    44: "doctor_samples bad-local-header",
    45: "doctor_samples duplicate-record",
    46: "doctor_samples case-variant",
    47: "overlaps are refused before anything is read: tests/unit/test_zip.py",
    48: "doctor_samples encrypted-record",
    49: "test_a_bad_checksum_of_the_pickle",
    50: "doctor_samples no-checksums",
    51: "doctor_samples odd-name",
    52: "doctor_samples junk-before",
    53: "scenarios 1-long_tail",
    54: "scenarios 56-edited",
    55: "refused by the directory reader: tests/unit/test_zip.py",
    56: "doctor_samples unknown-compression",
    57: "scenarios 57-no_root; two roots: test_two_roots",
    58: "doctor_samples no-version",
    59: "doctor_samples damaged, big-endian",
    60: "doctor_samples hidden-pickle",
    61: "doctor_samples hidden-bytes",
    62: "about salvage, which doctor does not do: tests/unit of repair",
    63: "doctor_samples misaligned-storage",
    64: "scenarios 11-safetensors_pointer",
    68: "doctor_samples leading-bytes, unknown-field",
    69: "refused by the header reader: tests/unit/test_safetensors.py",
    70: "tests/cli/test_doctor.py",
    72: "cannot be seen; said by the finding no-checksums",
}
"""Threat -> where it is shown, or why it cannot be."""


@pytest.fixture(scope="module")
def samples() -> dict[str, bytes]:
    return hostile_files()


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory, samples: dict[str, bytes]) -> dict[str, dict[str, Any]]:
    """name -> what doctor said about it, with the row ``"control"``, in a separate process under an audit hook."""
    folder = tmp_path_factory.mktemp("hostile")
    for index, data in enumerate(samples.values()):
        (folder / str(index)).write_bytes(data)
    (folder / "names.json").write_text(json.dumps(list(samples)))
    done = subprocess.run(
        [sys.executable, "-m", "property.run_doctor", str(folder)],
        cwd=TESTS,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS.parent)])},
        capture_output=True,
        text=True,
        timeout=300,
    )
    rows = {row["name"]: row for row in map(json.loads, done.stdout.splitlines())}
    assert done.returncode == 0 and set(rows) == {*samples, "control"}, (list(rows)[-1:], done.stderr[-2000:])
    return rows


def test_the_hook_sees_an_import(outcomes: dict[str, dict[str, Any]]) -> None:
    assert any("pyclbr" in event for event in outcomes["control"]["events"])


def test_a_diagnosis_comes_out_of_every_file(outcomes: dict[str, dict[str, Any]]) -> None:
    failures = {name: row["failure"] for name, row in outcomes.items() if row["failure"]}
    assert not failures, "\n".join(f"{name}: {text}" for name, text in list(failures.items())[:5])


def test_nothing_is_imported_called_or_opened(outcomes: dict[str, dict[str, Any]]) -> None:
    seen = {name: row["events"] for name, row in outcomes.items() if row["events"] and name != "control"}
    assert not seen


def test_time_and_memory(outcomes: dict[str, dict[str, Any]]) -> None:
    assert not {name: row["seconds"] for name, row in outcomes.items() if row["seconds"] > SECONDS}
    assert not [name for name, row in outcomes.items() if row["grown"] > MEMORY][:1]


def test_every_call_of_a_function_is_flagged(outcomes: dict[str, dict[str, Any]]) -> None:
    """150 hostile pickles in both containers."""
    wanted = [f"{container}-{name}" for container in ("zip", "legacy") for name in GADGETS]
    present = [name for name in wanted if name in outcomes]
    assert len(present) > 60
    missed = [name for name in present if not {"dangerous-global", "foreign-global"} & set(outcomes[name]["ids"])]
    assert not missed
    flagged = [name for name, row in outcomes.items() if row["serious"]]
    assert len(flagged) >= 150


@pytest.mark.parametrize("threat", THREATS)
def test_a_threat_is_flagged(threat: int, outcomes: dict[str, dict[str, Any]]) -> None:
    assert outcomes[THREATS[threat]]["serious"], outcomes[THREATS[threat]]


def test_every_threat_of_groups_a_to_d_has_a_test_or_a_reason() -> None:
    assert not set(THREATS) & set(REASONS)
    assert set(THREATS) | set(REASONS) == set(range(1, 73))


def test_what_a_broken_pickle_contains_is_reported(samples: dict[str, bytes], tmp_path: Path) -> None:
    path = tmp_path / "a.pth"
    path.write_bytes(samples["zip-payload-then-broken"])
    found = {finding.id: finding for finding in ckptfix.doctor(path).findings}
    assert "bad-pickle" in found and "posix.system" in found["dangerous-global"].message.replace("os.", "posix.")
    assert found["dangerous-global"].offset == samples["zip-payload-then-broken"].index(b"cos\nsystem")


def test_a_call_is_reported_with_its_offset_in_the_file(samples: dict[str, bytes], tmp_path: Path) -> None:
    data = samples["zip-global-os.system"]
    path = tmp_path / "a.pth"
    path.write_bytes(data)
    (finding,) = [finding for finding in ckptfix.doctor(path).findings if finding.id == "dangerous-global"]
    place = data.index(b"cos\nsystem")
    call = data.index(b"\x85R", place) + 1
    assert finding.offset == place and f"called at {call:#x}" in finding.message


def test_a_bad_checksum_of_the_pickle(samples: dict[str, bytes], tmp_path: Path) -> None:
    records = torch_records(b"\x80\x02}.", [WEIGHT_DATA])
    path = tmp_path / "a.pth"
    path.write_bytes(build_zip([replace(records[0], crc=5), *records[1:]]))
    assert "bad-crc" in {finding.id for finding in ckptfix.doctor(path).findings}


def test_two_roots(tmp_path: Path) -> None:
    other = [Record(f"other/{name}", data) for name, data in (("data.pkl", b"\x80\x02}."), ("version", b"3"))]
    path = tmp_path / "a.pth"
    path.write_bytes(build_zip([*torch_records(b"\x80\x02}."), *other]))
    assert ckptfix.doctor(path).exit_code() == 1
