"""A slice of `campaigns.store_faults`: requests of edits and reads in S3 that fail."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("moto.server", reason="moto[server] is not installed")
pytest.importorskip("botocore", reason="s3fs or boto3 is not installed")

from campaigns import store_faults

pytestmark = [pytest.mark.campaign, pytest.mark.slow, pytest.mark.xdist_group("stores")]


def test_the_output_is_old_or_new_and_no_upload_is_left(tmp_path: Path) -> None:
    ends, wrong = store_faults.run(tmp_path, 28)
    assert not wrong, wrong[:3]
    assert sum(count for end, count in ends.items() if end.endswith("refused")) >= 3
