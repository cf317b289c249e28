"""Writing of a state dict as shards of limited size, and their index.

The tensors go into shards in order: each is added to the current shard until that is full. A tensor larger than a shard
gets a file of its own. Tensors that share a storage, because they are tied or views of each other, are kept together.
Source: ``split_state_dict_into_shards_factory`` of huggingface_hub (serialization/_base.py), which transformers calls.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial

from ckptfix.checkpoint import OutputFile, Plan, TensorEntry
from ckptfix.errors import Refused
from ckptfix.findings.row import Finding
from ckptfix.formats.base import PlanWrite
from ckptfix.formats.safetensors.ties import ORDER_KEY, VIEWS_KEY, ties
from ckptfix.formats.safetensors.write import plan_write as plan_file
from ckptfix.formats.shards.index import MAX_SHARDS, written
from ckptfix.formats.shards.layout import data_bytes
from ckptfix.urls import as_path

SHARD_SIZE = 5 * 10**9
"""Bytes of tensors in a shard: the hub's default, 5GB."""

NAME = "model"
SUFFIX = ".safetensors"
INDEX_NAME = "model.safetensors.index.json"


def plan_write(
    entries: Sequence[TensorEntry],
    dest: str,
    *,
    metadata: Mapping[str, str] | None = None,
    shard_size: int = SHARD_SIZE,
) -> Plan:
    """Plan a folder `dest` of shards and their index that hold `entries`; see the contract in `base`.

    A state dict that fits in one shard becomes ``model.safetensors`` alone, without an index, as transformers writes
    it.

    Args:
        shard_size: bytes of tensors in one file.

    Raises:
        KeyConflict: two entries have the same key.
        CkptfixError: an error of `formats.safetensors.write.plan_write`.
    """
    pairs = dict(metadata or {})
    shards = split(entries, _bases(pairs), shard_size)
    if len(shards) > MAX_SHARDS:
        message = f"{len(shards):,} shards of {shard_size:,} bytes are too many; the limit is {MAX_SHARDS:,}"
        raise Refused(message, path=dest, hint="give a larger shard size")
    files: list[OutputFile] = []
    findings: list[Finding] = []
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        name = f"{NAME}-{number:05d}-of-{len(shards):05d}{SUFFIX}" if len(shards) > 1 else f"{NAME}{SUFFIX}"
        weight_map |= {entry.key: name for entry in shard}
        made = plan_file(shard, str(as_path(dest, name)), metadata=_own(pairs, {entry.key for entry in shard}))
        files += made.files
        findings += made.findings
    if len(shards) > 1:
        order = {entry.key: weight_map[entry.key] for entry in entries}
        document = {"metadata": {"total_size": data_bytes(entries)}, "weight_map": order}
        files.append(OutputFile.of(as_path(dest, INDEX_NAME), [written(document) + b"\n"]))
    return Plan(tuple(files), tuple(findings))


def sized(shard_size: int) -> PlanWrite:
    """Return `plan_write` with shards of at most this many bytes."""
    return partial(plan_write, shard_size=shard_size)


def split(entries: Sequence[TensorEntry], bases: Mapping[str, str], most: int) -> list[list[TensorEntry]]:
    """Return the entries of each shard.

    Args:
        bases: name of a tensor that is recorded as a view -> the tensor that it is a view of.
        most: the largest number of bytes in a shard.
    """
    shards: list[list[TensorEntry]] = []
    current: list[TensorEntry] = []
    size = 0
    groups = _groups(entries, bases)
    with_others: dict[object, list[TensorEntry]] = {}
    for entry in entries:
        group = groups[entry.key]
        if group in with_others:
            with_others[group].append(entry)
            continue
        with_others[group] = []
        if entry.nbytes > most:
            shards.append([entry])
            continue
        if size + entry.nbytes > most:
            shards.append(current)
            current, size = [], 0
        current.append(entry)
        size += entry.nbytes
    if current or not shards:
        shards.append(current)
    return [[one for entry in shard for one in (entry, *with_others[groups[entry.key]])] for shard in shards]


def _groups(entries: Sequence[TensorEntry], bases: Mapping[str, str]) -> dict[str, object]:
    """Return name -> a group id; tensors of the same group stay in one shard."""
    groups: dict[str, object] = {}
    for entry in entries:
        alone = entry.storage is None or not entry.nbytes
        groups[entry.key] = entry.key if alone or entry.storage is None else entry.storage.identity
    for name, base in bases.items():
        if name in groups and base in groups:
            groups[name] = groups[base]
    return groups


def _bases(pairs: Mapping[str, str]) -> dict[str, str]:
    records = json.loads(pairs.get(VIEWS_KEY, "{}"))
    return {name: record["base"] for name, record in records.items()}


def _own(pairs: Mapping[str, str], names: set[str]) -> dict[str, str]:
    """Return the metadata of the shard that holds `names`: its own ties and views, and all other pairs."""
    own: dict[str, str] = {}
    tied = ties(pairs, names)
    for key, value in pairs.items():
        if key in (VIEWS_KEY, ORDER_KEY):
            kept = {name: row for name, row in json.loads(value).items() if name in names or name in tied}
            if kept:
                own[key] = json.dumps(kept, separators=(",", ":"))
        elif key in tied or value not in names:
            own[key] = value
    return own
