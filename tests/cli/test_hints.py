"""Commands in hints are to be pasted: whatever a file is called, a shell finds that very file in them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from builders import safetensors, written
from cli.conftest import shell_words
from doctor_samples import SAMPLES
from property.verbs import run_command

from ckptfix.command_table import COMMANDS
from ckptfix.commands import command, quoted, word

NAMES = (
    "two words.pth", "it's.pth", 'dq".pth', "e;touch PWNED;.pth", "$(touch PWNED).pth", "new\nline.pth", "-rf.pth",
    "\x1b[2Jansi.pth", "a{source}b.pth", "\udcff.pth", "star*?.pth", "back\\slash.pth", "\u202ebidi.pth", "e'\x01'.pth",
)  # fmt: skip


def commands_of(text: str) -> list[str]:
    """The ckptfix commands among lines of output, from the name of the program to OUT or the end."""
    found = []
    for line in text.splitlines():
        match = re.search(rf"(?:^|[`: ])(ckptfix (?:{'|'.join(COMMANDS)}) .*)", line)
        if match is not None:
            found.append(match[1].partition(" OUT")[0].partition("` ")[0].rstrip("`"))
    return found


@pytest.mark.parametrize("name", NAMES)
def test_a_name_is_one_word(name: str) -> None:
    assert shell_words(word(name)) == [name]
    assert shell_words(quoted(name)) == [f"./{name}" if name.startswith("-") else name]
    assert shell_words(command("extract", name, "OUT", at="a b", force="")) == [
        "ckptfix", "extract", f"./{name}" if name.startswith("-") else name, "OUT", "--at", "a b", "--force",
    ]  # fmt: skip
    assert word(name).isprintable()


def broken_files() -> dict[str, bytes]:
    """Files whose errors come with a command: cut, no checkpoint, of another format than the name says."""
    from property.small_files import SMALL

    whole = SMALL["zip"]
    rows = [("module.a", "F32", (2,), b"\0" * 8)]
    return {
        "cut": whole[: len(whole) // 2], "tail": whole[:-30], "text": b"no checkpoint", "gzip": b"\x1f\x8b" + whole,
        "safetensors": safetensors(rows)[:-4], "legacy": SMALL["legacy"][:-4],
        "tar": b"x" * 257 + b"ustar" + b"x" * 300,
        "directory": whole.replace(b"PK\x01\x02", b"PK\x01\x03"),
    }  # fmt: skip


@pytest.mark.slow
@pytest.mark.sampled(1, test_all=2)
@pytest.mark.parametrize("name", [NAMES[0], NAMES[3], NAMES[6], NAMES[8], NAMES[13]])
def test_every_command_names_the_file(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By doctor of each sample, and by the verbs of broken files, from the folder that the file is in."""
    told = 0
    places: list[Path] = []
    for index, (_, data) in enumerate(broken_files().items()):
        folder = tmp_path / f"broken{index}"
        folder.mkdir()
        places.append(written(folder / name, data))
    for index, sample in enumerate(SAMPLES):
        folder = tmp_path / f"sample{index}"
        folder.mkdir()
        made = sample.build(folder)
        if made.is_file() and made.parent == folder and made.suffix == ".pth":
            places.append(made.rename(folder / name))
    for place in places:
        monkeypatch.chdir(place.parent)
        for verb in (["doctor"], ["inspect"], ["sanitize"], ["strip-module"], ["extract"], ["convert"]):
            out = [] if verb[0] in ("doctor", "inspect") else ["out.pth"]
            outcome = run_command((verb[0], "--", place.name, *out))
            assert not outcome.failure, outcome.failure
            Path("out.pth").unlink(missing_ok=True)
            for line in commands_of(outcome.stdout + outcome.stderr):
                found = shell_words(line)
                told += 1
                wanted = {name, f"./{name}", str(place), str(place.resolve())}
                # The second line of a chain names what the first one writes.
                follows = any(part.removeprefix("./").startswith(name.removesuffix(".pth")) for part in found)
                assert wanted & set(found) or follows or str(place.parent) in found, (line, found)
    assert told >= 40
    assert not list(tmp_path.rglob("PWNED*"))


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    source = written(tmp_path / "in.pth", broken_files()["text"])
    folder = tmp_path / "a b;$(x)"
    outcome = run_command(("to-cpu", str(source), str(folder / "out.pth")))
    (hint,) = [line.removeprefix("hint: ") for line in outcome.stderr.splitlines() if "mkdir" in line]
    assert shell_words(hint) == ["mkdir", "-p", str(folder)]
