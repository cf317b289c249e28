"""The object of a torch checkpoint, edited by a rules file: its state dicts, and everything that refers to them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from ckptfix.checkpoint.address import join
from ckptfix.checkpoint.tree import Item, ListValue, MapValue, ObjectValue, Value, identity, label, pairs_of
from ckptfix.errors import Unsupported
from ckptfix.formats.object_edit import ObjectEdit
from ckptfix.ops.rename.transform import StateDictChange


def edit_site(edit: ObjectEdit, site: StateDictChange) -> int:
    """Replace the rows of a state dict and the modules in its ``_metadata``; return how many modules changed.

    Raises:
        Unsupported: the object is a kind of dict that cannot be rewritten.
    """
    holder = edit.at(site.at)
    rows = edit.rows(holder)
    if rows is None:
        message = "the tensors of this kind of dict cannot be replaced"
        raise Unsupported(message, where=site.at or None, hint="convert the file first, and edit the result")
    made: list[tuple[Item, Item]] = []
    same: dict[int, Item] = {}
    for own, key, value in rows:
        for name, entry in site.rows.get(own, [(own, None)]):
            if entry is not None and id(entry) not in same:
                same[id(entry)] = edit.tensor(entry)
            made.append((key if name == own else name, value if entry is None else same[id(entry)]))
    edit.replace(holder, edit.with_rows(holder, made))
    return _edit_versions(edit, site)


def _edit_versions(edit: ObjectEdit, site: StateDictChange) -> int:
    """Move the entries of a state dict's ``_metadata``, so that a module's version goes along with its tensors."""
    versions = edit.metadata_at(site.at)
    rows = edit.rows(versions)
    if rows is None:
        return 0
    paths = modules(site, [label(key) for _, key, _ in rows])
    made = [
        (key, own) if new == label(key) else (new, edit.copy(own))
        for _, key, own in rows
        for new in paths[label(key)]
    ]
    edit.replace(versions, edit.with_rows(versions, made))
    return sum(new != (path,) for path, new in paths.items())


def modules(site: StateDictChange, paths: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Map each module path to its paths in the output, which are empty if the module is gone.

    A module moves with its tensors; a module without tensors of its own moves with the modules below it.
    """
    source: dict[str, str] = {"": ""}
    above: list[tuple[str, str]] = []
    busy: set[str] = set()
    for key, row in site.after():
        old, new = key.split("."), row[0].split(".")
        source.setdefault(".".join(new[:-1]), ".".join(old[:-1]))
        ends = 1
        while ends < min(len(old), len(new)) and old[-ends] == new[-ends]:
            ends += 1
            above.append((".".join(new[:-ends]), ".".join(old[:-ends])))
    for new_path, old_path in above:
        source.setdefault(new_path, old_path)
    for key in site.keys:
        parts = key.split(".")
        busy.update(".".join(parts[:end]) for end in range(len(parts)))
    made: dict[str, list[str]] = {path: [] for path in paths}
    for new_path, old_path in source.items():
        if old_path in made:
            made[old_path].append(new_path)
    for path in paths:
        if not made[path] and path not in busy:
            made[path] = [_below(path, made)]
    return {path: tuple(new) for path, new in made.items()}


def _below(path: str, made: Mapping[str, Sequence[str]]) -> str:
    """Return the new path of a module without tensors: it moves with the nearest module above it."""
    above, _, rest = path.rpartition(".")
    while above:
        if len(made.get(above, ())) == 1:
            return f"{made[above][0]}.{rest}".lstrip(".")
        above, _, part = above.rpartition(".")
        rest = f"{part}.{rest}"
    return path


def optimizers(root: Item) -> Iterator[tuple[str, Item]]:
    """Yield (address, value) of everything that ``Optimizer.state_dict()`` returned."""
    seen: set[int] = set()
    stack: list[tuple[str, Item]] = [("", root)]
    while stack:
        address, item = stack.pop()
        if not _may_hold_optimizer(item) or identity(item) in seen:
            continue
        assert isinstance(item, Value)
        seen.add(identity(item))
        rows = rows_of(item)
        groups = rows.get("param_groups")
        if pairs_of(rows.get("state")) is not None and isinstance(groups, ListValue) and groups.kind in _LISTS:
            yield address, item
            continue
        below = [(join(address, name), child) for name, child in item.children()]
        stack += [(where[:1024], child) for where, child in reversed(below)]


_LISTS = ("list", "tuple")


def _may_hold_optimizer(item: Item) -> bool:
    return isinstance(item, MapValue | ObjectValue) or (isinstance(item, ListValue) and item.kind in _LISTS)


def rows_of(item: Item) -> Mapping[str, Item]:
    """Return the values of a dict by their keys as text; empty for any other value."""
    return {label(key): value for key, value in pairs_of(item) or ()}
