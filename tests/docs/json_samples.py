"""Runs whose ``--json`` output has, together, every field that the documentation lists."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import run_folders
import torch
from builders import Tensor, assemble, safetensors, state_dict_ops, torch_zip, written
from cli.conftest import floats, state, wrapped
from docs.samples import files, model, saved
from json_contract import SCHEMA

import ckptfix
from ckptfix.command_table import COMMANDS


class Net(torch.nn.Module):
    """A module with a tensor that no state dict has."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = torch.nn.Linear(2, 2)
        self.kept = torch.ones(3)


def rich() -> Any:
    """A training checkpoint with a tie, an average, an optimizer, and a value that is not plain."""
    layer = torch.nn.Linear(3, 2)
    optimizer = torch.optim.Adam(layer.parameters())
    layer(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    weights = {"weight": torch.ones(2, 3), "tied": torch.zeros(3)}
    weights["other"] = weights["tied"]
    return {"model": weights, "ema": {**weights}, "optimizer": optimizer.state_dict(), "run": argparse.Namespace(a=1)}


def meta() -> Any:
    """A tensor without data, which safetensors cannot hold."""
    return {"w": torch.ones(2), "m": torch.ones(2, device="meta")}


def functions() -> Any:
    """A value that sanitize leaves out."""
    return {"w": torch.ones(2), "call": saved}


def norm(counted: bool) -> Any:
    names = torch.nn.BatchNorm1d(2).state_dict()
    return {name: value for name, value in names.items() if counted or name != "num_batches_tracked"}


def tied(same: bool) -> Any:
    weight = torch.ones(2)
    return {"a": weight, "b": weight if same else weight.clone()}


def gan() -> Any:
    """Two models in a file."""
    return {name: {f"{name}.weight": torch.ones(2, 2)} for name in ("generator", "discriminator")}


def half() -> Any:
    return {"fc.weight": torch.ones(3).half(), "fc.bias": torch.ones(2).half()}


def damaged() -> bytes:
    """A tensor that is larger than its storage."""
    items = {"fc.weight": Tensor("0", (3,), 3), "x": Tensor("1", (4,), 4)}
    return torch_zip(assemble(("PROTO", 2), *state_dict_ops(items), "STOP"), [floats(1, 2, 3), floats(1)])


def edited() -> Iterator[tuple[str, bytes]]:
    """Files after two edits in place each, and what is kept beside them."""
    plain = safetensors([("module.a", "F32", [2], floats(1, 2))], metadata={"format": "pt", "room": "x" * 99})
    with TemporaryDirectory() as folder:
        for name, content in (("edited.pth", wrapped()), ("edited.safetensors", plain)):
            path = written(Path(folder, name), content)
            ckptfix.strip_module(path, in_place=True)
            ckptfix.add_module(path, prefix="m", in_place=True)
        yield from ((path.name, path.read_bytes()) for path in Path(folder).iterdir())


LAST = "global_step200/bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"


def training() -> Iterator[tuple[str, bytes]]:
    """Files of a run of DeepSpeed whose last save was cut, and of one of transformers' Trainer without its model."""
    with TemporaryDirectory() as folder:
        run_folders.cut(run_folders.built("deepspeed", Path(folder, "deepspeed")) / LAST, 60)
        trainer = run_folders.built("trainer", Path(folder, "trainer"))
        for step in run_folders.STEPS:
            (trainer / f"checkpoint-{step}" / "model.safetensors").unlink()
        paths = [path for path in Path(folder).rglob("*") if path.is_file()]
        yield from ((str(path.relative_to(folder)), path.read_bytes()) for path in paths)


def adapter() -> Iterator[tuple[str, bytes]]:
    """A base, an adapter of PEFT, and one with parts that are not merged."""
    yield "base.safetensors", safetensors([("fc.weight", "F32", [2, 2], floats(1, 2, 3, 4)),
                                           ("norm.weight", "F32", [1], floats(1))])  # fmt: skip
    yield "tuned.safetensors", safetensors([("fc.weight", "F32", [2, 2], floats(2, 4, 3, 4)),
                                            ("norm.weight", "F32", [1], floats(2))])  # fmt: skip
    rows: list[tuple[str, Sequence[int]]] = [("lora_A", [1, 2]), ("lora_B", [2, 1])]
    parts = [(f"base_model.model.fc.{name}.default.weight", "F32", shape, floats(1, 2)) for name, shape in rows]
    whole = ("base_model.model.norm.weight", "F32", [1], floats(3))
    yield "peft/adapter_model.safetensors", safetensors([*parts, whole])
    yield "peft/adapter_config.json", json.dumps({"r": 1, "lora_alpha": 2, "base_model_name_or_path": "a"}).encode()
    lone = [(name.replace("base_model.model.", "layers.0."), code, shape, data) for name, code, shape, data in parts]
    yield "alone/adapter_model.safetensors", safetensors(lone)
    odd = [("lora_unet_a_0.lora_down.weight", "F32", [1, 2], floats(1, 2)),
           ("lora_unet_b.diff", "F32", [1], floats(1)),
           ("lora_unet_c.oft_blocks", "F32", [1], floats(1)),
           ("lora_unet_a_0.alpha", "F32", [], floats(1))]  # fmt: skip
    yield "odd.safetensors", safetensors(odd)


def make() -> Iterator[tuple[str, bytes]]:
    """(name, content) of the files."""
    yield from files().items()
    for name, contents in {
        "rich.pth": rich, "module.pth": Net, "meta.pth": meta, "functions.pth": functions,
        "norm.pth": lambda: norm(False), "counted.pth": lambda: norm(True),
        "half.pth": half, "tied.pth": lambda: tied(True), "one.pth": lambda: {"a": torch.ones(2)},
        "untied.pth": lambda: tied(False),
    }.items():  # fmt: skip
        yield name, saved(contents)
    yield "old.pth", wrapped()
    yield "single.pth", saved(lambda: {"weight": torch.ones(2, 3), "tied": torch.zeros(3)})
    numbers = {"c": torch.tensor([1 + 2j, 3]), "q": torch.quantize_per_tensor(torch.ones(2), 0.5, 0, torch.qint8)}
    yield "numbers.pth", saved(lambda: numbers)
    codes = {"fc.weight": torch.ones(4, 4).to(torch.float8_e4m3fn), "fc.weight_scale_inv": torch.ones(4, 1)}
    yield "quantized.pth", saved(lambda: codes)
    yield "nodata.pth", saved(lambda: {"fc.weight": torch.ones(3), "fc.bias": torch.empty(3, device="meta")})
    yield "tiny.pth", saved(lambda: {"w": torch.tensor([1e-30, 1e30])})
    yield "damaged.pth", damaged()
    yield "renamed.pth", state(new__weight=(1, 2, 3), fc__bias=(4, 5))
    yield "copies.pth", state(one=(1, 2, 3), two=(1, 2, 3))
    yield "original.pth", state(three=(1, 2, 3))
    yield "flat.pth", model({"fc.weight": (6,)})
    yield "square.pth", model({"head.weight": (2, 3)})
    yield "flat.rules", b"fc.weight -> head.weight\nno.weight -> one.weight\n"
    yield "a.rules", b"no.weight -> one.weight\n"
    yield "fused.pth", model({"attn.qkv.weight": (6, 2), "attn.out.weight": (2, 2)})
    yield "apart.pth", model({f"attn.{part}.weight": (2, 2) for part in ("query", "key", "value", "out")})
    yield "matrix.safetensors", safetensors([("fc.weight", "F32", [2, 1], floats(1, 2))])
    yield "plain.safetensors", safetensors([("a", "F32", [2], floats(1, 2))], metadata={"format": "pt"})
    yield "run/model.safetensors", safetensors([("a", "F32", [2], floats(1, 2))])
    yield "run/trainer_state.json", b"{}"
    yield from adapter()
    yield "page.pth", b"<!DOCTYPE html><html></html>"
    yield "truncated.pth", wrapped()[:900]
    yield "mixed.pth", wrapped(second="")
    yield "gan.pth", saved(gan)
    yield from edited()
    yield from training()
    for name in ("plan", "again"):
        yield f"{name}.jsonl", plan(name).encode()


def plan(name: str) -> str:
    """The plan of a fleet: an output, a finding and a failure."""
    jobs = [(path, f"{name}-{path}", ["to-cpu", path, f"{name}-{path}"]) for path in ("ddp.pth", "cut.pth")]
    known = {"identity": None, "bytes": 1}
    rows = [{"input": path, "output": output, "argv": argv, **known} for path, output, argv in jobs]
    rows.append({"input": "rich.pth", "output": None, "argv": ["doctor", "rich.pth"], **known})
    return "".join(json.dumps(row) + "\n" for row in rows)


_RUNS: dict[str, tuple[str, ...]] = {
    "inspect": ("inspect ddp.pth", "inspect rich.pth", "inspect meta.pth", "inspect plain.safetensors",
                "inspect run", "inspect module.pth", "inspect quantized.pth", "inspect peft"),
    "ls": ("ls ddp.pth", "ls rich.pth", "ls page.pth", "ls a.pth", "ls trainer --check",
           "ls quantized.pth", "ls model.pth"),
    "fix": ("fix ddp.pth", "fix plain.safetensors out.safetensors"),
    "doctor": ("doctor ddp.pth --error 'Unexpected key(s) in state_dict: \"module.fc.weight\"'", "doctor cut.pth",
               "doctor page.pth", "doctor rich.pth"),
    "run_folder": ("doctor deepspeed", "doctor trainer"),
    "explanation": ("doctor --explain bad-pickle", "doctor --explain lfs-pointer"),
    "diff": ("diff ddp.pth rich.pth", "diff rich.pth ddp.pth", "diff model.pth ddp.pth", "diff a.pth b.pth",
             "diff a.pth b.pth --atol 2", "diff module.pth meta.pth", "diff copies.pth original.pth",
             "diff tied.pth untied.pth", "diff a.pth renamed.pth", "diff damaged.pth a.pth"),
    "digest": ("digest ddp.pth --check rich.pth", "digest --files ddp.pth", "digest a.pth --check b.pth",
               "digest renamed.pth --check a.pth", "digest single.pth --check rich.pth", "digest ddp.pth --total",
               "digest nodata.pth", "digest nodata.pth --check nodata.pth"),
    "stats": (
        *("stats ddp.pth --by-layer", "stats a.pth --depth 1"),
        "stats numbers.pth --filter * --filter none --allow-unmatched",
    ),
    "git": ("git enable --global --dry-run", "git textconv a.pth"),
    "rename": ("strip-module ddp.pth OUT.pth", "rename ddp.pth OUT.pth --sub a=b"),
    "match": ("match bert.pth OUT.pth --like mine.pth", "match heads.pth OUT.pth --like like.pth --accept-ambiguous",
              "match bert.pth --like like.pth --report",
              "match fused.pth OUT.pth --like apart.pth", "match flat.pth OUT.pth --like square.pth --reshape",
              "match counted.pth OUT.pth --like norm.pth", "match norm.pth OUT.pth --like counted.pth",
              "match a.pth OUT.pth --like half.pth", "match one.pth OUT.pth --like tied.pth"),
    "rules_check": ("match flat.pth --like square.pth --check flat.rules",
                    "match a.pth --like fused.pth --check a.rules",
                    "match a.pth --like torch.nn:PReLU --source torch.nn:PReLU --check a.rules --allow-import"),
    "map-location": ("to-cpu ddp.pth OUT.pth", "map-location ddp.pth OUT.pth cuda:1=cpu",
                             "to-cpu ddp.pth old.pth --force --backup"),
    "convert": ("convert model.pth OUT.safetensors", "convert meta.pth OUT.safetensors --drop-unsupported",
                "convert model.pth OUT.pth --to legacy", "convert quantized.pth OUT.safetensors --dequantize",
                "convert model.pth OUT.safetensors --dtype fp16"),
    "extract": ("extract module.pth OUT.pth", "extract rich.pth OUT.pth",
                "extract meta.pth OUT.safetensors --drop-unsupported"),
    "sanitize": ("sanitize rich.pth OUT.pth", "sanitize functions.pth OUT.pth"),
    "repair": ("repair cut.pth OUT.pth", "repair cut.pth OUT.pth --fill zeros"),
    "select": ("select ddp.pth OUT.pth --drop *.bias",),
    "merge": ("merge a.pth plain.safetensors -o OUT.pth",
              "merge model.pth plain.safetensors -o OUT.pth"),
    "cast": ("cast counted.pth OUT.pth --to bf16", "cast tiny.pth OUT.pth --to float16",
             "cast tiny.pth OUT.pth --to e4m3", "cast matrix.safetensors OUT.safetensors --to e4m3 --scale row"),
    "average": ("average a.pth b.pth -o OUT.pth", "average counted.pth counted.pth -o OUT.pth --weights 1,3"),
    "set-metadata": ("set-metadata plain.safetensors OUT.safetensors --set room=b --delete format",),
    "slim": ("slim view.pth OUT.pth", "slim rich.pth OUT.pth --no-optimizer"),
    "lora_info": ("lora info peft", "lora info alone", "lora info odd.safetensors"),
    "lora_merge": ("lora merge base.safetensors peft -o OUT.safetensors",
                   "lora merge base.safetensors peft -o OUT.safetensors --only *fc*"),
    "lora_convert": ("lora convert alone OUT --to peft --alpha 1",
                     "lora convert alone OUT.safetensors --to diffusers --alpha 1 --prefix unet"),
    "lora_extract": ("lora extract base.safetensors tuned.safetensors -o OUT --rank 1",
                     "lora extract base.safetensors tuned.safetensors -o OUT.safetensors --rank 1 --to kohya "
                     "--prefix lora_unet"),
    "fleet": ("fleet run plan.jsonl", "fleet status plan.jsonl --list done"),
    "fleet_job": ("fleet run plan.jsonl --dry-run", "fleet run again.jsonl"),
    "undo": ("undo --list edited.pth", "undo edited.safetensors", "undo ddp.pth"),
    "failure": ("inspect none.pth", "inspect --nonsense", "rename model.pth OUT.pth --sub 'bias|weight=x'",
               "inspect truncated.pth", "inspect page.pth", "inspect a.pth --filter fc.weigth",
               "strip-module mixed.pth OUT.pth", "convert gan.pth OUT.safetensors",
               "match heads.pth OUT.pth --like like.pth"),
}  # fmt: skip

RUNS = {name: (f"{name} ddp.pth" + (" OUT.pth" if row.writes else ""),) for name, row in COMMANDS.items()
        if name in SCHEMA["$defs"]} | _RUNS  # fmt: skip
"""Definition of the schema -> command lines; OUT is a name of their own."""
