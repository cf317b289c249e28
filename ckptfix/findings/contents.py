"""Findings about what a checkpoint holds: its pickle, its tensors, its names, and how they fit a model."""

from __future__ import annotations

from ckptfix.findings.load_errors import LoadError as E
from ckptfix.findings.row import Entry

_REPAIR = "ckptfix repair {source} {repaired}"
_SANITIZE = "ckptfix sanitize {source} {plain}"
_LOAD_INTO = "in Python: ckptfix.load_into(model, {source})"
_MATCH = "ckptfix match {source} {matched} --like {like}"

CONTENTS: tuple[Entry, ...] = (
    Entry(
        "bad-pickle", "error", "the pickle is broken: no unpickler takes it",
        "A byte of it is wrong, or it was made so that scanners stop before what they look for. What it contains "
        "before that place is listed.",
        (E.NOT_ALLOWED, E.BAD_RECORD), _REPAIR,
    ),
    Entry(
        "dangerous-global", "error", "the pickle contains a function that can run code or open files",
        "No checkpoint needs it. torch.load(weights_only=False) and pickle.load would call it; here nothing was "
        "imported and "
        "nothing called. Do not load the file that way.",
        (E.NOT_ALLOWED,), _SANITIZE,
    ),
    Entry(
        "whole-module", "error", "a whole pickled module, not a state dict",
        "torch.save(model) stores the names of the classes, and loading needs their code: `No module named "
        "'models'`, `Can't get "
        "attribute 'Net'`, `object has no attribute ...` after a new release. The weights can be taken out without it.",
        (E.NOT_ALLOWED, E.WHOLE_MODEL, E.CLASS_OF_SCRIPT, E.OTHER_RELEASE, E.NOT_A_MODEL),
        "ckptfix extract {source} {weights}",
    ),
    Entry(
        "foreign-global", "error", "the pickle contains a class or function that weights_only=True refuses",
        "Hyper-parameters, paths, NumPy numbers or a training framework's objects were saved beside the weights. "
        "torch.load says `Unsupported global` or `No module named ...`; the weights do not need them.",
        (E.NOT_ALLOWED, E.CLASS_OF_SCRIPT, E.PACKAGE_MISSING, E.PATH_OBJECT, E.NUMPY2), _SANITIZE,
    ),
    Entry(
        "tensor-class", "error", "the pickle contains a tensor class whose library is to be imported first",
        "Quantized weights of torchao, a TensorDict or a nested tensor are objects of their library, which registers "
        "them with torch when it is imported; then torch.load(weights_only=True) takes them. Without it, torch says "
        "`Unsupported global`. Plain values in their place would be codes and scales that no framework loads.",
        (E.NOT_ALLOWED, E.PACKAGE_MISSING), "import the library before torch.load",
    ),
    Entry(
        "quantized", "info", "quantized weights: codes, which mean a weight only with their scales",
        "The file holds small numbers and, beside them, scales and zero points. They can be renamed, selected, "
        "converted and sharded; a mean, a cast or a copy into a float model would make other weights of them. A model "
        "that its library has quantized in the same way loads them.",
        (E.SHAPES, E.PREFIX), None,
    ),
    Entry(
        "no-data", "error", "a tensor without data: it was saved on the meta device",
        "A model was saved before its weights were there: made under init_empty_weights or torch.device('meta'), or "
        "offloaded. torch.load gives a meta tensor, and the first use says `Cannot copy out of meta tensor; no data!`.",
        (E.NO_DATA,), "save it again once its weights are loaded; the values are not in this file",
    ),
    Entry(
        "unsupported-opcode", "error", "the pickle has an opcode that weights_only=True refuses",
        "torch.load(weights_only=True) reads what protocol 2 writes. torch.save with pickle_protocol=4, or another "
        "program, "
        "wrote this one.",
        (E.NOT_ALLOWED,), _SANITIZE,
    ),
    Entry(
        "stacked-pickles", "error", "another pickle follows the end of the first",
        "A loader that reads on, or a scanner that reads on where a loader does not, sees another file.",
        (), _SANITIZE,
    ),
    Entry(
        "bytes-after-stop", "warning", "bytes follow the end of the pickle",
        "An unpickler stops before them. torch writes none.",
        (), _SANITIZE,
    ),
    Entry(
        "nested-pickle", "error", "a bytes value holds a pickle that contains functions",
        "It is inert until a program unpickles it, which some classes do when they are restored.",
        (), _SANITIZE,
    ),
    Entry(
        "python2-strings", "warning", "strings as Python 2 wrote them",
        "They have no encoding; Python 3 guesses ASCII and says `'ascii' codec can't decode byte`.",
        (E.PYTHON2,), f"{_SANITIZE} --encoding latin-1",
    ),
    Entry(
        "bad-tensor", "error", "a tensor that the file does not hold as it describes it",
        "Its storage is missing or of another size, or its shape reaches beyond it. Where several processes saved to "
        "one "
        "file, the parts do not go together; torch says `storage has wrong size`. Save on rank 0 only.",
        (E.STORAGE_SIZE, E.BAD_RECORD), "ckptfix repair {source} {repaired}",
    ),
    Entry(
        "memory-bomb", "error", "loading it asks for far more memory than the file has data",
        "bytearray(2**40) in a pickle of 100 bytes, or a view of 2**62 elements on a storage of one: no training "
        "writes that. torch.load, or the first copy of the tensor, ends with MemoryError or `not enough memory`.",
        (), None,
    ),
    Entry(
        "bad-call", "error", "the pickle calls a function with arguments that it does not take",
        "Such as OrderedDict of a number, or a gradient for a tensor of integers. "
        "torch.load stops there with a TypeError, even with weights_only=True. The file is damaged, or was made so "
        "that tools stop before what follows.",
        (), None,
    ),
    Entry(
        "bad-storage", "error", "a storage with an impossible length",
        "Several processes wrote to one file, or it is damaged: torch says `storage has wrong size`. Save on rank 0 "
        "only.",
        (E.STORAGE_SIZE,), _REPAIR,
    ),
    Entry("too-deep", "error", "nested too deeply to be listed", "No training checkpoint nests like that."),
    Entry(
        "unused-record", "info", "tensor data that no tensor uses",
        "The rest of an edit, or of a program that dropped tensors and not their bytes.",
        (E.WHOLE_STORAGE,), "ckptfix slim {source} {slim}",
    ),
    Entry(
        "oversized-storage", "warning", "saved views keep a larger storage in the file",
        "torch.save writes the whole storage behind a view: a slice of a large tensor saves all of it. `.clone()` "
        "before "
        "saving helps next time.",
        (E.WHOLE_STORAGE,), "ckptfix slim {source} {slim}",
    ),
    Entry(
        "tied-tensors", "info", "names that share one tensor",
        "torch keeps them tied. safetensors holds no ties, and its save_file says `Some tensors share memory`; ckptfix "
        "writes one of them, and the tie as metadata.",
        (E.TIED_WEIGHT, E.SHARED_MEMORY), "ckptfix convert {source} {safetensors}",
    ),
    Entry(
        "shared-memory", "warning", "tensors that overlap in memory",
        "They are parts of one storage, and no tensor holds both. safetensors says `Some tensors share memory`; "
        "converted, "
        "each is written apart.",
        (E.SHARED_MEMORY,), "ckptfix convert {source} {safetensors}",
    ),
    Entry(
        "nan-values", "warning", "values that are not a number",
        "Training diverged, or bytes are damaged or read as another dtype.",
        (), "go back to an earlier checkpoint; the original values can't be recovered",
    ),
    Entry(
        "infinite-values", "info", "infinite values",
        "Masks use them on purpose; a weight does not.",
    ),
    Entry(
        "all-zero", "info", "tensors of zeros only",
        "New biases are zero; a large weight of zeros was never trained, or its bytes never arrived.",
        (), None,
    ),
    Entry(
        "zero-tail", "warning", "a tensor ends in zeros from the middle of a row on",
        "A download that reserved its space, or a disk that was not written to the end, leaves zeros.",
        (E.TAKEN_FOR_TAR, E.WRONG_VALUES), "copy or download it again",
    ),
    Entry(
        "zero-size", "error", "weights of shape [0]: the file holds no values of them",
        "DeepSpeed ZeRO-3 keeps each parameter on all ranks in parts; a plain save on one of them writes empty "
        "tensors, such as an "
        "adapter of 443 bytes. The values are in the ZeRO checkpoint, if one was saved.",
        (E.PARTS_OF_RANKS,),
        "nothing here can be fixed: convert the folder of all ranks, or save with gathering on",
    ),
    Entry(
        "numpy-weights", "info", "its weights are NumPy arrays, not tensors",
        "Programs that do not use torch, such as Caffe2, keep weights as arrays by name, and torch.save pickles them "
        "as they are. torch.load(weights_only=True) refuses NumPy's functions, and no state dict is found in the file. "
        "`ckptfix sanitize` makes a tensor of each array.",
        (E.NOT_ALLOWED,), _SANITIZE,
    ),
    Entry(
        "no-tensors", "info", "it holds no tensor",
        "A scheduler's state or a program's settings, which have none; or the save wrote an empty mapping: a wrong "
        "variable, or an adapter gathered on no rank (443 bytes).",
        (E.PARTS_OF_RANKS,), "if it was to hold weights, save the state dict again",
    ),
    Entry(
        "unknown-dtype", "warning", "a dtype that is unknown",
        "Older readers know fewer dtypes, and say `unknown variant` or `InvalidHeaderDeserialization`.",
        (E.UNKNOWN_DTYPE,), "upgrade safetensors and torch",
    ),
    Entry(
        "wrapped-names", "warning", "the keys have a wrapper's prefix",
        "DataParallel and DDP put `module.` before every key, torch.compile `_orig_mod.`, FSDP, checkpointing and "
        "Lightning "
        "theirs. A model without that wrapper finds none of its keys: `Unexpected key(s)`.",
        (E.PREFIX, E.COMPILED, E.NO_KEY_IN_MODEL, E.WRAPPED), "ckptfix unwrap {source} {unwrapped}",
    ),
    Entry(
        "device-tags", "warning", "tensors load to a device that may not be there",
        "torch.load puts each tensor on its old device: `Attempting to deserialize object on a CUDA device`, `don't "
        "know how to "
        "restore data location`, or every process on cuda:0 and out of memory.",
        (E.NO_GPU, E.SAME_GPU, E.UNKNOWN_DEVICE, E.OPTIMIZER_DEVICE), "ckptfix to-cpu {source} {cpu}",
    ),
    Entry(
        "training-checkpoint", "info", "the weights are nested in a training checkpoint",
        "The file is a dict with the state dict under a key. A model that is given all of it says `Unexpected "
        "key(s): \"epoch\", "
        "\"state_dict\"`.",
        (E.TRAINING,), None,
    ),
    Entry(
        "doubtful-model", "info", "no key says which state dict is the model's, and others are larger",
        "The names chose it. Commands that write or return one state dict ask for its address here: --at ADDRESS, and "
        "--at / for the top level.",
        (), None,
    ),
    Entry(
        "optimizer-state", "info", "it holds an optimizer's state",
        "Two more tensors a parameter, as a rule: three times the size, and not needed to use the model.",
        (E.PARAMETER_COUNT, E.SAME_GPU, E.OPTIMIZER_DEVICE), "ckptfix slim {source} {slim} --no-optimizer",
    ),
    Entry(
        "no-lightning-version", "info", "no pytorch-lightning_version in it",
        "Lightning's load_from_checkpoint asks for the key and says `KeyError: 'pytorch-lightning_version'`. The "
        "file was "
        "written by other code, and its weights load into the module by themselves.",
        (E.NOT_LIGHTNING,), _LOAD_INTO,
    ),
    Entry(
        "no-format-metadata", "warning", "metadata has no \"format\" entry (transformers needs format=pt)",
        "transformers asks its metadata for `format` and says `'NoneType' object has no attribute 'get'`. save_file "
        "writes "
        "none unless asked to.",
        (E.NO_FORMAT_ENTRY,),
        "ckptfix convert {source} {zip} --to zip && ckptfix convert {zip} {safetensors} --to safetensors",
    ),
    Entry(
        "old-spelling", "info", "names in an older spelling",
        "LayerNorm's gamma and beta, weight_norm's weight_g and weight_v, spectral_norm's weight_orig: newer models "
        "have other names for the same tensors.",
        (E.GAMMA_BETA, E.WEIGHT_NORM, E.SPECTRAL_NORM),
        "with the model at hand: " + _LOAD_INTO.removeprefix("in Python: "),
    ),
    Entry(
        "needs-torch", "info", "older releases of torch cannot read it",
        "torch 1.6 brought the zip container, later releases new rebuild calls and dtypes. Older ones say `is a zip "
        "archive (did you "
        "mean to use torch.jit.load()?)`, `kMaxSupportedFileFormatVersion` or miss a function.",
        (E.ZIP_TOO_NEW, E.ARCHIVE_TOO_NEW, E.CALL_TOO_NEW), "ckptfix convert {source} {legacy} --to legacy",
    ),
    Entry(
        "no-mmap", "info", "torch's old format cannot be mapped into memory",
        "torch.load(mmap=True) takes only the zip container.",
        (E.NO_MMAP,), "ckptfix convert {source} {zip} --to zip",
    ),
    Entry(
        "zip-root", "info", "the folder in the archive is not called archive",
        "Some checkers know only `archive/` and call the file malicious; torch takes any name.",
        (E.FOLDER_NAME,),
        "ckptfix convert {source} {legacy} --to legacy && ckptfix convert {legacy} {zip} --to zip",
    ),
    Entry(
        "pickle-format", "info", "a pickled checkpoint",
        "transformers refuses to load pickles with torch before 2.6 (CVE-2025-32434). safetensors files it takes.",
        (E.TORCH_BEFORE_2_6,), "ckptfix convert {source} {safetensors}",
    ),
    Entry(
        "state-dict-file", "info", "it holds weights, not a program",
        "A state dict is not a model: it has no eval(), and torch.jit.load finds no constants.pkl. Build the model by "
        "its code, "
        "then load the weights into it. pickle.load does not read it either; torch.load does.",
        (E.PICKLE_LOAD, E.NOT_A_PROGRAM, E.NOT_A_MODEL), _LOAD_INTO,
    ),
    Entry(
        "misnamed-tar", "info", "called .tar, but not a tar archive",
        "The suffix .pth.tar is a habit: torch.load reads the file as it is, and tar does not.",
        (E.UNPACKED,), "do not unpack it: torch.load reads it as it is",
    ),
    Entry(
        "big-endian", "info", "its numbers are big-endian",
        "A big-endian machine wrote it; torch swaps the bytes when it loads.",
    ),
    # With --like.
    Entry(
        "names-prefixed", "error", "the keys match the model's except for a prefix",
        "The model was saved inside another, or inside a wrapper. With strict=False nothing would load, silently.",
        (E.PREFIX, E.COMPILED, E.NO_KEY_IN_MODEL, E.WRAPPED), _MATCH,
    ),
    Entry(
        "no-names-match", "error", "no key of the file is in the model",
        "strict=False would load nothing, without any error.",
        (E.NO_KEY_IN_MODEL,), _MATCH,
    ),
    Entry(
        "matched-by-structure", "error", "the file has the model's tensors under other names",
        "The names differ, but shapes, order and neighbours agree: every tensor has one place in the model.",
        (E.GAMMA_BETA, E.NO_KEY_IN_MODEL, E.WEIGHT_NORM, E.SPECTRAL_NORM), _MATCH,
    ),
    Entry(
        "missing-keys", "error", "the model has keys that the file lacks",
        "They would keep the values that the model was initialised with.",
        (E.PREFIX, E.NO_KEY_IN_MODEL), None,
    ),
    Entry(
        "unexpected-keys", "error", "the file has keys that the model lacks",
        "They would not be loaded.",
        (E.PREFIX, E.NO_KEY_IN_MODEL), None,
    ),
    Entry(
        "optional-buffers", "warning", "buffers that one side lacks, and that hold no weights",
        "Releases differ in whether num_batches_tracked, position_ids, masks and the like are saved. A strict "
        "load_state_dict stops at them; the model computes them again.",
        (E.BATCHES_TRACKED, E.POSITION_IDS), _LOAD_INTO,
    ),
    Entry(
        "tied-missing", "warning", "a tied weight is saved under one of its names only",
        "lm_head.weight is the embedding's weight in many models, and files keep one of the two.",
        (E.TIED_WEIGHT,), _LOAD_INTO,
    ),
    Entry(
        "other-spelling", "error", "keys that the model spells differently",
        "The same tensors under the names of an older or newer release: LayerNorm, weight_norm, spectral_norm, "
        "in_proj.",
        (E.GAMMA_BETA, E.WEIGHT_NORM, E.SPECTRAL_NORM), _MATCH,
    ),
    Entry(
        "shape-mismatch", "error", "tensors of other shapes than the model's",
        "A head for another number of classes, or another model. strict=False does not help: load_state_dict raises "
        "`size "
        "mismatch` all the same.",
        (E.SHAPES,), "to load all the rest: in Python, ckptfix.load_into(model, {source}, strict=False)",
    ),
    Entry(
        "position-embedding", "error", "position embeddings for another resolution or length",
        "They have to be interpolated, which is a choice about the model: no file command makes it.",
        (E.POSITION_SIZE,),
        "interpolate them in the model's code; for the rest: ckptfix.load_into(model, {source}, strict=False)",
    ),
    Entry(
        "dtype-mismatch", "warning", "tensors of another kind of number than the model's",
        "Whole numbers where the model has fractions, or the reverse.",
        (), None,
    ),
    Entry(
        "optimizer-groups", "warning", "the optimizer was saved for another number of parameters",
        "load_state_dict says `loaded state dict contains a parameter group that doesn't match the size of "
        "optimizer's group`.",
        (E.PARAMETER_COUNT,), "ckptfix slim {source} {slim} --no-optimizer",
    ),
)  # fmt: skip
