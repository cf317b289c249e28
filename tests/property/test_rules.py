"""Random rules over random shapes: what they make is what torch makes, and backwards it is the input, bit for bit."""

from __future__ import annotations

import math
import random
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest
import torch

import ckptfix

DTYPES = (
    *(torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int8, torch.bool),
    *(torch.float8_e4m3fn, torch.complex64),
)
Tensors = list[torch.Tensor]


def filled(shape: list[int], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """A tensor of random bytes, NaN and infinities among them; one in three is a strided view."""
    width = torch.empty((), dtype=dtype).element_size()
    made = torch.Generator().manual_seed(seed)
    strided = seed % 3 == 0 and len(shape) > 1
    sizes = list(reversed(shape)) if strided else shape
    if dtype is torch.bool:
        flat = torch.randint(0, 2, sizes, generator=made).bool()
    else:
        flat = torch.randint(0, 256, (math.prod(sizes) * width,), generator=made, dtype=torch.uint8).view(dtype)
        flat = flat.reshape(sizes)
    return flat.permute(*reversed(range(len(shape)))) if strided else flat


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if not one.numel():
        return True
    copies = [part.clone(memory_format=torch.contiguous_format).flatten() for part in (one, other)]
    return torch.equal(*(part.view(torch.uint8) for part in copies))


def through(tensor: torch.Tensor, make: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """`make`, which only moves elements, on dtypes for which torch cannot."""
    if tensor.dtype is torch.float8_e4m3fn:
        return make(tensor.view(torch.uint8)).contiguous().view(tensor.dtype)
    return make(tensor)


def unflat(value: torch.Tensor, dim: int, sizes: tuple[int, ...]) -> torch.Tensor:
    return value.reshape(*value.shape[:dim], *sizes, *value.shape[dim + 1 :])


def cat(parts: Tensors, dim: int) -> torch.Tensor:
    if parts[0].dtype is torch.float8_e4m3fn:
        return torch.cat([part.view(torch.uint8) for part in parts], dim).view(parts[0].dtype)
    return torch.cat(parts, dim)


@dataclass
class Line:
    """A random line: the tensors that it takes, those that it makes, and its text."""

    rng: random.Random
    number: int
    taken: Tensors = field(default_factory=list)
    made: Tensors = field(default_factory=list)
    steps: list[str] = field(default_factory=list)
    back: bool = True

    def build(self) -> Line:
        rng = self.rng
        dtype = rng.choice(DTYPES)
        shape = [rng.choice((1, 2, 4, 6, 8, 12)) for _ in range(rng.randint(1, 3))]
        count = rng.choice((1, 1, 2, 3))
        self.taken = [filled(shape, dtype, rng.randrange(1 << 30)) for _ in range(count)]
        self.part(self.each(self.taken[0] if count == 1 else self.join(shape)))
        return self

    def join(self, shape: list[int]) -> torch.Tensor:
        rng, parts = self.rng, self.taken
        kind = rng.choice(("concat", "stack", "interleave"))
        if kind == "stack":
            dim = rng.randint(0, len(shape))
            self.steps.append(f"stack dim={dim}")
            return cat([part.unsqueeze(dim) for part in parts], dim)
        dim = rng.randrange(len(shape))
        if kind == "concat":
            self.steps.append(f"concat dim={dim} parts={len(parts)}")
            return cat(parts, dim)
        groups = rng.choice([size for size in range(1, shape[dim] + 1) if not shape[dim] % size])
        self.steps.append(f"interleave dim={dim} groups={groups} parts={len(parts)}")
        cut = [unflat(part, dim, (groups, shape[dim] // groups)) for part in parts]
        return cat(cut, dim + 1).flatten(dim, dim + 1)

    def each(self, value: torch.Tensor) -> torch.Tensor:
        for _ in range(self.rng.randint(0, 2)):
            value = getattr(self, self.rng.choice(("transpose", "permute", "reshape", "rope", "rows", "order")))(value)
        return value

    def transpose(self, value: torch.Tensor) -> torch.Tensor:
        if value.dim() < 2:
            return value
        one, other = self.rng.sample(range(value.dim()), 2)
        self.steps.append(f"transpose dims={one},{other}")
        return value.transpose(one, other)

    def permute(self, value: torch.Tensor) -> torch.Tensor:
        dims = self.rng.sample(range(value.dim()), value.dim())
        self.steps.append(f"permute dims={','.join(map(str, dims))}")
        return value.permute(*dims)

    def reshape(self, value: torch.Tensor) -> torch.Tensor:
        dim = self.rng.randrange(value.dim())
        size = value.shape[dim]
        inner = self.rng.choice([one for one in range(1, size + 1) if not size % one])
        letters = list("abcdefg"[: value.dim()])
        before = [*letters]
        before[dim] = f"{inner}*{letters[dim]}"
        after = [*letters[: dim + 1], str(inner), *letters[dim + 1 :]]
        self.steps.append(f"reshape from={','.join(before)} to={','.join(after)}")
        return through(value, lambda one: unflat(one, dim, (size // inner, inner)))

    def rope(self, value: torch.Tensor) -> torch.Tensor:
        dims = [dim for dim, size in enumerate(value.shape) if size % 2 == 0]
        if not dims:
            return value
        dim = self.rng.choice(dims)
        size = value.shape[dim]
        heads = self.rng.choice([one for one in range(1, size + 1) if not size % (2 * one)])
        to_half = self.rng.random() < 0.5
        self.steps.append(f"rope heads={heads} dim={dim} to={'half' if to_half else 'interleaved'}")
        sizes = (heads, size // heads // 2, 2) if to_half else (heads, 2, size // heads // 2)
        return through(
            value, lambda one: unflat(one, dim, sizes).transpose(dim + 1, dim + 2).flatten(dim, dim + 2)
        )

    def order(self, value: torch.Tensor) -> torch.Tensor:
        dim = self.rng.randrange(value.dim())
        size = value.shape[dim]
        count = self.rng.choice([one for one in range(1, size + 1) if not size % one])
        to = self.rng.sample(range(count), count)
        self.steps.append(f"order dim={dim} to={','.join(map(str, to))}")
        width = size // count
        return cat([value.narrow(dim, part * width, width) for part in to], dim)

    def rows(self, value: torch.Tensor) -> torch.Tensor:
        dim = self.rng.randrange(value.dim())
        size = value.shape[dim]
        to = self.rng.randint(1, size + 3)
        self.steps.append(f"rows dim={dim} from={size} to={to} fill=0")
        self.back &= to >= size
        if to <= size:
            return value.narrow(dim, 0, to)
        zeros = torch.zeros([to - size if axis == dim else one for axis, one in enumerate(value.shape)])
        return cat([value, zeros.to(value.dtype)], dim)

    def part(self, value: torch.Tensor) -> None:
        rng = self.rng
        dim = rng.randrange(value.dim())
        size = value.shape[dim]
        kind = rng.choice(("none", "split", "sizes", "unstack", "deinterleave"))
        if size == 1 or kind == "none":
            self.made = [value]
        elif kind == "unstack":
            self.steps.append(f"unstack dim={dim}")
            self.made = [value.select(dim, index) for index in range(size)]
        elif kind == "sizes":
            first = rng.randint(0, size)
            self.steps.append(f"split dim={dim} sizes={first},{size - first}")
            self.made = [value.narrow(dim, 0, first), value.narrow(dim, first, size - first)]
        else:
            count = rng.choice([one for one in range(2, size + 1) if not size % one])
            if kind == "split":
                self.steps.append(f"split dim={dim} parts={count}")
                self.made = [value.narrow(dim, index * (size // count), size // count) for index in range(count)]
            else:
                groups = rng.choice([one for one in range(1, size // count + 1) if not size // count % one])
                self.steps.append(f"deinterleave dim={dim} groups={groups} parts={count}")
                width = size // count // groups
                for index in range(count):
                    rows = partial(self.rows_of, dim=dim, groups=groups, first=index * width, width=width)
                    self.made.append(through(value, rows))

    @staticmethod
    def rows_of(value: torch.Tensor, dim: int, groups: int, first: int, width: int) -> torch.Tensor:
        cut = unflat(value, dim, (groups, value.shape[dim] // groups))
        return cut.narrow(dim + 1, first, width).flatten(dim, dim + 1)

    def names(self, side: str, tensors: Tensors) -> list[str]:
        if len(tensors) == 1:
            return [f"{side}.{self.number}.w"]
        return [f"{side}.{self.number}.{index}.w" for index in range(len(tensors))]

    def text(self) -> str:
        """The line; parts are a list, or numbers that run."""

        def side(name: str, tensors: Tensors) -> str:
            if len(tensors) == 1:
                return f"{name}.{self.number}.w"
            parts = ",".join(map(str, range(len(tensors))))
            running = self.rng.random() < 0.5
            return f"{name}.{self.number}.{'{' + name[0] + '}' if running else '{' + parts + '}'}.w"

        steps = self.steps or ["permute dims=" + ",".join(map(str, range(self.made[0].dim())))]
        return f"{side('in', self.taken)} -> {side('out', self.made)} | {' | '.join(steps)}"


def held(lines: list[Line]) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    before: dict[str, torch.Tensor] = OrderedDict()
    after: dict[str, torch.Tensor] = OrderedDict()
    for line in lines:
        before |= zip(line.names("in", line.taken), line.taken, strict=True)
        after |= zip(line.names("out", line.made), line.made, strict=True)
    return before, after


@pytest.mark.sampled(quick=3)
@pytest.mark.parametrize("seed", range(40))
def test_random_rules_do_what_torch_does_and_back(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    lines = [Line(rng, number).build() for number in range(8)]
    suffix = ("pth", "pth", "safetensors")[seed % 3]
    # A legacy file holds no float8 that torch could load, and safetensors has no complex numbers.
    lacks = (None, torch.float8_e4m3fn, torch.complex64)[seed % 3]
    lines = [line for line in lines if line.taken[0].dtype is not lacks]
    before, after = held(lines)
    torch.save({"step": 7, "model": before}, tmp_path / "in.pth", _use_new_zipfile_serialization=seed % 3 == 0)
    source = tmp_path / f"in.{suffix}"
    if suffix == "safetensors":
        ckptfix.convert(tmp_path / "in.pth", source)
    rules = tmp_path / "rules.txt"
    texts = {line.number: line.text() for line in lines}
    rules.write_text("\n".join(texts.values()))
    done = ckptfix.rename(source, tmp_path / f"out.{suffix}", rules=rules)
    assert done.exit_code == 0, done
    found = loaded(tmp_path / f"out.{suffix}")
    assert list(found) == list(after)
    assert not wrong(after, found, texts)
    rules.write_text("\n".join(texts[line.number] for line in lines if line.back))
    ckptfix.rename(tmp_path / f"out.{suffix}", tmp_path / f"back.{suffix}", rules=rules, reverse=True)
    again = loaded(tmp_path / f"back.{suffix}")
    expected, _ = held([line for line in lines if line.back])
    assert expected.keys() <= again.keys()
    assert not wrong(expected, again, texts)


def wrong(expected: dict[str, torch.Tensor], found: dict[str, torch.Tensor], texts: dict[int, str]) -> list[str]:
    """The tensors that are others, each with its line."""
    return [f"{name}: {texts[_order(name)[0]]}" for name, one in expected.items() if not same(found[name], one)]


def loaded(path: Path) -> dict[str, torch.Tensor]:
    if path.suffix == ".safetensors":
        from safetensors.torch import load_file

        found = load_file(path)
        return {name: found[name] for name in sorted(found, key=_order)}
    whole = torch.load(path, weights_only=True)
    assert whole["step"] == 7
    return whole["model"]  # type: ignore[no-any-return]


def _order(name: str) -> tuple[int, int]:
    _, number, *part = name.split(".")
    return int(number), int(part[0]) if len(part) > 1 else 0
