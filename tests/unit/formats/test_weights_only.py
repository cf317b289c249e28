"""The table of what weights_only=True accepts, against the torch that is installed."""

from __future__ import annotations

import collections
import pathlib
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch._weights_only_unpickler import _get_allowed_globals

from ckptfix.checkpoint import dtypes
from ckptfix.formats import open_checkpoint
from ckptfix.formats.torch import weights_only
from ckptfix.ops.inspect.describe import inspect


def test_the_table_is_torchs() -> None:
    """Where it is missing rows, a newer torch accepts more; where it has too many, we promise too much."""
    names = set(_get_allowed_globals())
    if any(name.startswith("torch.distributed") for name in names):
        names = {name for name in names if not name.startswith("torch.distributed")}
    assert names == weights_only.ALLOWED


def test_the_dtype_table_is_torchs() -> None:
    from torch.storage import _dtype_to_storage_type_map, _new_dtypes

    ours = {row.name: row.storage_class for row in dtypes.TABLE}
    theirs: dict[str, str | None] = {str(dtype)[6:]: name for dtype, name in _dtype_to_storage_type_map().items()}
    theirs |= {str(dtype)[6:]: None for dtype in _new_dtypes()}
    assert ours == theirs
    for row in dtypes.TABLE:
        if row.family not in ("quantized", "bits"):
            assert torch.empty(0, dtype=getattr(torch, row.name)).element_size() == row.itemsize


@pytest.mark.parametrize(
    "value",
    [
        {"a": torch.ones(2)},
        collections.OrderedDict(a=torch.nn.Parameter(torch.ones(2))),
        {"a": {1, 2}, "b": torch.ones(2).to_sparse(), "c": torch.device("cpu"), "d": torch.Size([1]), "e": b"x"},
        {"a": numpy.float64(1.0)},
        {"a": numpy.ones(2)},
        {"a": pathlib.PurePosixPath("x")},
        torch.nn.Linear(2, 2),
        {"a": complex(1, 2), "b": bytearray(b"abc"), "c": frozenset({1})},
        [torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8), torch.bfloat16],
        collections.defaultdict(int, a=1),
        {"a": 1 << 40, "b": -5, "c": 10**400, "d": None, "e": True, "f": 1.5},
    ],
    ids=repr,
)
@pytest.mark.parametrize("protocol", [2, 3, 4])
@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.filterwarnings("ignore")
def test_the_verdict_is_torchs(tmp_path: Path, value: Any, protocol: int, zipped: bool) -> None:
    path = tmp_path / "x.pth"
    torch.save(value, path, pickle_protocol=protocol, _use_new_zipfile_serialization=zipped)
    try:
        torch.load(path, weights_only=True)
        accepted = True
    except Exception:
        accepted = False
    assert (inspect(open_checkpoint(path)).weights_only is None) == accepted
