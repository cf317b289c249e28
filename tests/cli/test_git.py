"""Checkpoints in real repositories of git."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from builders import safetensors, written
from cli.conftest import Cli, floats, state, wrapped
from hostile import checkpoint as hostile

from ckptfix.git import attributes
from ckptfix.git.text import text

pytestmark = [
    pytest.mark.skipif(shutil.which("git") is None, reason="needs git"),
    pytest.mark.slow,
]

Git = Callable[..., str]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home folder of its own, without a configuration but for a name."""
    for name in [name for name in os.environ if name.startswith("GIT_")]:
        monkeypatch.delenv(name)
    place = tmp_path / "home"
    place.mkdir()
    monkeypatch.setenv("HOME", str(place))
    monkeypatch.setenv("GIT_CONFIG_NOSYSTEM", "1")
    monkeypatch.setenv("GIT_PAGER", "cat")
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    written(place / ".gitconfig", b"[user]\n\tname = A\n\temail = a@b\n[init]\n\tdefaultBranch = main\n")
    return place


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    place = tmp_path / "it's a repository"
    place.mkdir()
    monkeypatch.chdir(place)
    git("init", "-q")
    return place


def git(*words: object, code: int = 0) -> str:
    done = subprocess.run(["git", *map(str, words)], capture_output=True, stdin=subprocess.DEVNULL, check=False)
    assert done.returncode == code, done.stderr.decode()
    return done.stdout.decode()


def commit(message: str) -> None:
    git("add", "-A")
    git("commit", "-qm", message)


def changed(diff: str) -> list[str]:
    """The lines of a diff that were removed or added."""
    return [line for line in diff.splitlines() if line[:1] in "+-" and not line.startswith(("+++", "---"))]


def test_what_changed_is_a_line_a_tensor(cli: Cli, repository: Path) -> None:
    assert cli("git", "enable").exit_code == 0
    path = written(repository / "model.pth", state(enc__10__w=(1, 2), enc__2__w=(3, 4)))
    commit("add")
    shown = git("show").splitlines()
    where = next(index for index, line in enumerate(shown) if line.startswith("+enc.2.w"))
    assert shown[where].startswith("+enc.2.w  float32 [2]  mean 3.5 std 0.7071 min 3 max 4  sha256:")
    assert shown[where + 1].startswith("+enc.10.w  float32 [2]  mean 1.5")
    written(path, state(enc__10__w=(1, 5), enc__2__w=(3, 4)))
    found = changed(git("diff"))
    assert [line.split("  ")[:3] for line in found] == [
        ["-enc.10.w", "float32 [2]", "mean 1.5 std 0.7071 min 1 max 2"],
        ["+enc.10.w", "float32 [2]", "mean 3 std 2.828 min 1 max 5"],
    ]
    commit("change one")
    written(path, state(new__10__w=(1, 5), enc__2__w=(3, 4)))
    found = changed(git("diff"))
    assert [line.split("  ")[0] for line in found] == ["-enc.10.w", "+new.10.w"]
    assert found[0].split("  ")[1:] == found[1].split("  ")[1:]
    commit("rename")
    assert git("log", "-p").count("enc.10.w  float32") == 4
    first, *_, last = git("blame", "-s", "model.pth").splitlines()
    assert first.startswith("^")
    assert not last.startswith("^")
    assert git("show-ref", "refs/notes/textconv/ckptfix")


@pytest.mark.parametrize("name", ["-f.pth", "--help.pth", "a b'c.pth"])
def test_a_name_that_looks_like_an_option(cli: Cli, repository: Path, name: str) -> None:
    assert cli("git", "enable").exit_code == 0
    path = written(repository / name, state(w=(1, 2)))
    commit("add")
    written(path, state(w=(1, 5)))
    assert [line.split("  ")[0] for line in changed(git("diff"))] == ["-w", "+w"]


def test_a_container_is_one_line_and_values_and_devices_are_others(cli: Cli, repository: Path) -> None:
    cli("git", "enable")
    path = written(repository / "model.pth", wrapped())
    commit("add")
    assert cli("to-cpu", path, "-o", path.with_name("x")).exit_code == 0
    path.with_name("x").replace(path)
    found = changed(git("diff"))
    assert len(found) == 4
    assert {line[0] for line in found if "cuda:0" in line} == {"-"}
    commit("devices")
    assert cli("convert", path, "model.safetensors", "-q").exit_code == 0
    Path("model.safetensors").replace(path)
    found = changed(git("diff"))
    assert "-epoch = 3" in found
    assert sum(line.startswith("-format: ") for line in found) == 1


def test_the_text_does_not_depend_on_the_place(tmp_path: Path) -> None:
    """Neither on the name of the file nor on what lies beside it."""
    content = state(w=(1,))
    one, two = written(tmp_path / "mp_rank_00_model_states.pt", content), tmp_path / "run" / "a b.pth"
    two.parent.mkdir()
    written(two, content)
    written(two.parent / "model.safetensors.index.json", b"{}")
    assert text(str(one)) == text(str(two))
    for cut in (0, 100, 300, len(content) - 30):
        assert text(str(written(one, content[:cut]))) == text(str(written(two, content[:cut])))
        assert str(tmp_path) not in text(str(one))


def test_what_is_damaged_or_no_checkpoint_is_said(cli: Cli, repository: Path) -> None:
    cli("git", "enable")
    written(repository / "cut.pth", state(w=(1,))[:-100])
    written(repository / "note.pt", b"hello\n")
    written(repository / "empty.ckpt", b"")
    rows = [("a", "F32", [2], floats(1, 2))]
    written(repository / "short.safetensors", safetensors(rows)[:-3])
    commit("add")
    shown = git("show")
    assert shown.count("+not readable as a checkpoint: ") == 3
    assert "+a  float32 [2]  not readable: 8 bytes are expected, but only 5 are left" in shown
    assert "+file: 6 bytes, sha256 5891b5b522d5" in shown


def test_names_cannot_reach_the_terminal(cli: Cli, repository: Path) -> None:
    cli("git", "enable")
    written(repository / "x.pth", hostile())
    commit("add")
    shown = git("show")
    assert not [char for char in shown if not char.isprintable() and char != "\n"]
    assert r"\x1b[31mred\x1b[0m  float32 [1]" in shown


@pytest.mark.sampled(2, test_all=10_000)
@pytest.mark.parametrize(
    "before", [None, b"*.txt text\n", b"*.pth diff=other\n*.py diff=python", b"a\r\n\r\n", b"# \xff\n\n\n"]
)
def test_what_is_in_the_file_of_attributes_stays(cli: Cli, repository: Path, before: bytes | None) -> None:
    for words, path in (((), ".git/info/attributes"), (("--shared",), ".gitattributes")):
        place = repository / path
        if before is not None:
            place.parent.mkdir(exist_ok=True)
            written(place, before)
        done = cli("git", "enable", "--dry-run", *words)
        assert done.exit_code == 0
        assert (place.read_bytes() if place.exists() else None) == before
        done = cli("git", "enable", *words)
        assert done.exit_code == 0
        assert f"{path}: added diff=ckptfix for" in done.stdout
        assert (before == b"*.pth diff=other\n*.py diff=python") == ("override this diff= line" in done.stdout)
        after = place.read_bytes()
        assert after.startswith(before or b"")
        assert git("check-attr", "diff", "x.pth", "dir/a.safetensors").count(": diff: ckptfix") == 2
        assert cli("git", "enable", *words).stdout.startswith("nothing to do")
        assert place.read_bytes() == after
        assert cli("git", "disable").exit_code == 0
        assert (place.read_bytes() if place.exists() else None) == before
        assert "ckptfix" not in (repository / ".git/config").read_text()
        if before is not None:
            place.unlink()
    assert cli("git", "disable").stdout.startswith("nothing to do")


def test_lines_behind_ours_stay_too() -> None:
    ours = attributes.with_block(b"a")
    assert attributes.without_block(ours + b"b diff\n") == b"a\nb diff\n"
    old = ours.replace(b"*.ckpt diff=ckptfix\n", b"")
    assert attributes.with_block(old + b"b\n") == attributes.with_block(b"a\nb\n")
    tracked = b"*.ckpt filter=lfs diff=lfs merge=lfs -text\n"
    assert attributes.with_block(ours + tracked) == attributes.with_block(b"a\n" + tracked)
    assert attributes.with_block(ours + b"*.x diff=lfs\n") == ours + b"*.x diff=lfs\n"


def test_for_all_repositories(cli: Cli, repository: Path, home: Path) -> None:
    config = (home / ".gitconfig").read_bytes()
    done = cli("git", "enable", "--global", "--json")
    found = json.loads(done.stdout)
    assert found["attributes"] == str(home / ".config/git/attributes")
    assert (found["enabled"], found["written"], found["scope"]) == (True, True, "global")
    written(repository / "x.pth", state(w=(1,)))
    commit("add")
    assert "+w  float32 [1]" in git("show")
    written(repository / ".gitattributes", b"*.pth filter=lfs diff=lfs merge=lfs -text\n")
    assert "overrides this" in cli("git", "status", "--global").stdout
    assert cli("git", "disable", "--global").exit_code == 0
    assert (home / ".gitconfig").read_bytes() == config
    assert not (home / ".config/git/attributes").exists()
    git("config", "--global", "core.attributesFile", "~/mine")
    (home / "real").write_bytes(b"*.x text\n")
    (home / "mine").symlink_to("real")
    assert cli("git", "enable", "--global").exit_code == 0
    assert (home / "mine").is_symlink()
    assert attributes.enabled((home / "real").read_bytes())


def test_outside_of_a_repository(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for action in ("enable", "disable", "status"):
        done = cli("git", action)
        assert done.exit_code == 2
        assert "not in a git repository" in done.stderr
        assert "--global" in done.stderr
    assert cli("git", "status", "--global").exit_code == 0
    monkeypatch.setenv("PATH", "")
    assert "git is not installed" in cli("git", "enable").stderr


def test_worktrees_and_submodules(cli: Cli, repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(repository / "x.pth", state(w=(1,)))
    commit("add")
    git("worktree", "add", "-q", tmp_path / "tree")
    monkeypatch.chdir(tmp_path / "tree")
    assert cli("git", "enable").exit_code == 0
    assert "+w  float32 [1]" in git("show")
    monkeypatch.chdir(repository)
    assert cli("git", "status").stdout.startswith("enabled")
    cli("git", "disable")
    git("-c", "protocol.file.allow=always", "submodule", "add", "-q", repository, "inner")
    monkeypatch.chdir(repository / "inner")
    assert cli("git", "enable").exit_code == 0
    assert "+w  float32 [1]" in git("show")
    monkeypatch.chdir(repository)
    assert cli("git", "status").stdout.startswith("not enabled")
    assert cli("git").stdout == cli("git", "status").stdout


def test_a_bare_repository(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    git("init", "-q", "--bare", tmp_path / "bare.git")
    monkeypatch.chdir(tmp_path / "bare.git")
    assert cli("git", "enable").exit_code == 0
    assert attributes.enabled((tmp_path / "bare.git/info/attributes").read_bytes())
    assert cli("git", "enable", "--shared").exit_code == 2


def test_modules_of_the_repository_are_not_imported(cli: Cli, repository: Path) -> None:
    """git runs the program in the folder of the repository, which may be anybody's."""
    cli("git", "enable")
    for name in ("ckptfix", "json", "click", "numpy", "tempfile"):
        written(repository / f"{name}.py", b"open('run', 'w')\nraise SystemExit('imported')\n")
    written(repository / "x.pth", state(w=(1,)))
    commit("add")
    assert "+w  float32 [1]" in git("show")
    assert not (repository / "run").exists()


def test_difftool(cli: Cli, repository: Path) -> None:
    cli("git", "enable")
    path = written(repository / "a b.pth", state(w=(1, 2)))
    commit("add")
    written(path, state(w=(1, 3)))
    shown = git("difftool", "-y", "-t", "ckptfix")
    assert "Different: 1 tensor in both, 1 with different values." in shown
    shown = git("difftool", "-y", "-t", "ckptfix-html")
    page = repository / ".git/ckptfix-a b.pth.html"
    assert f"page: {page}" in shown
    assert page.read_text().startswith("<!DOCTYPE html>")
    written(repository / "new.pth", state(v=(1,)))
    git("add", "-A")
    shown = git("difftool", "-y", "-t", "ckptfix", "--cached", "--", "new.pth")
    assert "only on the right:" in shown
    assert "float32" in shown


@pytest.mark.skipif(shutil.which("git-lfs") is None, reason="needs git-lfs")
def test_git_lfs(cli: Cli, repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    git("lfs", "install", "--local")
    git("lfs", "track", "*.pth")
    cli("git", "enable")
    path = written(repository / "x.pth", state(w=(1,), v=(2,)))
    commit("add")
    assert git("cat-file", "-p", "HEAD:x.pth").startswith("version https://git-lfs")
    written(path, state(w=(3,), v=(2,)))
    assert [line.split("  ")[0] for line in changed(git("diff", "--", "x.pth"))] == ["-w", "+w"]
    commit("change")
    assert "w  float32 [1]  mean 3 min 3 max 3" in git("log", "-p", "--", "x.pth")
    pointer = written(repository / "pointer.pth", git("cat-file", "-p", "HEAD:x.pth").encode())
    assert text(str(pointer)) == text(str(path))
    shutil.rmtree(repository / ".git/lfs/objects")
    found = text(str(pointer))
    assert found.startswith("git-lfs pointer: sha256 ")
    assert f"{path.stat().st_size:,} bytes" in found


def test_a_pointer_outside_of_a_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:%b\nsize 12345\n" % (b"ab" * 32)
    found = text(str(written(tmp_path / "x.pth", pointer)))
    assert found == f"git-lfs pointer: sha256 {'ab' * 32}, 12,345 bytes; `git lfs pull` gets the file\n"


def test_wrong_usage(cli: Cli, repository: Path) -> None:
    for words in (
        ["nothing"], ["enable", "x"], ["textconv"], ["difftool", "a"], ["disable", "--shared"],
        ["enable", "--shared", "--global"], ["textconv", "none.pth"], ["difftool", "none.pth", "none.pth"],
    ):  # fmt: skip
        assert cli("git", *words).exit_code == 2


def test_the_command_names_this_python(cli: Cli, repository: Path) -> None:
    cli("git", "enable")
    words = git("config", "diff.ckptfix.textconv")
    assert words.startswith(sys.executable)
    assert " -P -m ckptfix git textconv" in words
    git("config", "diff.ckptfix.textconv", "ckptfix git textconv")
    assert "different ckptfix" in cli("git", "status").stdout


def test_enabling_again_forgets_the_texts(cli: Cli, repository: Path) -> None:
    cli("git", "enable")
    written(repository / "x.pth", state(w=(1,)))
    commit("add")
    git("show")
    ref = "refs/notes/textconv/ckptfix"
    assert git("show-ref", ref)
    assert "deleted" in cli("git", "enable", "--dry-run").stdout
    assert git("show-ref", ref)
    assert "deleted" in cli("git", "enable").stdout
    git("show-ref", ref, code=1)
