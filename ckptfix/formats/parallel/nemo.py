"""The files of the ranks of a NeMo model, in a ``.nemo`` archive (a tar) or in the folder that it was unpacked to.

::

    model_config.yaml
    mp_rank_00/model_weights.ckpt                     tensor parallelism alone
    tp_rank_00_pp_rank_000/model_weights.ckpt         and pipeline parallelism

A file is the state dict of a rank, with the names of Megatron-LM behind ``model.``. The sizes are in the configuration:
here its lines ``name: value`` are read, and everything below them is not needed.

Source: nemo/core/connectors/save_restore_connector.py, nemo/collections/nlp/parts/nlp_overrides.py
(NLPSaveRestoreConnector), nemo/collections/nlp/modules/common/megatron/mlp.py and attention.py, NeMo 8cfedd72.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from ckptfix.errors import CkptfixError
from ckptfix.formats.folders.safe_paths import file_inside
from ckptfix.formats.foreign.archives import tar_members
from ckptfix.formats.members import NEMO_FILE, NEMO_FOLDER
from ckptfix.formats.parallel.files import MOST_TEXT, FoundFiles, names_in
from ckptfix.formats.yaml_lines import plain_values
from ckptfix.io.layers import WindowName
from ckptfix.io.source import is_folder, open_source
from ckptfix.urls import as_path

NAME = "nemo-ranks"
ARCHIVE_NAME = "nemo-archive"
CONFIG = "model_config.yaml"
MOST_MEMBERS = 10_000

GATED = frozenset(f"{fast}{name}" for fast in ("", "fast-") for name in ("geglu", "reglu", "swiglu"))
"""Activations with a gate. The core has both matrices in one ``linear_fc1``. Before it, only those called ``fast-`` are
in one ``dense_h_to_4h``; others have a ``dense_h_to_4h_2``."""


def rank_files(path: str) -> FoundFiles | None:
    """Return the files of all ranks in a folder, or None if the folder contains none."""
    paths: dict[tuple[int, ...], str] = {}
    for name in names_in(path):
        if NEMO_FOLDER.fullmatch(name) and NEMO_FILE in names_in(str(as_path(path, name))):
            numbers = tuple(int(number) for number in re.findall(r"\d+", name))
            paths[numbers] = file_inside(path, f"{name}/{NEMO_FILE}", where=path)
    return FoundFiles(path, paths) if paths else None


def archived_files(path: str) -> FoundFiles | None:
    """Return the files of all ranks in an uncompressed archive, as windows of it, or None if it contains none."""
    paths: dict[tuple[int, ...], str] = {}
    for name, part in _members(path):
        folder, _, file = name.rpartition("/")
        if file == NEMO_FILE and NEMO_FOLDER.fullmatch(folder):
            paths[tuple(int(number) for number in re.findall(r"\d+", folder))] = part
    return FoundFiles(path, paths) if paths else None


def _members(path: str) -> Iterator[tuple[str, WindowName]]:
    """Yield the members of a tar: the name, and the window."""
    with open_source(path) as reader:
        for name, offset, length in tar_members(reader, MOST_MEMBERS):
            name = name.removeprefix("./")
            if 0 <= length <= reader.size - offset:
                yield name, WindowName(f"{path}/{name}", path, offset, length)


def configuration(place: str) -> dict[str, object]:
    """Return the plain values at the top level of the configuration in a folder or an archive.

    Nothing is returned if it is missing or cannot be read.
    """
    try:
        own = str(as_path(place, CONFIG))
        if not is_folder(place):
            own = next((part for name, part in _members(place) if name == CONFIG), own)
        with open_source(own) as source:
            text = source.read(0, min(source.size, MOST_TEXT)).decode("utf-8", "replace")
    except CkptfixError:
        return {}
    return plain_values(text)


def arguments(config: Mapping[str, object]) -> dict[str, object]:
    """Return the configuration with the names that Megatron-LM gives to what decides the cuts."""
    made = dict(config)
    activation = config.get("activation")
    if isinstance(activation, str):
        fused = config.get("mcore_gpt") is True or activation.startswith("fast-")
        made["swiglu"] = activation in GATED and fused
    shared = config.get("share_embeddings_and_output_weights", True)
    made["untie_embeddings_and_output_weights"] = shared is False
    return made


def version(config: Mapping[str, object]) -> float:
    """Return the checkpoint version of Megatron-LM that has queries, keys and values in the same order."""
    return 0.0 if config.get("megatron_legacy") is True else 3.0
