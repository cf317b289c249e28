"""Tables of names: rules files that ship with the package, a file for each family of models, or for a format.

A table holds conversions. A comment ``# names: FROM:TO`` begins one, and its lines give a model the names of TO that
has those of FROM; run backwards, they lead from TO to FROM. Further comments describe it::

    # family: llama
    # models: Llama 1 to 3.3, Mistral 7B
    # types: llama mistral
    #
    # names: meta:hf
    # versions: llama-models 0.3.0, transformers 5.24.0
    # source: https://...
    tok_embeddings.weight -> model.embed_tokens.weight

Two conversions of a table that share an ecosystem make a third: from ``meta:hf`` and ``hf:torchtune`` follows
``meta:torchtune``. A user's own file may have such comments too.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import field, replace
from functools import cache
from importlib.resources import files
from itertools import product

from ckptfix.dataclass import dataclass
from ckptfix.names.rulefile import ANY_SIZE, Rules, Sizes, read, sizes_in

FAMILIES: tuple[str, ...] = (
    *("llama", "qwen2", "qwen3", "mixtral", "qwen2_moe", "qwen3_moe", "gpt2", "gpt_neox"),
    *("whisper", "vit", "clip", "sd_unet", "sdxl_unet", "sd_vae"),
)
"""The tables of families, in order: ``FAMILY.rules`` in this folder."""

FORMATS: tuple[str, ...] = ("gguf", "keras", "flax", "tensorflow", "mxnet")
"""The tables of formats with names of their own: ``FORMAT.rules``, in which each conversion states its family."""

OTHER_WORDS: Mapping[str, str] = {
    "transformers": "hf",
    "huggingface": "hf",
    "llama": "meta",
    "mcore": "megatron",
    "openai-whisper": "openai",
    "openai-clip": "openai",
    "ldm": "original",
    "stable-diffusion": "original",
}
"""Other words for an ecosystem -> the word in the tables."""

_ABOUT = re.compile(r"#\s*(names|family|models|types|formats|versions|source|note|one-way):\s+(\S.*?)\s*")
_PAIR = re.compile(r"([a-z0-9][\w.-]*):([a-z0-9][\w.-]*)", re.IGNORECASE)

@dataclass(frozen=True, slots=True)
class NameConversion:
    """The rules that lead from the names of one ecosystem to those of another.

    Attributes:
        names: the ecosystems that the file states, in its direction; both empty if it states none.
        path: the file.
        text: its lines, with those of its other conversions left blank.
        about: the comments that describe it, by their words.
        backwards: the lines are to be run backwards.
    """

    names: tuple[str, str]
    path: str
    text: str
    about: Mapping[str, str] = field(default_factory=dict)
    backwards: bool = False

    @property
    def old(self) -> str:
        """The ecosystem that it leads from."""
        return self.names[self.backwards]

    @property
    def new(self) -> str:
        """The ecosystem that it leads to."""
        return self.names[not self.backwards]

    @property
    def family(self) -> str:
        """The family of models, or else the file."""
        return self.about.get("family", self.path)

    @property
    def types(self) -> tuple[str, ...]:
        """The values of ``model_type`` in a config.json that it is for; empty for any."""
        return tuple(self.about.get("types", "").split())

    def made_for(self, format: str) -> bool:
        """Return whether it is for files of this format, before any other table."""
        return format in self.about.get("formats", "").split()

    @property
    def needs(self) -> frozenset[str]:
        """The sizes of the model that its lines need."""
        return sizes_in(self.text)

    def may_match(self, key: str) -> bool:
        """Return whether a line may match `key`, in either direction, by its first and last components alone.

        The lines are not read: that takes a hundred times as long, and a key fits few tables.
        """
        ends = zip((key.partition(".")[0], key.rpartition(".")[2]), _ends(self.text), strict=True)
        return all(known is None or component in known for component, known in ends)

    @property
    def ways(self) -> tuple[NameConversion, ...]:
        """The conversion in each direction in which it can be run."""
        return (self,) if "one-way" in self.about else (self, self.turned())

    def turned(self) -> NameConversion:
        """Return the conversion in the other direction."""
        return replace(self, backwards=not self.backwards)

    def rules(self, sizes: Sizes = ANY_SIZE) -> Rules:
        """Return its rules, for a model of these sizes.

        Raises:
            CkptfixError: a line is malformed or has no inverse, or a size is not stated.
        """
        if sizes is ANY_SIZE:
            return _matching(self.text, self.path, any(self.names), self.backwards)
        rules = read(self.text, self.path, sizes, table=any(self.names))
        return rules.reversed() if self.backwards else rules

    def __str__(self) -> str:
        return f"{self.family} {self.old}:{self.new}" if any(self.names) else self.path


@cache
def _ends(text: str) -> tuple[frozenset[str] | None, frozenset[str] | None]:
    """Return the first components of all words in lines, and the last ones; None if a placeholder is among them."""
    words = [word for line in text.split("\n") if not line.startswith("#") for word in line.split()]
    firsts = frozenset(word.partition(".")[0] for word in words)
    lasts = frozenset(word.rpartition(".")[2] for word in words)
    return _closed(firsts), _closed(lasts)


def _closed(components: frozenset[str]) -> frozenset[str] | None:
    return None if any("{" in one for one in components) else components


@cache
def _matching(text: str, path: str, table: bool, backwards: bool) -> Rules:
    """Return rules that only match keys, whatever the sizes: several questions need those of every table."""
    rules = read(text, path, table=table)
    return rules.reversed() if backwards else rules


Route = tuple[NameConversion, ...]
"""Conversions that lead from one ecosystem to another, one after another: one or two."""


def conversions(text: str, path: str) -> tuple[NameConversion, ...]:
    """Return the conversions in `text`, the content of the file `path`; a file without ``# names:`` is one."""
    lines = text.split("\n")
    starts: list[tuple[int, tuple[str, str]]] = []
    about: dict[int, dict[str, str]] = {-1: {}}
    for number, line in enumerate(lines):
        found = _ABOUT.fullmatch(line.strip())
        if found is None:
            continue
        pair = _PAIR.fullmatch(found[2]) if found[1] == "names" else None
        if pair is not None:
            starts.append((number, (pair[1].lower(), pair[2].lower())))
            about[number] = {}
        elif found[1] != "names":
            about[starts[-1][0] if starts else -1][found[1]] = found[2]
    if not starts:
        return (NameConversion(("", ""), path, text, about[-1]),)
    ends = [number for number, _ in starts[1:]] + [len(lines)]
    return tuple(
        NameConversion(names, path, "\n" * start + "\n".join(lines[start:end]), {**about[-1], **about[start]})
        for (start, names), end in zip(starts, ends, strict=True)
    )


@cache
def shipped() -> tuple[NameConversion, ...]:
    """Return the conversions of the package's tables."""
    texts = ((f"{name}.rules", files(__name__).joinpath(f"{name}.rules")) for name in (*FAMILIES, *FORMATS))
    return tuple(one for name, file in texts for one in conversions(file.read_text(encoding="utf-8"), name))


def ecosystem(word: str) -> str:
    """Return the word that the tables have for an ecosystem."""
    return OTHER_WORDS.get(word.lower(), word.lower())


def ecosystems(rows: Iterable[NameConversion]) -> tuple[str, ...]:
    """Return the ecosystems of these conversions, in order."""
    return tuple(dict.fromkeys(name for row in rows for name in row.names))


def pair_for(keys: Sequence[str], wanted: Sequence[str]) -> str | None:
    """Return the ``FROM:TO`` of the first conversion of the package that has lines for `keys` and makes `wanted`."""
    likely = [row for row in shipped() if all(map(row.may_match, keys[:1]))]
    fits = [way for row in likely for way in row.ways if not way.rules().unmatched(keys)[0]]
    backwards = [row.turned() for row in fits if "one-way" not in row.about]
    return next((f"{row.new}:{row.old}" for row in backwards if not row.rules().unmatched(wanted)[0]), None)


def routes(rows: Sequence[NameConversion], old: str | None, new: str) -> Iterator[Route]:
    """Yield the ways from `old`, or from any ecosystem, to `new`: single conversions first.

    Two conversions follow each other only in one family.
    """
    turned = [*rows, *(way for row in rows for way in row.ways[1:])]
    for row in turned:
        if row.new == new and old in (None, row.old):
            yield (row,)
    ends = [row for row in turned if row.new == new]
    for first, second in product(turned, ends):
        joined = first.new == second.old and first.old != new
        if joined and first.family == second.family and old in (None, first.old):
            yield first, second
