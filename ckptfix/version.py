"""The version of ckptfix: of the code that runs, whether it is installed or run from a checkout."""

VERSION = "0.1.0"
