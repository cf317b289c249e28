"""Exported programs (``.pt2``, ``torch.export.save``): their state dict, from its description in JSON.

::

    ROOT/archive_format                             'pt2'
    ROOT/models/NAME.json                           the graph
    ROOT/data/weights/NAME_weights_config.json      {"config": {"fc.weight": {"path_name": "weight_0", "is_param": true,
                                                     "use_pickle": false, "tensor_meta": {...}}}}
    ROOT/data/weights/weight_0                      the bytes of a storage
    ROOT/data/constants/NAME_constants_config.json  the same for tensors outside the state dict

The ``tensor_meta`` has ``dtype`` (a number), ``sizes``, ``strides`` and ``storage_offset`` as ``{"as_int": n}``, and
``device``. Source: torch/export/pt2_archive/constants.py and torch/_export/serde/schema.py (torch 2.13). An archive of
torch before 2.8 holds checkpoints instead, and is read as one (`formats.torch.readonly.archive`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from ckptfix.checkpoint import Storage, TensorEntry, dtypes
from ckptfix.checkpoint.tensors import reach
from ckptfix.errors import BadIndex, CkptfixError, NoSuchTensor, Refused
from ckptfix.findings.row import Finding
from ckptfix.findings.table import found
from ckptfix.formats.programs.torchscript import Program, open_program
from ckptfix.formats.torch.weights import Weights, check_whole
from ckptfix.io.source import open_source
from ckptfix.zips.local import record_data

DTYPES = {
    1: "uint8",
    2: "int8",
    3: "int16",
    4: "int32",
    5: "int64",
    6: "float16",
    7: "float32",
    8: "float64",
    9: "complex32",
    10: "complex64",
    11: "complex128",
    12: "bool",
    13: "bfloat16",
    28: "uint16",
    29: "float8_e4m3fn",
    30: "float8_e5m2",
    31: "float8_e4m3fnuz",
    32: "float8_e5m2fnuz",
    33: "float8_e8m0fnu",
    34: "uint32",
    35: "uint64",
}
"""``ScalarType`` of the schema -> dtype."""

STRIDED = 7
"""The strided ``Layout`` of the schema."""

CONSTANTS = "constants"
_CONFIG = re.compile(r"data/(weights|constants)/(.*)_\1_config\.json")


def read(path: str, at: str | None = None) -> Weights | None:
    """Return the state dict of the exported program at `path`, or its constants; None for any other file.

    Args:
        at: the name of the model, where there are several, or ``"constants"``.

    Raises:
        NoSuchTensor: no model has this name.
        Refused: there are several models.
        BadIndex: the description is not one that torch writes.
    """
    program = open_program(path, "archive_format")
    if program is None:
        return None
    kind = "constants" if at == CONSTANTS else "weights"
    names = []
    for name in program.records:
        found = _CONFIG.fullmatch(name.removeprefix(f"{program.root}/"))
        if found and found[1] == kind:
            names.append(found[2])
    if at is not None and kind == "weights":
        if at not in names:
            hint = f"the archive has {', '.join([*names, CONSTANTS])}"
            raise NoSuchTensor(f"no model called {at!r}", near=tuple(names), path=path, hint=hint)
        names = [at]
    if len(names) != 1:
        hint = f"choose one with --at {names[0]}" if names else "it may be compiled code only (AOTInductor)"
        message = f"the archive has {len(names)} models with {kind}" + (f": {', '.join(names)}" if names else "")
        raise Refused(message, path=path, hint=hint)
    made = _weights(program, names[0], kind)
    check_whole(made, lambda _: program.size)
    return made


def _weights(program: Program, name: str, kind: str) -> Weights:
    where = f"{program.root}/data/{kind}/{name}_{kind}_config.json"
    config = _config(program, f"data/{kind}/{name}_{kind}_config.json", where)
    storages: dict[str, Storage] = {}
    entries: list[TensorEntry] = []
    findings: list[Finding] = []
    for key, row in config.items():
        try:
            if row["use_pickle"] or row["tensor_meta"]["layout"] != STRIDED:
                message = "left out: it is stored as a separate pickle, or is not a dense tensor"
                findings.append(found("not-taken", message, where=key))
                continue
            entries.append(_entry(program, key, row, kind, storages))
        except (KeyError, TypeError, AttributeError, ValueError, OverflowError) as error:
            message = f"the description of {key!r} is not what torch writes ({error!r})"
            raise BadIndex(message, path=program.path, where=where) from None
        except CkptfixError as error:
            error.path, error.where = program.path, key
            raise
    what = f"the exported program {name}" if kind == "weights" else f"the constants of the exported program {name}"
    others = (CONSTANTS,) if kind == "weights" and _has_constants(program, name) else ()
    return Weights(
        path=program.path,
        what=what,
        at=CONSTANTS if kind == "constants" else "",
        entries=tuple(entries),
        left=others,
        findings=tuple(findings),
        byteorder=program.byteorder,
    )


def _config(program: Program, name: str, where: str) -> Mapping[str, Any]:
    try:
        config = json.loads(program.text(name) or b"{}")["config"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise BadIndex(
            f"the description of the tensors cannot be read ({error!r})", path=program.path, where=where
        ) from None
    if not isinstance(config, dict):
        raise BadIndex("the description of the tensors is not a JSON object", path=program.path, where=where)
    return config


def _has_constants(program: Program, name: str) -> bool:
    config = f"data/constants/{name}_constants_config.json"
    return bool(program.text(config)) and bool(_config(program, config, config))


def _entry(
    program: Program, key: str, row: Mapping[str, Any], kind: str, storages: dict[str, Storage]
) -> TensorEntry:
    meta = row["tensor_meta"]
    dtype = dtypes.by_name(DTYPES[meta["dtype"]])
    shape = tuple(_count(size) for size in meta["sizes"])
    stride = tuple(_count(step) for step in meta["strides"])
    offset = _count(meta["storage_offset"])
    name = row["path_name"]
    if name not in storages:
        record = program.records.get(f"{program.root}/data/{kind}/{name}")
        if record is None:
            raise BadIndex(f"the archive has no record {name}")
        device, index = meta["device"]["type"], meta["device"]["index"]
        with open_source(program.path) as reader:
            data = record_data(reader, record)
        location = device if index is None else f"{device}:{int(index)}"
        storages[name] = Storage(name, dtype.name, record.size, location, data, record.crc32 or None)
    storage = storages[name]
    if len(shape) != len(stride):
        raise ValueError("the numbers of strides and sizes differ")
    needed = dtype.nbytes(offset + reach(shape, stride))
    if 0 not in shape and needed > storage.nbytes:
        raise BadIndex(f"the tensor needs {needed} bytes of {name}, which has {storage.nbytes}")
    return TensorEntry(key, "", storage, dtype.name, shape, stride, offset)


def _count(value: Any) -> int:
    number = value["as_int"]
    if type(number) is not int or not 0 <= number < 1 << 63:
        raise ValueError("a size is not a valid number")
    return number
