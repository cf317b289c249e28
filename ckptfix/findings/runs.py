"""Findings about run folders: which checkpoints of a training run can be resumed from."""

from __future__ import annotations

from ckptfix.findings.row import FindingKind

_OLDER = "resume from the newest checkpoint that is not listed here; or copy the file again from where it was saved"

RUNS: tuple[FindingKind, ...] = (
    FindingKind(
        "run-damaged", "error", "a checkpoint of the run has a damaged file",
        "A file that the trainer needs to resume is cut, or cannot be read: the disk was full, or the job was killed "
        "while it saved. A trainer that resumes from the newest folder stops at this file, or starts with a new "
        "optimizer. An older checkpoint of the run is intact, or the file can be copied again.",
        (), _OLDER,
    ),
    FindingKind(
        "run-incomplete", "error", "a checkpoint of the run lacks a part that resuming needs",
        "Without the optimizer, the scheduler or the trainer's state, a trainer fails, or silently starts these parts "
        "anew: transformers' Trainer loads neither optimizer nor scheduler if one of them is missing. If no "
        "checkpoint of the run has the part, the run saved only weights, and this is a warning.",
        (), _OLDER,
    ),
    FindingKind(
        "run-rank", "error", "a checkpoint of the run lacks the files of a rank",
        "Each process of a distributed job writes its own files. A process did not finish its save, or a node's disk "
        "was not copied. Where only the states of random generators are missing, the trainer resumes with other "
        "random numbers on that rank, and this is a warning.",
        (), _OLDER,
    ),
    FindingKind(
        "run-unfinished", "error", "the save of a checkpoint was not finished",
        "The folder is empty, has the files of ranks without the index that is written last (.metadata), has the name "
        "of an unfinished save (tmp-checkpoint-500), or has a marker (-unfinished) beside it.",
        (), "resume from an older checkpoint, and delete the unfinished one",
    ),
    FindingKind(
        "run-steps", "error", "the parts of a checkpoint are from different steps",
        "The step in the name of the checkpoint, in the trainer's state and in the files of each rank must be the "
        "same. Files of two saves are in one folder, or the folder was renamed.",
        (), "copy all files of the checkpoint from one save, or resume from a different one",
    ),
    FindingKind(
        "run-latest", "error", "the file that names the newest checkpoint names a missing or broken one",
        "DeepSpeed reads `latest`, Megatron `latest_checkpointed_iteration.txt`, and Lightning `last.ckpt`. A job that "
        "was killed between writing the checkpoint and the name, or a folder that was deleted or copied in part, "
        "leaves a name that cannot be loaded. Write the name of a whole checkpoint into the file.",
        (), "write the name of a whole checkpoint into the file",
    ),
    FindingKind(
        "run-lost", "error", "no checkpoint of the run can be resumed from",
        "Each checkpoint of the folder is damaged, incomplete or unfinished. Weights that are intact can still start "
        "a new run: `ckptfix doctor CHECKPOINT` shows what is left of each.",
        (), "start a new run from the weights of a checkpoint whose model is intact: `ckptfix doctor CHECKPOINT`",
    ),
)  # fmt: skip
