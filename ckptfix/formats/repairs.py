"""The result of a repair, and what the format of a folder uses to make one; see `Format.repair`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from typing import NamedTuple

from ckptfix.checkpoint import Checkpoint, Plan, TensorEntry, storages_of
from ckptfix.dataclass import dataclass
from ckptfix.findings.row import Finding, Severity
from ckptfix.findings.table import found


@dataclass(frozen=True, slots=True)
class LostTensor:
    """A tensor that is not intact, and why; `filled` describes its replacement, "" if it is left out.

    `taken`: all of the replacement comes from a different file, and no byte of it is generated.
    `shape` and `dtype` are None and "" for a call that does not describe a tensor.
    """

    name: str
    shape: tuple[int, ...] | None
    dtype: str
    reason: str
    filled: str = ""
    taken: bool = False

    def finding(self) -> Finding:
        what = f"{list(self.shape)} {self.dtype}: {self.reason}" if self.shape is not None else self.reason
        if self.filled:
            severity: Severity = "info" if self.taken else "warning"
            return found("filled", f"{what}; filled with {self.filled}", where=self.name, severity=severity)
        return found("lost", what, where=self.name)


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A part left out because it can run code: the function or the record that it names, and the finding."""

    name: str
    finding: Finding


@dataclass(frozen=True)
class Repair:
    """The plan of a repair: what can be saved of a file.

    Attributes:
        format: of the file that `plan_to` plans.
        kept: the intact tensors.
        losses: the other tensors, each by name.
        notes: what happened to the file.
        left_out: the parts that can run code, and are not in the plan.
        compared: the kept tensors match their checksums; if not, they are only whole inside the file.
        any_format: the output has the format that its suffix names, or else `format`.
    """

    format: str
    kept: tuple[TensorEntry, ...]
    losses: tuple[LostTensor, ...]
    notes: tuple[Finding, ...]
    plan_to: Callable[[str], Plan] = field(repr=False)
    left_out: tuple[LeftOut, ...] = ()
    compared: bool = False
    any_format: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of the kept tensors; a storage that several share counts once."""
        stored = [storage for storage in storages_of(self.kept) if storage.data is not None]
        return sum({storage.identity: storage.nbytes for storage in stored}.values())


class RepairTools(NamedTuple):
    """The functions that `Format.repair` may use.

    Attributes:
        file: plans the repair of one file of the folder, whatever its format.
        without: (checkpoint, name of a tensor -> why it is lost, losses that the checkpoint does not list) -> the plan
            of the rest, in which lost tensors are left out or filled as the user asked.
    """

    file: Callable[[str], Repair]
    without: Callable[[Checkpoint, Mapping[str, str], Sequence[LostTensor]], Repair]
