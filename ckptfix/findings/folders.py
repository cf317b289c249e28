"""Findings about checkpoints that consist of many files: shards, distributed checkpoints, the files of ranks."""

from __future__ import annotations

from ckptfix.findings.load_errors import LoadError as E
from ckptfix.findings.row import FindingKind
from ckptfix.findings.steps import Step, step

_REPAIR = step("repair")

FOLDERS: tuple[FindingKind, ...] = (
    FindingKind(
        "shard-path", "error", "an index that points outside its folder",
        "The name of a shard is absolute, contains `..`, is a link that leads out of the folder, is a second "
        "name of a shard, or is the name of an index. ckptfix opened nothing outside the folder.",
        (), _REPAIR,
    ),
    FindingKind(
        "dcp-folder", "error", "a folder: a distributed checkpoint (DCP)",
        "torch.distributed.checkpoint writes a folder of .distcp files and one .metadata. The whole folder is "
        "the checkpoint: torch.load reads none of its files, and torch.distributed.checkpoint.load reads it "
        "into a model. ckptfix accepts the folder wherever it accepts a file.",
        (E.DISTRIBUTED, E.NO_MODEL_FILE), (Step("convert", word="zip"),),
    ),
    FindingKind(
        "distributed-shard", "error", "a file of a distributed checkpoint (DCP)",
        "For each rank, torch.distributed.checkpoint writes a .distcp file: one torch archive after the other, "
        "each with a part of a tensor. The file is not damaged: the whole folder is the checkpoint, and "
        "`ckptfix convert` makes one file of it.",
        (E.DISTRIBUTED,),
        "put it back in its folder, next to .metadata and the files of the other ranks, and pass the folder",
    ),
    FindingKind(
        "one-rank", "error", "one rank's part of a model",
        "FSDP, tensor parallelism and ZeRO-3 keep a part of each parameter on each rank, and a plain save on a "
        "rank writes only that. No model can load it; the other parts are in the files that the other ranks "
        "saved.",
        (E.PARTS_OF_RANKS,),
        "gather the state dict on all ranks before saving it, or save with torch.distributed.checkpoint",
    ),
    FindingKind(
        "missing-rank", "error", "a rank's file is missing, or cannot be read",
        "DeepSpeed and FSDP write a file for each process, and no other file holds the same parts. A node's "
        "disk was not copied, or a process did not finish its save. convert, extract and load_into refuse the "
        "tensors that have a part in the missing file; the finding lists them, and their rows.",
        (E.PARTS_OF_RANKS,), "copy the file from where that process saved it, or use an older step",
    ),
    FindingKind(
        "other-save", "error", "a rank's file is from a different save",
        "Files of two saves are in one folder: one was copied over the other, a process did not finish the "
        "later save, or the files of two ranks were exchanged. Joined, they would be a model that never existed.",
        (E.WRONG_VALUES,), "copy the files of all ranks from one save",
    ),
    FindingKind(
        "cut-unknown", "error", "a tensor that ranks have in parts, and nothing says along which dimension it was cut",
        "Tensor parallelism cuts a matrix along its rows or its columns, and the files of the ranks do not state "
        "which. Tables of the names of Megatron-LM, Meta and fairseq decide it, and the settings of the model where "
        "versions differ. This name is in no table.",
        (E.PARTS_OF_RANKS,), "convert it with --dim 'NAME=0', or NAME=1, or NAME=copy if each rank has all of it",
    ),
    FindingKind(
        "ranks-unverified", "info", "only the file name shows the rank of a DeepSpeed file",
        "torch.save gives the records in a file the file's name, which shows the rank. With stages 1 and 2 the "
        "weights show it too. Stage 3 files that were written to a buffer do not state their rank: if two of them "
        "were swapped, nothing in them shows it.",
    ),
    FindingKind(
        "model-steps", "warning", "DeepSpeed's model states and optimizer states count different steps",
        "DeepSpeed writes both at once, so the files may be from two saves: then the fp32 weights are from one "
        "save, and the buffers and settings from the other. Training that continued without the optimizer's "
        "states leaves such a difference too.",
        (E.WRONG_VALUES,), "if they are from two saves, copy the files of all ranks from one save",
    ),
    FindingKind(
        "ranks-differ", "warning", "values that every rank holds whole differ between ranks",
        "Buffers such as running means are not split among the ranks: each rank has its own copy, and the "
        "copies differ unless something keeps them equal. ckptfix uses the first rank's.",
    ),
    FindingKind(
        "flat-parameters", "error", "the parameters of an FSDP unit in one flat row, without keys and shapes",
        "FSDP1 with LOCAL_STATE_DICT saves its FlatParameter unchanged. Only the model that was wrapped knows "
        "the position and the shape of each parameter in it.",
        (E.PARTS_OF_RANKS,),
        "load it into the same FSDP model on the same number of ranks, and save a full state dict: `ckptfix "
        "help recipes`",
    ),
    FindingKind(
        "no-masters", "warning", "the fp32 master weights are missing",
        "With mixed precision, ZeRO keeps the fp32 weights with the optimizer's states, and these files are "
        "missing or were deleted. ckptfix uses the model's own weights instead, which are complete, in fp16 or "
        "bf16.",
    ),
    FindingKind(
        "dcp-no-metadata", "error", "a distributed checkpoint without its .metadata",
        "A save writes .metadata last; it lists where each tensor is stored. Without it the save did not "
        "finish, or the file was not copied, because its name begins with a dot.",
        (E.DISTRIBUTED,),
        "copy the hidden file .metadata too; if it never existed, the save did not finish: use an older "
        "checkpoint",
    ),
    FindingKind(
        "deepspeed-folder", "error", "a folder: a DeepSpeed checkpoint",
        "DeepSpeed saves the module and the optimizer in separate files; with ZeRO, each rank saves a part of "
        "them. convert makes one file of one save. It cannot tell which save of this folder is meant, or the "
        "weights were split in a way that only the program that saved them can join.",
        (E.PARTS_OF_RANKS,), "pass the folder of one save, such as global_step100",
    ),
    FindingKind(
        "bad-index", "error", "the index of a sharded checkpoint cannot be read",
        "An index is JSON with a weight_map from keys to files. `repair` rebuilds it from the headers of the "
        "shards.",
        (E.SHARD_MISSING,), _REPAIR,
    ),
    FindingKind(
        "missing-shard", "error", "a file that the index lists is missing",
        "Not all shards were downloaded, or some were renamed. The finding lists the tensors of the missing "
        "file.",
        (E.SHARD_MISSING,), "download the missing file into the same folder",
    ),
    FindingKind(
        "missing-tensors", "error", "tensors that are in no shard",
        "The index lists them, but neither the shard that it names nor any other has them: index and shards are "
        "from different saves, or the shards were written again without them.",
        (E.SHARD_MISSING,), "keep index and shards of one save together; fetch both again",
    ),
    FindingKind(
        "doubled-tensors", "error", "tensors that are in several shards",
        "The order of the files decides which copy a loader reads: one shard is from a different save, or a "
        "process wrote tensors that an earlier one had already written.",
        (E.SHARD_MISSING,), "keep shards of one save together; fetch them again",
    ),
    FindingKind(
        "missing-slices", "error", "slices of a tensor that are in no rank's file",
        "HuggingFaceStorageWriter with `save_distributed=True` writes one or more files for each rank, with its "
        "slices of the tensors. One is missing, or was overwritten: without `save_distributed` all ranks write "
        "to the same names, and only the slices of the last rank remain.",
        (), "fetch the files of all ranks into one folder, or save again with save_distributed=True",
    ),
    FindingKind(
        "one-shard", "info", "one shard of a model",
        "The file is one of the numbered files that a large model was split into. A model that loads this file alone "
        "misses the tensors of the others. Pass the folder to `doctor`, `convert` or `load_into`, which read all "
        "shards.",
        (), "pass the folder",
    ),
    FindingKind(
        "no-index", "error", "shards without their index",
        "The shards are numbered, but `model.safetensors.index.json` or `pytorch_model.bin.index.json`, which "
        "lists the shard of each tensor, is missing: the loaders of transformers find no checkpoint. `repair` "
        "rebuilds it from the headers of the shards.",
        (E.SHARD_MISSING, E.NO_MODEL_FILE), _REPAIR,
    ),
    FindingKind(
        "extra-shard", "warning", "a shard that the index does not list",
        "It belongs to a different save, or the index is older than the shards: no loader opens it.",
        (E.SHARD_MISSING,), "keep index and shards of one save together; fetch both again",
    ),
    FindingKind(
        "other-model", "warning", "the folder holds the model twice, in two files or series of shards",
        "The folder has the weights once in one file and once in shards, or in two containers. ckptfix reads "
        "the one that `from_pretrained` would, where that is known, and ignores the other: they may be the same "
        "weights, or from two saves.",
        (), "pass the file that you mean, or keep only one of them in the folder",
    ),
    FindingKind(
        "peft-adapter", "info", "the weights of a PEFT adapter, not a whole model",
        "PEFT saves what it added to a model: adapter_model.safetensors, and adapter_config.json, which names "
        "the base model. from_pretrained of transformers looks for model.safetensors or pytorch_model.bin, and "
        "finds neither.",
        (E.NO_MODEL_FILE,),
        "load the base model, and then PeftModel.from_pretrained(base, FOLDER); "
        "`ckptfix lora merge BASE FOLDER -o OUT` makes a whole model of both",
    ),
    FindingKind(
        "adapter", "info", "the weights of an adapter (LoRA), not a whole model",
        "An adapter has small factors for some layers of a base model: lora_A and lora_B, or lora_down and lora_up. "
        "Loaders of models do not read them, and each program knows some of the layouts.",
        (E.NO_MODEL_FILE,),
        "`ckptfix lora info FILE` shows it; `ckptfix lora merge BASE FILE -o OUT` makes a whole model, and "
        "`ckptfix lora convert FILE OUT --to LAYOUT` writes that of peft, kohya, diffusers or comfy",
    ),
    FindingKind(
        "adapter-names", "warning", "an adapter whose names or configuration its loader does not accept",
        "A loader of adapters looks for keys by name, and takes what it finds: of a model that was wrapped twice the "
        "keys begin with base_model.model. twice; keys of model.state_dict() have the adapter's name in them "
        "(lora_A.default.weight); a layer that target_modules does not name is left out; a rank that the tensors do "
        "not have is refused (size mismatch for lora_A); and PEFT, kohya, diffusers and ComfyUI have keys of their "
        "own. Most loaders only warn, and the adapter then has no effect. `lora convert` writes the form that the "
        "loader reads, with rank and targets as the tensors have them.",
        (E.PEFT_ADAPTER, E.DIFFUSERS_LORA, E.KOHYA_LORA, E.COMFY_LORA, E.SHAPES),
        "`ckptfix lora convert {source} OUT --to LAYOUT` writes the form that the loader reads: peft, kohya, diffusers "
        "or comfy",
    ),
    FindingKind(
        "adapter-base", "warning", "weights of a model of PEFT, with the layers that PEFT put around the base's",
        "In a model of PEFT each adapted layer holds the base's layer as base_layer, and its state dict has both: "
        "q_proj.base_layer.weight and q_proj.lora_A.default.weight. A loader of the base model looks for "
        "q_proj.weight. With an adapter in the file, merging it gives the weights that were trained; without "
        "one, the keys need only the level taken out.",
        (), "`ckptfix lora merge {source} -o OUT` merges an adapter that the file holds",
    ),
    FindingKind(
        "adapter-incomplete", "warning", "an adapter lacks a part, or its configuration contradicts its tensors",
        "The strength of an update is alpha / rank. PEFT and MLX state alpha in adapter_config.json beside the file; "
        "a rank there that the tensors do not have is refused by the loader (size mismatch for lora_A).",
        (E.SHAPES,),
        "put adapter_config.json beside the file, or give alpha: "
        "`ckptfix lora convert {source} OUT --to peft --alpha A`",
    ),
    FindingKind(
        "index-mismatch", "error", "index and shards disagree about a key",
        "The index sends a loader to a different file than the one that has the tensor, or does not list a "
        "tensor that a shard has.",
        (E.SHARD_MISSING,), _REPAIR,
    ),
    FindingKind(
        "index-total", "info", "total_size in the index is not the size of its tensors",
        "Loaders use it to plan memory; a wrong value suggests that the index is from a different save.",
        (E.SHARD_MISSING,), None,
    ),
    FindingKind(
        "dcp-leftover", "warning", "a file of a distributed checkpoint that its .metadata does not name",
        "It is from a different save, or from one that did not finish: torch does not read it. A later save on "
        "fewer ranks leaves the files of the other ranks.",
        (), "save to a new folder; delete the leftover file once you have read the checkpoint back",
    ),
    FindingKind(
        "steps-differ", "warning", "a file of a distributed checkpoint counts different steps than the others",
        "Its optimizer states are not at the step that most of the other files are at: the file was copied "
        "from a different save, or its parameters were trained for less time. In a folder without an "
        "optimizer, a file from a different save cannot be told apart if it has the right size.",
        (E.WRONG_VALUES,), "copy the files of all ranks from one save",
    ),
    FindingKind(
        "dcp-unused", "info", "items of a distributed checkpoint that belong to no tensor",
        "The .metadata records where they are, and no chunk refers to them. torch does not read them.",
    ),
    FindingKind(
        "dcp-overlap", "error", "items of a distributed checkpoint that share bytes",
        "Two entries of the .metadata refer to byte ranges of a file that overlap without being equal.",
        (), "save the checkpoint again",
    ),
    FindingKind(
        "stacked-layers", "info", "tensors that hold all layers of a model",
        "Megatron-LM's torch_dist format stacks the tensors of all layers in one, whose first dimension counts the "
        "layers: decoder.layers.mlp.linear_fc1.weight has no number. Other libraries, and Megatron-LM's classic "
        "files, have a tensor for each layer. A table of names divides them, where one has the model.",
    ),
    FindingKind(
        "dcp-saved-at", "info", "the folder that a distributed checkpoint was saved to",
        "The .metadata holds its full path, which may reveal names of users and machines. torch does not need "
        "it.",
    ),
)  # fmt: skip

LOST = frozenset({
    *("missing-shard", "shard-path", "missing-tensors", "doubled-tensors", "missing-slices"),
    *("missing-rank", "other-save", "flat-parameters", "cut-unknown"),
})  # fmt: skip
"""Findings that prevent a checkpoint from being written or loaded as if it were complete."""

MISREAD = LOST | {"bad-tensor", "unknown-dtype", "too-deep", "duplicate-record", "duplicate-key"}
"""Findings about content that will be misread although sizes and checksums are right."""

BROKEN = MISREAD | {"bad-crc", "truncated"}
"""Findings about tensors that cannot be read as they were written."""
