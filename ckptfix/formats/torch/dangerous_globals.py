"""Globals that run code, access the network or touch files when they are called."""

from __future__ import annotations

from ckptfix.formats.torch import weights_only
from ckptfix.pickles.machine import UNRESOLVABLE

_DANGEROUS_MODULES = frozenset({
    "os", "posix", "nt", "subprocess", "sys", "shutil", "importlib", "runpy", "pip", "webbrowser", "socket", "pty",
    "inspect", "timeit", "bdb", "cProfile", "profile", "code", "codeop", "ctypes", "pickle", "_pickle", "dill",
    "cloudpickle", "joblib", "marshal", "types", "http", "urllib", "requests", "asyncio", "multiprocessing",
    "threading", "tempfile", "pydoc", "pdb", "doctest", "trace", "commands", "popen2", "ftplib", "smtplib",
    "platform", "site", "distutils", "setuptools", "ensurepip", "venv", "zipimport", "pkgutil", "imp", "signal",
    "operator", "functools", "_io", "io", "fileinput", "glob", "builtins", "aiohttp", "httpx", "cffi", "idlelib",
    "lib2to3", "test", "ssl", "telnetlib", "xmlrpc", "_operator", "_posixsubprocess", "_ctypes", "_socket", "_ssl",
    "_asyncio", "_signal", "_thread", "_imp", "_frozen_importlib", "_aix_support", "_osx_support", "posixpath",
    "ntpath", "nturl2path", "linecache", "sqlite3",
})  # fmt: skip
"""Top-level modules with functions that run code, access the network or touch files; no checkpoint needs them."""

_HARMLESS = frozenset(
    {f"builtins.{name}" for name in ("set", "frozenset", "dict", "list", "tuple", "int", "float", "str", "bytes",
                                     "bool", "complex", "bytearray", "object", "slice", "range")}
    | {"functools.partial", "types.SimpleNamespace", "types.MappingProxyType", "_io.BytesIO"}
    | {"joblib.numpy_pickle.NumpyArrayWrapper", "joblib.numpy_pickle.NDArrayWrapper"}
)  # fmt: skip
"""Names in those modules that hold data; `partial` runs nothing by itself, and is reported like any other global."""

_DANGEROUS = frozenset({
    "torch.load", "torch.serialization.load", "torch.hub.load", "torch.jit.load", "torch.storage._load_from_bytes",
    "torch.utils.cpp_extension.load", "torch._inductor.codecache.compile_file", "numpy.load",
    "numpy.testing._private.utils.runstring", "torch.utils.cpp_extension.load_inline",
    "torch.hub.load_state_dict_from_url", f"{UNRESOLVABLE}.{UNRESOLVABLE}",
})  # fmt: skip

_RESTORING = ("numpy.random._pickle.", "torch.jit._pickle.")
"""Modules with functions that restore NumPy's generators and TorchScript's lists, and do nothing else."""

_PROGRAM = "__torch__"
"""Top-level module of the classes of a TorchScript program, which Python never imports."""


def is_dangerous(name: str) -> bool:
    """Return whether the global `name`, ``"module.name"``, runs code, accesses the network or touches files."""
    if name in _HARMLESS or weights_only.accepted(name):
        return False
    parts = [part.strip() for part in name.split(".")]
    if parts[0] == _PROGRAM:
        return False
    if name in _DANGEROUS or parts[0] in _DANGEROUS_MODULES:
        return True
    # A dotted name under a harmless module (`torch._utils` `os.system`) reaches modules that this one imported.
    inner = parts[3:-1] if name.startswith(_RESTORING) else parts[1:-1]
    return any(part in _DANGEROUS_MODULES and part not in ("code", "test", "types", "platform") for part in inner)
