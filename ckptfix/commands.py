"""Commands to paste: names quoted so that a shell reads the very file, whatever its name holds."""

from __future__ import annotations

import os
import shlex


def quoted(name: str | os.PathLike[str]) -> str:
    """The name of a file for a shell; one that begins with a dash cannot be taken for an option."""
    text = os.fspath(name)
    return word(f"./{text}" if text.startswith("-") else text)


def word(text: str) -> str:
    """`text` as one word of a shell; one that cannot be shown as it is stands in bash's ``$'...'``."""
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
    """``ckptfix VERB NAME... --option VALUE``: upper-case words such as OUT are for the reader to replace.

    Args:
        names: files; quoted.
        options: name -> value; None is left out, ``""`` stands for a flag.
    """
    parts = ["ckptfix", verb, *map(quoted, names)]
    for option, value in options.items():
        if value is not None:
            parts += [f"--{option.replace('_', '-')}", *([word(value)] if value else [])]
    return " ".join(parts)


def verbatim(line: str) -> str:
    """`line` as a template of `findings.table.remedy` that stands for itself: a name may hold braces."""
    return line.replace("{", "{{").replace("}", "}}")
