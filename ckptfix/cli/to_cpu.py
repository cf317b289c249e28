"""ckptfix to-cpu."""

from __future__ import annotations

from ckptfix.cli.shared.common import Written, link_option, writes
from ckptfix.ops import relocate
from ckptfix.ops.writing import How


@writes("to-cpu", link_option(), example="ckptfix to-cpu gpu.pth cpu.pth")
def command(source: str, dest: str, how: How) -> Written:
    """Write OUT: IN with every tensor on the CPU, so that it loads on a machine without a GPU.

    Short for `map-location IN OUT cpu`.
    """

    return relocate.to_cpu(source, dest, **how.keywords())
