"""``ckptfix.digest``: digests of tensors that do not depend on keys, formats and shards, and checks against them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

from ckptfix.arguments import checks_types
from ckptfix.dataclass import dataclass
from ckptfix.errors import NoSuchFile, Refused, StrPath, WrongType, file_name, printable
from ckptfix.formats import open_checkpoint
from ckptfix.io.read import Progress
from ckptfix.io.source import found_as, shares_open_files
from ckptfix.ops.digest import files, manifest, tensors
from ckptfix.ops.digest.compare import DigestCheck, compare
from ckptfix.ops.digest.tensors import Digest
from ckptfix.ops.writing import LOSSES, write_text
from ckptfix.pickles.collector import gc_paused
from ckptfix.shown import html
from ckptfix.urls import as_path
from ckptfix.words import plural, some

Algorithm = Literal["sha256", "sha512", "blake2b", "blake3"]


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Digests:
    """Digests of tensors or files, and the result of a comparison.

    Attributes:
        path: the file or folder; the manifest if only that was given.
        of: ``"tensors"`` or ``"files"``.
        algorithm: ``"sha256"`` by default.
        entries: digests in the order of the file; empty for files that were checked.
        named: digest of all tensors under their names, that is of their sorted manifest. None for files.
        unnamed: digest of all tensors without their names, that is of their sorted digests, one a line. None for files.
        no_data: names of tensors without a digest: they are on the meta device, and the file does not hold their data.
        check: comparison with `check`; None if nothing was checked.
    """

    path: str
    of: Literal["tensors", "files"]
    algorithm: str
    entries: tuple[Digest, ...] = ()
    named: str | None = None
    unnamed: str | None = None
    no_data: tuple[str, ...] = ()
    check: DigestCheck | None = None

    @property
    def exit_code(self) -> int:
        """1 if a check failed, 3 if a tensor has no digest."""
        if self.check is not None:
            return int(not self.check.verified)
        return LOSSES if self.no_data else 0

    @property
    def manifest(self) -> str:
        """The digests in the form of ``sha256sum``."""
        return manifest.text(self.entries, self.algorithm, tensors=self.of == "tensors")

    @property
    def lines(self) -> tuple[str, ...]:
        """The result of a check, or the number of digests, in sentences."""
        noun = "tensor" if self.of == "tensors" else "file"
        check = self.check
        if check is None:
            without = (f"no data: {some(self.no_data)}",) if self.no_data else ()
            return (f"{plural(len(self.entries), noun)}, {self.algorithm}", *without)
        present = plural(check.same + len({row.old for row in check.moved}), noun)
        lines = [f"{'verified' if check.verified else 'DIFFERENT'}: {present} intact (against {check.against})"]
        if check.moved:
            first = check.moved[0]
            lines[0] += f", {len(check.moved):,} under other names, such as {first.old} -> {first.new}"
        for names, what in check.rows:
            if names:
                lines.append(f"{what}: {some(names)}")
        for at, count in check.left_out.items():
            lines.append(f"not in it: {at} ({plural(count, noun)})")
        return tuple(lines)

    def __str__(self) -> str:
        return self.manifest.rstrip("\n") if self.check is None else "\n".join(map(printable, self.lines))

    def __repr__(self) -> str:
        return f"<Digests: {self.path!r}, {self.lines[0]}>"

    def _repr_html_(self) -> str:
        return html(self.lines, [("", ("digest", "name"), [(row.digest, row.name) for row in self.entries])])

    def as_dict(self) -> dict[str, Any]:
        """Return the result for JSON."""
        return {
            "path": self.path,
            "of": self.of,
            "algorithm": self.algorithm,
            "entries": [
                {
                    "name": row.name,
                    "digest": row.digest,
                    "dtype": row.dtype,
                    "shape": None if row.shape is None else list(row.shape),
                }
                for row in self.entries
            ],
            "named": self.named,
            "unnamed": self.unnamed,
            "no_data": list(self.no_data),
            "check": None if self.check is None else self.check.as_dict(),
            "summary": list(self.lines),
        }


@checks_types
@gc_paused
@shares_open_files()
def digest(
    path: StrPath | None = None,
    *,
    check: StrPath | None = None,
    at: str | None = None,
    check_at: str | None = None,
    algorithm: Algorithm = "sha256",
    whole_files: bool = False,
    hub: bool = False,
    manifest: StrPath | None = None,
    force: bool = False,
    dequantized: bool = False,
    progress: Progress | None = None,
) -> Digests:
    """Compute the digest of each tensor of a checkpoint: of its dtype, shape and elements, and of nothing else.

    A copy that was renamed, stripped, converted or sharded again has the same digests.

    Args:
        path: a checkpoint; may be omitted if `check` is a manifest of files.
        check: another checkpoint, or a manifest, to compare `path` with.
        at: address of the state dict in `path`; the names are then its keys.
        check_at: address of the state dict in `check`.
        algorithm: hash algorithm; that of the manifest if `check` is one.
        whole_files: compute digests of files, not of tensors, as ``sha256sum`` does; for a folder, of every file in it.
        hub: check the files of a Hugging Face cache against the digests in their names.
        manifest: write the digests to this file.
        force: replace an existing manifest.
        dequantized: of the plain weights of a quantized model, also of those in `check`.

    Raises:
        Refused: the options cannot be combined.
        CkptfixError: a file cannot be read, or is damaged; or `manifest` cannot be written.
    """
    if dequantized and (whole_files or hub):
        raise Refused("--dequantized needs tensors, not whole files", hint="leave out --dequantized")
    if path is None and check is None:
        raise WrongType("digest(): `path` must be the name of a file (str or os.PathLike) without `check`, not None")
    if hub:
        if path is None or check is not None:
            raise Refused("hub checks the files of a folder against their own names")
        return _hub(file_name(path), progress)
    other = None if check is None else file_name(check)
    known = manifest_at(other)
    if known is not None and not known.tensors:
        return _of_files(None if path is None else file_name(path), known, progress)
    if path is None:
        raise Refused("there is nothing to compare it with", path=other, hint="name the checkpoint, and --check OTHER")
    source = file_name(path)
    if whole_files:
        if other is not None:
            raise Refused("not a manifest of files", path=other, hint="leave out --files to compare tensors")
        rows = files.digests(files.below(source), algorithm, progress=progress)
        made = Digests(path=source, of="files", algorithm=algorithm, entries=tuple(rows))
    else:
        made = _of_tensors(source, other, known, at, check_at, algorithm, progress, dequantized=dequantized)
    if manifest is not None:
        write_text(manifest, made.manifest, source, force=force)
    return made


def manifest_at(path: str | None) -> manifest.Manifest | None:
    """Return the manifest in a file; None if it is not a manifest."""
    if path is None or found_as(path) == "folder":
        return None
    if not found_as(path):
        raise NoSuchFile(path)
    return manifest.found(path)


def _of_tensors(
    path: str,
    other: str | None,
    known: manifest.Manifest | None,
    at: str | None,
    check_at: str | None,
    algorithm: str,
    progress: Progress | None,
    *,
    dequantized: bool,
) -> Digests:
    algorithm = known.algorithm if known is not None else algorithm
    others = [] if other is None or known is not None else [other]
    checkpoints = [open_checkpoint(one) for one in (path, *others)]
    if dequantized:
        from ckptfix.ops.dequantize.view import as_plain

        checkpoints = list(as_plain(*checkpoints))
    checkpoint = checkpoints[0]
    rows, empty = tensors.digests(checkpoint, algorithm, at=at, progress=progress)
    named, unnamed = tensors.of_set(rows, algorithm)
    found: DigestCheck | None = None
    if other is not None:
        wanted: Sequence[Digest]
        if known is not None:
            wanted = known.digests
        else:
            wanted, none = tensors.digests(checkpoints[-1], algorithm, at=check_at, progress=progress)
            empty = list(dict.fromkeys([*empty, *none]))
        found = replace(compare(rows, wanted, other), no_data=tuple(empty))
    return Digests(
        path=path,
        of="tensors",
        algorithm=algorithm,
        entries=tuple(rows),
        named=named,
        unnamed=unnamed,
        no_data=tuple(empty) if found is None else (),
        check=found,
    )


def _of_files(path: str | None, known: manifest.Manifest, progress: Progress | None) -> Digests:
    """Compare the files that a manifest lists with it, or only the file at `path`."""
    folder = as_path(known.path).parent
    wanted = {row.name: row.digest for row in known.digests}
    places = {name: name if found_as(name) else str(folder / name) for name in wanted}
    if path is not None:
        real = as_path(path).resolve()
        places = {name: place for name, place in places.items() if as_path(place).resolve() == real}
        if not places:
            raise Refused("the manifest does not list it", path=path, hint=f"the manifest is {known.path}")
    there = {name: place for name, place in places.items() if found_as(place) == "file"}
    rows = files.digests(list(there.values()), progress=progress)
    wrong = tuple(name for name, row in zip(there, rows, strict=True) if row.digest != wanted[name])
    check = DigestCheck(
        known.path,
        same=len(there) - len(wrong),
        missing=tuple(name for name in places if name not in there),
        changed=wrong,
    )
    return Digests(path=path or known.path, of="files", algorithm="sha256", entries=tuple(rows), check=check)


def _hub(path: str, progress: Progress | None) -> Digests:
    named = files.of_hub(path)
    wrong = files.wrong(named, progress=progress)
    rows = tuple(Digest(row.path, row.digest) for row in named)
    check = DigestCheck("the names of its blobs", same=len(named) - len(wrong), changed=tuple(wrong))
    return Digests(path=path, of="files", algorithm="sha256", entries=rows, check=check)
