"""The pages in a browser: Chromium, without a window."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from math import nan
from pathlib import Path
from typing import Any

import pytest
from builders import Tensor, assemble, safetensors, state_dict_ops, torch_zip, written
from cli.conftest import Cli, floats, state
from click.testing import CliRunner
from doctor_samples import CALL
from hostile import checkpoint as hostile

from ckptfix.cli import commands

sync_api = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install 'ckptfix[browser]'")

FAULTS = Path(__file__).with_name("layout_faults.js").read_text(encoding="utf-8")
"""A function of the page: its faults."""

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")

pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium"),
    pytest.mark.xdist_group("browser"),
    pytest.mark.slow,
]

Open = Callable[..., Any]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield found
        found.close()


@pytest.fixture
def shown(browser: Any) -> Iterator[Open]:
    """Opens a page; what a console, a dialog or the network would have had is a failure of the test."""
    contexts: list[Any] = []
    troubles: list[str] = []

    def dialog(box: Any) -> None:
        troubles.append(box.message)
        box.dismiss()

    def request(one: Any, path: Path) -> None:
        if one.url != path.as_uri():
            troubles.append(one.url)

    def show(path: Path, **options: Any) -> Any:
        context = browser.new_context(**options)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: troubles.append(message.text))
        page.on("pageerror", lambda error: troubles.append(str(error)))
        page.on("dialog", dialog)
        page.on("request", lambda one: request(one, path))
        page.goto(path.as_uri())
        return page

    yield show
    for context in contexts:
        context.close()
    assert not troubles


@pytest.fixture
def report(cli: Cli, tmp_path: Path) -> Path:
    layers = {f"enc__{index}__{part}": (1.0, index) for index in range(4) for part in ("q", "k", "v")}
    a = written(tmp_path / "a.pth", state(**layers, head=(1, 2, 3), gone=(8,)))
    b = written(tmp_path / "b.pth", state(**{**layers, "enc__2__k": (5, 5)}, head=(1, 2, 4), new=(9,)))
    assert cli("diff", a, b, "--html", tmp_path / "report.html", "-q").exit_code == 1
    return tmp_path / "report.html"


def names(page: Any) -> list[str]:
    """The rows that are seen, by the text of their first cell."""
    rows: list[str] = page.eval_on_selector_all(
        "#tensors tbody tr:not([hidden])", "rows => rows.map(row => row.cells[0].innerText.trim())"
    )
    return rows


def test_fold_search_filter_and_sort(shown: Open, report: Path) -> None:
    page = shown(report)
    assert names(page) == ["enc.0-3 4 similar", "head", "gone", "new"]
    page.click("text=enc.0-3")
    assert names(page)[:5] == ["enc.0-3 4 similar", "0.", "1.", "2.", "3."]
    page.focus("#tensors tr:nth-child(8)")
    page.locator("#tensors tr.m", has_text="2.").first.press("Enter")
    assert "k" in names(page)
    page.click("#fold")
    assert len(names(page)) == 4
    page.click("#unfold")
    assert len(names(page)) == 20
    page.keyboard.press("/")
    page.keyboard.type("2. k")
    assert names(page) == ["enc.0-3 4 similar", "2.", "k"]
    assert page.inner_text("#shown") == "1 of 15 tensors"
    page.keyboard.press("Escape")
    page.click("button:has-text('only in A')")
    assert names(page) == ["gone"]
    page.click("button:has-text('All')")
    page.click("th:has-text('Rel. change') button")
    assert names(page)[:2] == ["enc.2.k", "head"]
    page.click("th:has-text('Rel. change') button")
    assert names(page)[:2] == ["head", "enc.2.k"]
    page.click("th:has-text('Name') button")
    assert names(page)[0] == "enc.0.k"
    page.click("#tree")
    assert len(names(page)) == 20


def test_of_very_many_rows_the_first_are_shown(shown: Open, cli: Cli, tmp_path: Path) -> None:
    rows = [(f"w{index}", "U8", [1], b"\0") for index in range(700)]
    path = written(tmp_path / "many.safetensors", safetensors(rows))
    assert cli("inspect", path, "--html", tmp_path / "x.html", "-q").exit_code == 0
    page = shown(tmp_path / "x.html")
    assert len(names(page)) == 500
    page.click("#more")
    assert len(names(page)) == 700
    page.fill("#search", "w69")
    assert len(names(page)) == 11
    assert not page.is_visible("#more")


def test_a_row_opens_its_histogram_and_the_command_is_copied(shown: Open, report: Path) -> None:
    page = shown(report, permissions=["clipboard-read", "clipboard-write"])
    page.click("#tensors tr:has-text('head')")
    assert page.locator(".detail svg path").count() == 3
    assert page.inner_text(".detail tbody tr:nth-child(2)").split() == ["B", "1", "4", "2.333", "1.528"]
    page.click("#tensors tr:has-text('head')")
    assert not page.locator(".detail").count()
    page.click(".copy")
    page.wait_for_selector("text=Copied")
    assert page.evaluate("navigator.clipboard.readText()").startswith("ckptfix diff ")


def test_light_dark_and_print(shown: Open, report: Path) -> None:
    colour = "getComputedStyle(document.body).backgroundColor"
    light, dark = (shown(report, color_scheme=scheme) for scheme in ("light", "dark"))
    assert light.evaluate(colour) == "rgb(255, 255, 255)"
    paper = dark.evaluate(colour)
    assert paper != "rgb(255, 255, 255)"
    light.click("#theme")
    light.click("#theme")
    assert light.evaluate(colour) == paper
    dark.emulate_media(media="print")
    assert dark.evaluate(colour) == "rgb(255, 255, 255)"
    assert not dark.is_visible(".controls")


def test_without_scripts_everything_is_there(shown: Open, report: Path) -> None:
    page = shown(report, java_script_enabled=False)
    text = page.inner_text("body")
    for said in ("enc.2.k", "only in B", "Where it changed", "Largest changes"):
        assert said in text
    assert page.locator("#tensors tbody tr").count() == 20
    assert page.locator(".cards svg path").count() >= 6
    assert not page.is_visible("#search")


def training(path: Path, tensors: dict[str, tuple[float, ...]], **others: Any) -> Path:
    """A file with these tensors under "model", and other values beside them."""
    items = {name: Tensor(str(index), (len(one),), len(one)) for index, (name, one) in enumerate(tensors.items())}
    pickle = assemble(("PROTO", 2), *state_dict_ops({**others, "model": state_dict_ops(items)}), "STOP")
    return written(path, torch_zip(pickle, [floats(*one) for one in tensors.values()]))


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A page of each command, with what is hard to lay out: long names, NaN, absent values, scales of colors."""
    folder = tmp_path_factory.mktemp("pages")
    before = {f"encoder.{index}.{part}": (1.0, index, 3) for index in range(9) for part in ("query_projection", "k")}
    after = {f"module.{name}": (1 + values[1] ** 2 / 50, *values[1:]) for name, values in before.items()}
    betas = state_dict_ops({"param_groups/0/betas": tuple(range(60))})
    odd = {"a_name_without_an_end_" * 6: (1.0,), "head": (1.0, 2.0)}
    a = training(folder / "a.pth", {**before, **odd}, epoch=3, optimizer=betas)
    b = training(folder / "b.pth", {**after, "module.head": (1.0, nan)}, evil=CALL)
    for words in (["diff", a, b], ["inspect", a, "--values"], ["doctor", a], ["doctor", b]):
        out = folder / f"{words[0]}-{Path(str(words[1])).stem}.html"
        assert CliRunner().invoke(commands, [*map(str, words), "--html", str(out), "-q"]).exit_code in (0, 1)
    return sorted(folder.glob("*.html"))


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_a_page_is_laid_out_well(shown: Open, pages: list[Path], width: int, scheme: str) -> None:
    for path in pages:
        page = shown(path, viewport={"width": width, "height": 800}, color_scheme=scheme)
        assert page.evaluate(FAULTS) == [], path.name
        for summary in page.locator("summary").all():
            summary.click()
        if page.locator("#unfold").count():
            page.click("#unfold")
            for row in page.locator("#tensors tr.d:visible").all()[:2]:
                row.click(position={"x": 5, "y": 5})
        assert page.evaluate(FAULTS) == [], f"{path.name}, opened"


@pytest.mark.parametrize(
    ("style", "fault"),
    [
        ("main { width: 2000px }", "sideways"),
        ("p { color: #999 }", "contrast"),
        ("h2 { margin-bottom: -1.5rem }", "overlap"),
        ("button { padding: 0; line-height: 1 }", "hard to hit"),
        ("td { display: block; width: 20px }", "squeezed"),
        ("h1 { transform: translateX(-60px) }", "outside"),
    ],
)
def test_a_bad_layout_is_seen(shown: Open, report: Path, style: str, fault: str) -> None:
    page = shown(report, viewport={"width": 800, "height": 600}, bypass_csp=True)
    page.add_style_tag(content=style)
    assert any(fault in one for one in page.evaluate(FAULTS))


def test_hostile_names_do_nothing(shown: Open, cli: Cli, tmp_path: Path) -> None:
    a, b = written(tmp_path / "a.pth", hostile()), written(tmp_path / "<img src=x onerror=alert(1)>.pth", hostile(x=1))
    clean = written(tmp_path / "c.pth", state(w=(1,)))
    for words in (["diff", a, b], ["diff", a, clean], ["inspect", b, "--values"], ["doctor", b]):
        out = tmp_path / f"{words[0]}.html"
        assert cli(*words, "--html", out, "-f").exit_code in (0, 1)
        page = shown(out, viewport={"width": 800, "height": 600})
        assert page.locator("script").count() == 2
        assert not page.locator("img, iframe, object, embed, link, a, body b[onload]").count()
        assert page.evaluate("document.documentElement.scrollWidth") <= 800
        if words[0] != "doctor":
            page.click("#unfold")
            for row in page.locator("#tensors tr.d:visible").all()[:12]:
                row.click(position={"x": 5, "y": 5})
            page.fill("#search", "</script>")
            assert page.locator("script").count() == 2
