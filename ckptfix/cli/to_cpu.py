"""ckptfix to-cpu."""

from __future__ import annotations

from ckptfix.cli.shared.common import Written, writes
from ckptfix.cli.shared.options import in_place_option, link_option
from ckptfix.ops import relocate
from ckptfix.ops.writing import WriteOptions


@writes("to-cpu", in_place_option(), link_option(), example="ckptfix to-cpu gpu.pth cpu.pth")
def command(source: str, dest: str | None, how: WriteOptions) -> Written:
    """Move every tensor of IN to the CPU, so that it loads on a machine without a GPU.

    Short for `map-location IN OUT cpu`.
    """

    return relocate.to_cpu(source, dest, **how.keywords())
