"""The entry point of ``python -m ckptfix`` and of the console script."""

from __future__ import annotations

import signal
from typing import NoReturn


def main() -> NoReturn:
    """Run the command line; an interrupt during the imports ends the process without a traceback."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from ckptfix import cli

    cli.main()


if __name__ == "__main__":
    main()
