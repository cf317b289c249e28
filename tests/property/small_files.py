"""A file of each format, as small as it can be and still hold what an edit touches."""

from __future__ import annotations

from builders import Record, Tensor, assemble, build_zip, legacy, safetensors, state_dict_ops

PREFIXED = {
    "module.a": Tensor("0", (2,), 2, location="cuda:0"),
    "module.b": Tensor("0", (1,), 2, location="cuda:0", offset=1),
    "epoch": 3,
}

PICKLE = assemble(("PROTO", 2), *state_dict_ops(PREFIXED), "STOP")
DATA = b"\x00\x00\x80\x3f\x00\x00\x00\x40"


def _legacy() -> bytes:
    tensor = Tensor("0", (2,), 2, location="cuda:0", legacy=True)
    return legacy(assemble(("PROTO", 2), *state_dict_ops({"module.a": tensor, "epoch": 3}), "STOP"), [("0", 2, DATA)])


SMALL = {
    "zip": build_zip(
        [Record("a/data.pkl", PICKLE), Record("a/byteorder", b"little"), Record("a/data/0", DATA)], zip64=None
    ),
    "legacy": _legacy(),
    "safetensors": safetensors(
        [("module.a", "F32", (2,), DATA), ("module.b", "I8", (), b"\x01")], metadata={"format": "pt"}
    ),
}
