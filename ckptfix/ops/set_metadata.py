"""``ckptfix.set_metadata``: the string pairs that a safetensors file stores beside its tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field
from functools import partial
from typing import Any

from ckptfix.arguments import checks_types
from ckptfix.checkpoint import Checkpoint, SetMetadata
from ckptfix.commands import command
from ckptfix.dataclass import dataclass
from ckptfix.errors import Refused, StrPath, Unsupported, WouldLoseData
from ckptfix.formats import format_of, states
from ckptfix.formats.base import Format
from ckptfix.formats.safetensors.ties import TIE_KEYS
from ckptfix.io.read import Progress
from ckptfix.names import typed
from ckptfix.ops.any_source import takes_any_source
from ckptfix.ops.audit.promise import Promise
from ckptfix.ops.writing import Draft, Result, WriteOptions, carry_out, copy_note, plan_edits
from ckptfix.words import plural, some


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class MetadataResult(Result):
    """The result of a metadata edit.

    Attributes:
        metadata: the pairs after the edit.
        changed: keys that were added, or have a new value.
        deleted: keys that were removed.
    """

    metadata: Mapping[str, str] = field(default_factory=dict)
    changed: tuple[str, ...] = ()
    deleted: tuple[str, ...] = ()

    def _details(self) -> dict[str, Any]:
        return {"metadata": dict(self.metadata), "changed": list(self.changed), "deleted": list(self.deleted)}


def _refuse_format(target: Format) -> None:
    """Raise `Unsupported` for an output in a format without such pairs."""
    if "metadata" not in target.states:
        hint = "call the output *.safetensors, which has them; the file is converted too"
        raise Unsupported(f"{target.title} has no metadata pairs", hint=hint)


@checks_types
@takes_any_source(refuse=_refuse_format)
def set_metadata(
    source: StrPath,
    dest: StrPath | None = None,
    *,
    pairs: Mapping[str, str] | None = None,
    delete: Sequence[str] = (),
    allow_unmatched: bool = False,
    force: bool = False,
    keep_old: bool = False,
    dry_run: bool = False,
    in_place: bool = False,
    progress: Progress | None = None,
) -> MetadataResult:
    """Write `source`, a safetensors file or a folder of them, to `dest` with new metadata.

    Args:
        pairs: key -> value, to add or change.
        delete: keys to remove.
        allow_unmatched: a key of `delete` that does not exist is a finding, not an error.
        force, keep_old, dry_run, in_place, progress: as in `strip_module`.

    Raises:
        WouldLoseData: a pair records which keys are tied to a tensor.
        Unsupported: the format has no such pairs.
        Refused: a key is both set and deleted.
        NoSuchTensor: a key of `delete` does not exist, and `allow_unmatched` is not set.
    """
    new = dict(pairs or {})

    def make(checkpoint: Checkpoint, dest: str) -> Draft[MetadataResult]:
        _refuse(checkpoint, new, delete)
        before = dict(checkpoint.metadata)
        deleted = [key for key in dict.fromkeys(delete) if key in before]
        changed = [key for key, value in new.items() if before.get(key) != value]
        edit: dict[str, str | None] = {**{key: new[key] for key in changed}, **dict.fromkeys(deleted)}
        after = {key: value for key, value in {**before, **new}.items() if key not in deleted}
        what = [f"set {some(changed)}"] if changed else []
        what += [f"deleted {some(deleted)}"] if deleted else []
        line = "; ".join(what) or "nothing to do: the metadata already has these pairs"
        missing = [key for key in dict.fromkeys(delete) if key not in before]
        none = "there is no such key to delete"
        findings = typed.unmatched(missing, before, kind="key", allow=allow_unmatched, message=none)
        return Draft(
            result=partial(MetadataResult, metadata=after, changed=tuple(changed), deleted=tuple(deleted)),
            format=checkpoint.format,
            plan=plan_edits(checkpoint, [SetMetadata(edit)] if edit else [], dest),
            promise=Promise(edited=checkpoint),
            lines=[line + copy_note(not edit)],
            findings=findings,
        )

    how = WriteOptions(force=force, keep_old=keep_old, dry_run=dry_run, in_place=in_place, progress=progress)
    return carry_out(source, dest, make, how)


def _refuse(checkpoint: Checkpoint, new: Mapping[str, str], delete: Sequence[str]) -> None:
    format = format_of(checkpoint)
    if not states(checkpoint, "metadata"):
        way = command("convert", checkpoint.path, "OUT.safetensors")
        message = f"{format.title} has no metadata pairs"
        raise Unsupported(message, hint=f"convert it to safetensors, which has them: `{way}`")
    both = [key for key in delete if key in new]
    if both:
        raise Refused(f"{some(both)}: cannot be both set and deleted")
    ties = {*format.ties(checkpoint), *TIE_KEYS}
    tied = [key for key in (*new, *delete) if key in ties]
    if tied:
        message = f"{plural(len(tied), 'pair')} that record ties or views: {some(tied)}"
        raise WouldLoseData(message, hint="run `ckptfix rename` or `ckptfix select` to change keys, tied ones too")
    named = [key for key in new if any(entry.key == key for entry in checkpoint.entries)]
    if named:
        raise Refused(f"{some(named)}: the key of a tensor; readers would take the pair for a tie")
