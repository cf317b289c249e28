"""What the messages of torch, transformers, Lightning, safetensors and pickle mean, old wordings and new.

`TEXTS` maps a pattern to the number of the load error it belongs to; `ERRORS` says what each usually means. The first
byte of a wrong file stands in some messages: the unpickler of weights_only=True says ``Unsupported operand 118`` where
the older one said ``invalid load key, 'v'``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from ckptfix.findings import message_names as error_names

ERRORS: dict[int, str] = {
    1: "the zip archive has no directory at its end: it was cut short, or other bytes follow it",
    2: "the keys in the file and in the model differ, mostly by the `module.` of DataParallel",
    3: "the pickle contains classes that torch.load(weights_only=True) does not allow",
    4: "a tensor of the file has another shape than the model's, mostly a head for another number of classes",
    5: "the tensors were saved on a GPU that is not here",
    6: "the file is a git-lfs pointer",
    7: "the file is not a checkpoint: a web page, JSON, something compressed, or zeros",
    8: "a whole model was pickled, and the code of its classes is not here",
    9: "the pickle contains a class of the script that saved it",
    10: "a whole model was pickled by another release of torch, whose modules have other attributes",
    11: "the file is not a safetensors file: a git-lfs pointer, or a torch file under that name",
    12: "the pickle contains classes of a package that is not installed; the weights do not need them",
    13: "the keys begin with `_orig_mod.`, which torch.compile adds",
    14: "the optimizer was saved for another number of parameters",
    15: "data.pkl, or a torch checkpoint, was loaded by pickle.load",
    16: "the file is a zip checkpoint, and this torch is older than 1.6",
    17: "transformers could not read the file at all, and tried it as TensorFlow's",
    18: "the file is a training checkpoint: the state dict is under a key of it",
    19: "one side has BatchNorm's num_batches_tracked, and the other lacks it",
    20: "Python 2 wrote the pickle, and its strings have no encoding",
    21: "one side has position_ids, and the other lacks it",
    22: "the file, in torch's old format, was cut short",
    23: "a storage is of another length than promised: several processes wrote one file, or it is damaged",
    24: "the file is empty",
    25: "a path object of another operating system was pickled beside the weights",
    26: "a tied weight was saved under its other name only",
    27: "torch.jit.load was given a state dict, or torch.load's file",
    28: "transformers refuses pickled checkpoints with torch before 2.6",
    29: "every process loads the tensors to the GPU that they were saved on",
    30: "a view was saved, and with it the whole storage behind it",
    31: "the index lists a shard that is missing, or belongs to another save",
    32: "a record of the zip archive is damaged",
    33: "the disk was full while the file was written; what is there is cut short",
    34: "the tensors were saved on a kind of device that this torch does not have",
    35: "a newer torch wrote the archive",
    36: "tensors share memory, which safetensors cannot hold",
    37: "the checkpoint is a distributed one: a folder, or without its .metadata",
    38: "the safetensors file has no \"format\" entry in its metadata",
    39: "a newer torch wrote the file: this one lacks a function that it names",
    40: "the file was unpacked, or is not a tar though its name says so",
    41: "LayerNorm's weight and bias are called gamma and beta on one side",
    42: "Lightning was given a checkpoint that Lightning did not write",
    43: "the optimizer's state is on another device than it must be",
    44: "a state dict was used as a model, or a model as a state dict",
    45: "NumPy 2 wrote an object in the pickle, and NumPy 1 reads it",
    46: "the weights are empty, or one rank's parts: DeepSpeed ZeRO-3, FSDP or tensor parallelism had "
    "them in parts when they were saved",
    47: "the data of a safetensors file is shorter or longer than its header says",
    48: "no key of the file is in the model: nothing was loaded",
    49: "a checker knows only archives whose folder is called archive",
    50: "weight_norm is spelled in the old way on one side and in the new way on the other",
    51: "position embeddings are for another resolution or length",
    52: "the keys have a prefix that FSDP, checkpointing, Lightning or Opacus adds",
    53: "the file has a dtype that this reader does not know",
    54: "spectral_norm is spelled in the old way on one side and in the new way on the other",
    55: "the file is a TorchScript program, which torch.jit.load reads",
    56: "a zip program changed the archive and left its directory wrong",
    57: "data.pkl is not in one folder of the archive: it was packed again",
    58: "pickle.dump wrote the file, and not torch.save",
    59: "the file begins with zeros or is a tar archive: torch took it for its first format",
    60: "torch can map only stored records of the zip format into memory",
    61: "values are wrong, and nothing was reported: torch checks no checksums",
}
"""Number of a load error -> what it usually means."""

TEXTS: tuple[tuple[str, tuple[int, ...]], ...] = (
    (r"failed finding central directory|central directory", (1,)),
    (r"\[Errno 22\] Invalid argument|negative seek value", (1,)),
    (r"not a ZIP archive|BadZipFile|File is not a zip file", (1, 57)),
    (r"(unexpected|missing) key.*['\"]_orig_mod\.|_orig_mod\.", (13,)),
    (r"_fsdp_wrapped_module|_checkpoint_wrapped_module|_forward_module\.|_fpw_module|['\"]_module\.", (52,)),
    (r"(unexpected|missing) key.*['\"]module\.", (2,)),
    (r"unexpected key.*['\"](epoch|state_dict|model_state_dict|optimizer\w*|arch|global_step)['\"]", (18,)),
    (r"num_batches_tracked", (19,)),
    (r"position_ids", (21,)),
    (r"lm_head\.weight|tied weights|newly initialized: \[?['\"]?lm_head", (26,)),
    (r"LayerNorm\.(gamma|beta)|\.gamma['\"]|\.beta['\"]", (41,)),
    (r"weight_g|weight_v|original0|original1", (50,)),
    (r"weight_orig|weight_u\b|parametrizations\.\w+\.original\b|parametrizations\.\w+\.0\._u", (54,)),
    (r"size mismatch for [\w.]*(pos_embed|position_embedding|positional_embedding|relative_position)", (51,)),
    (r"size mismatch for|ignore_mismatched_sizes|shapes did not match", (4,)),
    (r"Missing key\(s\) in state_dict|Unexpected key\(s\) in state_dict|were not initialized from|were not used when",
     (2, 48)),
    (r"parameter group that doesn't match the size|different number of parameter groups", (14,)),
    (r"WeightsUnpickler error: Unsupported operand 118|invalid load key, '?v", (6,)),
    (r"Unsupported operand (60|123|31|0|147|10|13|37|91)\b|invalid load key, '?(<|\{|\\x|\n|%|\[|H|E|N)", (7,)),
    (r"Unsupported operand (149|128|\d+)", (3, 58)),
    (r"invalid load key", (7,)),
    (r"No module named '?numpy\._core", (45,)),
    (r"No module named '?(pytorch_lightning|lightning|omegaconf|mmcv|mmengine|wandb|hydra|utils)", (12, 8)),
    (r"No module named|ModuleNotFoundError", (8, 12)),
    (r"Can't get attribute|has no attribute '\w+' on <module '__main__'", (9,)),
    (r"Weights only load failed.*Unsupported (global|class)|Unsupported (global|class|type)|add_safe_globals|"
     r"was not an allowed global|weights_only.*(arbitrary code|untrusted)", (3,)),
    (r"Weights only load failed", (3, 6, 7, 58)),
    (r"recompute_scale_factor|object has no attribute '(_\w+|padding_mode|is_causal|batch_first|approximate|"
     r"align_corners|_is_full_backward_hook|_non_persistent_buffers_set|inplace)'", (10,)),
    (r"object has no attribute '(eval|forward|to|cuda|train|parameters|named_parameters|modules)'|"
     r"state_dict to be dict-like", (44,)),
    (r"(module|Attribute).{0,40}has no attribute '_rebuild_|_rebuild_(tensor_v2|tensor_v3|parameter\w*)", (39,)),
    (r"Attempting to deserialize object on a? ?CUDA device|device_count\(\)|torch\.cuda\.is_available\(\) is False|"
     r"No CUDA GPUs are available|invalid device ordinal", (5,)),
    (r"don't know how to restore data location|tagged with", (34,)),
    (r"CUDA out of memory|OutOfMemoryError", (29,)),
    (r"capturable=False|state_steps|Expected all tensors to be on the same device", (43,)),
    (r"HeaderTooLarge|header too large|HeaderTooSmall|header too small|InvalidHeader(Start|Length)?\b|"
     r"invalid header start|InvalidHeaderDeserialization|invalid JSON in header", (11, 53)),
    (r"MetadataIncompleteBuffer|incomplete metadata|not fully covered|InvalidOffset|invalid offset", (47,)),
    (r"unknown variant|unknown dtype|Dtype not understood|float8|F8_E|KeyError: ['\"]?(F8|BF16|F4|U16)", (53,)),
    (r"Some tensors share memory|shared tensors|shared memory", (36,)),
    (r"NoneType' object has no attribute 'get'|does not contain the valid metadata|metadata\.get\(.format", (38,)),
    (r"persistent.{0,3}id instruction|persistent_load function|persistent IDs? .*specified", (15,)),
    (r"is a zip archive.*torch\.jit\.load", (16,)),
    (r"kMaxSupportedFileFormatVersion|Attempted to read a PyTorch file with version", (35,)),
    (r"from_tf=True|from_flax=True|Unable to load weights from pytorch checkpoint", (17,)),
    (r"'ascii' codec can't decode|codec can't decode byte", (20,)),
    (r"unexpected EOF|expected \d+ more bytes|might be corrupted", (22,)),
    (r"storage has wrong (byte )?size", (23,)),
    (r"Ran out of input|EOFError", (24,)),
    (r"cannot instantiate '(Posix|Windows)Path'|PosixPath|WindowsPath", (25,)),
    (r"constants\.pkl.*(not found|file not found)|file not found: .*constants\.pkl", (27,)),
    (r"serious vulnerability|at least v2\.6|CVE-2025-32434", (28,)),
    (r"invalid header or archive is corrupted|archive is corrupted|bad CRC|checksum|invalid distance",
     (32, 61)),
    (r"PytorchStreamWriter.*failed|file write failed|unexpected pos \d+ vs|No space left on device", (33,)),
    (r"\.distcp|distributed checkpoint|\.metadata'?$|No such file.*\.metadata", (37,)),
    (r"ShardedTensor|DTensor|_flat_param|FlatParameter|initialize (the )?default process group|"
     r"default process group has not been initialized", (46,)),
    (r"index\.json|weight_map|does not appear to have a file named|\bshards?\b", (31,)),
    (r"cannot untar|not a gzip file|tar: This does not look|Is a directory|IsADirectoryError", (40,)),
    (r"pytorch-lightning_version", (42,)),
    (r"bad file inside|may be malicious|safe.?unpickle", (49,)),
    (r"Size\(\[0\]\)|size\(?\[0\]\)?|443 bytes", (46,)),
    (r"TorchScript archive|looks like a TorchScript|torch\.jit\.load.*instead|RecursiveScriptModule", (55,)),
    (r"not in a subdirectory|hasRecord\(.?\"?version|file in archive is not", (57,)),
    (r"Invalid magic number|corrupt file\?", (58,)),
    (r"legacy \.tar format|filename 'storages' not found|'storages' not found|No such file .*storages", (59,)),
    (r"mmap can only be used|mmap=True", (60,)),
    (r"file is too large|bigger than it should|larger than expected|checkpoint is huge", (30,)),
    (r"zip64|too many (bytes|entries)|Overlapped entries|local header", (56, 32)),
)  # fmt: skip
"""Pattern, without regard to case, -> numbers of load errors; every row that fits counts, the first ones most."""

_COMPILED = tuple((re.compile(pattern, re.IGNORECASE | re.DOTALL), rows) for pattern, rows in TEXTS)

MOST_TEXT = 20_000
"""Characters of a pasted message that are read: its end, where the error stands."""


def rows(text: str) -> tuple[int, ...]:
    """The numbers of the load errors that `text` may be, most likely first; none if it is not known."""
    found = dict.fromkeys(_rows(text[-MOST_TEXT:]))
    names = error_names.listed(text)
    if names is None:
        return tuple(found)
    # A word that some of the names have is not a cause, unless all that one side lists have it.
    chance = [row for row in found if row in _OF_NAMES and not _of_all(row, names)]
    cause = [2] if error_names.prefix(names) is not None else []
    return tuple(dict.fromkeys([*cause, *(row for row in found if row not in chance), 2, 48, *chance]))


_OF_NAMES = {row: re.compile(pattern, re.IGNORECASE) for row, pattern in (
    (19, r"num_batches_tracked"), (21, r"position_ids"), (26, r"lm_head"), (41, r"LayerNorm|gamma|beta"),
    (50, r"weight_g|weight_v|original"), (54, r"weight_orig|weight_u\b|original|\._u\b|\._v\b"),
)}  # fmt: skip
"""Load errors that are recognised by a word in the names, and the word."""


def _of_all(row: int, names: error_names.Listed) -> bool:
    return any(side and all(map(_OF_NAMES[row].search, side)) for side in (names.missing, names.unexpected))


def _rows(text: str) -> Iterator[int]:
    for pattern, numbers in _COMPILED:
        if pattern.search(text):
            yield from numbers


def meaning(row: int) -> str:
    """What load error number `row` usually means, in one sentence without a full stop."""
    return ERRORS[row]
