"""The browser under Textual's pilot: keys in, and what is seen."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("textual", reason="pip install 'ckptfix[browse]'")

from browsed import hostile, labels, play, screen, settled, tensors, training, until
from builders import safetensors, written

from ckptfix.browse.view.app import BrowseApp, Help
from ckptfix.browse.view.browser import Browser
from ckptfix.browse.view.cells import Cells
from ckptfix.browse.view.files import FilesScreen
from ckptfix.browse.view.findings import Findings
from ckptfix.browse.view.values import ValuesScreen
from ckptfix.ops import listing


@pytest.mark.slow
def test_a_tree_with_sizes_is_walked_with_arrows_and_letters(tmp_path: Path) -> None:
    async def script(pilot: Any) -> None:
        await settled(pilot)
        seen = screen(pilot.app)
        assert "train.pth" in seen and "5 tensors" in seen and "PyTorch zip" in seen and "= 3" in seen
        assert "? Help" in seen and "q Quit" in seen
        assert labels(pilot.app) == ["", "model", "epoch", "args"]
        await pilot.press("j", "enter", "j", "l")
        assert labels(pilot.app)[2:5] == ["layers", "0", "1"]
        await pilot.press("right", "right", "down")
        await until(pilot, lambda: "mean" in screen(pilot.app))
        seen = screen(pilot.app)
        assert "model/layers.0.attn.weight" in seen or "model/layers.0.mlp.weight" in seen
        assert "float32 [2, 3]" in seen
        await pilot.press(*["left"] * 6)
        assert labels(pilot.app) == ["", "model", "epoch", "args"]
        await pilot.press("asterisk")
        assert "mlp.weight" in labels(pilot.app)
        await pilot.press("minus", "G")
        assert labels(pilot.app)[-1] == "args"

    play(BrowseApp(str(training(tmp_path))), script)


@pytest.mark.slow
def test_search_as_it_is_typed_and_back_in_the_tree(tmp_path: Path) -> None:
    async def script(pilot: Any) -> None:
        await settled(pilot)
        await pilot.press("slash", *"mlp")
        await until(pilot, lambda: labels(pilot.app) == ["model/layers.0.mlp.weight", "model/layers.1.mlp.weight"])
        await pilot.press("backspace", "backspace", "backspace", *"/.[/")
        await until(pilot, lambda: "not a regular expression" in screen(pilot.app))
        await pilot.press(*["backspace"] * 4, *"*.MLP.*")
        await until(pilot, lambda: labels(pilot.app) == [])
        await pilot.press(*["backspace"] * 7, *"layers.1.m")
        await until(pilot, lambda: len(labels(pilot.app)) == 1)
        await pilot.press("enter", "y")
        assert pilot.app.clipboard.endswith("--filter '/(?i)layers\\.1\\.m/'")
        await pilot.press("enter")
        assert labels(pilot.app) == ["", "model", "layers", "0", "1", "attn.weight", "mlp.weight", "norm.bias", *VALUES]
        await pilot.press("y")
        assert pilot.app.clipboard.endswith("--filter model/layers.1.mlp.weight")
        assert "copied" in screen(pilot.app)

    play(BrowseApp(str(training(tmp_path))), script)


VALUES = ("epoch", "args")


@pytest.mark.slow
def test_values_are_read_where_they_are_seen(tmp_path: Path) -> None:
    raw = b"".join(bytes([row % 251]) * 300 for row in range(5000))
    path = written(tmp_path / "a.safetensors", safetensors([("w", "U8", [5000, 300], raw)]))

    async def script(pilot: Any) -> None:
        await settled(pilot)
        await pilot.press("j", "v")
        await until(pilot, lambda: isinstance(pilot.app.screen, ValuesScreen) and bool(cells(pilot).known))
        await pilot.press("G")
        await until(pilot, lambda: 4999 in cells(pilot).known)
        assert "4999" in screen(pilot.app) and str(4999 % 251) in screen(pilot.app)
        await pilot.press("colon", *"1234, 250", "enter")
        await until(pilot, lambda: cells(pilot).value() == 1234 % 251)
        assert "[1234, 250]" in screen(pilot.app)
        assert len(cells(pilot).known) < 100
        await pilot.press("colon", *"9999", "enter")
        await until(pilot, lambda: "no element" in screen(pilot.app))
        await pilot.press("escape")
        assert isinstance(pilot.app.screen, Browser)

    def cells(pilot: Any) -> Cells:
        return pilot.app.screen.query_one(Cells)  # type: ignore[no-any-return]

    play(BrowseApp(str(path)), script)


@pytest.mark.slow
def test_findings_are_marked_and_listed(tmp_path: Path) -> None:
    async def script(pilot: Any) -> None:
        await settled(pilot)
        assert "! " in screen(pilot.app) and "1 warning" in screen(pilot.app)
        await pilot.press("n")
        assert pilot.app.screen.query_one("Tree").cursor == 1
        await pilot.press("f")
        await until(pilot, lambda: isinstance(pilot.app.screen, Findings))
        assert "wrapped-names" in screen(pilot.app) and "strip-module" in screen(pilot.app)
        await pilot.press("x")
        assert pilot.app.clipboard.startswith("ckptfix strip-module ")
        await pilot.press("enter")
        await until(pilot, lambda: isinstance(pilot.app.screen, Browser))

    play(BrowseApp(str(training(tmp_path, prefix="module."))), script, (120, 30))


@pytest.mark.slow
def test_two_files_side_by_side(tmp_path: Path) -> None:
    a = training(tmp_path, "a.pth")
    b = tensors(tmp_path / "b.safetensors", {"norm.bias": tuple(map(float, range(25))), "extra": (1.0,)})

    async def script(pilot: Any) -> None:
        await settled(pilot)
        browser = pilot.app.screen
        assert browser.session.counts["+"] == 1 and browser.session.counts["-"] == 7
        await pilot.press("slash", *"norm.bias", "enter", "enter")
        bias = next(item for item in browser.session.items if item.name.endswith("norm.bias"))
        await until(pilot, lambda: bias.status == "=")
        await pilot.press("C")
        await until(pilot, lambda: not browser.session.counts["?"])
        await pilot.press("y")
        assert pilot.app.clipboard == f"ckptfix diff {a} {b} --filter model/norm.bias"
        await pilot.press("v")
        await until(pilot, lambda: isinstance(pilot.app.screen, ValuesScreen))
        await pilot.press("x", "x")
        await until(pilot, lambda: "B - A" in screen(pilot.app) and bool(pilot.app.screen.query_one(Cells).known))
        assert set(pilot.app.screen.query_one(Cells).known[0]) == {0.0}

    play(BrowseApp(str(a), str(b)), script, (120, 30))


@pytest.mark.slow
def test_a_folder_of_checkpoints(tmp_path: Path) -> None:
    for step in (500, 1000):
        (tmp_path / f"checkpoint-{step}").mkdir()
        tensors(tmp_path / f"checkpoint-{step}/model.safetensors", {"w": (1.0,) * step})
    written(tmp_path / "broken.pth", b"not a checkpoint")

    async def script(pilot: Any) -> None:
        files = pilot.app.screen
        assert isinstance(files, FilesScreen)
        await until(pilot, lambda: "reading" not in screen(pilot.app) and "with errors" in screen(pilot.app))
        seen = screen(pilot.app).splitlines()
        assert [line[2:17].strip() for line in seen[1:4]] == ["broken.pth", "checkpoint-500", "checkpoint-1000"]
        await pilot.press("y")
        assert pilot.app.clipboard == f"ckptfix ls {tmp_path}"
        await pilot.press("j", "enter")
        await settled(pilot)
        assert isinstance(pilot.app.screen, Browser) and "float32 [500]" in screen(pilot.app)
        await pilot.press("escape")
        assert isinstance(pilot.app.screen, FilesScreen)
        await pilot.press("d", "j", "d")
        await settled(pilot)
        assert pilot.app.screen.session.counts["~"] == 1

    play(BrowseApp(str(tmp_path), None, None, tuple(listing.checkpoints(str(tmp_path)))), script)


@pytest.mark.slow
def test_a_file_that_changes_is_not_shown_as_it_was(tmp_path: Path) -> None:
    path = tensors(tmp_path / "a.safetensors", {"w": (1.0, 2.0), "v": (1.0,)})

    async def script(pilot: Any) -> None:
        await settled(pilot)
        tensors(path, {"w": (7.0, 8.0), "v": (1.0,)})
        os.utime(path, ns=(1, 1))
        await pilot.press("j")
        await until(pilot, lambda: pilot.app.screen.session.stale)
        assert "changed on disk" in screen(pilot.app) and "mean" not in screen(pilot.app)
        await pilot.press("v")
        assert isinstance(pilot.app.screen, Browser)
        await pilot.press("r")
        await settled(pilot)
        await pilot.press("j")
        await until(pilot, lambda: "mean 7.5" in screen(pilot.app))
        assert not pilot.app.screen.session.stale

    play(BrowseApp(str(path)), script, (120, 30))


@pytest.mark.slow
def test_a_file_that_cannot_be_opened(tmp_path: Path) -> None:
    path = written(tmp_path / "page.pth", b"<!DOCTYPE html><html></html>")

    async def script(pilot: Any) -> None:
        await settled(pilot)
        assert "cannot be opened" in screen(pilot.app) and "web page" in screen(pilot.app).lower()
        await pilot.press("j", "enter", "v", "s", "f", "y")
        assert pilot.app.clipboard.startswith("ckptfix doctor ")

    play(BrowseApp(str(path)), script)


@pytest.mark.slow
def test_two_state_dicts_are_chosen_with_at(tmp_path: Path) -> None:
    a = training(tmp_path, "a.pth")
    b = tensors(tmp_path / "b.safetensors", {"norm.bias": (0.0,) * 25})

    async def script(pilot: Any) -> None:
        await settled(pilot)
        assert labels(pilot.app)[:2] == ["", "model"] and "epoch" not in labels(pilot.app)
        await pilot.press("y")
        assert pilot.app.clipboard == f"ckptfix diff {a} {b} --keys-only --at model --at ''"

    play(BrowseApp(str(a), str(b), ("model", "")), script)

    async def refused(pilot: Any) -> None:
        await settled(pilot)
        assert "They cannot be compared" in screen(pilot.app) and "at 'gone'" in screen(pilot.app)

    play(BrowseApp(str(a), str(b), ("gone", "")), refused)


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("size", [(80, 24), (40, 12), (200, 50)])
def test_hostile_names_are_text_at_every_size(tmp_path: Path, size: tuple[int, int]) -> None:
    async def script(pilot: Any) -> None:
        await settled(pilot)
        await pilot.press("j", "asterisk")
        count = len(labels(pilot.app))
        for _ in range(count):
            seen = screen(pilot.app)
            assert all(line.isprintable() for line in seen.splitlines())
            await pilot.press("j")
        await pilot.press("slash", *"[red]")
        await pilot.press(*["backspace"] * 5, *"red")
        await until(pilot, lambda: len(labels(pilot.app)) >= 2)
        assert "[red]" in screen(pilot.app) or size[0] < 80
        await pilot.press("enter", "y", "enter", "y", "v")
        await pilot.pause(0.2)
        assert all(line.isprintable() for line in screen(pilot.app).splitlines())

    play(BrowseApp(str(hostile(tmp_path / "[red]\x1b[31m\nname.pth"))), script, size)


@pytest.mark.slow
def test_sorting_help_mouse_and_quitting(tmp_path: Path) -> None:
    async def script(pilot: Any) -> None:
        await settled(pilot)
        await pilot.press("s")
        assert labels(pilot.app) == ["", "args", "epoch", "model"] and "sorted by name" in screen(pilot.app)
        await pilot.press("s")
        assert labels(pilot.app)[1] == "model"
        await pilot.press("question_mark")
        assert isinstance(pilot.app.screen, Help) and "search as you type" in screen(pilot.app)
        await pilot.press("escape")
        await pilot.click("Tree", offset=(8, 1))
        assert labels(pilot.app)[2:4] == ["norm.bias", "layers"]
        await pilot.click("Tree", offset=(8, 2), times=2)
        await until(pilot, lambda: isinstance(pilot.app.screen, ValuesScreen))
        await pilot.press("q")
        assert not pilot.app.is_running or pilot.app._exit

    play(BrowseApp(str(training(tmp_path))), script)


def test_names_come_first_where_there_are_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ckptfix.browse.model import contents

    monkeypatch.setattr(contents, "MANY", 3)
    told: list[tuple[bool, bool]] = []
    filled = Browser.filled

    def noting(self: Browser, *, keep: bool) -> None:
        told.append((keep, self.session.items[0].pending))
        filled(self, keep=keep)

    monkeypatch.setattr(Browser, "filled", noting)

    async def script(pilot: Any) -> None:
        await settled(pilot)
        assert told == [(False, True), (True, False)]
        assert labels(pilot.app) == ["", "model", "layers", "norm.bias", "epoch", "args"]

    play(BrowseApp(str(training(tmp_path))), script)


@pytest.mark.slow
def test_a_large_tensor_waits_for_c_and_esc_stops_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import threading

    from ckptfix.browse.model import summary

    path = tensors(tmp_path / "a.safetensors", {"w": (1.0, 2.0)})
    monkeypatch.setattr(summary, "AT_ONCE", 4)
    go, stopped = threading.Event(), threading.Event()
    real = summary.summarise

    def slow(contents: Any, entry: Any, progress: Any) -> Any:
        progress(4, 8)
        go.wait(20)
        try:
            return real(contents, entry, progress)
        except BaseException:
            stopped.set()
            raise

    monkeypatch.setattr(summary, "summarise", slow)

    async def script(pilot: Any) -> None:
        await settled(pilot)
        await pilot.press("j")
        await settled(pilot)
        assert "c reads its 8 B" in screen(pilot.app)
        await pilot.press("c")
        await until(pilot, lambda: "50% of 8 B, esc stops" in screen(pilot.app))
        await pilot.press("escape")
        go.set()
        assert stopped.wait(20)
        await settled(pilot)
        assert "mean" not in screen(pilot.app)
        await pilot.press("c")
        await until(pilot, lambda: "mean" in screen(pilot.app))

    play(BrowseApp(str(path)), script)


@pytest.mark.slow
def test_a_url_is_read_in_parts(tmp_path: Path) -> None:
    from stores import WebServer

    server = WebServer()
    rows = {"a": (0.0,) * 1_000_000, "layers.0.w": (1.0, 2.0), "b": (0.0,) * 1_000_000}
    url = server.put("model.safetensors", tensors(tmp_path / "a.safetensors", rows))

    async def script(pilot: Any) -> None:
        await settled(pilot)
        assert url in screen(pilot.app) and labels(pilot.app) == ["", "a", "layers.0.w", "b"]
        await pilot.press("j", "j")
        await until(pilot, lambda: "mean 1.5" in screen(pilot.app))
        await pilot.press("y")
        assert pilot.app.clipboard == f"ckptfix stats {url} --filter layers.0.w"
        await pilot.press("k", "v")
        await until(pilot, lambda: isinstance(pilot.app.screen, ValuesScreen))
        await until(pilot, lambda: bool(pilot.app.screen.query_one(Cells).known))
        assert server.traffic.down < 3_000_000

    try:
        play(BrowseApp(url), script, (120, 30))
    finally:
        server.close()
