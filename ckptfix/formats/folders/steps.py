"""How many steps a training had taken when a file was saved, as numbers and tensors of one element tell it."""

from __future__ import annotations

from struct import unpack

from ckptfix.checkpoint import Data, TensorEntry
from ckptfix.io.read import read_chunks

_FORMS = {"float32": "<f", "float64": "<d", "int64": "<q", "int32": "<i"}


def counted(value: object) -> float | None:
    """A number as it stands, or the only element of a tensor, which is read; None for anything else.

    Raises:
        DamagedFile: the element cannot be read.
    """
    if isinstance(value, TensorEntry):
        if value.numel != 1 or value.dtype not in _FORMS or value.storage is None:
            return None
        return element(value.dtype, value.data)
    return float(value) if type(value) in (int, float) else None  # type: ignore[arg-type]


def element(dtype: str, data: Data) -> float | None:
    """The number that `data` is, which is read; None of a dtype that nothing is counted in. Raises as `counted`."""
    form = _FORMS.get(dtype)
    return None if form is None else float(unpack(form, b"".join(read_chunks(data)))[0])
