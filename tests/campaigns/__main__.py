"""The long campaigns over what is written, ``python -m campaigns``. Ends with 1 where one finds a fault."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from campaigns import memory, power_cuts, repaired

if __name__ == "__main__":
    found = 0
    for campaign in (power_cuts, memory, repaired):
        with tempfile.TemporaryDirectory() as folder:
            found += campaign.main(Path(folder))
    sys.exit(found > 0)
