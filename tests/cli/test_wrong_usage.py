"""What a wrong command line is answered with: plain words, and a line that is right."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from ckptfix.cli import commands

LINES = [
    ("cast a.pth", "Example: ckptfix cast "),
    ("match a.pth", "--like my_vgg.pth"),
    ("diff a.pth", "Example: ckptfix diff "),
    ("diff a.pth b.pth c.pth", "Unexpected argument 'c.pth'."),
    ("map-location a.pth b.pth", "Example: ckptfix map-location model.pth moved.pth cuda:1\n"),
    ("fleet plan", "Example: ckptfix fleet plan "),
    ("rename a.pth b.pth conv cv", "`ckptfix rename IN OUT --sub conv=cv`"),
    ("rename a.pth b.pth --sub s/conv/cv/", "Did you mean --sub conv=cv?"),
    ("set-metadata a.safetensors b.safetensors format=pt", "--set format=pt."),
    ("git enabel", "Did you mean enable?"),
    ("inspect a.pth --sort sizes", "Did you mean size?"),
    ("inspect a.pth --limit x", "'x' is not a whole number."),
    ("cast a.pth --dtype fp16", "Use --to DTYPE"),
]


@pytest.mark.parametrize(("line", "said"), LINES, ids=[line for line, _ in LINES])
def test_the_answer_is_plain_and_shows_the_right_line(line: str, said: str) -> None:
    done = CliRunner().invoke(commands, line.split())
    assert done.exit_code == 2 and said in done.stderr, done.stderr
    assert "range" not in done.stderr
