"""What a pickle names and hides: functions, other pickles, strings of another age. Read as text, never run."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from ckptfix.checkpoint import Finding
from ckptfix.errors import CkptfixError
from ckptfix.formats import trusted
from ckptfix.ops.catalogue import found
from ckptfix.pickles import Call, Global, Graph, PersId, parse
from ckptfix.pickles import opcodes as op
from ckptfix.pickles.graph import attributes, pairs

_DANGEROUS_MODULES = frozenset({
    "os", "posix", "nt", "subprocess", "sys", "shutil", "importlib", "runpy", "pip", "webbrowser", "socket", "pty",
    "inspect", "timeit", "bdb", "cProfile", "profile", "code", "codeop", "ctypes", "pickle", "_pickle", "dill",
    "cloudpickle", "joblib", "marshal", "types", "http", "urllib", "requests", "asyncio", "multiprocessing",
    "threading", "tempfile", "pydoc", "pdb", "doctest", "trace", "commands", "popen2", "ftplib", "smtplib",
    "platform", "site", "distutils", "setuptools", "ensurepip", "venv", "zipimport", "pkgutil", "imp", "signal",
    "operator", "functools", "_io", "io", "fileinput", "glob", "builtins", "aiohttp", "httpx", "cffi", "idlelib",
    "lib2to3", "test", "ssl", "telnetlib", "xmlrpc",
})  # fmt: skip
"""Top modules of functions that run code, reach the network or touch files; no checkpoint needs one of theirs."""

_HARMLESS = frozenset(
    {f"builtins.{name}" for name in ("set", "frozenset", "dict", "list", "tuple", "int", "float", "str", "bytes",
                                     "bool", "complex", "bytearray", "object", "slice", "range")}
    | {"functools.partial", "types.SimpleNamespace", "types.MappingProxyType", "_io.BytesIO"}
)  # fmt: skip
"""Names of those modules that hold data; `partial` runs nothing by itself, and is told like any other."""

_DANGEROUS = frozenset({
    "torch.load", "torch.serialization.load", "torch.hub.load", "torch.jit.load", "torch.storage._load_from_bytes",
    "torch.utils.cpp_extension.load", "torch._inductor.codecache.compile_file", "numpy.load",
    "numpy.testing._private.utils.runstring", "torch.utils.cpp_extension.load_inline",
    "torch.hub.load_state_dict_from_url",
})  # fmt: skip

_ABOUT = (
    ("numpy._core", "a name of NumPy 2, which NumPy 1 does not have"),
    ("numpy", "a NumPy object"),
    ("pathlib", "a path, which the other system can not build"),
    ("argparse.Namespace", "hyper-parameters"),
    ("pytorch_lightning", "an object of Lightning"),
    ("lightning", "an object of Lightning"),
    ("omegaconf", "a configuration of OmegaConf"),
    ("__main__", "a class of the script that saved it"),
)
"""Beginnings of names, and what such a thing is."""

MOST_NESTED = 1 << 20
"""Bytes of a value or record up to which it is tried as a pickle."""


def scan(graph: Graph, where: str, base: int = 0) -> Iterator[Finding]:
    """Findings about a parsed pickle.

    Args:
        where: its record.
        base: offset in the file of the first byte that the graph's spans count from.
    """
    calls = _calls(graph)
    seen: set[str] = set()
    for node in graph.globals:
        name = trusted.canonical(node)
        if name not in seen and not trusted.accepted(name):
            seen.add(name)
            yield _global(name, where, base + node.start, calls.get(name), base)
    beyond = [(place, code) for code, place in graph.rare.items() if code not in op.WEIGHTS_ONLY]
    if beyond:
        place, code = min(beyond)
        message = f"opcode {op.NAMES[code]} (pickle protocol {graph.protocol}), which weights_only=True refuses"
        yield found("unsupported-opcode", message, where=where, offset=base + place)
    yield from _old_strings(graph, where, base)
    yield from _nested(graph, where, base)


def _global(name: str, where: str, offset: int, call: int | None, base: int) -> Finding:
    module = name.partition(".")[0]
    called = "" if call is None else f"; it would be called at {base + call:#x}"
    if is_dangerous(name):
        return found("dangerous-global", f"names {name}{called}; it was not imported", where=where, offset=offset)
    about = next((text for front, text in _ABOUT if name == front or name.startswith(f"{front}.")), "")
    what = f"names {name}{f' ({about})' if about else f', a name of the package {module}' if module else ''}{called}"
    return found("foreign-global", f"{what}; it was not imported", where=where, offset=offset)


def is_dangerous(name: str) -> bool:
    """Whether the global `name`, ``"module.name"``, runs code, reaches the network or touches files."""
    if name in _HARMLESS or trusted.accepted(name):
        return False
    parts = name.split(".")
    if name in _DANGEROUS or parts[0] in _DANGEROUS_MODULES:
        return True
    # A dotted name under an innocent module (`torch._utils` `os.system`) reaches what that module imported.
    return any(part in _DANGEROUS_MODULES and part not in ("code", "test", "types", "platform") for part in parts[1:-1])


def _calls(graph: Graph) -> dict[str, int]:
    """Name of a refused global -> offset of the first call of it that the object holds."""
    found_calls: dict[str, int] = {}
    if all(trusted.accepted(trusted.canonical(node)) for node in graph.globals):
        return found_calls
    seen: set[int] = set()
    queue = deque([graph.root])
    while queue:
        node = queue.popleft()
        kind = type(node)
        if kind in (str, int, float, bool, bytes) or id(node) in seen:
            continue
        seen.add(id(node))
        if kind is Call:
            if type(node.func) is Global:
                found_calls.setdefault(trusted.canonical(node.func), node.position)
            queue += [node.func, node.args, node.kwargs, node.state]
            queue += node.elements or ()
            queue += [part for pair in node.items or () for part in pair]
        elif kind in (tuple, list):
            queue += node
        elif kind is PersId:
            queue.append(node.pid)
        elif hasattr(node, "items"):
            queue += [part for pair in node.items for part in pair]
        elif hasattr(node, "elements"):
            queue += node.elements
    return found_calls


def _old_strings(graph: Graph, where: str, base: int) -> Iterator[Finding]:
    """Strings without an encoding; those with bytes above 127 are what Python 3 stops at."""
    codes = {op.STRING, op.BINSTRING, op.SHORT_BINSTRING} & set(graph.rare)
    if not codes:
        return
    first = min(graph.rare[code] for code in codes)
    high = -1
    for opcode in op.walk(graph.data, graph.start, graph.end):
        if opcode.code not in codes:
            continue
        # A length stands before the bytes; STRING is a line of text in which high bytes are written \\x...
        width = {op.BINSTRING: 4, op.SHORT_BINSTRING: 1}.get(opcode.code, 0)
        text = graph.data[opcode.arg + width : opcode.end]
        if not text.isascii() or (not width and b"\\x" in text):
            high = opcode.start
            break
    if high >= 0:
        yield found("python2-strings", where=where, offset=base + high)
    else:
        message = "strings as Python 2 wrote them, all of them ASCII"
        yield found("python2-strings", message, where=where, offset=base + first, severity="info")


def _nested(graph: Graph, where: str, base: int) -> Iterator[Finding]:
    """Bytes values that are pickles and name functions."""
    if not {op.BINBYTES, op.SHORT_BINBYTES, op.BINBYTES8, op.BYTEARRAY8} & set(graph.rare):
        return
    for opcode in op.walk(graph.data, graph.start, graph.end):
        if opcode.code not in (op.BINBYTES, op.SHORT_BINBYTES, op.BINBYTES8, op.BYTEARRAY8):
            continue
        width = {op.BINBYTES: 4, op.SHORT_BINBYTES: 1}.get(opcode.code, 8)
        names = named_by(graph.data[opcode.arg + width : opcode.end])
        if names:
            message = f"a bytes value holds a pickle that names {', '.join(names[:3])}"
            yield found("nested-pickle", message, where=where, offset=base + opcode.start)


def named_by(data: bytes) -> list[str]:
    """Globals outside the known list that `data`, if it is a pickle, names; nothing for anything else."""
    if data[:1] != b"\x80" or data[1:2] > b"\x05" or len(data) > MOST_NESTED:
        return []
    try:
        graph = parse(data)
    except CkptfixError:
        return []
    names = dict.fromkeys(trusted.canonical(node) for node in graph.globals)
    return [name for name in names if not trusted.accepted(name)]


def after_stop(data: bytes, end: int, where: str, base: int = 0) -> Iterator[Finding]:
    """What follows the STOP of a pickle whose record ends with `data`."""
    if end >= len(data):
        return
    rest = len(data) - end
    try:
        second = parse(data, start=end)
    except CkptfixError:
        message = f"{rest:,} bytes follow the end of the pickle"
        yield found("bytes-after-stop", message, where=where, offset=base + end)
        return
    names = [name for name in map(trusted.canonical, second.globals) if not trusted.accepted(name)]
    named = f", and names {', '.join(dict.fromkeys(names))}" if names else ""
    message = f"another pickle of {second.end - end:,} bytes follows the first{named}"
    yield found("stacked-pickles", message, where=where, offset=base + end)


def before_break(data: bytes, where: str, base: int = 0, start: int = 0) -> Iterator[Finding]:
    """The refused globals that a broken pickle names before it breaks."""
    texts: deque[str] = deque(maxlen=2)
    seen: set[str] = set()
    opcodes = op.walk(data, start, len(data))
    while True:
        try:
            opcode = next(opcodes)
        except (StopIteration, ValueError, IndexError):
            return
        raw = data[opcode.arg : opcode.end]
        names: list[tuple[str, str]] = []
        if opcode.code in (op.GLOBAL, op.INST):
            module, _, name = raw.decode("utf-8", "replace").rstrip("\n").partition("\n")
            names.append((module, name))
        elif opcode.code in (op.BINUNICODE, op.SHORT_BINUNICODE, op.BINUNICODE8):
            width = {op.BINUNICODE: 4, op.SHORT_BINUNICODE: 1}.get(opcode.code, 8)
            texts.append(raw[width : width + 200].decode("utf-8", "replace"))
        elif opcode.code == op.STACK_GLOBAL and len(texts) == 2:
            names.append((texts[0], texts[1]))
        for module, name in names:
            full = trusted.canonical(Global(module, name, opcode.start))
            if full not in seen and not trusted.accepted(full):
                seen.add(full)
                yield _global(full, where, base + opcode.start, None, base)


def modules(graph: Graph) -> tuple[str, int] | None:
    """(class, offset) of the pickled module that is the object or one of its values; None if there is none."""
    candidates = [graph.root, *(value for _, value in pairs(graph.root) or ())]
    for node in candidates:
        if type(node) is Call:
            names = {str(name) for name, _ in attributes(node.state)}
            if {"_parameters", "_modules"} <= names:
                arguments = node.arguments
                func = node.func if type(node.func) is Global else arguments[0] if arguments else None
                # copyreg._reconstructor(cls, object, None) and NEWOBJ stand for the same.
                if type(func) is Global and func.name in ("_reconstructor", "__newobj__") and arguments:
                    func = arguments[0]
                return (func.full if type(func) is Global else "a module", node.position)
    return None
