"""The tables of names on small models: the names and shapes that the libraries have, and equal bytes back.

`library_names.json` holds keys and shapes of models with one layer, as the libraries build them (the versions are in
the tables): ``family -> ecosystem -> key -> shape``. Of the UNets, biases and the insides of attention are left out.
`DIGESTS` holds the values of each conversion, from a run in which tests/real/test_name_tables.py passed.
"""

from __future__ import annotations

import hashlib
import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from safetensors.numpy import load_file, save_file

import ckptfix
from ckptfix.errors import Refused
from ckptfix.names import tables
from ckptfix.names.tables import NameConversion

Array = npt.NDArray[np.int32]

HERE = Path(__file__).parent
NAMES: dict[str, dict[str, dict[str, list[int]]]] = json.loads((HERE / "library_names.json").read_text("utf-8"))
DIGESTS: dict[str, str] = json.loads((HERE / "library_digests.json").read_text("utf-8"))

ROWS: dict[str, NameConversion] = {}
for _one in tables.shipped():
    if _one.path.removesuffix(".rules") in tables.FORMATS:  # test_format_tables.py
        continue
    _name = f"{_one.family} {':'.join(_one.names)}"
    ROWS[f"{_name} (other)" if _name in ROWS else _name] = _one
HUBS = ("hf", "diffusers")


@cache
def hub_of(family: str) -> str:
    return next(name for name in HUBS if name in NAMES[family])


def made(family: str) -> dict[str, Array]:
    """The tensors of a small model in the names of the hub; no two elements of it are the same."""
    found, start = {}, 0
    for key, shape in NAMES[family][hub_of(family)].items():
        count = int(np.prod(shape))
        found[key] = np.arange(start, start + count, dtype=np.int32).reshape(shape)
        start += count
    return found


def heads_of(family: str) -> dict[str, Any]:
    needs = {name for one in tables.shipped() if one.family == family for name in one.needs}
    return {"heads": 4, **({"kv_heads": 2} if "kv" in needs else {})} if needs else {}


def digest(tensors: dict[str, Array]) -> str:
    text = hashlib.sha256()
    for key in sorted(tensors):
        text.update(f"{key} {tensors[key].shape} ".encode() + tensors[key].tobytes())
    return text.hexdigest()[:16]


def alone(name: str) -> tuple[str, str, str]:
    """The hub, the other ecosystem, and the lines of a row: of the one that leads on to the hub too, if it does not."""
    row = ROWS[name]
    hub = hub_of(row.family)
    if hub in row.names:
        return hub, next(one for one in row.names if one != hub), row.text
    other, between = row.names
    following = next(one for one in ROWS.values() if one.family == row.family and one.names == (between, hub))
    return hub, other, f"# family: {row.family}\n{row.text}\n{following.text}"


def sides(name: str, tmp_path: Path) -> tuple[Path, list[tuple[str, str]]]:
    """The rules of a row as a user's own file, since alternatives of one pair are tried alone; and its two ways."""
    hub, other, text = alone(name)
    rules = tmp_path / "own.rules"
    rules.write_text(text)
    return rules, [(hub, other), (other, hub)]


@pytest.mark.sampled(12, test_all=10_000)
@pytest.mark.parametrize("name", ROWS)
def test_names_and_bytes(name: str, tmp_path: Path) -> None:
    row = ROWS[name]
    hub, other, _ = alone(name)
    rules, _ = sides(name, tmp_path)
    start = made(row.family)
    save_file(start, tmp_path / "hub.safetensors")
    ways = {"there": f"{hub}:{other}", "back": f"{other}:{hub}"}
    files = [tmp_path / f"{one}.safetensors" for one in ("hub", "there", "back")]
    for (way, names), source, dest in zip(ways.items(), files, files[1:], strict=False):
        done = ckptfix.rename(source, dest, names=names, rules=rules, **heads_of(row.family))
        assert done.exit_code == 0 and not done.left_out, way
    there, back = load_file(files[1]), load_file(files[2])
    known = NAMES[row.family].get(other)
    if known is not None and not name.endswith("(other)"):
        assert {key: list(value.shape) for key, value in there.items()} == known
    assert back.keys() == start.keys() and all(np.array_equal(back[key], value) for key, value in start.items())
    assert digest(there) == DIGESTS[name]


ODD = "encoder.of_another_family.3.weight"


@pytest.mark.sampled(8, quick=3, test_all=10_000)
@pytest.mark.parametrize("name", ROWS)
def test_a_key_without_a_line_is_refused(name: str, tmp_path: Path) -> None:
    """In both directions, with the key named; the tables of the package refuse it too, and nothing is written."""
    rules, ways = sides(name, tmp_path)
    heads = heads_of(ROWS[name].family)
    files = [tmp_path / f"{one}.safetensors" for one in ("hub", "there", "odd")]
    save_file(made(ROWS[name].family), files[0])
    ckptfix.rename(files[0], files[1], names=":".join(ways[0]), rules=rules, **heads)
    for (old, new), source in zip(ways, files, strict=False):
        save_file({**load_file(source), ODD: np.zeros(2, np.float32)}, files[2])
        for own in (rules, None):
            with pytest.raises(Refused) as error:
                ckptfix.rename(files[2], tmp_path / "no", names=f"{old}:{new}", rules=own, **heads)
            assert error.value.where == ODD and repr(ODD) in str(error.value)
        assert not (tmp_path / "no").exists()


def test_every_table_is_listed_and_described() -> None:
    folder = Path(tables.__file__).parent
    assert sorted(path.stem for path in folder.glob("*.rules")) == sorted((*tables.FAMILIES, *tables.FORMATS))
    for one in tables.shipped():
        assert {"family", "models", "versions", "source"} <= one.about.keys(), one
    for one in ROWS.values():
        assert one.family == one.path.removesuffix(".rules")
        assert hub_of(one.family) in (*one.names, *(name for row in tables.shipped() if row.family == one.family
                                                    and one.new == row.old for name in row.names))  # fmt: skip


def test_every_row_has_a_digest() -> None:
    assert DIGESTS.keys() == ROWS.keys()
