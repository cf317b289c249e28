"""What is measured: each case is ckptfix at one job, and those who do the same or a comparable one."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import inputs
import packages
from inputs import BIG_LAYERS, BIG_WIDTH
from measure import Contender, Failed, quietly

MOUNTED = ExitStack()
"""The file systems that are mounted; closed at the end."""

HERE = Path(__file__).resolve().parent
MB = 1_000_000


@dataclass(frozen=True, slots=True)
class Target:
    """What a row is to show: `limit` seconds, times the other's time at most, or times faster at least."""

    kind: Literal["seconds", "ratio", "faster"]
    limit: float

    def __str__(self) -> str:
        return {"seconds": "under {:g} s", "ratio": "at most {:g} x", "faster": "{:g} x faster"}[self.kind].format(
            self.limit
        )

    def met(self, seconds: float, ratio: float) -> bool:
        """Whether ckptfix, taking `seconds` and `ratio` times the other's time, reaches it."""
        if self.kind == "seconds":
            return seconds < self.limit
        return ratio <= (self.limit if self.kind == "ratio" else 1 / self.limit)


@dataclass(frozen=True, slots=True)
class Case:
    """A job of ckptfix and what it is raced against.

    Attributes:
        job: what the table calls it.
        ours: ckptfix.
        rivals: each with the target for ckptfix against it, None where there is none.
        memory: most bytes that ckptfix may hold; None for no limit.
        check: name of a function in checks.py, and the file that outputs are checked against.
        skipped: rivals that are not here, and why.
    """

    job: str
    ours: Contender
    rivals: Sequence[tuple[Contender, Target | None]]
    memory: int | None = None
    check: tuple[str, Path] | None = None
    skipped: dict[str, str] = field(default_factory=dict)

    @property
    def contenders(self) -> list[Contender]:
        return [self.ours, *(rival for rival, _ in self.rivals)]


@dataclass(frozen=True, slots=True)
class Bench:
    """Where a session of benchmarks works, and how large its inputs are."""

    folder: Path
    scale: float

    def input(self, name: str) -> Path:
        """The input `name` of inputs.py, built at the first call and kept."""
        home = self.folder / f"scale-{self.scale:g}"
        path = home / name
        if not path.exists():
            home.mkdir(parents=True, exist_ok=True)
            for source in inputs.INPUTS[name][1]:
                self.input(source)
            print(f"building {path}", file=sys.stderr)
            quietly([sys.executable, HERE / "inputs.py", name, home, str(self.scale)])
            quietly(["sync", path])
        return path

    def copies(self, name: str, count: int) -> tuple[Path, ...]:
        """The input `name` and copies of it, which have pages of memory of their own."""
        path = self.input(name)
        made = (path, *(path.with_name(f"copy-{number}-{name}") for number in range(1, count)))
        for copy in made:
            if not copy.exists():
                shutil.copyfile(path, copy)
                quietly(["sync", copy])
        return made

    def output(self, name: str) -> Path:
        return self.folder / f"output-{name}"

    def disk(self, kind: str, size: int) -> Path:
        """An empty file system of `kind` (see disks.py), mounted until this process ends. Raises Failed."""
        sys.path.insert(0, str(HERE.parent))
        from disks import Unavailable, mounted

        home = self.folder / f"disk-{kind}"
        home.mkdir(exist_ok=True)
        try:
            return MOUNTED.enter_context(mounted(kind, home, size))
        except Unavailable as error:
            raise Failed(str(error)) from None

    def ckptfix(self, *arguments: str | Path, output: Path | None = None, status: int = 0) -> Contender:
        """The console script beside this interpreter; it syncs what it writes by itself."""
        script = Path(sys.executable).with_name("ckptfix")
        return Contender("ckptfix", (str(script), *map(str, arguments)), output, status=status)

    def copied(self, source: Path) -> Contender:
        output = self.output(f"cp{source.suffix}")
        return Contender("cp + sync", ("cp", "-r", str(source), str(output)), output, sync=True)

    def copied_folder(self, source: Path) -> Contender:
        output = self.output("cp")
        script = 'cp -r "$1" "$2" && find "$2" -exec sync {} +'
        return Contender("cp -r + sync", ("sh", "-c", script, "sh", str(source), str(output)), output)

    def baseline(
        self, name: str, function: str, *arguments: str | Path, output: Path | None = None, python: str | Path = ""
    ) -> Contender:
        """`function` of baselines.py, under this interpreter or `python`."""
        command = (str(python or sys.executable), str(HERE / "baselines.py"), function, *map(str, arguments))
        return Contender(name, command, output, sync=output is not None)


def _beside_cp(
    bench: Bench,
    job: str,
    source: Path,
    output: str,
    verb: str,
    *options: str,
    ratio: float,
    check: tuple[str, Path],
    memory: int | None = 64 * MB,
) -> Case:
    """A command that writes about as many bytes as it reads, against ``cp`` of its input."""
    ours = bench.output(output)
    return Case(
        job,
        bench.ckptfix(verb, source, ours, *options, output=ours),
        ((bench.copied(source), Target("ratio", ratio)),),
        memory=memory,
        check=check,
    )


def _beside_torch(bench: Bench, verb: str, function: str, check: str) -> Case:
    """An edit of a large file, against ``cp`` and against torch, which does `function` of baselines.py."""
    big, theirs = bench.input("big.pth"), bench.output("torch.pth")
    case = _beside_cp(bench, verb, big, "ours.pth", verb, ratio=1.1, check=(check, big))
    loaded = bench.baseline("torch.load, save", function, big, theirs, output=theirs)
    mapped = bench.baseline("torch.load(mmap), save", function, big, theirs, "mmap", output=theirs)
    return replace(case, rivals=(*case.rivals, (loaded, Target("faster", 8)), (mapped, Target("faster", 8))))


def strip_module(bench: Bench) -> Case:
    return _beside_torch(bench, "strip-module", "torch_strip", "stripped")


def _sharing(bench: Bench, kind: str) -> Case:
    """An edit on a file system that shares blocks, in an image: beside a copy of the blocks' list alone.

    Raises:
        Failed: no such file system can be mounted here.
    """
    big = bench.input("big.pth")
    place = bench.disk(kind, 4 * big.stat().st_size + (1 << 30))
    source, ours, theirs = place / "big.pth", place / "ours.pth", place / "cp.pth"
    if not source.exists():
        quietly(["cp", big, source])
        quietly(["sync", source])
    rival = Contender("cp --reflink + sync", ("cp", "--reflink=always", str(source), str(theirs)), theirs, sync=True)
    return Case(
        f"strip-module, {kind}",
        bench.ckptfix("strip-module", source, ours, output=ours),
        ((rival, Target("seconds", 0.5)),),
        memory=64 * MB,
        check=("stripped_sharing", source),
    )


def _in_place(bench: Bench, job: str, source: Path, verb: str, *options: str) -> Case:
    """An edit in place and its undo, against two looks at the same header."""
    script = Path(sys.executable).with_name("ckptfix")
    there = f"'{script}' {verb} -i '{source}' {' '.join(options)}"
    look = f"'{script}' inspect '{source}'"
    return Case(
        job,
        Contender("ckptfix", ("sh", "-c", f"{there} && '{script}' undo '{source}'")),
        (
            (Contender("inspect, twice", ("sh", "-c", f"{look} && {look}")), Target("ratio", 1.6)),
            (bench.copied(source), Target("faster", 2)),
        ),
        memory=64 * MB,
    )


def in_place(bench: Bench) -> Case:
    return _in_place(bench, "strip-module -i, undo", bench.input("place.pth"), "strip-module")


def in_place_blocks(bench: Bench) -> Case:
    source = bench.input("place.safetensors")
    return _in_place(bench, "blocks put in, undo", source, "add-module", "--prefix", "longer" * 20)


def strip_xfs(bench: Bench) -> Case:
    return _sharing(bench, "xfs")


def strip_btrfs(bench: Bench) -> Case:
    return _sharing(bench, "btrfs")


def to_cpu(bench: Bench) -> Case:
    return _beside_torch(bench, "to-cpu", "torch_to_cpu", "on_cpu")


def _by_rule(bench: Bench, operation: str, job: str, ratio: float) -> Case:
    big, rules = bench.input("big.pth"), bench.input(f"{operation}.rules")
    given = ("rename", "--map", str(rules))
    check = (operation, big)
    return _beside_cp(bench, f"rename, {job}", big, "ours.pth", *given, ratio=ratio, check=check, memory=100 * MB)


def split(bench: Bench) -> Case:
    return _by_rule(bench, "split", "each weight in two", 1.2)


def stack(bench: Bench) -> Case:
    return _by_rule(bench, "stack", "all weights stacked", 1.2)


def transpose(bench: Bench) -> Case:
    return _by_rule(bench, "transpose", "each weight transposed", 2.5)


def many_tensors(bench: Bench) -> Case:
    many = bench.input("many.pth")
    ours, theirs = bench.output("ours.pth"), bench.output("torch.pth")
    return Case(
        "strip-module, 100,000 tensors and an optimizer",
        bench.ckptfix("strip-module", many, ours, output=ours),
        (
            (
                bench.baseline("torch.load, save", "torch_strip_nested", many, theirs, output=theirs),
                Target("faster", 5),
            ),
        ),
        check=("optimizer", many),
    )


def to_dcp(job: str, source: str, seconds: float, memory: int) -> Callable[[Bench], Case]:
    """Many small tensors as a distributed checkpoint."""

    def case(bench: Bench) -> Case:
        many, ours, theirs = bench.input(source), bench.output("ours"), bench.output("torch")
        rival = bench.baseline("torch_save_to_dcp", "torch_to_dcp", many, theirs, output=theirs)
        return Case(
            f"convert to DCP, {job}",
            bench.ckptfix("convert", many, ours, "--to", "dcp", output=ours),
            ((rival, Target("seconds", seconds)),),
            memory=memory,
            check=("same", many),
        )

    return case


def of_dicts(verb: str, source: str) -> Callable[[Bench], Case]:
    """A verb on 8,000 state dicts of one tensor."""

    def case(bench: Bench) -> Case:
        many, ours, theirs = bench.input(source), bench.output("ours.pth"), bench.output("torch.pth")
        rival = bench.baseline("torch.load, save", "torch_strip_dicts", many, theirs, output=theirs)
        return Case(
            f"{verb}, 8,000 state dicts{', wrapped' if source.startswith('wrapped') else ''}",
            bench.ckptfix(verb, many, ours, output=ours),
            ((rival, Target("seconds", 1)),),
            memory=100 * MB,
        )

    return case


def match(bench: Bench) -> Case:
    many, names = bench.input("many.pth"), bench.input("names.json")
    ours, theirs = bench.output("ours.pth"), bench.output("torch.pth")
    rival = bench.baseline("torch.load, by order, save", "torch_by_order", many, names, theirs, output=theirs)
    return Case(
        "match by structure, 100,000 keys against 100,000",
        bench.ckptfix("match", many, ours, "--like", names, output=ours),
        ((rival, Target("seconds", 30)),),
    )


def load(bench: Bench) -> Case:
    big = bench.input("big.pth")
    return Case(
        "load_into, in Python",
        bench.baseline("ckptfix", "load_into", big),
        (
            (bench.baseline("torch.load, load_state_dict", "load_state_dict", big), None),
            (bench.baseline("torch.load(mmap), load_state_dict", "load_state_dict", big, "mmap"), Target("ratio", 1.0)),
        ),
    )


def load_unverified(bench: Bench) -> Case:
    big = bench.input("big.pth")
    rival = bench.baseline("torch.load(mmap), load_state_dict", "load_state_dict", big, "mmap")
    ours = bench.baseline("ckptfix", "load_into", big, "unverified")
    return Case("load_into, verify=False", ours, ((rival, Target("ratio", 0.9)),))


def load_state_dict(bench: Bench) -> Case:
    big = bench.input("big.pth")
    ours, theirs = bench.baseline("ckptfix", "ours_load", big), bench.baseline("torch.load", "torch_load", big)
    return Case("load_state_dict, in Python", ours, ((theirs, Target("ratio", 1.0)),))


def load_folder(name: str, *, bias: bool) -> Callable[[Bench], Case]:
    """A folder into a model, against reading each of its bytes once; both make the model."""

    def case(bench: Bench) -> Case:
        folder = bench.input(name)
        sizes = (str(max(2, round(BIG_LAYERS * bench.scale))), str(BIG_WIDTH), str(int(bias)))
        ours = bench.baseline("ckptfix", "folder_into", folder, *sizes)
        rival = bench.baseline("cat, in Python", "folder_read", folder, *sizes)
        return Case(f"load_into from {name}", ours, ((rival, Target("ratio", 1.2)),))

    return case


def to_safetensors(bench: Bench) -> Case:
    big = bench.input("big.pth")
    ours, theirs = bench.output("ours.safetensors"), bench.output("theirs.safetensors")
    rivals = [
        (bench.copied(big), Target("ratio", 1.2)),
        (bench.baseline("torch.load(mmap), save_file", "save_file", big, theirs, output=theirs), None),
    ]
    skipped = {}
    try:
        python = packages.interpreter("sft-cli", ["sft-cli==0.2.2", "torch"])
        command = (str(python.with_name("sft")), "convert", str(big), "--output", str(theirs))
        rivals.append((Contender("sft-cli 0.2.2", command, theirs, sync=True), None))
    except Failed as error:
        skipped["sft-cli 0.2.2"] = str(error)
    try:
        python = packages.interpreter("pt-safe-loader", ["pt-safe-loader==0.1.4"])
        name = "pt-safe-loader 0.1.4"
        rivals.append((bench.baseline(name, "pt_safe_loader", big, theirs, output=theirs, python=python), None))
    except Failed as error:
        skipped["pt-safe-loader 0.1.4"] = str(error)
    return Case(
        "convert zip to safetensors",
        bench.ckptfix("convert", big, ours, output=ours),
        rivals,
        check=("same", big),
        skipped=skipped,
    )


def from_safetensors(bench: Bench) -> Case:
    plain = bench.input("plain.safetensors")
    job = "convert safetensors to zip"
    return _beside_cp(bench, job, plain, "ours.pth", "convert", ratio=1.1, check=("same", plain))


def shards_strip(bench: Bench) -> Case:
    shards = bench.input("shards")
    return _beside_cp(
        bench, "strip-module, 50 shards", shards, "ours", "strip-module", ratio=1.1, check=("stripped", shards)
    )


def shards_to_file(bench: Bench) -> Case:
    shards = bench.input("shards")
    job = "convert 50 shards to one file"
    return _beside_cp(bench, job, shards, "ours.safetensors", "convert", ratio=1.2, check=("same", shards))


def file_to_shards(bench: Bench) -> Case:
    plain, job = bench.input("plain.safetensors"), "convert one file to 50 shards"
    options = ("--to", "hf", "--shard-size", "50MB")
    return _beside_cp(bench, job, plain, "ours", "convert", *options, ratio=1.2, check=("same", plain))


def zero_to_file(bench: Bench) -> Case:
    zero3, check = bench.input("zero3"), ("stripped", bench.input("big.pth"))
    job = "convert ZeRO-3 of 8 ranks to one file"
    return _beside_cp(bench, job, zero3, "ours.pth", "convert", ratio=1.5, check=check, memory=100 * MB)


def diff_equal(bench: Bench) -> Case:
    big, copy = bench.input("big.pth"), bench.input("copy.pth")
    return Case(
        "diff, equal files",
        bench.ckptfix("diff", big, copy),
        ((Contender("cmp", ("cmp", str(big), str(copy))), Target("ratio", 1.5)),),
        memory=100 * MB,
    )


def diff_different(bench: Bench) -> Case:
    plain, tuned = bench.input("plain.safetensors"), bench.input("tuned.safetensors")
    return Case(
        "diff, every value different",
        bench.ckptfix("diff", plain, tuned, status=1),
        ((bench.baseline("numpy, same sums", "numpy_diff", plain, tuned), None),),
    )


def inspect(bench: Bench) -> Case:
    return Case(
        "inspect, small file",
        bench.ckptfix("inspect", bench.input("small.pth")),
        ((bench.baseline("import torch", "import_torch"), Target("seconds", 0.2)),),
    )


def doctor(bench: Bench) -> Case:
    """Every byte read, its checksum and its NaN looked for, against nothing but reading.

    The rounds run on a warm page cache, where the ratio is the worst that there is: the target is a time.
    """
    big = bench.input("big.pth")
    rival = Contender("cat > /dev/null", ("sh", "-c", f"cat '{big}' > /dev/null"))
    return Case("doctor, every byte", bench.ckptfix("doctor", big), ((rival, Target("seconds", 2.4)),), 100 * MB)


def doctor_fast(bench: Bench) -> Case:
    return Case(
        "doctor --fast",
        bench.ckptfix("doctor", bench.input("big.pth"), "--fast"),
        ((bench.baseline("import torch", "import_torch"), Target("seconds", 0.3)),),
    )


def help_page(bench: Bench) -> Case:
    return Case(
        "--help",
        bench.ckptfix("--help"),
        ((bench.baseline("import torch", "import_torch"), Target("seconds", 0.2)),),
    )


def from_ranks(bench: Bench) -> Case:
    folder = bench.input("ranks")
    ours, theirs = bench.output("ours.safetensors"), bench.output("torch.pth")
    return Case(
        "8 ranks to safetensors",
        bench.ckptfix("convert", folder, ours, output=ours),
        (
            (bench.copied_folder(folder), Target("ratio", 1.3)),
            (bench.baseline("dcp_to_torch_save", "dcp_to_torch", folder, theirs, output=theirs), Target("faster", 4)),
        ),
        memory=100 * MB,
        check=("of_ranks", folder),
    )


def tensor_ranks(count: int, dim: int) -> Callable[[Bench], Case]:
    """A model of `count` ranks of tensor parallelism, all of whose tensors are cut along the dimension `dim`."""

    def case(bench: Bench) -> Case:
        folder = bench.input(f"tensor-ranks-{count}-{dim}")
        ours = bench.output("ours.safetensors")
        return Case(
            f"convert {count} ranks, cut along {dim}",
            bench.ckptfix("convert", folder, ours, output=ours),
            ((bench.copied_folder(folder), Target("ratio", 1.5)),),
            memory=100 * MB,
            check=("of_tensor_ranks", folder),
        )

    return case


def inspect_ranks(bench: Bench) -> Case:
    folder = bench.input("many-ranks")
    return Case(
        "inspect, 100,000 tensors of 64 ranks",
        bench.ckptfix("inspect", folder),
        ((bench.baseline("torch, its metadata alone", "dcp_metadata", folder), Target("seconds", 10)),),
    )


def inspect_sharded(bench: Bench) -> Case:
    folder = bench.input("sharded-ranks")
    return Case(
        "inspect, 1,600 tensors in 64 parts each",
        bench.ckptfix("inspect", folder),
        ((bench.baseline("torch, its metadata alone", "dcp_metadata", folder), Target("seconds", 10)),),
    )


def select(bench: Bench) -> Case:
    big, ours = bench.input("plain.safetensors"), bench.output("ours.safetensors")
    return Case(
        "select, all weights",
        bench.ckptfix("select", big, ours, "--drop", "*.bias", output=ours),
        ((bench.copied(big), Target("ratio", 1.1)),),
        memory=64 * MB,
    )


def lora_merge(bench: Bench) -> Case:
    big, style = bench.input("plain.safetensors"), bench.input("adapter.safetensors")
    ours = bench.output("ours.safetensors")
    return Case(
        "lora merge, rank 16 into all weights",
        bench.ckptfix("lora", "merge", big, style, "-o", ours, output=ours),
        ((bench.copied(big), Target("ratio", 6)),),
        memory=300 * MB,
        check=("lora_merged", big),
    )


def cast(bench: Bench) -> Case:
    big, ours = bench.input("plain.safetensors"), bench.output("ours.safetensors")
    theirs = bench.output("theirs.safetensors")
    return Case(
        "cast to bfloat16",
        bench.ckptfix("cast", big, ours, "--to", "bfloat16", output=ours),
        (
            (bench.copied(big), Target("ratio", 1.5)),
            (bench.baseline("load_file, to, save_file", "torch_cast", big, theirs, output=theirs), None),
        ),
        memory=100 * MB,
    )


def dequantize(scheme: str) -> Callable[[Bench], Case]:
    """Plain weights of 2 GB from codes of `scheme`, against ``cp`` of the input and of as large an output."""

    def case(bench: Bench) -> Case:
        codes, whole = bench.input(f"{scheme}.safetensors"), bench.input("matrices.safetensors")
        ours, both = bench.output("ours.safetensors"), bench.output("both")
        script = 'mkdir "$3" && cp "$1" "$2" "$3" && find "$3" -exec sync {} +'
        copied = Contender("cp of both + sync", ("sh", "-c", script, "sh", str(codes), str(whole), str(both)), both)
        return Case(
            f"convert --dequantize, {scheme}",
            bench.ckptfix("convert", codes, ours, "--dequantize", output=ours),
            ((copied, Target("ratio", 2)),),
            memory=200 * MB,
        )

    return case


def average(bench: Bench) -> Case:
    big, ours = bench.input("plain.safetensors"), bench.output("ours.safetensors")
    return Case(
        "average of three",
        bench.ckptfix("average", big, big, big, "-o", ours, output=ours),
        ((cat(big, big, big), None), (bench.copied(big), None)),
        memory=100 * MB,
    )


def average_cold(bench: Bench) -> Case:
    files, ours = bench.copies("plain.safetensors", 3), bench.output("ours.safetensors")
    return Case(
        "average of three, read from the disk",
        replace(bench.ckptfix("average", *files, "-o", ours, output=ours), cold=files),
        ((replace(cat(*files), cold=files), Target("ratio", 1.5)),),
        memory=100 * MB,
    )


def stats(bench: Bench) -> Case:
    big = bench.input("plain.safetensors")
    return Case("stats", bench.ckptfix("stats", big), ((cat(big), None),), memory=100 * MB)


def stats_cold(bench: Bench) -> Case:
    big = bench.input("plain.safetensors")
    return Case(
        "stats, read from the disk",
        replace(bench.ckptfix("stats", big), cold=(big,)),
        ((replace(cat(big), cold=(big,)), Target("ratio", 2)),),
        memory=100 * MB,
    )


def cat(*files: Path) -> Contender:
    return Contender("cat", ("sh", "-c", f"cat {shlex.join(map(str, files))} > /dev/null"))


def digest(bench: Bench) -> Case:
    big = bench.input("plain.safetensors")
    rival = Contender("sha256sum", ("sha256sum", str(big)))
    return Case("digest", bench.ckptfix("digest", big), ((rival, Target("ratio", 1.1)),), memory=100 * MB)


def digest_blake3(bench: Bench) -> Case:
    big = bench.input("plain.safetensors")
    ours = bench.ckptfix("digest", "--algorithm", "blake3", big)
    return Case("digest, blake3", ours, ((cat(big), Target("seconds", 1.6)),), memory=100 * MB)


def fleet(bench: Bench) -> Case:
    """A hundred small files: a plan and its run, against one process for each and one for all."""
    first, *_ = bench.copies("small.pth", 101)
    program = shlex.quote(str(Path(sys.executable).with_name("ckptfix")))
    files = f"{shlex.quote(str(first.parent))}/copy-*-small.pth"

    def script(name: str, text: str) -> Contender:
        output = bench.output(f"fleet-{name.replace(' ', '-')}")
        lines = f"set -e; mkdir -p {output}; {text.format(program=program, files=files, out=output)}"
        return Contender(name, ("sh", "-c", lines), output)

    ours = script(
        "ckptfix",
        "{program} fleet plan {files} -- to-cpu --out-dir {out}/out > {out}/plan.jsonl 2> {out}/said; "
        "{program} fleet run {out}/plan.jsonl",
    )
    loop = script("a shell loop", 'for f in {files}; do {program} to-cpu "$f" {out}/$(basename "$f"); done')
    one = script("one process", "{program} to-cpu --out-dir {out}/out {files}")
    return Case("fleet, 100 small files", ours, ((loop, Target("faster", 2)), (one, None)))


CASES: dict[str, Callable[[Bench], Case]] = {
    "strip-module": strip_module,
    "in-place": in_place,
    "in-place-blocks": in_place_blocks,
    "strip-xfs": strip_xfs,
    "strip-btrfs": strip_btrfs,
    "to-cpu": to_cpu,
    "split": split,
    "stack": stack,
    "transpose": transpose,
    "many-tensors": many_tensors,
    "tensors-to-dcp": to_dcp("100,000 tensors", "tensors.pth", 8, 400 * MB),
    "views-to-dcp": to_dcp("8,000 overlapping views", "views.pth", 1, 100 * MB),
    "fix-dicts": of_dicts("fix", "dicts.pth"),
    "fix-wrapped-dicts": of_dicts("fix", "wrapped-dicts.pth"),
    "repair-dicts": of_dicts("repair", "dicts.pth"),
    "match": match,
    "load": load,
    "load-unverified": load_unverified,
    "load-state-dict": load_state_dict,
    "load-dcp": load_folder("ranks", bias=False),
    "load-hf": load_folder("shards", bias=True),
    "load-zero": load_folder("zero3", bias=True),
    "to-safetensors": to_safetensors,
    "from-safetensors": from_safetensors,
    "shards-strip": shards_strip,
    "shards-to-file": shards_to_file,
    "file-to-shards": file_to_shards,
    "from-ranks": from_ranks,
    **{f"tensor-ranks-{count}-{dim}": tensor_ranks(count, dim) for count in (4, 8) for dim in (0, 1)},
    "zero-to-file": zero_to_file,
    "diff-equal": diff_equal,
    "diff-different": diff_different,
    "inspect": inspect,
    "inspect-ranks": inspect_ranks,
    "inspect-sharded": inspect_sharded,
    "doctor": doctor,
    "doctor-fast": doctor_fast,
    "select": select,
    "cast": cast,
    "lora-merge": lora_merge,
    **{f"dequantize-{scheme}": dequantize(scheme) for scheme in ("gptq", "awq", "fp8", "nf4", "nvfp4")},
    "average": average,
    "average-cold": average_cold,
    "stats": stats,
    "stats-cold": stats_cold,
    "digest": digest,
    "digest-blake3": digest_blake3,
    "fleet": fleet,
    "help": help_page,
}


def checker(case: Case) -> Callable[[Contender], None]:
    """What looks at a contender's first output. Raises Failed when it is not what was asked for."""

    def check(contender: Contender) -> None:
        if case.check is None or contender.output is None or contender.name.endswith(" + sync"):
            return
        name, source = case.check
        quietly([sys.executable, HERE / "checks.py", name, source, contender.output], env=dict(os.environ))

    return check
