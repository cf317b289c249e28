"""ckptfix lora info."""

from __future__ import annotations

from ckptfix.cli.lora.options import adapter_option, alpha_option, file_named
from ckptfix.cli.shared.common import reads
from ckptfix.cli.shared.console import Console
from ckptfix.cli.shared.options import at_option
from ckptfix.errors import printable


@reads(
    "info",
    file_named("source", "FILE"),
    at_option(),
    adapter_option(),
    alpha_option(),
    examples=("ckptfix lora info adapter_model.safetensors",),
)
def info(console: Console, *, source: str, at: str | None, adapter: str | None, alpha: float | None) -> int:
    """Describe an adapter: layout, rank, alpha, targets, layers, base model, and what is missing.

    FILE is a file, or a folder with one; adapter_config.json is read beside it.
    """
    from ckptfix.ops.lora.info import lora_info

    found = lora_info(source, at=at, adapter=adapter, alpha=alpha)
    if console.json:
        console.emit(found.as_dict(), 0)
    else:
        for line in found.lines:
            console.say(printable(line))
    return 0


