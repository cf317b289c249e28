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
    pipes,
    power_cuts,
    repaired,
    signals,
    store_faults,
    swapped_ranks,
)

if __name__ == "__main__":
    found = 0
    campaigns = (
        power_cuts,
        memory,
        in_place,
        full_disk,
        repaired,
        swapped_ranks,
        store_faults,
        pipes,
        signals,
        match_answers,
    )
    for campaign in campaigns:
        with tempfile.TemporaryDirectory() as folder:
            found += campaign.main(Path(folder).resolve())
    sys.exit(found > 0)
