"""What torch.load meets in a pickle is listed as facts: names, calls, opcodes, strings, and what follows."""

from __future__ import annotations

import pickle
from pathlib import Path

from builders import torch_zip, written

from ckptfix.formats import open_checkpoint
from ckptfix.formats.loading import on_load
from ckptfix.formats.torch.common import PickledObject, pickled_object

RUNS = b"cos\nsystem\n\x8c\x04true\x85R"


def parts(folder: Path, data: bytes) -> PickledObject:
    return pickled_object(open_checkpoint(written(folder / "in.pth", torch_zip(data))))


def test_refused_globals_are_listed_with_their_calls(tmp_path: Path) -> None:
    found = parts(tmp_path, b"\x80\x04](" + RUNS + RUNS + b"cargparse\nNamespace\nccollections\nOrderedDict\ne.")
    rows = {row.name: row for row in on_load.refused_globals(found)}
    assert list(rows) == ["os.system", "argparse.Namespace"] and len(found.global_names()) == 3
    assert (rows["os.system"].offset, rows["os.system"].calls) == (4, 2)
    assert rows["os.system"].called == 4 + len(RUNS) - 1 and "os.system('true')" in rows["os.system"].text
    assert rows["argparse.Namespace"][2:] == (None, 0, "")


def test_strings_opcodes_and_what_follows(tmp_path: Path) -> None:
    inner = pickle.dumps({"a": RUNS}, 4)
    nested = b"C" + bytes((len(RUNS) + 3,)) + b"\x80\x04" + RUNS + b"."
    found = parts(tmp_path, b"\x80\x04(U\x01aU\x01\xe9" + nested + b"t." + inner)
    assert on_load.old_strings(found) == (6, True)
    assert on_load.refused_opcode(found) is not None
    assert [names for _, names in on_load.hidden_in_bytes(found)] == [["os.system"]]
    rest = on_load.after_stop(found)
    assert rest is not None and (rest.length, rest.pickled) == (len(inner), len(inner))
    clean = parts(tmp_path, b"\x80\x02}.")
    assert on_load.old_strings(clean) is None and on_load.after_stop(clean) is None
    assert on_load.refused_opcode(clean) is None
    assert not on_load.refused_globals(clean) and not list(on_load.hidden_in_bytes(clean))
