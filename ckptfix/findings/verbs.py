"""Findings of the commands that write, for those who read JSON: what a command noticed while it worked."""

from __future__ import annotations

from ckptfix.findings.load_errors import LoadError as E
from ckptfix.findings.row import FindingKind

VERBS: tuple[FindingKind, ...] = (
    FindingKind("no-such-location", "warning", "no tensor is on this device",
          "map-location was asked to move tensors from a device that no tensor is on."),
    FindingKind("fixed-device", "warning", "a device that ckptfix cannot change",
          "The pickle computes it, or has it in a constant; torch restores it unchanged.", (E.NO_GPU,)),
    FindingKind("prefix-twice", "info", "the keys already began with the prefix",
          "add-module put a second one before them."),
    FindingKind("average-kept", "info", "averaged weights keep the module. of their wrapper",
          "AveragedModel and similar classes hold the model as module, and the code that loads them expects "
          "that prefix. --at removes it too."),
    FindingKind("partial-prefix", "info", "only some keys of a state dict have the prefix",
          "The model may have a part with that name. strip-module refuses such a state dict without --partial. "
          "0-d tensors do not count: they keep their keys, and the result names them."),
    FindingKind("unused-rule", "warning", "a rule that matched no key",
          "rename got a rule that changes nothing, or select or cast got a glob that matches nothing."),
    FindingKind("optimizer-names-left", "info", "names in an optimizer that were not changed",
          "They match none of the keys that changed."),
    FindingKind("optimizer-left", "info", "the optimizer still has the state of parameters that were dropped",
          "select drops tensors of a model. The optimizer numbers its parameters by their position in the whole "
          "model, so after a selection its state would refer to the wrong parameters. slim --no-optimizer leaves it "
          "out."),
    FindingKind("out-of-range", "warning", "numbers outside the range of a dtype",
          "cast turned them into infinity, NaN or the largest number of the dtype, as torch does. --keep leaves "
          "their tensors unchanged, --on-overflow error writes nothing, and bfloat16 has the range of float32."),
    FindingKind("batchnorm", "warning",
          "BatchNorm statistics are stale: run torch.optim.swa_utils.update_bn(loader, model) before using them",
          "running_mean and running_var are averages of the statistics of the single models; the averaged model "
          "needs its own."),
    FindingKind("adapters-differ", "warning", "adapters of different ranks or alphas are put together by key",
          "The mean of lora_A times the mean of lora_B is not the mean of the updates, and one alpha cannot be right "
          "for tensors that had two: `ckptfix lora merge BASE A B -o OUT --scale 0.5` merges the updates."),
    FindingKind("left-behind", "info", "not in the output",
          "The output's format holds only one state dict, or only strings."),
    FindingKind("lost", "warning", "a tensor that the output's format cannot store",
          "It was dropped because --drop-unsupported was given."),
    FindingKind("tie-lost", "warning", "two storages that shared bytes are stored separately",
          "The output's format cannot store views of a storage."),
    FindingKind("optimizer-shapes", "warning", "the optimizer's tensors keep their shapes",
          "match --reshape changed a parameter's shape, but not the shapes of its averages in the optimizer."),
    FindingKind("surrogate-name", "warning", "a name that is not valid Unicode",
          "JSON cannot represent it, so other characters replace the invalid ones."),
    FindingKind("refused", "warning", "a command refuses the file",
          "In a report of match, nothing was written. fix leaves out a step that only warnings need."),
    FindingKind("no-counterpart", "warning", "a key that only one side has", "match found no key to pair it with."),
    FindingKind("dropped", "warning", "a value that sanitize removed",
          "It has no counterpart among plain values; the weights are unchanged.", (E.NOT_ALLOWED,)),
    FindingKind("unloadable", "warning", "a value that torch.load fails on",
          "sanitize replaced every object that torch can refuse by its name with plain values. This one "
          "describes no tensor of the file, or is a call that fails; the output contains it unchanged."),
    FindingKind("not-taken", "warning", "tensors that extract left out",
          "They are stored in a class's private format, or are not dense tensors."),
    FindingKind("hook-not-run", "info", "a hook that might change the state dict was not run",
          "Code of the model would have to run; extract reads only the stored values."),
    FindingKind("all-buffers", "info", "the output includes buffers that a state dict would leave out",
          "TorchScript does not record which buffers have persistent=False."),
    FindingKind("filled", "warning", "a lost tensor was filled",
          "repair --fill or --fill-from put other values in its place."),
    FindingKind("byteorder-lost", "warning", "the byte order is lost",
          "repair assumed little-endian, the byte order of nearly all files."),
    FindingKind("no-directory", "info", "the zip directory is lost", "repair read the records from their own headers.",
    (E.NO_DIRECTORY,)),
    FindingKind("wrong-root", "info", "data.pkl was in the wrong folder",
          "repair wrote one folder with everything in it.", (E.PACKED_AGAIN,)),
    FindingKind("unreadable", "warning", "a record that repair could not read",
          "It is encrypted, or compressed with an unsupported method."),
    FindingKind("unverifiable", "warning", "records without checksums",
          "The records that repair kept have the right size; their bytes cannot be verified."),
    FindingKind("unzipped", "info", "the archive was unzipped",
          "repair put the folder's files into one archive again.", (E.UNPACKED,)),
    FindingKind("gzip", "info", "repair decompressed gzip",
          "The checkpoint was compressed as a whole.", (E.NOT_A_CHECKPOINT,)),
    FindingKind("pickle-lost", "warning", "the pickle is lost, and with it all keys",
          "Only numbered storages are left; repair --like gives them keys where their sizes identify them.",
          (E.NO_DIRECTORY,)),
    FindingKind("torn-write", "warning", "records of two writes in one file",
          "Two processes wrote to one file, or it was overwritten in part. Save on rank 0 only.",
          (E.STORAGE_SIZE, E.WRONG_VALUES)),
    FindingKind("misread", "warning", "records whose bytes torch does not read correctly",
          "The directory of the input places them at the position of other bytes. torch checks no checksums, "
          "and loads those; repair kept the bytes that match the record's checksum.", (E.WRONG_VALUES,)),
    FindingKind("more-open", "warning", "a replaced file that more users can read than the input",
          "It keeps its mode; a new output can be read only by those who can read all inputs."),
    FindingKind("links-left", "warning", "other hard links of a replaced file",
          "The output is a new file under one of the names; the other names still refer to the old content."),
    FindingKind("linked-files", "warning", "unchanged files are shared with the input",
          "With --link they are hard links, where the file system supports them. torch opens the files of a "
          "folder that it saves to with \"wb\": saving to either folder again changes both. Save to a new "
          "folder, or delete one of the two first."),
    FindingKind("attributes-lost", "warning", "extended attributes of a replaced file",
          "They may describe the old content (a checksum, an origin), so ckptfix did not copy them."),
    FindingKind("note", "info", "a remark of match", "It concerns the pairs that match found."),
)  # fmt: skip
