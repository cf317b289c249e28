"""ckptfix: fix PyTorch checkpoints without loading them.

    import ckptfix

    ckptfix.strip_module("multi_gpu.pth", "single_gpu.pth")
    ckptfix.map_location("cuda.pth", "cpu.pth", "cpu")
    print(ckptfix.load_into(model, "multi_gpu.pth"))

Names are imported when they are first used: nothing here loads torch, and only the loaders ever do.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ckptfix.api import add_module as add_module
    from ckptfix.api import convert as convert
    from ckptfix.api import diff as diff
    from ckptfix.api import inspect as inspect
    from ckptfix.api import map_location as map_location
    from ckptfix.api import rename as rename
    from ckptfix.api import strip_module as strip_module
    from ckptfix.api import to_cpu as to_cpu
    from ckptfix.api import unwrap as unwrap
    from ckptfix.checkpoint import Checkpoint as Checkpoint
    from ckptfix.cleaning import sanitize as sanitize
    from ckptfix.cleaning import slim as slim
    from ckptfix.diagnosis import doctor as doctor
    from ckptfix.errors import CkptfixError as CkptfixError
    from ckptfix.errors import LoadMismatch as LoadMismatch
    from ckptfix.formats import open_checkpoint as open_checkpoint
    from ckptfix.loaders import ForeignObject as ForeignObject
    from ckptfix.loaders import LoadReport as LoadReport
    from ckptfix.loaders import OptimizerReport as OptimizerReport
    from ckptfix.loaders import load_checkpoint as load_checkpoint
    from ckptfix.loaders import load_into as load_into
    from ckptfix.loaders import load_optimizer as load_optimizer
    from ckptfix.loaders import load_state_dict as load_state_dict
    from ckptfix.matching import match as match
    from ckptfix.rescue import repair as repair
    from ckptfix.weights import extract as extract

__version__ = "0.1.0"

_HOMES = {
    **dict.fromkeys(("add_module", "convert", "diff", "inspect", "map_location"), "ckptfix.api"),
    **dict.fromkeys(("rename", "strip_module", "to_cpu", "unwrap"), "ckptfix.api"),
    "Checkpoint": "ckptfix.checkpoint",
    "CkptfixError": "ckptfix.errors",
    "LoadMismatch": "ckptfix.errors",
    "doctor": "ckptfix.diagnosis",
    "match": "ckptfix.matching",
    "open_checkpoint": "ckptfix.formats",
    "repair": "ckptfix.rescue",
    **dict.fromkeys(("sanitize", "slim"), "ckptfix.cleaning"),
    "extract": "ckptfix.weights",
    **dict.fromkeys(("load_checkpoint", "load_into", "load_optimizer", "load_state_dict"), "ckptfix.loaders"),
    **dict.fromkeys(("ForeignObject", "LoadReport", "OptimizerReport"), "ckptfix.loaders"),
}

__all__ = ["__version__", *sorted(_HOMES)]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'ckptfix' has no attribute {name!r}")
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
