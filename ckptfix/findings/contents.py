"""Findings about the contents of a checkpoint: its pickle, its tensors, its keys, and how they fit a model."""

from __future__ import annotations

from ckptfix.findings.load_errors import LoadError as E
from ckptfix.findings.row import FindingKind
from ckptfix.findings.steps import LIKE, step

_REPAIR = step("repair")
_SANITIZE = step("sanitize")
_LOAD_INTO = "in Python: ckptfix.load_into(model, {source!r})"
RESUMED = "in Python: ckptfix.load_optimizer(optimizer, {source!r}, model=model), which pairs the state by parameter"
RESUMED_ELSEWHERE = (
    RESUMED + ", also for a different number of ranks; an engine of DeepSpeed needs a universal checkpoint, which "
    "`python -m deepspeed.checkpoint.ds_to_universal` makes"
)
RESUMED_IN_PART = (
    "in Python: ckptfix.load_optimizer(optimizer, {source!r}, model=model, strict=False), which pairs the state by "
    "parameter, and names the parameters that begin without one"
)
_MATCH = step("match", like=LIKE)

CONTENTS: tuple[FindingKind, ...] = (
    FindingKind(
        "bad-pickle", "error", "the pickle is broken: no unpickler accepts it",
        "A byte of it is wrong, or it was made to stop scanners before they reach something. The report lists "
        "everything that comes before that place.",
        (E.NOT_ALLOWED, E.BAD_RECORD), _REPAIR,
    ),
    FindingKind(
        "dangerous-global", "error", "the pickle contains a function that can run code or open files",
        "No legitimate checkpoint contains this. torch.load(weights_only=False) and pickle.load would call it; "
        "ckptfix imported nothing and called nothing. Do not load the file that way.",
        (E.NOT_ALLOWED,), _SANITIZE,
    ),
    FindingKind(
        "whole-module", "error", "a whole pickled module, not a state dict",
        "torch.save(model) stores the names of the classes, and loading needs their code: `No module named "
        "'models'`, `Can't get attribute 'Net'`, `object has no attribute ...` after a new release. `ckptfix "
        "extract` reads the weights without that code.",
        (E.NOT_ALLOWED, E.WHOLE_MODEL, E.CLASS_OF_SCRIPT, E.OTHER_RELEASE, E.NOT_A_MODEL),
        step("extract"),
    ),
    FindingKind(
        "foreign-global", "error", "the pickle contains a class or function that weights_only=True refuses",
        "Hyper-parameters, paths, NumPy numbers or objects of a training framework were saved with the weights. "
        "torch.load says `Unsupported global` or `No module named ...`; the weights do not need them.",
        (E.NOT_ALLOWED, E.CLASS_OF_SCRIPT, E.PACKAGE_MISSING, E.PATH_OBJECT, E.NUMPY2), _SANITIZE,
    ),
    FindingKind(
        "tensor-class", "error", "the pickle contains a tensor class: import its library first",
        "Quantized weights of torchao, a TensorDict and a nested tensor are objects of their library, which "
        "registers them with torch when it is imported; then torch.load(weights_only=True) accepts them. "
        "Without the import, torch says `Unsupported global`. Plain values in their place would be codes and "
        "scales that no framework loads.",
        (E.NOT_ALLOWED, E.PACKAGE_MISSING), "import the library before torch.load",
    ),
    FindingKind(
        "quantized", "info", "quantized weights: codes that have a meaning only with their scales",
        "The file holds small numbers and, next to them, scales and zero points. They can be renamed, selected, "
        "converted and sharded; an average, a cast or a copy into a float model would produce wrong weights. A "
        "model that its library has quantized in the same way loads them, and `ckptfix convert --dequantize` writes "
        "plain weights.",
        (E.SHAPES, E.PREFIX), None,
    ),
    FindingKind(
        "no-data", "error", "a tensor without data: it was saved on the meta device",
        "A model was saved before its weights existed: it was built under init_empty_weights or "
        "torch.device('meta'), or offloaded. torch.load returns a meta tensor, and its first use says `Cannot "
        "copy out of meta tensor; no data!`.",
        (E.NO_DATA,), "save it again once its weights are loaded; the values are not in this file",
    ),
    FindingKind(
        "unsupported-opcode", "error", "the pickle has an opcode that weights_only=True refuses",
        "torch.load(weights_only=True) reads the opcodes of protocol 2. torch.save with pickle_protocol=4, or a "
        "different program, wrote this pickle.",
        (E.NOT_ALLOWED,), _SANITIZE,
    ),
    FindingKind(
        "stacked-pickles", "error", "a second pickle follows the first",
        "A scanner that stops at the first pickle and a loader that reads on see different files, and so do a "
        "scanner that reads on and a loader that stops.",
        (), _SANITIZE,
    ),
    FindingKind(
        "bytes-after-stop", "warning", "bytes follow the end of the pickle",
        "An unpickler stops before them. torch never writes such bytes.",
        (), _SANITIZE,
    ),
    FindingKind(
        "nested-pickle", "error", "a bytes value holds a pickle that contains functions",
        "It is inert until a program unpickles it, which some classes do when they are restored.",
        (), _SANITIZE,
    ),
    FindingKind(
        "python2-strings", "warning", "strings in Python 2's form",
        "They have no encoding; Python 3 guesses ASCII and says `'ascii' codec can't decode byte`.",
        (E.PYTHON2,), step("sanitize", encoding="latin-1"),
    ),
    FindingKind(
        "bad-tensor", "error", "a tensor whose description does not match the data in the file",
        "Its storage is missing or has a different size, or its shape reaches beyond the storage. If several "
        "processes saved to one file, the parts do not fit together; torch says `storage has wrong size`. Save "
        "on rank 0 only.",
        (E.STORAGE_SIZE, E.BAD_RECORD), step("repair"),
    ),
    FindingKind(
        "memory-bomb", "error", "loading it allocates far more memory than the file has data",
        "For example, bytearray(2**40) in a pickle of 100 bytes, or a view of 2**62 elements on a storage of "
        "one element: no training writes that. torch.load, or the first copy of the tensor, ends with "
        "MemoryError or `not enough memory`. Do not load the file; get it from a source that you trust.",
        (), None,
    ),
    FindingKind(
        "bad-call", "error", "the pickle calls a function with arguments that it does not accept",
        "For example, OrderedDict of a number, or a gradient for a tensor of integers. torch.load stops there "
        "with a TypeError, even with weights_only=True. The file is damaged, or was made so that tools stop "
        "before the rest: get it again from a source that you trust.",
        (), None,
    ),
    FindingKind(
        "bad-storage", "error", "a storage with an impossible length",
        "Several processes wrote to one file, or it is damaged: torch says `storage has wrong size`. Save on rank 0 "
        "only.",
        (E.STORAGE_SIZE,), _REPAIR,
    ),
    FindingKind("too-deep", "error", "nested too deeply to be listed",
          "No training checkpoint nests like that. Do not load the file unless you trust its source."),
    FindingKind(
        "unused-record", "info", "tensor data that no tensor uses",
        "It remains from an edit, or from a program that dropped tensors but not their bytes.",
        (E.WHOLE_STORAGE,), step("slim"),
    ),
    FindingKind(
        "oversized-storage", "warning", "saved views keep a larger storage in the file",
        "torch.save writes the whole storage behind a view: a slice of a large tensor saves all of it. Call "
        "`.clone()` before saving next time.",
        (E.WHOLE_STORAGE,), step("slim"),
    ),
    FindingKind(
        "averaged-keys", "info", "averages (EMA) with keys of their own beside the weights",
        "The trainer kept a second copy of the weights, an exponential moving average, in the same state dict: "
        "`ema_backbone_conv1_weight`, `generator_ema.conv.weight`, `model_ema.conv1weight`. A model without the "
        "averages calls their keys unexpected. `ckptfix extract --ema` writes the averages under the plain keys.",
        (E.PREFIX,), step("extract", ema=True),
    ),
    FindingKind(
        "tied-tensors", "info", "keys that share one tensor",
        "torch keeps them tied. safetensors cannot store ties, and its save_file says `Some tensors share "
        "memory`; ckptfix writes one of them, and the tie as metadata.",
        (E.TIED_WEIGHT, E.SHARED_MEMORY), step("convert"),
    ),
    FindingKind(
        "shared-memory", "warning", "tensors that overlap in memory",
        "They are parts of one storage, and no tensor contains both. safetensors says `Some tensors share "
        "memory`; a conversion writes each of them separately.",
        (E.SHARED_MEMORY,), step("convert"),
    ),
    FindingKind(
        "nan-values", "warning", "values that are not a number",
        "Training diverged, or the bytes are damaged or read with the wrong dtype.",
        (), "use an earlier checkpoint; the original values cannot be recovered",
    ),
    FindingKind(
        "infinite-values", "info", "infinite values",
        "Masks contain them on purpose; weights should not.",
    ),
    FindingKind(
        "all-zero", "info", "tensors of zeros only",
        "New biases are zero; a large weight of zeros was never trained, or its bytes never arrived.",
        (), None,
    ),
    FindingKind(
        "zero-tail", "warning", "a tensor that is zero from the middle of a row to its end",
        "A download that reserved its space, or a disk that was not written to the end, leaves zeros.",
        (E.TAKEN_FOR_TAR, E.WRONG_VALUES), "copy or download it again",
    ),
    FindingKind(
        "zero-size", "error", "weights of shape [0]: the file does not hold their values",
        "DeepSpeed ZeRO-3 splits each parameter among all ranks; a plain save on one rank writes empty tensors, "
        "such as an adapter of 443 bytes. The values are in the ZeRO checkpoint, if one was saved.",
        (E.PARTS_OF_RANKS,),
        "this file cannot be fixed: convert the folder of all ranks, or save again with gathering turned on",
    ),
    FindingKind(
        "numpy-weights", "info", "its weights are NumPy arrays, not tensors",
        "Programs that do not use torch, such as Caffe2, keep weights as NumPy arrays, and torch.save pickles "
        "them unchanged. torch.load(weights_only=True) refuses NumPy's functions, and the file contains no "
        "state dict. `ckptfix sanitize` makes a tensor of each array.",
        (E.NOT_ALLOWED,), _SANITIZE,
    ),
    FindingKind(
        "no-tensors", "info", "it holds no tensor",
        "It holds a scheduler's state or a program's settings, which have no tensors. Or the save wrote an empty "
        "dict: it got the wrong variable, or an adapter that no rank had gathered (443 bytes).",
        (E.PARTS_OF_RANKS,), "if it should hold weights, save the state dict again",
    ),
    FindingKind(
        "unknown-dtype", "warning", "an unknown dtype",
        "Older readers support fewer dtypes, and say `unknown variant` or `InvalidHeaderDeserialization`.",
        (E.UNKNOWN_DTYPE,), "upgrade safetensors and torch",
    ),
    FindingKind(
        "wrapped-names", "warning", "the keys have a wrapper's prefix",
        "DataParallel and DDP put `module.` before every key, torch.compile `_orig_mod.`; FSDP, checkpointing "
        "and Lightning have their own prefixes. A model without that wrapper finds none of its keys: "
        "`Unexpected key(s)`.",
        (E.PREFIX, E.COMPILED, E.NO_KEY_IN_MODEL, E.WRAPPED), step("unwrap"),
    ),
    FindingKind(
        "device-tags", "warning", "tensors load to a device that may not exist",
        "torch.load puts each tensor on its old device: `Attempting to deserialize object on a CUDA device`, "
        "`don't know how to restore data location`, or every process loads to cuda:0 and runs out of memory.",
        (E.NO_GPU, E.SAME_GPU, E.UNKNOWN_DEVICE, E.OPTIMIZER_DEVICE), step("to-cpu"),
    ),
    FindingKind(
        "training-checkpoint", "info", "the weights are nested in a training checkpoint",
        "The file is a dict with the state dict under a key. If a model is given the whole dict, it says "
        "`Unexpected key(s): \"epoch\", \"state_dict\"`.",
        (E.TRAINING,), None,
    ),
    FindingKind(
        "doubtful-model", "info", "no key says which state dict is the model's, and others are larger",
        "ckptfix chose the state dict whose keys look most like a model's. For this file, commands that write or "
        "return one state dict require its address: --at ADDRESS, and --at / for the top level.",
        (), None,
    ),
    FindingKind(
        "optimizer-state", "info", "it holds an optimizer's state",
        "An optimizer usually keeps two more tensors for each parameter: it triples the size, and the model "
        "does not need it.",
        (E.PARAMETER_COUNT, E.SAME_GPU, E.OPTIMIZER_DEVICE, E.WORLD_SIZE, E.PARAMETER_ORDER),
        step("slim", no_optimizer=True),
    ),
    FindingKind(
        "no-lightning-version", "info", "the key pytorch-lightning_version is missing",
        "Lightning's load_from_checkpoint looks for the key and says `KeyError: 'pytorch-lightning_version'`. "
        "Other code wrote the file, and its weights load into the module directly.",
        (E.NOT_LIGHTNING,), _LOAD_INTO,
    ),
    FindingKind(
        "no-format-metadata", "warning", "the metadata has no \"format\" entry (transformers needs format=pt)",
        "transformers looks for `format` in the metadata and says `'NoneType' object has no attribute 'get'`. "
        "save_file writes this entry only if asked to.",
        (E.NO_FORMAT_ENTRY,),
        step("set-metadata", pairs=(("format", "pt"),)),
    ),
    FindingKind(
        "old-spelling", "info", "keys in an older spelling",
        "LayerNorm's gamma and beta, weight_norm's weight_g and weight_v, spectral_norm's weight_orig: newer "
        "models use other keys for the same tensors.",
        (E.GAMMA_BETA, E.WEIGHT_NORM, E.SPECTRAL_NORM),
        "with the model at hand: " + _LOAD_INTO.removeprefix("in Python: "),
    ),
    FindingKind(
        "needs-torch", "info", "older releases of torch cannot read it",
        "torch 1.6 introduced the zip container, later releases new rebuild functions and dtypes. Older "
        "releases say `is a zip archive (did you mean to use torch.jit.load()?)` or "
        "`kMaxSupportedFileFormatVersion`, or lack a function.",
        (E.ZIP_TOO_NEW, E.ARCHIVE_TOO_NEW, E.CALL_TOO_NEW), step("convert", to="legacy"),
    ),
    FindingKind(
        "no-mmap", "info", "torch's old format cannot be mapped into memory",
        "torch.load(mmap=True) accepts only the zip container.",
        (E.NO_MMAP,), step("convert", to="zip"),
    ),
    FindingKind(
        "zip-root", "info", "the folder in the archive is not called archive",
        "Some checkers accept only `archive/` and call the file malicious; torch accepts any name.",
        (E.FOLDER_NAME,),
        step("convert", to="legacy") + step("convert", to="zip"),
    ),
    FindingKind(
        "pickle-format", "info", "a pickled checkpoint",
        "transformers refuses to load pickles with torch before 2.6 (CVE-2025-32434). It accepts safetensors "
        "files.",
        (E.TORCH_BEFORE_2_6,), step("convert"),
    ),
    FindingKind(
        "state-dict-file", "info", "it holds weights, not a program",
        "A state dict is not a model: it has no eval(), and torch.jit.load finds no constants.pkl. Build the "
        "model with its code, then load the weights into it. torch.load reads the file; pickle.load does not.",
        (E.PICKLE_LOAD, E.NOT_A_PROGRAM, E.NOT_A_MODEL), _LOAD_INTO,
    ),
    FindingKind(
        "misnamed-tar", "info", "called .tar, but not a tar archive",
        "The suffix .pth.tar is a habit: torch.load reads the file directly, and tar cannot unpack it.",
        (E.UNPACKED,), "do not unpack it: torch.load reads it directly",
    ),
    FindingKind(
        "big-endian", "info", "its numbers are big-endian",
        "A big-endian machine wrote it; torch swaps the bytes when it loads.",
    ),
    # With --like.
    FindingKind(
        "names-prefixed", "error", "the keys match the model's except for a prefix",
        "The model was saved inside another module, or inside a wrapper. With strict=False nothing would load, "
        "silently.",
        (E.PREFIX, E.COMPILED, E.NO_KEY_IN_MODEL, E.WRAPPED), _MATCH,
    ),
    # With --error.
    FindingKind(
        "library-names", "error", "keys that a version of a library changed",
        "transformers, PEFT, diffusers and torch renamed keys between versions: `language_model.model.` became "
        "`model.language_model.` in transformers 4.52, `text_model.` left CLIPTextModel in 5.6, `weight_g` became "
        "`parametrizations.weight.original0`. The message and the file show which side is older; the command gives "
        "the file the keys that the model asks for.",
        (E.PREFIX, E.NO_KEY_IN_MODEL, E.GAMMA_BETA, E.WEIGHT_NORM), None,
    ),
    FindingKind(
        "vocabulary-rows", "error", "embeddings with a different number of rows: a padded or resized vocabulary",
        "Tokens were added, rows were padded to a round number, or two vocabularies were merged. "
        "model.resize_token_embeddings(N) before loading keeps all rows; the rule `rows` cuts the file's or pads "
        "them with zeros.",
        (E.SHAPES,), None,
    ),
    FindingKind(
        "model-side", "info", "the cause of the message is the model, not the file",
        "The model is partitioned by DeepSpeed ZeRO-3 (its parameters have the shape [0]), or was built with other "
        "settings, such as another LoRA rank.",
        (E.SHAPES, E.PARTS_OF_RANKS), None,
    ),
    FindingKind(
        "quantized-keys", "info", "the message is about parts of quantized weights",
        "Codes, scales and zero points have names and shapes that only a model knows which its library has "
        "quantized in the same way.",
        (E.PREFIX, E.SHAPES), None,
    ),
    FindingKind(
        "adapter-only", "info", "the missing keys belong to the base model of an adapter",
        "An adapter's file holds only what was trained. Load the base model first, and the adapter into it.",
        (E.PREFIX, E.NO_KEY_IN_MODEL), None,
    ),
    FindingKind(
        "other-file", "info", "the message does not agree with this file",
        "The keys or shapes that it names are not those of the file: it is about a different file, or the loading "
        "code changed the keys first.",
        (), None,
    ),
    FindingKind(
        "no-names-match", "error", "no key of the file is in the model",
        "strict=False would load nothing, without any error.",
        (E.NO_KEY_IN_MODEL,), _MATCH,
    ),
    FindingKind(
        "matched-by-structure", "error", "the file has the model's tensors under different keys",
        "The keys differ, but shapes, order and neighbors agree: every tensor has exactly one place in the "
        "model.",
        (E.GAMMA_BETA, E.NO_KEY_IN_MODEL, E.WEIGHT_NORM, E.SPECTRAL_NORM), _MATCH,
    ),
    FindingKind(
        "missing-keys", "error", "the model has keys that the file lacks",
        "The model would keep its initial values for them. Pass a file that has them, or load all other tensors "
        "with ckptfix.load_into(model, FILE, strict=False).",
        (E.PREFIX, E.NO_KEY_IN_MODEL), None,
    ),
    FindingKind(
        "unexpected-keys", "error", "the file has keys that the model lacks",
        "The model has no place for them. If it is the right model, `ckptfix fix` and `ckptfix match` leave them "
        "out with --drop-unexpected, and ckptfix.load_into(model, FILE, strict=False) does.",
        (E.PREFIX, E.NO_KEY_IN_MODEL), None,
    ),
    FindingKind(
        "optional-buffers", "warning", "buffers that one side lacks, and that hold no weights",
        "Releases differ in whether they save num_batches_tracked, position_ids, masks and similar buffers. A "
        "strict load_state_dict refuses them; the model computes them again.",
        (E.BATCHES_TRACKED, E.POSITION_IDS, E.PREFIX), _LOAD_INTO,
    ),
    FindingKind(
        "tied-missing", "warning", "a tied weight is saved under only one of its keys",
        "In many models lm_head.weight is the weight of the embedding, and files keep only one of the two.",
        (E.TIED_WEIGHT,), _LOAD_INTO,
    ),
    FindingKind(
        "other-spelling", "error", "keys that the model spells differently",
        "The same tensors under the keys of an older or newer release: LayerNorm, weight_norm, spectral_norm, "
        "in_proj.",
        (E.GAMMA_BETA, E.WEIGHT_NORM, E.SPECTRAL_NORM), _MATCH,
    ),
    FindingKind(
        "shape-mismatch", "error", "tensors whose shapes differ from the model's",
        "The head has a different number of classes, or the model is a different one. strict=False does not "
        "help: load_state_dict still raises `size mismatch`.",
        (E.SHAPES,), "to load all other tensors: in Python, ckptfix.load_into(model, {source!r}, strict=False)",
    ),
    FindingKind(
        "position-embedding", "error", "position embeddings for a different resolution or length",
        "They must be interpolated, which is a decision about the model: no file command makes it.",
        (E.POSITION_SIZE,),
        "interpolate them in the model's code; to load the rest: ckptfix.load_into(model, {source!r}, "
        "strict=False)",
    ),
    FindingKind(
        "dtype-mismatch", "warning", "tensors whose kind of number differs from the model's",
        "They hold integers where the model has floating-point numbers, or the reverse. Check that the file "
        "belongs to this model.",
        (), None,
    ),
    FindingKind(
        "optimizer-groups", "warning", "the optimizer was saved for a different number of parameters",
        "load_state_dict says `loaded state dict contains a parameter group that doesn't match the size of "
        "optimizer's group`.",
        (E.PARAMETER_COUNT,), RESUMED,
    ),
)  # fmt: skip
