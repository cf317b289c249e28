"""The commands that do what the screen shows, ready to be pasted."""

from __future__ import annotations

from dataclasses import field

from ckptfix.browse.model.contents import ContentItem, Contents
from ckptfix.browse.model.outline import Order, OutlineNode
from ckptfix.browse.model.search import filter_of
from ckptfix.checkpoint import TensorEntry
from ckptfix.commands import command, word
from ckptfix.dataclass import dataclass
from ckptfix.errors import CkptfixError


def literal(name: str) -> str:
    """Return a glob that matches only `name`; a character that an argument cannot contain becomes ``?``."""
    return _not_regex("".join(map(_as_glob, name)))


def _as_glob(char: str) -> str:
    if char in "*?[":
        return f"[{char}]"
    return "?" if char == "\0" or "\ud800" <= char <= "\udfff" else char


def _not_regex(glob: str) -> str:
    """Change `glob` so that it is not read as ``/REGEX/``."""
    return f"[/]{glob[1:]}" if len(glob) > 2 and glob.startswith("/") and glob.endswith("/") else glob


@dataclass(slots=True)
class OpenCommands:
    """The commands for what is open: `path`, or with `other` the comparison of two files."""

    path: str
    other: str | None = None
    at: tuple[str, str] | None = None
    contents: Contents | None = None
    _names: dict[object, str] | None = field(default=None, repr=False)

    def everything(self, order: Order = "file") -> str:
        """Return the command for the whole file, or for the comparison of both."""
        if self.other is not None:
            return self._diff(self.other, None, keys_only=True)
        return command("inspect", self.path, sort=None if order == "file" else order)

    def findings(self) -> str:
        """Return the command that lists the problems of the file."""
        return command("doctor", self.path, fast="", verbose="")

    def search(self, text: str, order: Order) -> str:
        """Return the command for a search. `diff` accepts only a glob."""
        if self.other is not None:
            return self._diff(self.other, _glob_of(text), keys_only=True)
        found = filter_of(text)
        return command("inspect", self.path, filter=found, sort=None if order == "file" else order)

    def of(self, node: OutlineNode, order: Order) -> str:
        """Return the command for a module, a tensor or a value."""
        item = node.item
        if item is None:
            return self._module(node, order)
        if item.is_value:
            return self.everything() if self.other is None else self._diff(self.other, literal(item.name))
        if self.other is not None:
            return self._diff(self.other, literal(item.name))
        return self._tensor(item)

    def _module(self, node: OutlineNode, order: Order) -> str:
        if not node.tensors:
            return self.everything()
        first = node.items[0]
        end = "".join(first.parts[: node.depth])[-1:]
        glob = f"{literal(node.address)}{end}*"
        if self.other is not None:
            return self._diff(self.other, glob, keys_only=True)
        sort = None if order == "file" else order
        return command("inspect", self.path, filter=_not_regex(glob), tensors="", sort=sort)

    def _tensor(self, item: ContentItem) -> str:
        name = self._in_stats(item.entry) if item.entry is not None else None
        if name is None:
            return command("inspect", self.path, filter=literal(item.name), tensors="")
        return command("stats", self.path, filter=literal(name))

    def _in_stats(self, entry: TensorEntry) -> str | None:
        """Return the name that `stats` has for a tensor; it names tensors of a whole module differently."""
        if self.contents is None:
            return None
        from ckptfix.ops.audit.promise import listed
        from ckptfix.ops.candidates import view
        from ckptfix.ops.choose import refuse_damaged

        if self._names is None:
            self._names = {}
            checkpoint = self.contents.checkpoint
            try:
                refuse_damaged(checkpoint)
            except CkptfixError:  # stats refuses the file
                return None
            rows = listed(checkpoint)
            self._names = {view(row): row.name for row in reversed(rows)}
            self._names |= {row.name: row.name for row in rows}
        return self._names.get(entry.name) or self._names.get(view(entry))

    def _diff(self, other: str, glob: str | None, *, keys_only: bool = False) -> str:
        line = command("diff", self.path, other, keys_only="" if keys_only else None, filter=glob)
        for at in self.at or ():
            line = f"{line} --at {word(at)}"
        return line


def _glob_of(text: str) -> str | None:
    """Return a glob that finds the same, for `diff`; None for a regular expression, which `diff` does not accept."""
    found = filter_of(text)
    if found is None or found == text:
        return None if found is None or _not_regex(found) != found else found
    if text != text.lower():
        return f"*{literal(text)}*"
    either = (f"[{char}{char.upper()}]" if char.upper() != char else literal(char) for char in text)
    return f"*{''.join(either)}*"


def of_folder(path: str) -> str:
    """Return the command that lists the checkpoints in a folder."""
    return command("ls", path)
