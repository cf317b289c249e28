"""A run folder in a bucket: the same answer as on a disk, from directories and headers."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from run_folders import LAYOUTS, built, cut
from stores import Bucket

import ckptfix

pytest.importorskip("botocore", reason="s3fs or boto3 is not installed")
pytestmark = pytest.mark.xdist_group("stores")


@pytest.mark.sampled(1, test_all=10_000)
@pytest.mark.slow
@pytest.mark.parametrize("layout", ["trainer", "deepspeed", "lightning"])
def test_a_run_in_a_bucket(bucket: Bucket, tmp_path: Path, layout: str) -> None:
    run = built(layout, tmp_path / "run")
    row = LAYOUTS[layout]
    cut(run / row.name(200) / row.optimizer if row.optimizer else run / row.name(200), 60)
    local = ckptfix.doctor(run)
    for path in run.rglob("*"):
        if path.is_file():
            bucket.put(f"run/{path.relative_to(run).as_posix()}", path.read_bytes())
    shutil.rmtree(run)
    far = ckptfix.doctor(bucket.url("run"))
    assert far.run is not None and local.run is not None
    assert far.sentence == local.sentence and "cut at 60 %" in far.sentence
    assert [one.state for one in far.run.checkpoints] == [one.state for one in local.run.checkpoints]
    assert {finding.id for finding in far.findings} == {finding.id for finding in local.findings}
    assert all("printf" not in (finding.fix or "") for finding in far.findings), "no shell writes into a bucket"
