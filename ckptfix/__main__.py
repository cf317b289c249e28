"""``python -m ckptfix``."""

from ckptfix.cli import main

if __name__ == "__main__":
    main()
