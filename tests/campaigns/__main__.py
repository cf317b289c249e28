"""The long campaigns over what is written and matched, ``python -m campaigns``. Ends with 1 where one finds a fault."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from campaigns import (
    full_disk,
    in_place,
    match_answers,
    memory,
    power_cuts,
    repaired,
    store_faults,
    swapped_ranks,
)

if __name__ == "__main__":
    found = 0
    for campaign in (power_cuts, memory, in_place, full_disk, repaired, swapped_ranks, store_faults, match_answers):
        with tempfile.TemporaryDirectory() as folder:
            found += campaign.main(Path(folder).resolve())
    sys.exit(found > 0)
