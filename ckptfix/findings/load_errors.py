"""The catalogue of load errors: messages of torch, transformers, safetensors and pickle, grouped by their cause."""

from __future__ import annotations

from enum import IntEnum


class LoadError(IntEnum):
    """A load error; its `id` appears in JSON, and never changes."""

    @property
    def id(self) -> str:
        """The name in JSON, such as ``no-directory``."""
        return self.name.lower().replace("_", "-")

    NO_DIRECTORY = 1
    PREFIX = 2
    NOT_ALLOWED = 3
    SHAPES = 4
    NO_GPU = 5
    LFS_POINTER = 6
    NOT_A_CHECKPOINT = 7
    WHOLE_MODEL = 8
    CLASS_OF_SCRIPT = 9
    OTHER_RELEASE = 10
    NOT_SAFETENSORS = 11
    PACKAGE_MISSING = 12
    COMPILED = 13
    PARAMETER_COUNT = 14
    PICKLE_LOAD = 15
    ZIP_TOO_NEW = 16
    TRIED_TENSORFLOW = 17
    TRAINING = 18
    BATCHES_TRACKED = 19
    PYTHON2 = 20
    POSITION_IDS = 21
    LEGACY_CUT = 22
    STORAGE_SIZE = 23
    EMPTY = 24
    PATH_OBJECT = 25
    TIED_WEIGHT = 26
    NOT_A_PROGRAM = 27
    TORCH_BEFORE_2_6 = 28
    SAME_GPU = 29
    WHOLE_STORAGE = 30
    SHARD_MISSING = 31
    BAD_RECORD = 32
    DISK_FULL = 33
    UNKNOWN_DEVICE = 34
    ARCHIVE_TOO_NEW = 35
    SHARED_MEMORY = 36
    DISTRIBUTED = 37
    NO_FORMAT_ENTRY = 38
    CALL_TOO_NEW = 39
    UNPACKED = 40
    GAMMA_BETA = 41
    NOT_LIGHTNING = 42
    OPTIMIZER_DEVICE = 43
    NOT_A_MODEL = 44
    NUMPY2 = 45
    PARTS_OF_RANKS = 46
    DATA_LENGTH = 47
    NO_KEY_IN_MODEL = 48
    FOLDER_NAME = 49
    WEIGHT_NORM = 50
    POSITION_SIZE = 51
    WRAPPED = 52
    UNKNOWN_DTYPE = 53
    SPECTRAL_NORM = 54
    TORCHSCRIPT = 55
    ZIP_PROGRAM = 56
    PACKED_AGAIN = 57
    PICKLE_DUMP = 58
    TAKEN_FOR_TAR = 59
    NO_MMAP = 60
    WRONG_VALUES = 61
    NO_MODEL_FILE = 62
    NO_DATA = 63
    WORLD_SIZE = 64
    PARAMETER_ORDER = 65
    PEFT_ADAPTER = 66
    DIFFUSERS_LORA = 67
    KOHYA_LORA = 68
    COMFY_LORA = 69


MEANINGS: dict[LoadError, str] = {
    LoadError.NO_DIRECTORY: "the zip archive has no directory at its end: it was cut short, or other bytes follow it",
    LoadError.PREFIX: "the keys in the file and in the model differ",
    LoadError.NOT_ALLOWED: "the pickle contains classes that torch.load(weights_only=True) does not allow",
    LoadError.SHAPES: "a tensor of the file has a different shape than the model's",
    LoadError.NO_GPU: "the tensors were saved on a GPU that this machine does not have",
    LoadError.LFS_POINTER: "the file is a git-lfs pointer",
    LoadError.NOT_A_CHECKPOINT: "the file is not a checkpoint: a web page, JSON, something compressed, or zeros",
    LoadError.WHOLE_MODEL: "a whole model was pickled, and the code of its classes is not available",
    LoadError.CLASS_OF_SCRIPT: "the pickle contains a class of the script that saved it",
    LoadError.OTHER_RELEASE:
        "a whole model was pickled by a different release of torch, whose modules have other attributes",
    LoadError.NOT_SAFETENSORS: "the file is not a safetensors file: a git-lfs pointer, or a torch file under that name",
    LoadError.PACKAGE_MISSING:
        "the pickle contains classes of a package that is not installed; the weights do not need them",
    LoadError.COMPILED: "the keys begin with `_orig_mod.`, which torch.compile adds",
    LoadError.PARAMETER_COUNT: "the optimizer was saved for a different number of parameters",
    LoadError.PICKLE_LOAD: "pickle.load was used on data.pkl or on a torch checkpoint",
    LoadError.ZIP_TOO_NEW: "the file is a zip checkpoint, and this torch is older than 1.6",
    LoadError.TRIED_TENSORFLOW: "transformers could not read the file at all, and tried to read it as TensorFlow's",
    LoadError.TRAINING: "the file is a training checkpoint: the state dict is under one of its keys",
    LoadError.BATCHES_TRACKED: "only the file or only the model has BatchNorm's num_batches_tracked",
    LoadError.PYTHON2: "Python 2 wrote the pickle, whose strings have no encoding",
    LoadError.POSITION_IDS: "only the file or only the model has position_ids",
    LoadError.LEGACY_CUT: "the file, in torch's old format, was cut short",
    LoadError.STORAGE_SIZE:
        "a storage has the wrong length: several processes wrote to one file, or it is damaged",
    LoadError.EMPTY: "the file is empty",
    LoadError.PATH_OBJECT: "a path object of a different operating system was pickled with the weights",
    LoadError.TIED_WEIGHT: "a tied weight was saved under only one of its keys",
    LoadError.NOT_A_PROGRAM: "torch.jit.load was given a state dict, or a file for torch.load",
    LoadError.TORCH_BEFORE_2_6: "transformers refuses pickled checkpoints with torch before 2.6",
    LoadError.SAME_GPU: "every process loads the tensors to the GPU that they were saved on",
    LoadError.WHOLE_STORAGE: "a view was saved, together with the whole storage behind it",
    LoadError.SHARD_MISSING: "a shard is missing, belongs to a different save, or was given alone",
    LoadError.BAD_RECORD: "a record of the zip archive is damaged",
    LoadError.DISK_FULL: "the disk was full while the file was written, so the file is cut short",
    LoadError.UNKNOWN_DEVICE: "the tensors were saved on a kind of device that this torch does not have",
    LoadError.ARCHIVE_TOO_NEW: "a newer torch wrote the archive",
    LoadError.SHARED_MEMORY: "tensors share memory, which safetensors cannot store",
    LoadError.DISTRIBUTED: "the checkpoint is distributed: it is a folder, or lacks its .metadata",
    LoadError.NO_FORMAT_ENTRY: "the safetensors file has no \"format\" entry in its metadata",
    LoadError.CALL_TOO_NEW: "a newer torch wrote the file: this torch lacks a function that the file uses",
    LoadError.UNPACKED: "the file was unpacked, or is not a tar archive although its name says so",
    LoadError.GAMMA_BETA: "either the file or the model calls LayerNorm's weight and bias gamma and beta",
    LoadError.NOT_LIGHTNING: "Lightning was given a checkpoint that it did not write",
    LoadError.OPTIMIZER_DEVICE: "the optimizer's state is on the wrong device",
    LoadError.NOT_A_MODEL: "a state dict was used as a model, or a model as a state dict",
    LoadError.NUMPY2: "NumPy 2 wrote an object in the pickle, which the installed NumPy 1 cannot read",
    LoadError.PARTS_OF_RANKS:
        "the weights are empty, or one rank's parts: DeepSpeed ZeRO-3, FSDP or tensor parallelism had split "
        "them when they were saved",
    LoadError.DATA_LENGTH: "the data of a safetensors file is shorter or longer than its header says",
    LoadError.NO_KEY_IN_MODEL: "no key of the file is in the model: nothing was loaded",
    LoadError.FOLDER_NAME: "a checker accepts only archives whose folder is called archive",
    LoadError.WEIGHT_NORM: "the file and the model use different spellings of weight_norm, the old and the new",
    LoadError.POSITION_SIZE: "position embeddings are for a different resolution or length",
    LoadError.WRAPPED: "the keys have a prefix that FSDP, checkpointing, Lightning or Opacus adds",
    LoadError.UNKNOWN_DTYPE: "the file has a dtype that this reader does not support",
    LoadError.SPECTRAL_NORM: "the file and the model use different spellings of spectral_norm, the old and the new",
    LoadError.TORCHSCRIPT: "the file is a TorchScript program, which torch.jit.load reads",
    LoadError.ZIP_PROGRAM: "a zip program changed the archive and left its directory wrong",
    LoadError.PACKED_AGAIN: "data.pkl is not in one folder of the archive: it was packed again",
    LoadError.PICKLE_DUMP: "the file was written by pickle.dump instead of torch.save",
    LoadError.TAKEN_FOR_TAR: "the file begins with zeros or is a tar archive: torch mistook it for its first format",
    LoadError.NO_MMAP: "torch can map only uncompressed records of the zip format into memory",
    LoadError.WRONG_VALUES: "values are wrong, and nothing was reported: torch does not verify checksums",
    LoadError.NO_MODEL_FILE:
        "the folder has no model file that from_pretrained looks for: it is an adapter's folder, lacks an index, or "
        "a trainer saved it in a different form",
    LoadError.WORLD_SIZE: "the optimizer's state was saved by a different number of processes",
    LoadError.PARAMETER_ORDER:
        "the optimizer's state belongs to other parameters: their order or their shapes differ from those at the save",
    LoadError.PEFT_ADAPTER:
        "an adapter is not as PEFT saves it: its keys are those of another library or have a wrong beginning, or "
        "adapter_config.json is missing or wrong",
    LoadError.DIFFUSERS_LORA: "the keys of a LoRA are not those that diffusers reads",
    LoadError.KOHYA_LORA: "the keys of a LoRA are not those of kohya's scripts, or it is for another kind of model",
    LoadError.COMFY_LORA: "the keys of a LoRA are not those that ComfyUI reads, or it is for another model",
    LoadError.NO_DATA: "a tensor is on the meta device: it has a shape but no values",
}
"""The usual cause of each load error, in one sentence without a full stop."""
