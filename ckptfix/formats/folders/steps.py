"""Step counts: how many training steps were taken before the save, stored as numbers or one-element tensors."""

from __future__ import annotations

from struct import unpack

from ckptfix.checkpoint import Data, TensorEntry
from ckptfix.io.read import read_chunks

_FORMS = {"float32": "<f", "float64": "<d", "int64": "<q", "int32": "<i"}


def counted(value: object) -> float | None:
    """Return a number, or the only element of a tensor, which is read; None for anything else.

    Raises:
        DamagedFile: the element cannot be read.
    """
    if isinstance(value, TensorEntry):
        if value.numel != 1 or value.dtype not in _FORMS or value.storage is None:
            return None
        return element(value.dtype, value.data)
    return float(value) if type(value) in (int, float) else None  # type: ignore[arg-type]


def element(dtype: str, data: Data) -> float | None:
    """Read one number of `dtype` from `data`; None for dtypes that hold no counts. Raises as `counted` does."""
    form = _FORMS.get(dtype)
    return None if form is None else float(unpack(form, b"".join(read_chunks(data)))[0])
