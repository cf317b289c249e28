"""Contents of a checkpoint that keep it from loading directly: devices, wrappers, nesting, views, empty weights."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from ckptfix.checkpoint import Checkpoint, StateDict, TensorEntry, address, bytes_of, dtypes, same_place, with_parts
from ckptfix.checkpoint.address import is_inside, shown
from ckptfix.checkpoint.tensors import NO_DATA, reach
from ckptfix.findings.load_errors import LoadError
from ckptfix.findings.row import Finding
from ckptfix.findings.steps import WHERE, Step, step
from ckptfix.findings.table import found
from ckptfix.formats import FORMATS, format_of, states
from ckptfix.formats.torch import calls, versions
from ckptfix.formats.torch.common import maybe_pickled_object
from ckptfix.names import averaged_keys, kinds, spellings, wrappers
from ckptfix.names.attributes import bare_names
from ckptfix.names.averaged_keys import AveragedKeys
from ckptfix.ops import choose
from ckptfix.ops.candidates import averages
from ckptfix.ops.choose import chosen_sites
from ckptfix.ops.dequantize import summary as quantized
from ckptfix.words import plural, some

WASTE = 4096
"""Least number of unused bytes of a storage that is reported, if they are also a tenth of it."""

_LIGHTNING_VERSION = "pytorch-lightning_version"
_LIGHTNING = ("hyper_parameters", "global_step", "callbacks", "lr_schedulers", "hparams_name")
"""Keys that, beside ``state_dict``, make a file look like one of Lightning's (checkpoint_connector.py)."""


def weights(checkpoint: Checkpoint) -> list[StateDict]:
    """Return the model's state dicts, the chosen one first; without one, those that do not belong to an optimizer."""
    return choose.states(checkpoint)


def only_at(checkpoint: Checkpoint, at: str) -> Checkpoint:
    """Restrict `checkpoint` to the object at the address `at`, for its keys, shapes and devices.

    Raises:
        NoSuchTensor: there are no tensors at `at`.
    """
    at = address.given(at)
    entries = tuple(entry for entry in checkpoint.entries if is_inside(entry.at, at))
    if not entries:
        chosen_sites(checkpoint, at)
    devices: Counter[str] = Counter()
    for entry in with_parts(entries):
        devices[entry.location] += 1
    return replace(
        checkpoint,
        load_entries=lambda: entries,
        load_values=lambda: ((address, value) for address, value in checkpoint.values() if is_inside(address, at)),
        sites=tuple(site for site in checkpoint.sites if is_inside(site.at, at)),
        state_dicts=tuple(state for state in checkpoint.state_dicts if is_inside(state.at, at)),
        devices=dict(devices),
    )


def scan(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Yield findings about `checkpoint` as a whole; no tensor byte is read."""
    yield from _suffix(checkpoint)
    yield from _wrappers(checkpoint)
    yield from _devices(checkpoint)
    yield from _nesting(checkpoint)
    yield from _averages(checkpoint)
    yield from _sizes(checkpoint)
    yield from _without_data(checkpoint)
    yield from quantized.notes(checkpoint)
    yield from _sharing(checkpoint)
    yield from _spellings(checkpoint)
    yield from format_of(checkpoint).notes(checkpoint)
    if checkpoint.byteorder == "big":
        yield found("big-endian")


def _suffix(checkpoint: Checkpoint) -> Iterator[Finding]:
    path, own = checkpoint.path.lower(), format_of(checkpoint)
    other = FORMATS.with_suffix(path)
    if other is not None and not path.endswith(own.suffixes):
        message = f"a {own.title} file with a suffix of {other.title}"
        yield found("wrong-suffix", message, fix=step("convert", to=other.name))


def _wrappers(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Yield findings about wrapper components on every key of a state dict; only-wrapper names count anywhere."""
    for site in checkpoint.sites:
        if site.kind != "state_dict":
            continue
        own = averages.has_own_level(checkpoint, site, site.names)
        whole = own and not site.at
        seen = averages.counting(checkpoint, site, site.names, *wrappers.LEADING)
        names = averages.inside(seen) if own and not whole else seen
        bare = bare_names(checkpoint, site)
        carried = wrappers.wrappers_in(names, averages.within(bare) if own and not whole else bare)
        beside = {*wrappers.COMPANIONS, *(wrappers.COUNTERS if whole else ())}
        others = [name for name in names if name not in beside]
        sure = {part: row for part, row in carried.items() if part in wrappers.ANYWHERE or row[0] >= len(others)}
        if not sure:
            for part, (count, first) in carried.items():
                message = f"{count} of {len(others)} keys begin with {part}., as in {first}; it may be the model's own"
                yield found("partial-prefix", message, where=site.at)
            continue
        (_, example) = next(iter(sure.values()))
        made = "; ".join(wrapper.made_by for wrapper in wrappers.WRAPPERS if wrapper.component in sure)
        prefixes = " and ".join(f"{part}." for part in sure)
        count = max(count for count, _ in sure.values())
        begin = f"{plural(count, 'key')} {'begins' if count == 1 else 'begin'} with"
        message = f"{begin} {prefixes} ({made}), as in {example}"
        if own and not whole:
            message += f", inside the module. of {averages.wrapper(site.names)}"
        if left := averages.scalars_left(checkpoint, site, site.names, *wrappers.LEADING):
            message += f"; {some(left)} {'lacks' if len(left) == 1 else 'lack'} it"
        simple = list(sure) == ["module"] and not any(name.startswith("module.module.") for name in names)
        fix = _STRIP if simple else None
        yield found("wrapped-names", message, where=site.at, fix=_OF_AVERAGES if whole else fix)


_STRIP = step("strip-module")


_OF_AVERAGES = step("extract", ema=True)
"""Fix for a file that holds only averages: it restores the keys of a plain model, and drops the counter."""


def _devices(checkpoint: Checkpoint) -> Iterator[Finding]:
    away = {place: count for place, count in checkpoint.devices.items() if place not in ("cpu", "meta")}
    values = _of_values(checkpoint, away) if away else ()
    for place in values:
        message = f"a torch.device value names {place} ({plural(away.pop(place), 'place')}), but no tensor is there"
        yield found("device-tags", message, severity="info")
    if away:
        rows = ", ".join(f"{place} ({plural(count, 'place')})" for place, count in list(away.items())[:6])
        needed = "that device" if len(away) == 1 else "those devices"
        yield found("device-tags", f"tensors were saved on {rows}; without map_location, torch.load needs {needed}")
    for place in checkpoint.fixed_devices[:20]:
        yield found("fixed-device", f"ckptfix cannot change this device: {place}")


def _of_values(checkpoint: Checkpoint, places: Iterable[str]) -> list[str]:
    """List those of `places` that only values of the object name; torch.load builds such values without the device."""
    parts = maybe_pickled_object(checkpoint)
    devices = parts.devices() if parts is not None else None
    if devices is None or not devices.calls:
        return []
    needed = {str(tag) for tag in devices.tags} | {str(tag) for _, tag, _ in devices.folded}
    needed |= {entry.location for entry in with_parts(checkpoint.entries)}
    return [place for place in places if place not in needed]


def _nesting(checkpoint: Checkpoint) -> Iterator[Finding]:
    tops = {entry.at.partition("/")[0] or entry.key for entry in checkpoint.entries if entry.at}
    found_at = [row.at for row in choose.meant(checkpoint)]
    lightning = any(address == _LIGHTNING_VERSION for address, _ in checkpoint.values())
    for state in weights(checkpoint) if found_at != [""] else ():
        if state.at and state.weights and not {"_parameters", "_buffers"} & set(state.at.split("/")):
            message = f"the weights are at {state.at!r}, in a training checkpoint"
            if lightning and (base := _base_of(checkpoint, state.at)):
                message += base
            yield found("training-checkpoint", message, where=state.at, fix=_EXTRACT)
    yield from choose.remarks(checkpoint)
    optimizer = choose.optimizer_tensors(checkpoint)
    if optimizer:
        message = f"an optimizer's state takes up {bytes_of(optimizer):,} of its {checkpoint.size:,} bytes"
        yield found("optimizer-state", message, where=optimizer[0].at)
    if "state_dict" in tops and states(checkpoint, "objects"):
        addresses = {address.partition("/")[0] for address, _ in checkpoint.values()} | tops
        if _LIGHTNING_VERSION not in addresses and addresses & set(_LIGHTNING):
            yield found("no-lightning-version")


_EXTRACT = step("extract", at=WHERE)


def _averages(checkpoint: Checkpoint) -> Iterator[Finding]:
    for state in weights(checkpoint):
        if averages.is_under_key(state.at):
            continue
        entries = {entry.key: entry.shape for entry in checkpoint.entries_at(state.at)}
        made = averaged_keys.find(list(entries))
        if made is not None and all(entries[old] == entries[new] for old, new in made.pairs.items()):
            yield found("averaged-keys", averaged_beside(made), where=state.at)


def averaged_beside(made: AveragedKeys) -> str:
    """Return the sentence about averages that a state dict has beside the weights."""
    old, new = next(iter(made.pairs.items()))
    other = "" if made.glob is None else f"; `select --drop '{made.glob}'` leaves them out"
    swapped = ", which exchanges the two before it saves" if made.spelling.swapped else ""
    writer = f" ({made.spelling.writer}{swapped})" if made.spelling.writer else ""
    count = f"{plural(len(made.pairs), 'tensor')} {'is' if len(made.pairs) == 1 else 'are'} kept twice for averaging"
    return f"{count}: {old} beside {new}{writer}{other}"


_JUDGES = re.compile(r"(.*_)?(criterion|loss|loss_fn|metrics?|acc|accuracy|auroc|f1)(_.*)?")
"""Attributes of a LightningModule that judge the model, and have weights or counters of their own."""


def _base_of(checkpoint: Checkpoint, at: str) -> str:
    """Name the attribute of a LightningModule that holds all weights at `at` but those of a loss, or ""."""
    counts = Counter(entry.key.partition(".")[0] for entry in checkpoint.entries_at(at))
    plain = any("." not in entry.key for entry in checkpoint.entries_at(at))
    beside = [name for name in counts if _JUDGES.fullmatch(name)]
    bases = [name for name in counts if name not in beside]
    if len(bases) != 1 or plain or bases == ["module"]:
        return ""
    base = f"{bases[0]}."
    whose = f"{counts[bases[0]]:,} of their {counts.total():,} keys" if beside else "their keys"
    options = [f"--strip-prefix {base}", *(f"--drop '{name}.*'" for name in beside)]
    return f", and {whose} begin with {base}; convert {' '.join(options)} removes it"


def _by_address(checkpoint: Checkpoint) -> dict[str, list[TensorEntry]]:
    """Map the address of each state dict to its tensors."""
    found: dict[str, list[TensorEntry]] = {}
    for entry in checkpoint.entries:
        found.setdefault(entry.at, []).append(entry)
    return found


def _without_tensors(checkpoint: Checkpoint) -> Iterator[Finding]:
    parts = maybe_pickled_object(checkpoint)
    arrays = list(parts.named_arrays()) if parts is not None else []
    if not arrays:
        yield found("no-tensors")
    for at, count in arrays[:8]:
        message = f"{plural(count, 'NumPy array')} by name at {shown(at)}, but no tensor"
        yield found("numpy-weights", message, where=at)


def _sizes(checkpoint: Checkpoint) -> Iterator[Finding]:
    if not checkpoint.entries:
        yield from _without_tensors(checkpoint)
        return
    ats = {state.at for state in weights(checkpoint)}
    mine = [entry for entry in checkpoint.entries if entry.at in ats]
    # Transformer Engine writes an empty tensor where a module has no state (`names.no_weights`).
    mine = [entry for entry in mine if entry.key.rpartition(".")[2] != kinds.EXTRA_STATE]
    # A key without a dot does not belong to a module, and its tensor may be empty on purpose.
    empty = [entry for entry in mine if entry.shape == (0,) and "." in entry.key]
    if empty and len(empty) * 2 >= len(mine):
        names = ", ".join(entry.name for entry in empty[:3])
        message = f"{len(empty):,} of {len(mine):,} tensors have the shape [0] and no values: {names}"
        yield found("zero-size", message, where=empty[0].name)


def _without_data(checkpoint: Checkpoint) -> Iterator[Finding]:
    for entry in checkpoint.entries:
        if not entry.has_data:
            yield found("no-data", NO_DATA, where=entry.name)


def _sharing(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Yield findings about tied tensors, overlapping ones, and storages larger than the tensors that view them."""
    whole: dict[tuple[str, str], int] = {}
    ends: dict[tuple[str, str], list[tuple[int, int, str]]] = defaultdict(list)
    ties: dict[object, list[TensorEntry]] = defaultdict(list)
    ats = {state.at for state in weights(checkpoint)}
    for entry in with_parts(checkpoint.entries):
        storage = entry.storage
        if storage is None or storage.data is None:
            continue
        whole[storage.identity] = storage.nbytes
        size = dtypes.by_name(entry.dtype)
        if not entry.numel:
            continue
        stop = entry.offset + reach(entry.shape, entry.stride)
        ends[storage.identity].append((size.nbytes(entry.offset), size.nbytes(stop), entry.name))
        if entry.at in ats:
            ties[same_place(entry)].append(entry)
    tied = [_names(entries) for entries in ties.values() if len(entries) > 1]
    if tied:
        shown = "; ".join(" = ".join(names[:4]) for names in sorted(tied)[:3])
        several = "1 tensor has" if len(tied) == 1 else f"{len(tied):,} tensors have"
        yield found("tied-tensors", f"{several} several keys: {shown}", where=sorted(tied)[0][0])
    wasted: list[tuple[int, int, str]] = []
    for key, spans in ends.items():
        used = _covered(spans)
        if whole[key] - used >= max(WASTE, whole[key] // 10):
            wasted.append((whole[key] - used, whole[key], spans[0][2]))
    if wasted:
        wasted.sort(reverse=True)
        total = sum(row[0] for row in wasted)
        _, held, name = wasted[0]
        message = f"no tensor uses {total:,} of the saved bytes: {name} is a view of a storage of {held:,} bytes"
        yield found("oversized-storage", message, where=name)
    yield from _overlaps(checkpoint)


def _names(entries: Sequence[TensorEntry]) -> list[str]:
    """Return the keys of the entries; with their addresses where a key is in several state dicts."""
    keys = [entry.key for entry in entries]
    return sorted(keys if len(set(keys)) == len(keys) else [entry.name for entry in entries])


def _overlaps(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Yield the findings that a conversion to safetensors would report about overlapping tensors."""
    if not states(checkpoint, "sharing"):
        return
    inside = _by_address(checkpoint)
    for at in (state.at for state in weights(checkpoint)):
        shared = defaultdict(list)
        for entry in inside.get(at, ()):
            if entry.storage is not None and entry.kind == "dense":
                shared[entry.storage.identity].append(entry)
        groups: Sequence[TensorEntry] = [entry for group in shared.values() if len(group) > 1 for entry in group]
        if groups:
            from ckptfix.formats.safetensors.ties import share_plan

            _, _, findings = share_plan(groups)
            yield from findings[:5]


def _covered(spans: Sequence[tuple[int, int, str]]) -> int:
    """Return how many bytes the spans cover together."""
    total = end = 0
    for start, stop, _ in sorted(spans):
        total += max(0, stop - max(start, end))
        end = max(end, stop)
    return total


def _spellings(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Yield findings about keys in an older spelling: LayerNorm's, weight_norm's, spectral_norm's."""
    inside = _by_address(checkpoint)
    for state in weights(checkpoint):
        names = [entry.key for entry in inside.get(state.at, ())]
        other = {
            name: new for name, new in spellings.canonical(names).items() if name.rpartition(".")[2] != "in_proj_weight"
            and not new.rpartition(".")[0].endswith("qkv")
        }  # fmt: skip
        if other:
            name, new = next(iter(other.items()))
            message = f"{len(other):,} keys have an older spelling, such as {name}, which newer models call {new}"
            yield found("old-spelling", message, where=state.at)


def needs_torch(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Yield a finding about the release of torch that the file needs, unless it is the oldest."""
    needs: dict[str, calls.Number] = {}
    format = format_of(checkpoint)
    container = f"the {format.name} container"
    if format.since is not None:
        needs[container] = format.since
    parts = maybe_pickled_object(checkpoint)
    needs |= versions.needs(parts) if parts is not None else {}
    newer = {what: since for what, since in needs.items() if since >= versions.ZIP_SINCE}
    if newer:
        what, since = max(newer.items(), key=lambda item: item[1])
        only_container = list(newer) == [container]
        fix = None if only_container else step("sanitize", torch="1.5")
        name = versions.Version(since).name
        yield found("needs-torch", f"it needs torch {name} or later ({what})", fix=fix)


def asked(checkpoint: Checkpoint, rows: Sequence[LoadError]) -> Iterator[Finding]:
    """Yield notes that explain an error but are not faults; they are reported only with ``--error``."""
    root = checkpoint.traits.get("zip root")
    if LoadError.FOLDER_NAME in rows and root not in (None, "archive"):
        yield found("zip-root", f"the folder in the archive is called {root!r}, not 'archive'")
    if LoadError.TORCH_BEFORE_2_6 in rows and states(checkpoint, "objects"):
        yield found("pickle-format")
    if LoadError.PARTS_OF_RANKS in rows and format_of(checkpoint).joins_ranks and checkpoint.entries:
        message = "each file of the folder holds the part of one rank: all of them together are the model"
        yield found("one-rank", message, severity="info", fix=(Step("convert", word="zip"),))
    others = {LoadError.PICKLE_LOAD, LoadError.NOT_A_PROGRAM, LoadError.NOT_A_MODEL}
    if others & set(rows) and states(checkpoint, "objects") and checkpoint.entries:
        yield found("state-dict-file")
    if LoadError.NOT_LIGHTNING in rows and states(checkpoint, "objects"):
        addresses = {address.partition("/")[0] for address, _ in checkpoint.values()}
        if "pytorch-lightning_version" not in addresses:
            yield found("no-lightning-version")
    if LoadError.UNPACKED in rows and ".tar" in checkpoint.path:
        yield found("misnamed-tar")
