"""Findings of the commands that write: what they noticed on the way, for those who read JSON."""

from __future__ import annotations

from ckptfix.ops.catalogue_row import Entry

VERBS: tuple[Entry, ...] = (
    Entry("no-such-location", "warning", "no tensor is on this device",
          "map-location was told to move what is not there."),
    Entry("fixed-device", "warning", "a device that no edit reaches",
          "It is computed in the pickle, or stands in a constant; torch restores it as it is.", (5,)),
    Entry("partial-prefix", "info", "only some names of a mapping carry the prefix",
          "A model may have a part of that name. strip-module refuses such a mapping without --partial."),
    Entry("unused-rule", "warning", "a rule that matched no name", "rename was given a rule that changes nothing."),
    Entry("optimizer-names-left", "info", "names in an optimizer that stay",
          "They are not among the names that changed."),
    Entry("left-behind", "info", "not in the output", "The output's format holds one state dict, or strings only."),
    Entry("lost", "warning", "a tensor that the output cannot hold", "Dropped because --drop-unsupported was given."),
    Entry("tie-lost", "warning", "two storages that shared bytes are stored apart",
          "The output's format has no views of storages."),
    Entry("optimizer-shapes", "warning", "the optimizer's tensors keep their shapes",
          "match --reshape changed a parameter's shape, and not those of its averages."),
    Entry("surrogate-name", "warning", "a name that is no valid Unicode",
          "It can not be written to JSON as it is, and gets other characters."),
    Entry("refused", "warning", "what match would refuse", "The report says why; nothing was written."),
    Entry("no-counterpart", "warning", "a name that only one side has", "match found nothing to pair it with."),
    Entry("note", "info", "a remark of a matcher", "Something to know about the pairs."),
)  # fmt: skip
