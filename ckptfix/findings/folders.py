"""Findings about checkpoints of many files: shards, distributed checkpoints, the files of ranks."""

from __future__ import annotations

from ckptfix.findings.load_errors import LoadError as E
from ckptfix.findings.row import Entry

_REPAIR = "ckptfix repair {source} {repaired}"

FOLDERS: tuple[Entry, ...] = (
    Entry(
        "shard-path", "error", "an index that leads out of its folder",
        "The name of a shard is absolute, has `..` in it, is a link that leads out of the folder, is another name of a "
        "shard, or is that of an index. Nothing outside the folder was opened.",
        (), _REPAIR,
    ),
    Entry(
        "dcp-folder", "error", "a folder: a distributed checkpoint (DCP)",
        "torch.distributed.checkpoint writes a folder of .distcp files and one .metadata. The folder is the "
        "checkpoint: torch.load reads none of its files, and torch.distributed.checkpoint.load reads it into a model. "
        "ckptfix takes the folder wherever it takes a file.",
        (E.DISTRIBUTED, E.NO_MODEL_FILE), "ckptfix convert {source} {zip}",
    ),
    Entry(
        "distributed-shard", "error", "a file of a distributed checkpoint (DCP)",
        "torch.distributed.checkpoint writes a torch archive for each part of a tensor, one after the other, into a "
        ".distcp file of each rank. The file is not damaged: the whole folder is the checkpoint, and `ckptfix convert` "
        "makes one file of it.",
        (E.DISTRIBUTED,),
        "put it back in its folder, beside .metadata and the files of the other ranks, and name the folder",
    ),
    Entry(
        "one-rank", "error", "one rank's piece of a model",
        "FSDP, tensor parallelism and ZeRO-3 keep a part of each parameter on each rank, and a plain save on a rank "
        "writes just that. No model can load it; the other parts are in what the other ranks saved.",
        (E.PARTS_OF_RANKS,),
        "gather the state dict on all ranks before saving it, or save with torch.distributed.checkpoint",
    ),
    Entry(
        "missing-rank", "error", "a rank's file is missing, or cannot be read",
        "DeepSpeed and FSDP write a file for each process. What one of them held is in no other file: a node's disk "
        "was not copied, or a process did not finish its save. convert, extract and load_into refuse the tensors that "
        "it held a part of; the finding lists them, and their rows.",
        (E.PARTS_OF_RANKS,), "copy the file from where that process saved it, or take an older step",
    ),
    Entry(
        "other-save", "error", "a rank's file is of another save",
        "Files of two saves are in one folder: one was copied over the other, or a process did not finish the later "
        "one; or the files of two ranks of one save were exchanged. Joined, they would be a model that never was.",
        (E.WRONG_VALUES,), "copy the files of all ranks from one save",
    ),
    Entry(
        "ranks-unverified", "info", "the rank of a DeepSpeed file is in its name alone",
        "torch.save gives the records of a file the file's name, which shows the rank, and with stages 1 and 2 the "
        "weights show it too. Files that were written to a buffer, with stage 3, state no rank: if two of them were "
        "renamed to each other's name, nothing in them tells.",
    ),
    Entry(
        "model-steps", "warning", "model states and optimizer of DeepSpeed count other steps",
        "DeepSpeed writes both at once, so the files may be of two saves: then the fp32 weights are of one, and "
        "buffers and settings of the other. Training that went on without the optimizer's states leaves such a "
        "difference too.",
        (E.WRONG_VALUES,), "copy the files of all ranks from one save, if they are of two",
    ),
    Entry(
        "ranks-differ", "warning", "what every rank holds whole is not the same on all",
        "Buffers such as running means are not cut among the ranks: each has its own, and they differ where nothing "
        "keeps them equal. The first rank's are taken.",
    ),
    Entry(
        "flat-parameters", "error", "the parameters of an FSDP unit in one row, without names and shapes",
        "FSDP1 with LOCAL_STATE_DICT saves its FlatParameter as it is. Which parameter is where in it, and of which "
        "shape, only the model that was wrapped knows.",
        (E.PARTS_OF_RANKS,),
        "load it into the same FSDP model on as many ranks, and save a full state dict: `ckptfix help recipes`",
    ),
    Entry(
        "no-masters", "warning", "the fp32 master weights are not there",
        "With mixed precision, ZeRO keeps the weights in fp32 with the optimizer's states, and these files are missing "
        "or were deleted. The model's own weights, in fp16 or bf16, are complete, and are taken.",
    ),
    Entry(
        "dcp-no-metadata", "error", "a distributed checkpoint without its .metadata",
        "The last file that a save writes is .metadata, which says what is where. Without it the save was not "
        "finished, "
        "or the file, whose name begins with a dot, was not copied.",
        (E.DISTRIBUTED,),
        "copy the hidden file .metadata too; where it never was, the save did not end: take an older checkpoint",
    ),
    Entry(
        "deepspeed-folder", "error", "a folder: a DeepSpeed checkpoint",
        "DeepSpeed saves the module and the optimizer in separate files; with ZeRO, each rank saves a part of them. "
        "convert makes one file of one save; of this folder it is not clear which is meant, or it was cut in a way "
        "that only the program that saved it can join.",
        (E.PARTS_OF_RANKS,), "name the folder of one save, such as global_step100",
    ),
    Entry(
        "bad-index", "error", "the index of a sharded checkpoint cannot be read",
        "An index is JSON with a weight_map from names to files. `repair` writes it anew, from the headers of the "
        "shards.",
        (E.SHARD_MISSING,), _REPAIR,
    ),
    Entry(
        "missing-shard", "error", "a file that the index lists is not there",
        "Shards were not all downloaded, or were renamed. The tensors that it should hold are listed.",
        (E.SHARD_MISSING,), "download the missing file into the same folder",
    ),
    Entry(
        "missing-tensors", "error", "tensors that no shard holds",
        "The index names them, and the shard that it sends a loader to does not have them, nor has any other: index "
        "and shards are of different saves, or the shards were written again without them.",
        (E.SHARD_MISSING,), "keep index and shards of one save together; fetch both again",
    ),
    Entry(
        "doubled-tensors", "error", "tensors that several shards hold",
        "Which of them a loader takes depends on the order of the files: one shard is of another save, or a process "
        "wrote what another had written already.",
        (E.SHARD_MISSING,), "keep shards of one save together; fetch them again",
    ),
    Entry(
        "missing-slices", "error", "slices of a tensor that no rank's file holds",
        "HuggingFaceStorageWriter with `save_distributed=True` writes a file or more for each rank, with its slices "
        "of the tensors. One is missing, or was written over: without `save_distributed` all ranks write to the same "
        "names, and what is left is the slices of the last of them.",
        (), "fetch the files of all ranks into one folder, or save again with save_distributed=True",
    ),
    Entry(
        "no-index", "error", "shards without their index",
        "The shards are numbered, and `model.safetensors.index.json` or `pytorch_model.bin.index.json`, which says "
        "which of them holds which tensor, is not there: loaders of transformers find no checkpoint. `repair` writes "
        "it anew, from the headers of the shards.",
        (E.SHARD_MISSING, E.NO_MODEL_FILE), _REPAIR,
    ),
    Entry(
        "extra-shard", "warning", "a shard that the index does not list",
        "It belongs to another save, or the index is older than the shards: no loader opens it.",
        (E.SHARD_MISSING,), "keep index and shards of one save together; fetch both again",
    ),
    Entry(
        "other-model", "warning", "two files or series of the folder are a model",
        "The folder has the weights once in one file and once in shards, or in two containers. One is taken, as "
        "`from_pretrained` does where it can be known, and the other is left where it is: they may be the same "
        "weights, or of two saves.",
        (), "name the file that is meant, or keep one of them in the folder",
    ),
    Entry(
        "peft-adapter", "info", "the weights of a PEFT adapter, not a whole model",
        "PEFT saves what it added to a model: adapter_model.safetensors, and adapter_config.json, which names the base "
        "model. from_pretrained of transformers looks for model.safetensors or pytorch_model.bin, and finds neither.",
        (E.NO_MODEL_FILE,),
        "load the base model, and then PeftModel.from_pretrained(base, FOLDER); merge_and_unload() of that gives a "
        "whole model to save",
    ),
    Entry(
        "index-mismatch", "error", "index and shards disagree about a name",
        "The index sends a loader to another file than the one that has the tensor, or does not list one that is "
        "there.",
        (E.SHARD_MISSING,), _REPAIR,
    ),
    Entry(
        "index-total", "info", "total_size of the index is not the size of its tensors",
        "Loaders use it to plan memory; a wrong one hints at an index of another save.",
        (E.SHARD_MISSING,), None,
    ),
    Entry(
        "dcp-leftover", "warning", "a file of a distributed checkpoint that its .metadata does not name",
        "It is of another save, or of one that did not end: torch reads none of it. A later save on fewer ranks leaves "
        "the files of the others.",
        (), "save to a new folder; what is left over can be deleted once the checkpoint has been read back",
    ),
    Entry(
        "steps-differ", "warning", "a file of a distributed checkpoint counts other steps than the others",
        "No step of the optimizer's states in it is that of most in the other files: it was copied from another save, "
        "or its parameters were trained for less time. Where a folder has no optimizer, nothing in a file of as many "
        "bytes tells which save it is of.",
        (E.WRONG_VALUES,), "copy the files of all ranks from one save",
    ),
    Entry(
        "dcp-unused", "info", "items of a distributed checkpoint that belong to no tensor",
        "The .metadata says where they are, and names no chunk for them. torch reads none of them.",
    ),
    Entry(
        "dcp-overlap", "error", "items of a distributed checkpoint that share bytes",
        "Two entries of the .metadata name places in a file that overlap without being the same.",
        (), "save the checkpoint again",
    ),
    Entry(
        "dcp-saved-at", "info", "the folder that a distributed checkpoint was saved to",
        "The .metadata holds its full name, with what that says of users and machines. torch does not need it.",
    ),
)  # fmt: skip

LOST = frozenset({
    *("missing-shard", "shard-path", "missing-tensors", "doubled-tensors", "missing-slices"),
    *("missing-rank", "other-save", "flat-parameters"),
})  # fmt: skip
"""Findings after which a checkpoint is not written or loaded as if it were whole."""
