"""The files that the tests of tests/real run over, and which of them stand for the others in a short run."""

from __future__ import annotations

import functools
import hashlib
import re
from pathlib import Path

from audit.truth import Truth, Unreadable, tensors
from conftest import LONG, ROOT

__all__ = ["FIXTURES", "SHARED", "fixture_files", "name_of", "real_files", "real_folders", "truth_beside", "truth_of"]

SHARED = ROOT.parent / "shared"
FIXTURES = ROOT / "fixtures"

NOT_CHECKPOINTS = {".json", ".md", ".tsv", ".txt", ".py"}

STAND_INS = (
    r"rank1\b|rank_1_|/__1_0\.distcp$",  # rank 0 of the same save
    r"_truth\.pt$|_dcp2torch\.pt$|/ref_fp32/|_merged/",  # plain state dicts: hf/bin, dist/ddp.pt
    r"/z2(_bf16|_universal|_bf16_universal)?/|/z\d_\w*universal/(?!zero)",  # as z1, and as the save itself
    r"/zero/(?!emb\.weight/|optimizer_state)|/(z2|z3)_\w*universal/zero/[^/]+/",  # as the embedding's, of z1
    r"/fsdp[12]_\w+/(random_states|scheduler)|/ddp_st/|-0000[3-9]-of-|/checkpoint-6/|/model_bin/",  # as the first
)
"""Files that an equal one stands for in a short run."""


@functools.cache
def real_files() -> tuple[Path, ...]:
    """Every file of the corpus and of the frameworks once; empty where they are absent."""
    found: dict[str, Path] = {}
    for path in sorted([*(SHARED / "corpus").rglob("*"), *(SHARED / "frameworks").rglob("*")]):
        if not path.is_file() or path.suffix in NOT_CHECKPOINTS or path.name.startswith("latest"):
            continue
        name = name_of(path)
        if not LONG and any(re.search(pattern, name) for pattern in STAND_INS):
            continue
        # A part of a distributed checkpoint is read with what lies beside it.
        content = name if path.suffix == ".distcp" else hashlib.sha256(path.read_bytes()).hexdigest()
        found.setdefault(content, path)
    return tuple(found.values())


@functools.cache
def fixture_files() -> tuple[Path, ...]:
    """The files of fixtures/, which are here in every clone."""
    suffixes = (".pth", ".pt", ".safetensors", ".distcp")
    return tuple(sorted(path for path in FIXTURES.iterdir() if path.suffix in suffixes))


@functools.cache
def real_folders() -> tuple[Path, ...]:
    """Folders that are one checkpoint: of torch.distributed.checkpoint, shards with an index, of DeepSpeed."""
    kinds = (".metadata", "*.index.json", "latest*")
    folders = sorted({path.parent for kind in kinds for path in (SHARED / "frameworks").rglob(kind)})
    return tuple(folders)


def name_of(path: Path) -> str:
    return str(path.relative_to(SHARED if path.is_relative_to(SHARED) else ROOT))


@functools.lru_cache(maxsize=8)
def _read(path: Path) -> Truth | Unreadable:
    try:
        return tensors(path, trusted=not path.is_relative_to(SHARED / "corpus"))
    except Unreadable as error:
        return error


def truth_of(path: Path) -> Truth:
    """What torch finds in it, read once.

    Raises:
        Unreadable: torch does not read it.
    """
    found = _read(path)
    if isinstance(found, Unreadable):
        raise found
    return found


def truth_beside(path: Path) -> Path | None:
    """The plain state dict of the same model, where the frameworks' files have one."""
    if path.name.endswith("_truth.pt") or not path.is_relative_to(SHARED / "frameworks"):
        return None
    name = re.split(r"[.\-]", path.name)[0]
    stem = re.sub(r"_(full|local|sharded|rawopt|rank|whole).*|_rank\d$", "", name)
    candidates = [
        path.parent / f"{stem}_truth.pt",
        path.parent.parent / f"{path.parent.name}_truth.pt",
        path.parent.parent / "live_truth.pt",
        path.parent.parent / "truth.pt",
        path.parent.parent.parent / f"{path.parent.parent.name}_truth.pt",
    ]
    return next((found for found in candidates if found.exists() and found != path), None)
