"""A known change of a library that also reorders elements: the printed command does both."""

from __future__ import annotations

from pathlib import Path

import torch
from threads.newer import OPENMMLAB, SWIN_DETECTOR, mmcv

import ckptfix
from ckptfix.ops.chain import function_of


def merged(value: torch.Tensor) -> torch.Tensor:
    """Return the parameters of Microsoft's patch merging as OpenMMLab has them.

    Its neighbors are (0, 0), (1, 0), (0, 1), (1, 1), one after another; torch.nn.Unfold takes each channel's neighbors
    row by row.
    """
    channels = value.shape[-1] // 4
    parts = [value[..., place * channels : (place + 1) * channels] for place in (0, 2, 1, 3)]
    return torch.stack(parts, dim=-1).reshape(value.shape)


def test_swin_of_openmmlab_and_back(tmp_path: Path) -> None:
    state = {name: torch.randn(shape) for name, shape in SWIN_DETECTOR.items()}
    torch.save(state, tmp_path / "model.pth")
    for names, missing in ((SWIN_DETECTOR, OPENMMLAB), (OPENMMLAB, SWIN_DETECTOR)):
        (line,) = ckptfix.doctor(tmp_path / "model.pth", error=mmcv(list(names), list(missing))).chain
        function_of(line.step.command)(line.source, tmp_path / "out.pth", **line.step.keywords())
        made = torch.load(tmp_path / "out.pth", weights_only=True)
        assert set(made) == set(missing)
        if names is SWIN_DETECTOR:
            for old, new in zip(SWIN_DETECTOR, OPENMMLAB, strict=True):
                wanted = merged(state[old]) if "downsample" in old else state[old]
                assert torch.equal(made[new], wanted), new
        else:
            assert all(torch.equal(made[name], value) for name, value in state.items())
        (tmp_path / "out.pth").replace(tmp_path / "model.pth")
