"""Meanings of the messages of torch, transformers, Lightning, safetensors and pickle, in old and new wordings.

`TEXTS` maps a pattern to the load errors that it may belong to. Some messages contain the first byte of a wrong file:
the unpickler of weights_only=True prints ``Unsupported operand 118`` where the older one printed ``invalid load key,
'v'``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from ckptfix.findings import message_names
from ckptfix.findings.load_errors import MEANINGS
from ckptfix.findings.load_errors import LoadError as E
from ckptfix.names.wrappers import WRAPPERS, Wrapper


def _keys_with(wrappers: Iterable[Wrapper]) -> str:
    """Return the pattern of keys with these components: anywhere, or only in front where models may have such keys."""
    return "|".join(("" if row.anywhere else "['\"]") + re.escape(row.component) + r"\." for row in wrappers)


_COMPILE = "_orig_mod"
_PARALLEL = "module"
"""The components that have load errors of their own."""

TEXTS: tuple[tuple[str, tuple[E, ...]], ...] = (
    (r"failed finding central directory|central directory", (E.NO_DIRECTORY,)),
    (r"\[Errno 22\] Invalid argument|negative seek value", (E.NO_DIRECTORY,)),
    (r"not a ZIP archive|BadZipFile|File is not a zip file", (E.NO_DIRECTORY, E.PACKED_AGAIN)),
    (_keys_with(row for row in WRAPPERS if row.component == _COMPILE), (E.COMPILED,)),
    (_keys_with(row for row in WRAPPERS if row.component not in (_COMPILE, _PARALLEL)), (E.WRAPPED,)),
    (rf"(unexpected|missing) key.*['\"]{_PARALLEL}\.", (E.PREFIX,)),
    (r"unexpected key.*['\"](epoch|state_dict|model_state_dict|optimizer\w*|arch|global_step)['\"]", (E.TRAINING,)),
    (r"num_batches_tracked", (E.BATCHES_TRACKED,)),
    (r"position_ids", (E.POSITION_IDS,)),
    (r"lm_head\.weight|tied weights|newly initialized: \[?['\"]?lm_head", (E.TIED_WEIGHT,)),
    (r"LayerNorm\.(gamma|beta)|\.gamma['\"]|\.beta['\"]", (E.GAMMA_BETA,)),
    (r"weight_g|weight_v|original0|original1", (E.WEIGHT_NORM,)),
    (r"weight_orig|weight_u\b|parametrizations\.\w+\.original\b|parametrizations\.\w+\.0\._u", (E.SPECTRAL_NORM,)),
    (r"size mismatch for [\w.]*(pos_embed|position_embedding|positional_embedding|relative_position)",
     (E.POSITION_SIZE,)),
    (r"size mismatch for|ignore_mismatched_sizes|shapes did not match", (E.SHAPES,)),
    (r"Error\(s\) in loading state_dict|(Missing|Unexpected) key\(s\)|were not initialized from|were not used when",
     (E.PREFIX, E.NO_KEY_IN_MODEL)),
    (r"used a DP world size of \d+ but|(world|dp|data.parallel) size of \d+.{0,60}(current|but)", (E.WORLD_SIZE,)),
    (r"parameter group that doesn't match the size|different number of parameter groups", (E.PARAMETER_COUNT,)),
    (r"(optim\w*[/\\.]|optimizer\.step|exp_avg|momentum_buffer|\.state\[).{0,3000}?"
     r"(size of tensor a \(\d+\) must match|output with shape .{0,60}doesn't match the broadcast shape)",
     (E.PARAMETER_ORDER,)),
    (r"WeightsUnpickler error: Unsupported operand 118|invalid load key, '?v", (E.LFS_POINTER,)),
    (r"Unsupported operand (60|123|31|0|147|10|13|37|91)\b|invalid load key, '?(<|\{|\\x|\n|%|\[|H|E|N)",
     (E.NOT_A_CHECKPOINT,)),
    (r"Unsupported operand (149|128|\d+)", (E.NOT_ALLOWED, E.PICKLE_DUMP)),
    (r"invalid load key", (E.NOT_A_CHECKPOINT,)),
    (r"No module named '?numpy\._core", (E.NUMPY2,)),
    (r"No module named '?(pytorch_lightning|lightning|omegaconf|mmcv|mmengine|wandb|hydra|utils)",
     (E.PACKAGE_MISSING, E.WHOLE_MODEL)),
    (r"No module named|ModuleNotFoundError", (E.WHOLE_MODEL, E.PACKAGE_MISSING)),
    # Python 3.14 writes the last form.
    (r"Can't get attribute|has no attribute '\w+' on <module '__main__'|\bmodule '[\w.]+' has no attribute '\w+'",
     (E.CLASS_OF_SCRIPT,)),
    (r"Weights only load failed.*Unsupported (global|class)|Unsupported (global|class|type)|add_safe_globals|"
     r"was not an allowed global|weights_only.*(arbitrary code|untrusted)", (E.NOT_ALLOWED,)),
    (r"Weights only load failed", (E.NOT_ALLOWED, E.LFS_POINTER, E.NOT_A_CHECKPOINT, E.PICKLE_DUMP)),
    (r"recompute_scale_factor|object has no attribute '(_\w+|padding_mode|is_causal|batch_first|approximate|"
     r"align_corners|_is_full_backward_hook|_non_persistent_buffers_set|inplace)'", (E.OTHER_RELEASE,)),
    (r"object has no attribute '(eval|forward|to|cuda|train|parameters|named_parameters|modules)'|"
     r"state_dict to be dict-like", (E.NOT_A_MODEL,)),
    (r"(module|Attribute).{0,40}has no attribute '_rebuild_|_rebuild_(tensor_v2|tensor_v3|parameter\w*)",
     (E.CALL_TOO_NEW,)),
    (r"Attempting to deserialize object on a? ?CUDA device|device_count\(\)|torch\.cuda\.is_available\(\) is False|"
     r"No CUDA GPUs are available|invalid device ordinal", (E.NO_GPU,)),
    (r"copy out of meta tensor|meta tensors?;? no data|(is|are|still) on (the )?meta device|"
     r"from a meta (parameter|tensor)|to_empty\(\)|uninitialized (parameter|buffer)|UninitializedParameter",
     (E.NO_DATA,)),
    (r"don't know how to restore data location|tagged with", (E.UNKNOWN_DEVICE,)),
    (r"CUDA out of memory|OutOfMemoryError", (E.SAME_GPU,)),
    (r"capturable=False|state_steps|Expected all tensors to be on the same device", (E.OPTIMIZER_DEVICE,)),
    (r"HeaderTooLarge|header too large|HeaderTooSmall|header too small|InvalidHeader(Start|Length)?\b|"
     r"invalid header start|InvalidHeaderDeserialization|invalid JSON in header", (E.NOT_SAFETENSORS, E.UNKNOWN_DTYPE)),
    (r"MetadataIncompleteBuffer|incomplete metadata|not fully covered|InvalidOffset|invalid offset", (E.DATA_LENGTH,)),
    (r"unknown variant|unknown dtype|Dtype not understood|float8|F8_E|KeyError: ['\"]?(F8|BF16|F4|U16)",
     (E.UNKNOWN_DTYPE,)),
    (r"Some tensors share memory|shared tensors|shared memory", (E.SHARED_MEMORY,)),
    (r"NoneType' object has no attribute 'get'|does not contain the valid metadata|metadata\.get\(.format",
     (E.NO_FORMAT_ENTRY,)),
    (r"persistent.{0,3}id instruction|persistent_load function|persistent IDs? .*specified", (E.PICKLE_LOAD,)),
    (r"is a zip archive.*torch\.jit\.load", (E.ZIP_TOO_NEW,)),
    (r"kMaxSupportedFileFormatVersion|Attempted to read a PyTorch file with version", (E.ARCHIVE_TOO_NEW,)),
    (r"missing adapter keys while loading|Can't find 'adapter_config\.json'|adapter_config\.json.{0,80}(not found|"
     r"missing|does not exist)", (E.PEFT_ADAPTER,)),
    (r"Invalid LoRA checkpoint|No LoRA keys associated to", (E.DIFFUSERS_LORA,)),
    (r"Target modules .{0,400}not found in the base model", (E.DIFFUSERS_LORA, E.PEFT_ADAPTER)),
    (r"lora key not loaded", (E.COMFY_LORA,)),
    (r"Failed to match keys when loading (network|lora)|Bad Lora layer name", (E.KOHYA_LORA,)),
    (r"no file named .{0,200}(pytorch_model\.bin|model\.safetensors|model\.ckpt)|"
     r"pytorch_model\.bin.{0,200} found in directory", (E.NO_MODEL_FILE,)),
    (r"from_tf=True|from_flax=True|Unable to load weights from pytorch checkpoint", (E.TRIED_TENSORFLOW,)),
    (r"'ascii' codec can't decode|codec can't decode byte", (E.PYTHON2,)),
    (r"unexpected EOF|expected \d+ more bytes|might be corrupted", (E.LEGACY_CUT,)),
    (r"storage has wrong (byte )?size", (E.STORAGE_SIZE,)),
    (r"Ran out of input|EOFError", (E.EMPTY,)),
    (r"cannot instantiate '(Posix|Windows)Path'|PosixPath|WindowsPath", (E.PATH_OBJECT,)),
    (r"constants\.pkl.*(not found|file not found)|file not found: .*constants\.pkl", (E.NOT_A_PROGRAM,)),
    (r"serious vulnerability|at least v2\.6|CVE-2025-32434", (E.TORCH_BEFORE_2_6,)),
    (r"invalid header or archive is corrupted|archive is corrupted|bad CRC|checksum|invalid distance",
     (E.BAD_RECORD, E.WRONG_VALUES)),
    (r"PytorchStreamWriter.*failed|file write failed|unexpected pos \d+ vs|No space left on device", (E.DISK_FULL,)),
    (r"\.distcp|distributed checkpoint|\.metadata'?$|No such file.*\.metadata", (E.DISTRIBUTED,)),
    (r"zero-dimensional tensor .{0,40}cannot be concatenated", (E.PARTS_OF_RANKS,)),
    (r"ShardedTensor|DTensor|_flat_param|FlatParameter|initialize (the )?default process group|"
     r"default process group has not been initialized", (E.PARTS_OF_RANKS,)),
    (r"index\.json|weight_map|does not appear to have a file named|\bshards?\b|(illegal|invalid) split file|GGUF split|"
     r"loaded with the first split", (E.SHARD_MISSING,)),
    (r"cannot untar|not a gzip file|tar: This does not look|Is a directory|IsADirectoryError", (E.UNPACKED,)),
    (r"pytorch-lightning_version", (E.NOT_LIGHTNING,)),
    (r"bad file inside|may be malicious|safe.?unpickle", (E.FOLDER_NAME,)),
    (r"Size\(\[0\]\)|size\(?\[0\]\)?|443 bytes", (E.PARTS_OF_RANKS,)),
    (r"TorchScript archive|looks like a TorchScript|torch\.jit\.load.*instead|RecursiveScriptModule", (E.TORCHSCRIPT,)),
    (r"not in a subdirectory|hasRecord\(.?\"?version|file in archive is not", (E.PACKED_AGAIN,)),
    (r"Invalid magic number|corrupt file\?", (E.PICKLE_DUMP,)),
    (r"legacy \.tar format|filename 'storages' not found|'storages' not found|No such file .*storages",
     (E.TAKEN_FOR_TAR,)),
    (r"mmap can only be used|mmap=True", (E.NO_MMAP,)),
    (r"file is too large|bigger than it should|larger than expected|checkpoint is huge", (E.WHOLE_STORAGE,)),
    (r"zip64|too many (bytes|entries)|Overlapped entries|local header", (E.ZIP_PROGRAM, E.BAD_RECORD)),
)  # fmt: skip
"""Pattern, case ignored, -> load errors; every row that matches counts, the first ones most."""

MOST_TEXT = 20_000
"""Characters of a pasted message that are read, from its end, where the error is."""


def rows(text: str) -> tuple[E, ...]:
    """Return the load errors that `text` may be, most likely first; empty if it is unknown."""
    found = dict.fromkeys(_rows(text[-MOST_TEXT:]))
    names = message_names.listed(text)
    if names is None:
        return tuple(found)
    # A word in some keys is not a cause, unless all keys that one side lists have it.
    chance = [row for row in found if row in _OF_NAMES and not _of_all(row, names)]
    cause = [E.PREFIX] if message_names.prefix(names) is not None else []
    others = [row for row in found if row not in chance]
    about = [E.SHAPES] if names.conflicts and E.POSITION_SIZE not in found else []
    keys = [E.PREFIX, E.NO_KEY_IN_MODEL] if names.missing or names.unexpected or names.seen or names.modules else []
    return tuple(dict.fromkeys([*cause, *others, *about, *keys, *chance]))


_OF_NAMES = {
    E.BATCHES_TRACKED: r"num_batches_tracked",
    E.POSITION_IDS: r"position_ids",
    E.TIED_WEIGHT: r"lm_head",
    E.GAMMA_BETA: r"LayerNorm|gamma|beta",
    E.WEIGHT_NORM: r"weight_g|weight_v|original",
    E.SPECTRAL_NORM: r"weight_orig|weight_u\b|original|\._u\b|\._v\b",
}
"""Load errors that are recognized by a word in the keys, case ignored, and the word."""


def beside_keys(rows: Iterable[E]) -> set[E]:
    """Return the load errors among `rows` that are about something else than the keys and shapes of a model."""
    return {row for row in rows if row not in _OF_KEYS and row not in _OF_NAMES}


_OF_KEYS = frozenset((E.PREFIX, E.NO_KEY_IN_MODEL, E.SHAPES, E.POSITION_SIZE, E.COMPILED, E.WRAPPED, E.TRAINING))


def _of_all(row: E, names: message_names.Listed) -> bool:
    pattern = re.compile(_OF_NAMES[row], re.IGNORECASE)
    return any(side and all(map(pattern.search, side)) for side in (names.missing, names.unexpected))


def _rows(text: str) -> Iterator[E]:
    for pattern, numbers in TEXTS:
        if re.search(pattern, text, re.IGNORECASE | re.DOTALL):
            yield from numbers


def meaning(row: E) -> str:
    """Return the usual meaning of load error `row`, in one sentence without a full stop."""
    return MEANINGS[row]
