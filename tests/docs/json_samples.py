"""Runs whose ``--json`` output has, together, every field that the documentation lists."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

from builders import Tensor, assemble, state_dict_ops, torch_zip
from cli.conftest import floats, state, wrapped
from docs.samples import FILES, model, one_row, saved

RUNS: dict[str, tuple[str, ...]] = {
    "inspect": ("inspect ddp.pth", "inspect rich.pth", "inspect meta.pth", "inspect plain.safetensors"),
    "doctor": ("doctor ddp.pth --error 'Unexpected key(s) in state_dict: \"module.fc.weight\"'", "doctor cut.pth",
               "doctor page.pth", "doctor rich.pth"),
    "doctor --explain": ("doctor --explain bad-pickle", "doctor --explain bad-pickle"),
    "diff": ("diff ddp.pth rich.pth", "diff rich.pth ddp.pth", "diff model.pth ddp.pth", "diff a.pth b.pth",
             "diff a.pth b.pth --atol 2", "diff module.pth meta.pth", "diff copies.pth original.pth",
             "diff tied.pth untied.pth", "diff a.pth renamed.pth", "diff damaged.pth a.pth"),
    "strip-module, add-module, unwrap, rename": ("strip-module ddp.pth OUT.pth", "rename ddp.pth OUT.pth --sub a=b"),
    "match": ("match bert.pth OUT.pth --like mine.pth", "match heads.pth OUT.pth --like like.pth --accept-ambiguous",
              "match bert.pth --like like.pth --report", "match flat.pth OUT.pth --like square.pth --reshape",
              "match counted.pth OUT.pth --like norm.pth", "match norm.pth OUT.pth --like counted.pth"),
    "to-cpu, map-location": ("to-cpu ddp.pth OUT.pth", "map-location ddp.pth OUT.pth cuda:1=cpu"),
    "convert": ("convert model.pth OUT.safetensors", "convert meta.pth OUT.safetensors --drop-unsupported",
                "convert model.pth OUT.pth --to legacy"),
    "extract": ("extract module.pth OUT.pth", "extract rich.pth OUT.pth",
                "extract meta.pth OUT.safetensors"),
    "sanitize": ("sanitize rich.pth OUT.pth", "sanitize functions.pth OUT.pth"),
    "repair": ("repair cut.pth OUT.pth", "repair cut.pth OUT.pth --fill zeros"),
    "slim": ("slim view.pth OUT.pth", "slim rich.pth OUT.pth --no-optimizer"),
    "Errors": ("inspect none.pth", "inspect --nonsense", "rename model.pth OUT.pth --sub 'bias|weight=x'",
               "repair badrecord.pth", "inspect truncated.pth"),
}  # fmt: skip
"""Section of the page -> command lines; OUT is a name of their own."""
