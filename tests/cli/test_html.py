from __future__ import annotations

import json
import os
import re
import shlex
from html.parser import HTMLParser
from pathlib import Path

import pytest
from builders import safetensors, written
from cli.conftest import Cli, floats, state, wrapped
from hostile import checkpoint as hostile
from stores import WebServer

import ckptfix
from ckptfix.errors import DamagedFile
from ckptfix.html.page import LIMIT


class Page(HTMLParser):
    """The elements of a page, what its script reads, and its text."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self._texts: list[str] = []
        self._script = False
        self.scripts: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        self._script = tag in ("script", "style")
        if self._script:
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        self._script = False

    def handle_data(self, data: str) -> None:
        if self._script:
            self.scripts[-1] += data
        else:
            self._texts.append(data)

    @property
    def text(self) -> str:
        return "".join(self._texts)

    @property
    def data(self) -> dict[str, object]:
        found = json.loads(self.scripts[1])
        assert isinstance(found, dict)
        return found


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    a = state(enc__0__w=(1, 2), enc__1__w=(1, 2), enc__2__w=(1, 2), gone=(8,), same=(3,))
    b = state(enc__0__w=(1, 2), enc__1__w=(1, 3), enc__2__w=(1, float("nan")), new=(9,), same=(3,))
    return written(tmp_path / "a.pth", a), written(tmp_path / "b.pth", b)


def test_a_page_stands_beside_what_is_printed(cli: Cli, pair: tuple[Path, Path], tmp_path: Path) -> None:
    out = tmp_path / "report.html"
    plain, done = cli("diff", *pair), cli("diff", *pair, "--html", out)
    assert done.exit_code == plain.exit_code == 1
    assert done.stdout == f"{plain.stdout}page: {out}\n"
    assert json.loads(cli("diff", *pair, "--html", out, "-f", "--json").stdout)["only_a"]
    page = Page(out.read_text())
    for said in ("Different", "only in A", "only in B", "1 NaN in B only", "enc.0-2", "3 similar", str(pair[0])):
        assert said in page.text
    assert page.data["levels"] == "0111000"
    assert page.data["filters"] == [-1, 0, 1, 1, 0, 4, 5]
    assert len(page.data["charts"]) == 4  # type: ignore[arg-type]


def test_an_existing_file_needs_force_and_a_wrong_one_is_refused_at_once(
    cli: Cli, pair: tuple[Path, Path], tmp_path: Path
) -> None:
    out = written(tmp_path / "report.html", b"mine")
    for verb in (["diff", *pair], ["inspect", pair[0]], ["doctor", pair[0]]):
        for words, said in (
            ([*verb, "--html", out], "--force"),
            ([*verb, "--html", pair[0], "-f"], "the output is the input"),
            ([*verb, "--html", tmp_path / "none/x.html"], "mkdir -p"),
            ([*verb, "--force"], "--force needs --html"),
        ):
            done = cli(*words)
            assert done.exit_code == 2
            assert said in done.stderr
            assert out.read_bytes() == b"mine"
        done = cli(*verb, "--html", out, "--force")
        assert done.exit_code in (0, 1)
        assert out.read_bytes().startswith(b"<!DOCTYPE html>")
        out.write_bytes(b"mine")


def test_standard_output_and_input(cli: Cli, pair: tuple[Path, Path], tmp_path: Path) -> None:
    done = cli("diff", *pair, "--html", "-")
    assert done.stdout.startswith("<!DOCTYPE html>")
    assert "Different" in done.stderr


def test_several_inputs_are_refused(cli: Cli, pair: tuple[Path, Path], tmp_path: Path) -> None:
    for words in (["inspect", *pair], ["doctor", *pair], ["inspect", "-r", tmp_path], ["doctor", tmp_path]):
        done = cli(*words, "--html", tmp_path / "x.html")
        assert (done.exit_code, "one page for one input" in done.stderr) == (2, True), words
    assert not (tmp_path / "x.html").exists()


def test_the_command_can_be_pasted(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = ["it's; $(a) `b`.pth", "-b\x1b\u202e.pth"]
    for name in names:
        written(tmp_path / name, state(w=(1,)))
    words = ["diff", names[0], f"./{names[1]}", "--html", "x y.html"]
    assert cli(*words).exit_code == 0
    text = (tmp_path / "x y.html").read_text()
    line = Page(text).text
    found = next(part for part in re.findall(r"ckptfix diff [^\n]*?html'", line))
    done = os.popen(f"bash -c {shlex.quote(f'printf %s... {found}')}").read()
    assert done == "".join(f"{word}..." for word in ["ckptfix", *words])


def test_hostile_names_are_text(cli: Cli, tmp_path: Path) -> None:
    a, b = written(tmp_path / "a.pth", hostile()), written(tmp_path / "<b>&.pth", hostile(more="</script>"))
    clean = written(tmp_path / "c.pth", state(w=(1,)))
    out = tmp_path / "x.html"
    for words in (["diff", a, b], ["diff", a, clean], ["inspect", b], ["inspect", a, "--values"], ["doctor", a]):
        assert cli(*words, "--html", out, "-f").exit_code in (0, 1)
        text = out.read_bytes().decode()
        assert not re.search("[\u2028\u2029\u202e\x1b\0\r]", text)
        page = Page(text)
        assert not {"img", "b>"} & set(page.tags)
        assert "://" not in text
        assert page.tags.count("script") == 2
        assert not [name for name, _ in page.attributes if name.startswith("on")]
        assert not [name for name, _ in page.attributes if name in ("src", "href", "style")]
        assert len(text) < 400_000
        assert isinstance(page.data, dict)


@pytest.mark.sampled(0, test_all=1)
@pytest.mark.slow
def test_a_page_of_ten_thousand_tensors_can_be_sent(cli: Cli, tmp_path: Path) -> None:
    """Where all changed, under names of a usual length."""
    paths = []
    for side in range(2):
        rows = []
        for index in range(10_000):
            expert = f"block_sparse_moe.experts.{index % 40 // 5}.w{index % 5}_projection"
            rows.append((f"model.layers.{index // 40}.{expert}.weight", "F32", [2], floats(index, side)))
        paths.append(written(tmp_path / f"{side}.safetensors", safetensors(rows)))
    assert cli("diff", *paths, "--html", tmp_path / "x.html", "-q").exit_code == 1
    text = (tmp_path / "x.html").read_bytes()
    assert len(text) < 5_000_000
    page = Page(text.decode())
    assert sum(value >= 0 for value in page.data["filters"]) == 10_000  # type: ignore[attr-defined]
    assert "Histograms show the 2,000 tensors that changed most, of 10,000." in page.text


@pytest.mark.slow
def test_a_page_that_would_be_too_large_leaves_out_rows_and_says_so(cli: Cli, tmp_path: Path) -> None:
    rows = [(f"{'<&' * 200}{index}", "U8", [1], b"\0") for index in range(5000)]
    path = written(tmp_path / "a.safetensors", safetensors(rows))
    assert cli("inspect", path, "--html", tmp_path / "x.html", "-q").exit_code == 0
    text = (tmp_path / "x.html").read_bytes()
    assert 2_000_000 < len(text) < LIMIT
    assert "The table has no room for the last" in text.decode()


def test_inspect_reads_no_values_unless_asked(cli: Cli, tmp_path: Path) -> None:
    path = written(tmp_path / "a.safetensors", safetensors([("w", "F32", [3], floats(1, 2, 6))], metadata={"k": "v"}))
    out = tmp_path / "x.html"
    assert cli("inspect", path, "--html", out).exit_code == 0
    assert "The values of the tensors were not read" in out.read_text()
    assert cli("inspect", path, "--html", out, "-f", "--values").exit_code == 0
    page = Page(out.read_text())
    assert "Std" in page.text
    assert "2.646" in page.text
    assert cli("inspect", path, "--values").exit_code == 2


def test_a_filter_is_of_the_page_too(cli: Cli, pair: tuple[Path, Path], tmp_path: Path) -> None:
    out = tmp_path / "x.html"
    assert cli("inspect", pair[0], "--filter", "enc.*", "--html", out, "--values").exit_code == 0
    page = Page(out.read_text())
    assert "enc.0-2" in page.text
    assert "gone" not in page.text
    assert cli("diff", *pair, "--keys-only", "--filter", "same", "--html", out, "-f").exit_code == 0
    assert Page(out.read_text()).data["charts"] == []


def test_files_of_one_name_are_told_apart(cli: Cli, tmp_path: Path) -> None:
    paths = [tmp_path / name / "last.ckpt" for name in ("one", "two")]
    for path in paths:
        path.parent.mkdir()
        written(path, state(w=(1,)))
    assert cli("diff", *paths, "--html", tmp_path / "x.html").exit_code == 0
    assert "one/last.ckpt" in re.findall("<h1>(.*?)</h1>", (tmp_path / "x.html").read_text())[0]


def test_fifty_gigabytes_are_opened_at_once(cli: Cli, tmp_path: Path) -> None:
    """A file of nothing but its header, which takes no room on the disk; a test fails that would read it."""
    count, each = 1000, 50_000_000
    offsets = [[each * index, each * (index + 1)] for index in range(count)]
    rows = {f"layers.{n}.w": {"dtype": "U8", "shape": [each], "data_offsets": offsets[n]} for n in range(count)}
    header = json.dumps(rows).encode()
    path = written(tmp_path / "huge.safetensors", len(header).to_bytes(8, "little") + header)
    os.truncate(path, 8 + len(header) + count * each)
    assert cli("inspect", path, "--html", tmp_path / "x.html", "-q").exit_code == 0
    assert "50.0 GB" in Page((tmp_path / "x.html").read_text()).text


def test_urls_go_without_their_secrets(cli: Cli, tmp_path: Path) -> None:
    server = WebServer()
    try:
        url = server.put("a.pth", state(w=(1,)))
        signed = f"{url.replace('//', '//me:pa55w0rd@')}?X-Amz-Signature=pa55w0rd"
        assert cli("inspect", signed, "--html", tmp_path / "x.html").exit_code == 0
    finally:
        server.close()
    text = (tmp_path / "x.html").read_text()
    assert "a.pth" in text
    assert "pa55w0rd" not in text


def test_doctor_says_what_helps(cli: Cli, ddp: Path, tmp_path: Path) -> None:
    out = tmp_path / "x.html"
    assert cli("doctor", ddp, "--html", out).exit_code == 0
    page = Page(out.read_text())
    for said in (f"ckptfix fix {ddp}", "wrapped-names", "Meaning", "torch.FloatStorage", "cuda:0"):
        assert said in page.text
    cut = written(tmp_path / "cut.pth", wrapped()[:900])
    assert cli("doctor", cut, "--html", out, "-f").exit_code == 1
    assert "Errors" in Page(out.read_text()).text
    assert cli("doctor", "--error", "Unexpected key(s)", "--html", out, "-f").exit_code == 0


def test_results_have_it_in_python_and_it_is_the_same_each_time(pair: tuple[Path, Path]) -> None:
    result = ckptfix.diff(*pair)
    assert result.to_html() == ckptfix.diff(*pair).to_html()
    assert f"ckptfix diff {pair[0]} {pair[1]}" in Page(result.to_html(histograms=False)).text
    assert ckptfix.inspect(pair[0]).to_html(values=True).count("<html") == 1
    assert ckptfix.doctor(pair[0]).to_html().count("<html") == 1
    os.utime(pair[0], (1, 1))
    with pytest.raises(DamagedFile, match="changed"):
        result.to_html()


def test_folders(cli: Cli, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    written(folder / "model.safetensors", safetensors([("w", "F32", [1], floats(1))]))
    written(folder / "optimizer.pt", state(w=(1,)))
    for verb in ("inspect", "doctor"):
        assert cli(verb, folder, "--html", tmp_path / f"{verb}.html").exit_code == 0
    assert "optimizer.pt" in (tmp_path / "inspect.html").read_text()
    assert cli("diff", folder, folder / "optimizer.pt", "--html", tmp_path / "diff.html").exit_code == 0


def test_without_a_name_the_page_is_named_after_the_inputs(
    cli: Cli, pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    a, b = (path.name for path in pair)
    done = cli("diff", a, b, "--html")
    assert done.exit_code == 1 and done.stdout.endswith(f"page: {a}-{b}.diff.html\n")
    assert Page(Path(f"{a}-{b}.diff.html").read_text()).text
    assert cli("diff", a, b, "--html", "-q").exit_code == 2, "it exists"
    assert cli("diff", a, b, "--html", "-qf").exit_code == 1
    assert f"ckptfix diff {a} {b} --html -qfCopy" in Page(Path(f"{a}-{b}.diff.html").read_text()).text
    assert cli("inspect", a, "--html", "-q").exit_code == cli("doctor", "--html", "-q", "--", a).exit_code == 0
    assert {path.name for path in tmp_path.glob("a*.html")} == {
        f"{a}-{b}.diff.html", f"{a}.inspect.html", f"{a}.doctor.html"
    }  # fmt: skip
