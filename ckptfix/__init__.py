"""ckptfix: fix PyTorch checkpoints without loading them.

    import ckptfix

    ckptfix.strip_module("multi_gpu.pth", "single_gpu.pth")
    ckptfix.map_location("cuda.pth", "cpu.pth", "cpu")
    print(ckptfix.load_into(model, "multi_gpu.pth"))

Names are imported on first use: nothing here loads torch, and only the loaders ever do.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ckptfix.command_table import COMMANDS as _COMMANDS
from ckptfix.command_table import STEPS as _STEPS
from ckptfix.hooks import register as _register
from ckptfix.version import VERSION

if TYPE_CHECKING:
    from ckptfix.checkpoint import Checkpoint as Checkpoint
    from ckptfix.errors import CkptfixError as CkptfixError
    from ckptfix.errors import LoadMismatch as LoadMismatch
    from ckptfix.errors import NoMatch as NoMatch
    from ckptfix.formats import open_checkpoint as open_checkpoint
    from ckptfix.loaders.atomic import save as save
    from ckptfix.loaders.model.load import load_into as load_into
    from ckptfix.loaders.model.report import LoadReport as LoadReport
    from ckptfix.loaders.objects import load as load
    from ckptfix.loaders.objects import load_checkpoint as load_checkpoint
    from ckptfix.loaders.optimizer.load import OptimizerReport as OptimizerReport
    from ckptfix.loaders.optimizer.load import load_optimizer as load_optimizer
    from ckptfix.loaders.state_dict import load_state_dict as load_state_dict
    from ckptfix.loaders.values import ForeignObject as ForeignObject
    from ckptfix.ops.average import average as average
    from ckptfix.ops.cast import cast as cast
    from ckptfix.ops.deploy import convert as convert
    from ckptfix.ops.diff import diff as diff
    from ckptfix.ops.digest import digest as digest
    from ckptfix.ops.doctor import doctor as doctor
    from ckptfix.ops.extract import extract as extract
    from ckptfix.ops.fix import fix as fix
    from ckptfix.ops.inspect import inspect as inspect
    from ckptfix.ops.lora.convert import lora_convert as lora_convert
    from ckptfix.ops.lora.extract import lora_extract as lora_extract
    from ckptfix.ops.lora.extract import lora_resize as lora_resize
    from ckptfix.ops.lora.info import lora_info as lora_info
    from ckptfix.ops.lora.merge import lora_merge as lora_merge
    from ckptfix.ops.match import match as match
    from ckptfix.ops.merge import merge as merge
    from ckptfix.ops.record import recording as recording
    from ckptfix.ops.relocate import map_location as map_location
    from ckptfix.ops.relocate import to_cpu as to_cpu
    from ckptfix.ops.rename import add_module as add_module
    from ckptfix.ops.rename import rename as rename
    from ckptfix.ops.rename import strip_module as strip_module
    from ckptfix.ops.rename import unwrap as unwrap
    from ckptfix.ops.repair import repair as repair
    from ckptfix.ops.sanitize import sanitize as sanitize
    from ckptfix.ops.select import select as select
    from ckptfix.ops.set_metadata import set_metadata as set_metadata
    from ckptfix.ops.slim import slim as slim
    from ckptfix.ops.stats import stats as stats
    from ckptfix.ops.undo import undo as undo

__version__ = VERSION

_HOMES = {
    **{row.function: row.home for row in _COMMANDS.values() if row.home},
    "Checkpoint": "checkpoint",
    "CkptfixError": "errors",
    "ForeignObject": "loaders.values",
    "LoadMismatch": "errors",
    "LoadReport": "loaders.model.report",
    "NoMatch": "errors",
    "OptimizerReport": "loaders.optimizer.load",
    "load": "loaders.objects",
    "load_checkpoint": "loaders.objects",
    "load_into": "loaders.model.load",
    "load_optimizer": "loaders.optimizer.load",
    "load_state_dict": "loaders.state_dict",
    "lora_convert": "ops.lora.convert",
    "lora_extract": "ops.lora.extract",
    "lora_info": "ops.lora.info",
    "lora_merge": "ops.lora.merge",
    "lora_resize": "ops.lora.extract",
    "open_checkpoint": "formats",
    "recording": "ops.record",
    "save": "loaders.atomic",
}
"""Public name -> the module that defines it, imported on first use."""

_register(
    {
        **{f"command.{row.name}": f"ckptfix.{row.home}:{row.function}" for row in _STEPS.values() if row.home},
        "command.lora merge": "ckptfix.ops.lora.merge:merge_own",
        "commands": "ckptfix.cli:commands",
        "diff.page": "ckptfix.html.diff:page",
        "diff.text": "ckptfix.cli.diff:text",
        "doctor.page": "ckptfix.html.doctor:page",
        "fleet.done": "ckptfix.cli.shared.command_lines:done",
        "fleet.jobs": "ckptfix.cli.fleet.plan:jobs",
        "fleet.job": "ckptfix.cli.shared.command_lines:job_of",
        "inspect.page": "ckptfix.html.inspect:page",
        "inspect.text": "ckptfix.cli.inspect:text",
    }
)

__all__ = ["__version__", *sorted(_HOMES)]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'ckptfix' has no attribute {name!r}")
    from ckptfix.pickles.collector import collector_paused

    with collector_paused():  # an import makes little garbage, and each collection walks all objects of torch
        value = getattr(import_module(f"ckptfix.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
