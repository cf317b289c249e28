"""JSON files beside a checkpoint: an object, or nothing."""

from pathlib import Path

import pytest

from ckptfix.formats.json_files import json_object


@pytest.mark.parametrize(
    ("text", "found"),
    [('{"a": 1}', {"a": 1}), ("[1]", {}), ("{", {}), ("[" * 100_000, {}), ('{"a": "' + "x" * 100 + '"}', {})],
    ids=["an object", "a list", "cut", "deep", "too long"],
)
def test_only_an_object_is_returned(text: str, found: dict[str, int], tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    assert json_object(str(path), 99) == {}
    path.write_text(text)
    assert json_object(str(path), 1_000_000 if text.startswith("[[") else 99) == found
