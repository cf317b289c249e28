"""How many steps a training had taken when a file was saved, as numbers and tensors of one element tell it."""

from __future__ import annotations

from struct import unpack

from ckptfix.checkpoint import TensorEntry
from ckptfix.io.read import read_chunks

_FORMS = {"float32": "<f", "float64": "<d", "int64": "<q", "int32": "<i"}


def counted(value: object) -> float | None:
    """A number as it stands, or the only element of a tensor, which is read; None for anything else.

    Raises:
        DamagedFile: the element cannot be read.
    """
    if isinstance(value, TensorEntry):
        form = _FORMS.get(value.dtype)
        if value.numel != 1 or form is None or value.storage is None:
            return None
        return float(unpack(form, b"".join(read_chunks(value.data)))[0])
    return float(value) if type(value) in (int, float) else None  # type: ignore[arg-type]
