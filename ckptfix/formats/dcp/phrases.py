r"""Patterns of the opcodes with which torch pickles the entries of a `.metadata`: only names and numbers differ.

Protocols 4 and 5, without their frames. Objects that were pickled before are fetched from the memo, and new objects get
the next number there (MEMOIZE, ``\\x94``).
"""

from __future__ import annotations

import re

from ckptfix.pickles.opcodes import pushed_int

GET = rb"(?:h.|j....)"
INT = rb"(?:K.|M..|J....|\x8a\x05.{5}|\x8a\x06.{6})"
INTS = rb"(?:\)|%b\x85\x94|%b\x86\x94|%b\x87\x94|\(%b{4,7}t\x94)" % (INT, INT * 2, INT * 3, INT)

_OBJECT = rb"(%b)\)\x81\x94\}\x94\(" % GET
"""The class, an object of it, and the dict of its attributes: two numbers."""

_SIZE = rb"(%b)(?:(%b)\x85\x94R\x94)?" % (GET, INTS)
"""``torch.Size`` and the tuple in it; or a size that was created before."""

_PROPERTIES = rb"(?:(%b)\)\x81\x94\((%b)(%b)[\x88\x89](%b)[\x88\x89]t\x94b|(%b))" % (GET, GET, GET, GET, GET)
"""Class, dtype, layout, requires_grad, memory format, pin_memory; or properties that were created before."""

TENSOR = re.compile(_OBJECT + rb"(%b)" % GET + _PROPERTIES + rb"(%b)" % GET + _SIZE + rb"(%b)\]\x94" % GET, re.DOTALL)
"""The opcodes after a tensor's name, up to its list of chunks: class, "properties", these, "size", that, "chunks"."""

CHUNK = re.compile(_OBJECT + rb"(%b)" % GET + _SIZE + rb"(%b)" % GET + _SIZE + rb"ub", re.DOTALL)
"""Class, "offsets", a size, "sizes", a size."""

VALUE = re.compile(rb"(%b)\)\x81\x94" % GET, re.DOTALL)
"""The opcodes after the name of a value: its class."""

INDEX = re.compile(_OBJECT + rb"(%b)" % GET, re.DOTALL)
"""Class and "fqn"; the name follows."""

BOX = re.compile(
    rb"(%b)(?:%b|N)(?:(%b)(?:N|%b))?ub" % (GET, INT, GET, _SIZE) + _OBJECT + rb"(%b)" % GET, re.DOTALL
)
"""The opcodes after the name in an index: "index", a number, "offset", a size; class of its place, "relative_path"."""

PLACE = re.compile(rb"(%b)(%b)(%b)(%b)ub" % (GET, INT, GET, INT), re.DOTALL)
"""The opcodes after the name of a file: "offset", a number, "length", a number."""

_ONE = re.compile(INT, re.DOTALL)


def numbers(pushed: bytes) -> tuple[int, ...]:
    """Return the numbers of a tuple."""
    return tuple(pushed_int(one) for one in _ONE.findall(pushed.removeprefix(b"("))) if pushed != b")" else ()
