"""Loaders for torch: they read any format, map the file where the format allows it, and never run a pickle.

torch is imported inside the functions, so that the rest of ckptfix starts without it.
"""

from __future__ import annotations

from ckptfix.loaders.atomic import save
from ckptfix.loaders.model.load import load_into
from ckptfix.loaders.model.report import LoadReport, Mismatch
from ckptfix.loaders.objects import load_checkpoint
from ckptfix.loaders.optimizer.load import GroupReport, OptimizerReport, load_optimizer
from ckptfix.loaders.state_dict import load_state_dict
from ckptfix.loaders.values import ForeignObject

load = load_checkpoint
"""The short name of `load_checkpoint`."""

__all__ = [
    "ForeignObject",
    "GroupReport",
    "LoadReport",
    "Mismatch",
    "OptimizerReport",
    "load",
    "load_checkpoint",
    "load_into",
    "load_optimizer",
    "load_state_dict",
    "save",
]
