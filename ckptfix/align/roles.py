"""Roles of modules according to the words in their paths: one table of synonyms, and a score for two paths.

Where shapes leave a choice (query, key and value are equally large), only words decide. A word stands for a part of
some kind. Two modules that play different parts of one kind are not counterparts.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import field, replace
from itertools import pairwise

from ckptfix.align import assignment
from ckptfix.align.scores import ENOUGH
from ckptfix.align.units import words
from ckptfix.dataclass import dataclass
from ckptfix.names.letters import COUNTED

ROLES: dict[str, dict[str, str]] = {
    "attention": {
        "query": "q query queries wq qs",
        "key": "k key keys wk ks",
        "value": "v value values wv vs",
        "out": "o out output wo dense proj c_proj",
        "fused": "qkv wqkv",
    },
    "gated": {"gate": "gate g w1/3 wi_0", "up": "up x w3/3 wi_1", "down": "down w2/3"},
    "feed-forward": {"first": "intermediate wi c_fc", "second": "down contract c_proj"},
    "path": {"shortcut": "shortcut downsample skip identity residual proj/f", "body": "body f/proj"},
    "block": {
        "attention": "attention attn sa ca crossattention self input before pre",
        "feed-forward": "ffn mlp feed ff intermediate c_fc output final after post_attention post_attn post_self",
    },
    "cross": {
        "self": "self sa",
        "cross": "cross ca crossattention encdec enc_dec dec_enc multihead src encoder_attn encoder_attention enc_attn "
        "src_attn",
    },
    "half": {"encoder": "encoder enc down downs", "decoder": "decoder dec up ups"},
    "embedding": {
        "token": "word words token tokens tok wte",
        "position": "position positions pos wpe positional",
        "type": "type segment seg",
    },
    "inverted": {"expand": "expand expansion", "depthwise": "dw depthwise", "project": "pwl project reduce"},
    "squeeze": {"reduce": "reduce squeeze", "expand": "expand excite excitation"},
    "modality": {"image": "visual vision image img pixel", "text": "text textual language"},
    "agent": {"actor": "actor policy", "critic": "critic"},
    "pair": {"student": "student online", "teacher": "teacher target momentum ema"},
    "adversary": {"generator": "generator gen", "discriminator": "discriminator disc"},
    "ends": {
        "first": "stem embed embedder embedding embeddings patch init in input in_proj",
        "last": "final last f head out output classifier",
    },
    "recurrent": {
        "input": "weight_x w_x wx x_h i_h ih weight_ih w_ih input/hidden",
        "hidden": "weight_h w_h wh h_h h_hh hh weight_hh w_hh hidden/input",
    },
    "reverse": {"reverse": "reverse backward backwards bw bwd b/f", "forward": "forward forwards fw fwd f/b"},
}
"""Kind -> part -> its terms. A term is a word, or two words in a row, or ``w1/3``: w1 if w3 is also among the choices
(LLaMA, llama/model.py FeedForward). ``wi_0`` is the gate in T5 (modeling_t5.py T5DenseGatedActDense). ``f/b`` is f if b
is among the choices. ``proj/f`` is from RegNet (torchvision/models/regnet.py ResBottleneckBlock, where f is the block
without it). A term may play several parts."""

LISTS = frozenset(["layer", "layers", "block", "blocks", "stage", "stages", "module", "modules", "net", "model"])
"""Words for any list of modules. If both sides have one, this means nothing."""

BEFORE = {"attention": 1, "feed-forward": 9}
"""Order of the parts of the kind ``block``, in which norms are numbered."""

_PARTS: dict[str, list[tuple[str, str]]] = {}
for _kind, _parts in ROLES.items():
    for _part, _written in _parts.items():
        for _term in _written.split():
            _PARTS.setdefault(_term, []).append((_kind, _part))

ATTENTION = frozenset(["attention", "attn", "sa", "ca", "crossattention", "self", "mha", "multihead"])
"""Words in the paths of an attention's modules."""

NORMS = frozenset(["bn", "ln", "gn", "layernorm", "batchnorm", "groupnorm", "rmsnorm"])
"""Words for a norm. The kind of norm says nothing about its place."""

KINDS = frozenset(
    ["weight", "gamma", "linear", "lin", "fc", "dense", "conv", "convs", "convolution", "proj", "projection", "norm",
     "normalization"]
)  # fmt: skip
"""Words for the kind of a layer: modules of equal shapes are of one kind, whatever each side calls it."""

_OUT = frozenset(["out"])

W123 = frozenset(("w1", "w2", "w3"))
"""Terms that all mean different parts."""

FEEDS = frozenset(["ffn", "mlp", "feed", "ff", "intermediate"])
"""Words of the feed-forward part, whatever words are beside them."""

OUTSIDE = frozenset(["ends"])
"""Kinds of parts outside of blocks: inside, ``output`` and ``in_proj`` are parts of an attention."""

INSIDE = frozenset(["attention", "gated", "feed-forward", "path", "block", "cross", "inverted", "squeeze"])
"""Kinds of parts inside blocks. Outside of blocks, ``final_norm`` and ``pre_classifier`` do not play such parts."""

WHOLES = frozenset(["block", "cross", "half", "modality", "agent", "pair", "adversary", "reverse"])
"""Kinds whose parts have several modules."""

_BLOCK = re.compile(r".*(?:\d|\{\})(?=\.)")
"""Pattern of the block that contains a module: its path up to the last number of a list of modules."""

_NUMBER = re.compile(r"\d+")
_LETTER = re.compile(COUNTED)


@dataclass(frozen=True, slots=True)
class RoleEvidence:
    """The features that distinguish one of several modules of the same signature.

    Attributes:
        terms: words that not all of them have.
        roles: kind -> parts that the words play.
        ordinal: (number of modules numbered in the same way, rank of this one), if it is numbered; see `_ordinals`.
        numbers: numbers in its path, including single letters.
        numbered: the terms of the thing that the last number counts.
        block: the path of the block that contains it.
        behind: the words of `terms` that come after the path of the block.
        inner: the roles that these play.
        alone: kinds of `inner` in which no other of its block plays the same part.
        counted: the reason for `ordinal`: a place in a list, a number in a name, or the words for parts in a row.
    """

    terms: frozenset[str]
    roles: dict[str, frozenset[str]]
    ordinal: tuple[int, int] | None
    numbers: tuple[int, ...]
    numbered: frozenset[str] = frozenset()
    block: str = ""
    behind: frozenset[str] = frozenset()
    inner: Mapping[str, frozenset[str]] = field(default_factory=dict)
    alone: frozenset[str] = frozenset()
    counted: str = ""

    def same_order(self, other: RoleEvidence) -> bool | None:
        """Return whether both have the same rank; None if their ranks cannot be compared.

        Numbers in names do not count an attention's parts in the order in which a list has them.
        """
        if not self.ordinal or not other.ordinal or self.ordinal[0] != other.ordinal[0]:
            return None
        return None if {self.counted, other.counted} == {NAME, WORDS} else self.ordinal == other.ordinal


PLACE, NAME, WORDS = "place", "name", "words"


def parts(texts: Sequence[str], *, within: bool = False) -> list[RoleEvidence]:
    """Return the part of each of `texts`, the paths to choose between.

    Args:
        within: they are in one block, so that a list holds parts of it, and not one part of several blocks.
    """
    terms = [Counter(_terms(text)) for text in texts]
    own = [{term for term in counts if any(counts[term] != other[term] for other in terms)} for counts in terms]
    if len(texts) == 1:
        own = [set(counts) for counts in terms]
    every = set[str]().union(*own)
    gated = {"w1", "w3"} <= every
    beside = {term: f"{term}/3" for term in W123} if gated else {}
    if _either(own, "f", "b"):
        beside |= {"f": "f/b", "b": "b/f"}
    if _either(own, "input", "hidden"):
        beside |= {"input": "input/hidden", "hidden": "hidden/input"}
    if _either(own, "f", "proj"):
        beside |= {"proj": "proj/f", "f": "f/proj"}
    roles = [_roles(counts, beside) for counts in own]
    inside = [_BLOCK.match(text) is not None for text in texts]
    if any(inside):
        roles = [{kind: part for kind, part in played.items() if kind not in (OUTSIDE if within else INSIDE)}
                 for played, within in zip(roles, inside, strict=True)]  # fmt: skip
    elif any(_attends(text, played) for text, played in zip(texts, roles, strict=True)):
        roles = [{kind: part for kind, part in played.items() if kind not in OUTSIDE} for played in roles]
    if not any(_attends(text, played) for text, played in zip(texts, roles, strict=True)):
        roles = [{kind: part for kind, part in played.items() if kind != "attention"} for played in roles]
    if any(played.get("cross") == frozenset(["cross"]) for played in roles):
        roles = [_to_itself(played) for played in roles]
    ordinals, in_words = _ordinals(texts, roles, gated)
    listed = [within and text.rpartition(".")[2].isdecimal() for text in texts]
    counted = [WORDS if in_words else PLACE if one else NAME for one in listed]
    blocks = [match[0] if match else "" for match in map(_BLOCK.match, texts)]
    behind = [own[i].intersection(_terms(text[len(blocks[i]) :])) for i, text in enumerate(texts)]
    inner = [_roles(terms, beside) for terms in behind]
    played_by = Counter((blocks[i], kind, part) for i, kinds in enumerate(inner) for kind, part in kinds.items())
    alone = [frozenset(kind for kind, part in kinds.items() if played_by[blocks[i], kind, part] == 1)
             for i, kinds in enumerate(inner)]  # fmt: skip
    return [
        RoleEvidence(
            *(_telling(own[i]), roles[i], ordinals[i], _numbers(text), _numbered(text)),
            *(blocks[i], _telling(behind[i]), inner[i], alone[i], counted[i]),
        )
        for i, text in enumerate(texts)
    ]


def _telling(terms: Iterable[str]) -> frozenset[str]:
    """Return the terms without those of words for lists and kinds of layers alone, such as ``layer_norm``."""
    return frozenset(term for term in terms if not (LISTS | KINDS).issuperset(term.split("_")))


def _either(own: Sequence[set[str]], one: str, other: str) -> bool:
    """Return whether some have the first of two terms where others have the second."""
    there = [terms & {one, other} for terms in own]
    return {one} in there and {other} in there


def _numbered(text: str) -> frozenset[str]:
    """Return the terms of the component with the last number or letter, or of the list that the number indexes."""
    components = _lettered(text).split(".")
    last = max((at for at, one in enumerate(components) if re.search(r"\d", one)), default=None)
    if last is None:
        return frozenset()
    while last and components[last].isdecimal():
        last -= 1
    return frozenset(_terms(text.split(".")[last]))


def _attends(text: str, played: Mapping[str, frozenset[str]]) -> bool:
    """Return whether a path belongs to an attention: ``dense`` and ``proj`` alone may belong to any layer."""
    return bool(played.get("attention", _OUT) - _OUT) or not ATTENTION.isdisjoint(words(text))


def _terms(text: str) -> list[str]:
    """Return the words, pairs of neighboring words in one component, and w1, w2, w3, wi_0, wi_1."""
    found = re.findall(r"\b(?:w[1-3]|wi_[01])\b", text)
    for component in text.split("."):
        single = ["norm" if word in NORMS else word for word in words(component)]
        found += [*single, *map("_".join, pairwise(single))]
    return found


def _roles(terms: set[str], beside: Mapping[str, str]) -> dict[str, frozenset[str]]:
    """Return the parts that `terms` play, replacing some as `beside` says; two words in a row outweigh each of them."""
    pairs = [term for term in terms if "_" in term and term in _PARTS]
    hidden = {word for pair in pairs for word in pair.split("_")}
    found: dict[str, set[str]] = {}
    for term in terms:
        if term in hidden:
            continue
        for kind, part in _PARTS.get(beside.get(term, term), ()):
            found.setdefault(kind, set()).add(part)
    if "cross" in found.get("cross", ()):
        found["cross"] = {"cross"}  # crossattention.self of BERT
    if "cross" in found and "block" in found:
        found["block"].add("attention")
    if len(found.get("block", ())) > 1 and not terms & FEEDS:
        found["block"].discard("feed-forward")  # attention.output belongs to the attention
    if found.get("block") == {"attention"} and "c_proj" in terms:
        found.pop("feed-forward", None)  # GPT-2 has a c_proj in both
    if len(found.get("attention", ())) > 1 or "feed-forward" in found or found.get("block") == {"feed-forward"}:
        found.get("attention", set()).discard("out")  # v_proj is a projection, not an output
        found = {kind: played for kind, played in found.items() if played}
    return {kind: frozenset(played) for kind, played in found.items()}


def _to_itself(roles: dict[str, frozenset[str]]) -> dict[str, frozenset[str]]:
    """Return `roles` beside cross attention: an attention of unstated kind counts as self-attention."""
    attends = "attention" in roles or roles.get("block") == frozenset(["attention"])
    return {**roles, "cross": frozenset(["self"])} if attends and "cross" not in roles else roles


def _lettered(text: str) -> str:
    return _LETTER.sub(lambda match: str(ord(match[0]) - ord("a")), text)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d{1,18}", _lettered(text))))


def _ordinals(
    texts: Sequence[str], roles: Sequence[dict[str, frozenset[str]]], gated: bool
) -> tuple[list[tuple[int, int] | None], bool]:
    """Return the rank among texts that differ only by numbers (or single letters), or by a part that has an order.

    Whether it is the order of an attention's or a recurrent layer's parts is returned too.

    Blocks that hold equally many of them are ranked together. Otherwise each block is ranked by itself, and the count
    is negative, to mark that it does not count blocks: ``0.bn1`` is not the first of ``1.bn1``, ``1.bn2`` and
    ``1.bn3``.
    """
    alike: dict[str, list[tuple[tuple[int, ...], int]]] = {}
    for index, text in enumerate(texts):
        lettered, numbers = _lettered(text), _numbers(text)
        alike.setdefault(_NUMBER.sub("#", lettered), []).append((numbers, index))
    found: list[tuple[int, int] | None] = [None] * len(texts)
    for kind in alike.values():
        of_block: dict[tuple[int, ...], list[tuple[tuple[int, ...], int]]] = {}
        for row in kind:
            of_block.setdefault(row[0][:-1], []).append(row)
        even = len(set(map(len, of_block.values()))) == 1
        for rows in [kind] if even else of_block.values():
            if len(rows) > 1:
                for rank, (_, index) in enumerate(sorted(rows)):
                    found[index] = (len(rows) if even else -len(rows), rank)
    if not any(found) and (places := _places(texts)) is not None:
        found = [(len(texts), sorted(places).index(place)) for place in places]
    elif (turns := _turns(roles, found)) is not None:
        return turns, any(played.keys() & {"attention", "recurrent"} for played in roles)
    named = r"\b(?:w[1-3]|wi_[01])\b" if gated else r"\bwi_[01]\b"
    found = [None if re.search(named, text) else row for text, row in zip(texts, found, strict=True)]
    if not _are_norms(texts, roles):
        return found, False
    placed = [None if played.get("cross") == _CROSS else _before(played) for played in roles]
    known = [place for place in placed if place is not None]
    blocks = {match and match[0] for match in map(_BLOCK.match, texts)}
    told = len(set(known)) == len(known) == 2 and 0 not in known and placed.count(None) < 2
    if told and len(blocks) == 1 and not any(found):
        return [None if place is None else (2, sorted(known).index(place)) for place in placed], False
    return found, False


_CROSS = frozenset(["cross"])


def _are_norms(texts: Sequence[str], roles: Sequence[Mapping[str, frozenset[str]]]) -> bool:
    """Return whether some names of modules of equal shapes say that they are norms, and the others say nothing."""
    said = [_says_norm(text) for text in texts]
    return any(said) and all(norm or not played for norm, played in zip(said, roles, strict=True))


def _says_norm(text: str) -> bool:
    return re.search("norm|ln", text, re.IGNORECASE) is not None


def _turns(
    roles: Sequence[Mapping[str, frozenset[str]]], found: Sequence[tuple[int, int] | None]
) -> list[tuple[int, int] | None] | None:
    """Return the rank in which the parts of a block run; None if words do not say it of all.

    Query, key, value and output have this order in `torch.nn.MultiheadAttention` and in lists of projections (the
    Annotated Transformer's ``linears``, BERT-pytorch's ``linear_layers``), input and hidden weights in `torch.nn.RNN`.
    The feed-forward part runs after the attention. A cross attention has no rank, because it may be listed last.
    """
    crossed = [played.get("cross") == _CROSS for played in roles]
    own = [played for played, across in zip(roles, crossed, strict=True) if not across]
    if not any(played.keys() & _RUNS.keys() for played in own):
        return None
    keys = [None if across else _turn(played, ordinal)
            for played, ordinal, across in zip(roles, found, crossed, strict=True)]  # fmt: skip
    known = [key for key in keys if key is not None]
    if len(set(known)) < len(own):
        return None
    return [None if key is None else (len(known), sorted(known).index(key)) for key in keys]


def _turn(played: Mapping[str, frozenset[str]], ordinal: tuple[int, int] | None) -> tuple[int, int] | None:
    """Return the place of a part in its block; of two that only a number tells apart, beside an attention, the number.

    What follows the first layer of a feed-forward part is the second one.
    """
    for place, (kind, order) in enumerate(_RUNS.items()):
        if kind in played:
            (part, *others) = played[kind]
            return None if others else (place, order.index(part))
    if ordinal is not None and ordinal[0] == 2 and played.get("block", _FEED) == _FEED:
        return _LAST, ordinal[1]
    return (_LAST, 1) if played.get("block") == _FEED else None


_RUNS = {
    "recurrent": ["input", "hidden"],
    "attention": ["fused", "query", "key", "value", "out"],
    "feed-forward": ["first", "second"],
}
_LAST = len(_RUNS) - 1
_FEED = frozenset(["feed-forward"])


def _before(played: Mapping[str, frozenset[str]]) -> int:
    """Return the place of a norm among those of its block, as it runs; 0 if words say several."""
    block = played.get("block", ())
    return BEFORE.get(next(iter(block), ""), 5) if len(block) < 2 else 0


def _places(texts: Sequence[str]) -> list[int] | None:
    """Return the numbers of the places in a list that hold one of `texts` each; None if they are in no list."""
    rows = [text.split(".") for text in texts]
    at = next((at for at, column in enumerate(zip(*rows, strict=False)) if len(set(column)) > 1), None)
    if at is None or not all(row[at].isdecimal() for row in rows) or len({row[at] for row in rows}) < len(rows):
        return None
    return [int(row[at]) for row in rows]


def scores(ours: Sequence[RoleEvidence], theirs: Sequence[RoleEvidence]) -> list[list[float]]:
    """Return `score` for all pairs of the parts to choose between.

    A word that only one side has may stand for any word of the other side, so it counts neither for nor against a pair.
    """
    known = [frozenset[str]().union(*(part.terms for part in side)) for side in (ours, theirs)]
    both = known[0] & known[1]
    mine, others = ([replace(part, terms=part.terms & both) for part in side] for side in (ours, theirs))
    return [[score(one, other) for other in others] for one in mine]


def told(ours: Sequence[str], theirs: Sequence[str]) -> list[tuple[int, int]]:
    """Return the only assignment of as many paths to paths that words and numbers allow; nothing if it is in doubt.

    That one of two layers is called after the whole that has both says nothing: ``c_fc``, ``c_proj`` and ``ffn.b``. Two
    that are called after different wholes are not the same: ``attention.output.norm`` and ``output.norm``.
    Numbers do not tell a list from what no word describes, which may be one of that list under another name:
    ``layer.0``, ``layer.1``, ``x`` and ``y``, ``layer.1``, ``layer.2``.
    """
    sides = parts(ours, within=True), parts(theirs, within=True)
    mine, others = (frozenset[str]().union(*(one.terms for one in side)) for side in sides)
    for texts, side in zip((ours, theirs), sides, strict=True):
        described = [bool(one.roles or one.terms & mine & others) for one in side]
        if len({_NUMBER.sub("#", text) for text, known in zip(texts, described, strict=True) if not known}) > 1:
            return []
    played = [{(kind, part) for one in side for kind, found in one.roles.items() for part in found} for side in sides]
    counts = [Counter(kind for kind, _ in side) for side in played]
    vague = {kind for kind in WHOLES if min(count[kind] for count in counts) < 2}
    norms = [_are_norms(texts, [one.roles for one in side]) for texts, side in zip((ours, theirs), sides, strict=True)]
    if all(norms) and not any(all(map(_says_norm, texts)) for texts in (ours, theirs)):
        return []  # each may be what the other side has no word for
    if all(norms):
        vague = set()  # a part of a block has one norm
    whole = sides
    sides = _without(sides[0], vague), _without(sides[1], vague)
    found = scores(*sides)
    chosen = assignment.best(found)
    if loose(*sides, chosen) or any(_apart(whole[0][row], whole[1][to]) for row, to in enumerate(chosen)):
        return []
    margins = assignment.margins(found, chosen, ENOUGH)
    rows = list(enumerate(chosen))
    sure = all(margin >= ENOUGH and found[row][to] >= 0 for (row, to), (margin, _) in zip(rows, margins, strict=True))
    return rows if sure else []


def _without(side: Sequence[RoleEvidence], kinds: Collection[str]) -> list[RoleEvidence]:
    return [replace(one, roles={kind: part for kind, part in one.roles.items() if kind not in kinds}) for one in side]


def score(one: RoleEvidence, other: RoleEvidence) -> float:
    """Return how well two parts match: 4 for each kind in which they agree, or -4 for each in which they differ."""
    kinds = one.roles.keys() & other.roles.keys()
    differ = sum(not one.roles[kind] & other.roles[kind] for kind in kinds)
    differ += bool(one.terms & W123 and other.terms & W123 and not one.terms & other.terms & W123)
    if (one.roles.get("cross") == _CROSS) != (other.roles.get("cross") == _CROSS):
        kinds -= {"block"}  # an attention of unstated kind may be the other one
    total = -4.0 * differ if differ else 4.0 * len(kinds)
    either = one.terms | other.terms
    numbered_alike = one.ordinal or other.ordinal or not one.numbers or not other.numbers
    shared = one.terms & other.terms
    if not (numbered_alike or one.numbers[-1] == other.numbers[-1]):
        shared -= one.numbered & other.numbered
    if either:
        total += 3 * len(shared) / len(either)
    same = one.same_order(other)
    return total if same is None else total + (1.5 if same else -1.5)


def loose(ours: Sequence[RoleEvidence], theirs: Sequence[RoleEvidence], chosen: Sequence[int]) -> set[int]:
    """Return the rows whose words may also apply to a part for which each side has no word.

    Of the two layers of a feed-forward part, one side may name the first, and the other the second.
    """
    mute = silent(ours, theirs)
    pairs = [(ours[row], theirs[column]) for row, column in enumerate(chosen)]
    return {row for row, pair in enumerate(pairs)
            if alike(*pair) and not singular(*pair) and _rivalled((ours, theirs), mute, pair)}  # fmt: skip


def _rivalled(
    sides: tuple[Sequence[RoleEvidence], ...], mute: tuple[Sequence[int], ...], pair: tuple[RoleEvidence, RoleEvidence]
) -> bool:
    """Return whether each side has an unlabeled part in this block that could take the place of the pair's part."""
    rivals = [
        [side[at] for at in found if not _apart(side[at], other)]
        for side, found, other in zip(sides, mute, reversed(pair), strict=True)
    ]
    return all(rivals) and any(
        rival.block == own.block for found, own in zip(rivals, pair, strict=True) for rival in found
    )


def silent(ours: Sequence[RoleEvidence], theirs: Sequence[RoleEvidence]) -> tuple[list[int], list[int]]:
    """Return for each side the parts whose place in a block is shown by neither a word nor a number."""
    words = [frozenset[str]().union(*(part.behind for part in side)) for side in (ours, theirs)]
    both = words[0] & words[1]
    found = [[at for at, part in enumerate(side) if not (part.inner or part.ordinal or part.behind & both)]
             for side in (ours, theirs)]  # fmt: skip
    return found[0], found[1]


def alike(one: RoleEvidence, other: RoleEvidence) -> bool:
    """Return whether two parts agree in a word or number for their place in a block."""
    shared = _shared_kinds(one, other) or one.behind & other.behind
    return bool(shared or one.same_order(other))


def singular(one: RoleEvidence, other: RoleEvidence) -> bool:
    """Return whether two parts agree in something that a block has only once."""
    if ("cross" in one.inner) != ("cross" in other.inner):
        return False
    kinds = _shared_kinds(one, other)
    shared = one.behind & other.behind
    if not (one.block or other.block) and one.numbers[-1:] == other.numbers[-1:]:
        return bool(kinds | shared)
    shared -= one.numbered & other.numbered
    return bool(kinds & one.alone & other.alone - WHOLES) or any(
        not any(kind in WHOLES for kind, _ in _PARTS.get(word, ())) for word in shared
    )


def _shared_kinds(one: RoleEvidence, other: RoleEvidence) -> set[str]:
    """Return the kinds in which two parts agree, judging by the words after the block."""
    return {kind for kind in one.inner.keys() & other.inner.keys() if one.inner[kind] & other.inner[kind]}


def _apart(one: RoleEvidence, other: RoleEvidence) -> bool:
    """Return whether two parts differ in a kind, such as the text half and the vision half of a model."""
    return any(not one.roles[kind] & other.roles[kind] for kind in one.roles.keys() & other.roles.keys())
