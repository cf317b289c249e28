"""Mutants of our own code that no test can kill, and why."""

from __future__ import annotations

EQUIVALENT: dict[str, str] = {
    "formats/safetensors/edit.py: _cuts: comparison: kept[index][0] < stop -> kept[index][0] <= stop #5": (
        "a kept range that begins where the dropped one ends cuts off what the end of the loop would cut off"
    ),
    "formats/torch/emit.py: reference: constant: 0 -> 1 #0": (
        "the position of a reference that is made, and was read nowhere, is not looked at"
    ),
    "formats/torch/emit.py: dense_call: constant: 0 -> 1 #1": (
        "the position of a class that is made, and was read nowhere, is not looked at"
    ),
    "io/background_checks.py: Checking._is_wanted: comparison: length < PORTION -> length <= PORTION #1": (
        "what is not summed as it is read is summed at the end"
    ),
    "io/background_checks.py: Checking.stop: statement: self._stopped.set() -> pass #0": (
        "checks that are not told to stop come to their end, and nobody asks for their results"
    ),
    "formats/torch/legacy_layout.py: _widened: constant: 0 -> 1 #1": "a pickle of a dict has no K as its first byte",
    "formats/torch/versions.py: _older: constant: 8 -> 9 #0": "no call has more than a few older forms",
    "io/byte_view.py: _stride_of: constant: 1 -> 2 #9": "nobody takes a step along a dimension of one element",
    "io/chunks.py: _Tiling.__init__: constant: 1024 -> 1025 #0": (
        "one look more of a limit that is far above what any tensor needs"
    ),
    "formats/torch/unchanged/strings.py: _behind_keys: constant: 0 -> 1 #9": (
        "an empty key is read as any other string, to its end"
    ),
    "pickles/folded.py: Phrases._run: constant: 4 -> 5 #12": (
        "what is not taken at once is compared with the molds one by one, and taken all the same"
    ),
    "pickles/folded.py: Phrases._run: comparison: number < _MOST_NUMBERS -> number <= _MOST_NUMBERS #7": (
        "there is room for the numbers of many more phrases below the last number"
    ),
    "pickles/paged.py: Pages.__getitem__: comparison: 0 <= here < len(self._page) -> 0 < here < len(self._page) #1": (
        "the page that begins there is read once more, and is the same"
    ),
    "zips/records.py: DirectoryRecords.with_ending: constant: 0 -> 1 #0": (
        "no name ends at the first bytes of a directory"
    ),
    "formats/shards/edit.py: _Part._rename: comparison: len(edit.names) < len(own) -> len(edit.names) <= len(own) #0": (
        "whether the names of the edit or of the shard are gone through, those of both are found"
    ),
    "formats/shards/edit.py: _Part._rename: condition: if len(edit.names) < len(own): ... -> "
    "if not len(edit.names) < len(own): ... #0": (
        "whether the names of the edit or of the shard are gone through, those of both are found"
    ),
    "zips/archive_sequence.py: _zips: comparison: 0 <= place < length -> 0 <= place <= length #2": (
        "a signature of four bytes cannot begin at the last but two of what was read"
    ),
}
"""`Mutant.what` -> why nobody can see the change."""
