"""The lines of the recipe for flat parameters, run by torch on two ranks."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from compare import assert_same

import ckptfix
from ckptfix.errors import WouldLoseData

RECIPES = Path(ckptfix.__file__).parent / "docs" / "recipes.md"
MODEL = """
import sys, torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, StateDictType
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(5, 3), nn.Linear(3, 5)

def wrapped():
    model = nn.ModuleDict({"top": nn.Linear(3, 5), "blocks": nn.ModuleList([Block(), Block()])})
    original = sys.argv[1] == "original"
    cpu = torch.device("cpu")
    return FSDP(model, auto_wrap_policy=ModuleWrapPolicy({Block}), use_orig_params=original, device_id=cpu)
"""
SAVE = """
torch.distributed.init_process_group("gloo")
rank, model = torch.distributed.get_rank(), wrapped()
with FSDP.state_dict_type(model, StateDictType.LOCAL_STATE_DICT):
    torch.save(model.state_dict(), f"local_rank{rank}.pt")
with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT):
    whole = model.state_dict()
if rank == 0:
    torch.save(whole, "truth.pth")
torch.distributed.destroy_process_group()
"""


@pytest.mark.skipif(os.environ.get("CKPTFIX_LONG") != "1", reason="CKPTFIX_LONG=1 runs torch on two ranks")
@pytest.mark.parametrize("kind", ["flat", "original"])
def test_torch_joins_them(kind: str, tmp_path: Path) -> None:
    blocks = re.findall(r"^```py\n(.*?)^```", RECIPES.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    (lines,) = (block for block in blocks if "FullyShardedDataParallel" in block)
    for script in (SAVE, lines):
        (tmp_path / "script.py").write_text(MODEL + script)
        line = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "script.py", kind]
        done = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
    assert_same(torch.load(tmp_path / "truth.pth"), torch.load(tmp_path / "whole.pth"))
    files = [tmp_path / f"local_rank{rank}.pt" for rank in range(2)]
    with pytest.raises(WouldLoseData, match="flat parameters"):
        ckptfix.convert(files, tmp_path / "out.pth")
