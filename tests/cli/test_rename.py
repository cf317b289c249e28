from __future__ import annotations

import json
from pathlib import Path

import click
import pytest
from builders import written
from cli.conftest import Cli, names

from ckptfix.cli.rename import split_substitution
from ckptfix.errors import CkptfixError
from ckptfix.ops.rename.run import read_rules


def test_substitutions_apply_in_order_and_the_map_after_them(cli: Cli, ddp: Path, tmp_path: Path) -> None:
    changes = written(tmp_path / "names.txt", b"# new names\nnet.head.bias net.bias  # the bias\n\n")
    out = tmp_path / "out.pth"
    result = cli("rename", ddp, out, "--sub", r"^module\.=net.", "--sub", "fc=head", "--map", changes)
    assert result.exit_code == 0, result.output
    assert list(names(out)) == ["model_state_dict/net.head.weight", "model_state_dict/net.bias"]


def test_a_conflict_writes_nothing(cli: Cli, ddp: Path, tmp_path: Path) -> None:
    result = cli("rename", ddp, tmp_path / "out.pth", "--sub", "weight|bias=x", "--json")
    assert result.exit_code == 2
    error = json.loads(result.stdout)["error"]
    assert error["type"] == "KeyConflict"
    assert error["pairs"] == [["module.fc.x", ["module.fc.weight", "module.fc.bias"]]]
    assert not (tmp_path / "out.pth").exists()


def test_a_rule_that_matches_nothing_is_reported(cli: Cli, ddp: Path, tmp_path: Path) -> None:
    result = cli("rename", ddp, tmp_path / "out.pth", "--sub", "wieght=w", "--allow-unmatched")
    assert result.exit_code == 0
    assert "warning: wieght: matched no key" in result.stderr


@pytest.mark.parametrize("sub", ["(=x", r"a=\9", "no-equals-sign", "=x"])
def test_a_bad_substitution(cli: Cli, ddp: Path, tmp_path: Path, sub: str) -> None:
    result = cli("rename", ddp, tmp_path / "out.pth", "--sub", sub)
    assert result.exit_code == 2
    assert result.stderr
    assert not (tmp_path / "out.pth").exists()


def test_a_rule_is_needed(cli: Cli, ddp: Path, tmp_path: Path) -> None:
    assert cli("rename", ddp, tmp_path / "out.pth").exit_code == 2


@pytest.mark.parametrize(
    ("text", "pair"),
    [
        ("a=b", ("a", "b")),
        ("a=", ("a", "")),
        ("a=b=c", ("a", "b=c")),
        (r"a\=b=c", (r"a\=b", "c")),
        (r"a\\=b", (r"a\\", "b")),
        (r"^(\w+)\.=\1=", (r"^(\w+)\.", r"\1=")),
    ],
)
def test_the_first_free_equals_sign_splits(text: str, pair: tuple[str, str]) -> None:
    assert split_substitution(text) == pair


@pytest.mark.parametrize("text", ["", "=", "=b", "a", r"a\=b", "a\\"])
def test_without_one_it_is_no_substitution(text: str) -> None:
    with pytest.raises(click.BadParameter):
        split_substitution(text)


@pytest.mark.parametrize(
    "content",
    [
        b'{"a": "b", "c d": "e"}',
        b'\xef\xbb\xbf\n{"a": "b", "c d": "e", "a": "b"}',
    ],
)
def test_json_maps(tmp_path: Path, content: bytes) -> None:
    assert read_rules(str(written(tmp_path / "m", content))).names == {"a": "b", "c d": "e"}


def test_line_maps(tmp_path: Path) -> None:
    path = written(tmp_path / "m", b"# head\r\na\tb\r\n\n  x#1  y # tail\n")
    assert read_rules(str(path)).names == {"a": "b", "x#1": "y"}


@pytest.mark.parametrize(
    ("content", "where"),
    [
        (b"a b\nc\n", "line 2"),
        (b"a b c", "line 1"),
        (b'{\n"a": }', "line 2"),
        (b'{"a": 1}', None),
        (b'{"a": {"b": "c"}}', None),
        (b'{"a": "b", "a": "c"}', None),
        (b"a b\na c", None),
        (b'{"a": ' + b"9" * 5000 + b"}", None),
        (b'{"a":' + b"[" * 100_000, None),
        (b"\xff\xfe", None),
    ],
)
def test_bad_maps_name_their_line(tmp_path: Path, content: bytes, where: str | None) -> None:
    path = str(written(tmp_path / "m", content))
    with pytest.raises(CkptfixError) as caught:
        read_rules(path)
    assert caught.value.path == path
    assert caught.value.where == where
