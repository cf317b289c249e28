"""Commands to paste, with file names quoted so that a shell passes them on exactly, whatever characters they have."""

from __future__ import annotations

import os
import shlex


def quoted(name: str | os.PathLike[str]) -> str:
    """Return the name of a file quoted for a shell, with ``./`` before a dash that would begin an option."""
    text = os.fspath(name)
    return word(f"./{text}" if text.startswith("-") else text)


def word(text: str) -> str:
    """Return `text` as one word of a shell; text with unprintable characters is written in bash's ``$'...'``."""
    if text.isprintable():
        return shlex.quote(text)
    return "$'" + "".join(map(_shown, text)) + "'"


def _shown(char: str) -> str:
    if char in "\\'":
        return f"\\{char}"
    if char.isprintable():
        return char
    try:
        raw = char.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        raw = char.encode("utf-8", "surrogatepass")
    return "".join(f"\\x{byte:02x}" for byte in raw)


def command(verb: str, *names: str | os.PathLike[str], **options: str | None) -> str:
    """Return ``ckptfix VERB NAME... --option VALUE``; the reader replaces upper-case words such as OUT.

    Args:
        names: files; they are quoted.
        options: name -> value; None leaves the option out, ``""`` makes it a flag.
    """
    parts = ["ckptfix", verb, *map(quoted, names)]
    for option, value in options.items():
        if value is not None:
            parts += [f"--{option.replace('_', '-')}", *([word(value)] if value else [])]
    return " ".join(parts)


def verbatim(line: str) -> str:
    """Return `line` escaped as a template of `findings.table.remedy`, because a file name may contain braces."""
    return line.replace("{", "{{").replace("}", "}}")
