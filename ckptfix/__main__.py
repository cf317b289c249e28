"""The entry point of ``python -m ckptfix`` and of the console script."""

from __future__ import annotations

import gc
import os
import signal
from typing import NoReturn


def main() -> NoReturn:
    """Run the command line; an interrupt during the imports ends the process without a traceback."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    # The threads of numpy's BLAS wait actively as they start, for 50 ms, and for each other on a busy machine: a
    # decomposition takes twenty times as long.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    gc.set_threshold(20_000)  # imports make objects that stay: looking through them every 700 takes 5 ms
    try:
        from ckptfix import cli

        cli.main()
    finally:
        gc.freeze()  # or the interpreter looks through all of them twice as it ends: 10 ms


if __name__ == "__main__":
    main()
