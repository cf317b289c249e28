"""The long campaigns over the writer, a table each: ``python -m campaigns``. Ends with 1 where one found a fault."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from campaigns import in_place, memory, power_cuts

if __name__ == "__main__":
    found = 0
    for campaign in (power_cuts, memory, in_place):
        with tempfile.TemporaryDirectory() as folder:
            found += campaign.main(Path(folder).resolve())
    sys.exit(found > 0)
