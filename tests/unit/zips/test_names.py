"""Names of records that lead out of a folder, and that readers take for each other."""

from __future__ import annotations

from pathlib import Path

import pytest
from builders import Tensor, assemble, build_zip, replace, state_dict_ops, torch_records

import ckptfix
from ckptfix.io.source import open_source
from ckptfix.zips.names import leads_out, safe_name
from ckptfix.zips.read import read_directory

GOOD = ("code/__torch__.py", "a//b", "...", "a..b/c", ".data/id", "a/./b")
ODD = {
    "../data/1": "_/data/1", "a/../b": "a/_/b", "/etc/passwd": "_/etc/passwd", "C:\\a": "C_/a", "c:a": "c_a",
    "a\\..\\b": "a/_/b", "a\0b": "a_b", "..": "_",
}  # fmt: skip


@pytest.mark.parametrize("name", GOOD)
def test_other_names_stay(name: str) -> None:
    assert not leads_out(name) and safe_name(name, ()) == name


@pytest.mark.parametrize("name", ODD)
def test_a_name_that_leads_out_gets_one_that_does_not(name: str) -> None:
    assert leads_out(name) and safe_name(name, ()) == ODD[name] and not leads_out(ODD[name])


def test_no_two_have_one_name() -> None:
    assert safe_name("Data.PKL", {"data.pkl"}) == "Data.PKL.1"
    assert safe_name("a", {"a", "a.1"}) == "a.2"


@pytest.mark.parametrize("name", ["../data/9", "/absolute", "back\\slash", "c:drive", "DATA.PKL", "Data/0", "VERSION"])
def test_repair_gives_records_names_of_which_doctor_says_nothing(name: str, tmp_path: Path) -> None:
    pickle = assemble(("PROTO", 2), *state_dict_ops({"w": Tensor("0", (2,), 2)}), "STOP")
    records = torch_records(pickle, [bytes(8)])
    path, out = tmp_path / "in.pth", tmp_path / "out.pth"
    path.write_bytes(build_zip([*records, replace(records[-1], name=f"archive/{name}", data=b"other")]))
    result = ckptfix.repair(path, out)
    assert result.exit_code == 0 and result.kept == ("w",)
    odd = ("odd-name", "case-variant", "duplicate-record")
    assert [finding for finding in ckptfix.doctor(out).findings if finding.id in odd] == []
    with open_source(str(out)) as reader:
        names = [record.name for record in read_directory(reader).records]
    assert len({made.lower() for made in names}) == len(names)
    assert b"other" in out.read_bytes()
