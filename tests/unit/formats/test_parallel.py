"""Models cut into the files of ranks: what is joined and written again equals what tests/rank_writer.py cut."""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import pickle
import re
import shlex
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
import rank_writer as writer
import torch
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from rank_files import dtensors
from rank_writer import Model, Sizes, State, write_megatron, write_meta
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint import metadata
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.state_dict_saver import save
from torch_versions import ALONE

import ckptfix
from ckptfix.checkpoint import Storage, TensorEntry, contiguous_stride
from ckptfix.cli import commands
from ckptfix.errors import CkptfixError, DamagedFile, Refused, WouldLoseData
from ckptfix.formats.foreign.rank_items import rank_items
from ckptfix.formats.members import RANKS_METADATA
from ckptfix.formats.parallel import cuts
from ckptfix.formats.parallel.cuts import RankCut
from ckptfix.formats.parallel.parameters import shown
from ckptfix.io.read import read_chunks
from ckptfix.io.virtual_files import SplicedFile, SplicedPiece
from ckptfix.ops.doctor import doctor

Make = Callable[[Path], State]


def meta(version: int, ranks: int) -> Make:
    def make(folder: Path) -> State:
        model = writer.llama(version)
        write_meta(model, folder, ranks)
        return model.tensors

    return make


def megatron(model: Model, sizes: Sizes, **more: Any) -> Make:
    def make(folder: Path) -> State:
        write_megatron(model, folder, sizes, **more)
        return model.tensors

    return make


CASES: dict[str, Make] = {
    "Llama 2": meta(2, 2),
    "Llama 3": meta(3, 4),
    "fairseq": lambda folder: writer.write_fairseq(folder, 2),
    "Qwen, TP 2, PP 2": megatron(writer.qwen(), Sizes(2, 2)),
    "Qwen, virtual pipeline": megatron(writer.qwen(), Sizes(2, 2, 2)),
    "Mixtral, EP 2": megatron(writer.mixtral(), Sizes(2, 1, 1, 2)),
    "Mixtral, EP 2, PP 2, grouped": megatron(writer.mixtral(grouped=True), Sizes(1, 2, 1, 2)),
    "GroupedMLP": megatron(writer.legacy_grouped(), Sizes(2, 2)),
    "GroupedMLP without gates": megatron(writer.legacy_grouped(gates=1), Sizes(4)),
    "GPT-2, tied": megatron(writer.gpt2(), Sizes(2, 2)),
    "GPT-2, one file": megatron(writer.gpt2(), Sizes()),
    "before the core": megatron(writer.legacy_gpt(3.0), Sizes(2, 2), nested=True),
    "queries apart": megatron(writer.legacy_gpt(0), Sizes(2), nested=True, version=0),
    "Mamba": megatron(writer.mixers("mamba"), Sizes(4)),
    "GatedDeltaNet": megatron(writer.mixers("gdn"), Sizes(2, 2)),
    "GatedDeltaNet2": megatron(writer.mixers("gdn2"), Sizes(4)),
    "GatedDeltaProduct": megatron(writer.mixers("gdp"), Sizes(2)),
    "latents, cut": megatron(writer.latents(fused=False, cut=True), Sizes(2)),
    "latents, whole": megatron(writer.latents(fused=False, cut=False), Sizes(2)),
    "latents in one, cut": megatron(writer.latents(fused=True, cut=True), Sizes(4)),
    "latents in one, whole": megatron(writer.latents(fused=True, cut=False), Sizes(2)),
    "LLaVA": megatron(writer.llava(), Sizes(2)),
}


def same(own: State, other: State) -> None:
    assert set(own) == set(other)
    for name, tensor in own.items():
        assert tensor.dtype == other[name].dtype and torch.equal(tensor, other[name]), name


def flat(state: dict[str, Any], at: str = "") -> State:
    made: State = {}
    for key, value in state.items():
        made |= flat(value, f"{at}{key}.") if isinstance(value, dict) else {f"{at}{key}": value}
    return made


@pytest.mark.sampled(1_000)
@pytest.mark.parametrize("case", CASES)
def test_all_ranks_are_joined(case: str, tmp_path: Path) -> None:
    whole = CASES[case](tmp_path / "in")
    ckptfix.convert(tmp_path / "in", tmp_path / "out.safetensors")
    same(whole, load_file(tmp_path / "out.safetensors"))


@pytest.mark.sampled(quick=3)
@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_meta_files_are_cut_as_fairscale_cuts_them(version: int, ranks: int, tmp_path: Path) -> None:
    model = writer.llama(version)
    write_meta(model, tmp_path / "two", 2)
    write_meta(model, tmp_path / "wanted", ranks)
    ckptfix.convert(tmp_path / "two", tmp_path / "out", to="meta", tp=ranks)
    for path in (tmp_path / "wanted").iterdir():
        if path.suffix == ".pth":
            same(torch.load(path), torch.load(tmp_path / "out" / path.name))
    assert json.loads((tmp_path / "out" / "params.json").read_text()) == model.args
    ckptfix.convert(tmp_path / "out", tmp_path / "again.safetensors")
    same(model.tensors, load_file(tmp_path / "again.safetensors"))


SPLITS: dict[str, tuple[Model, Sizes, dict[str, Any]]] = {
    "Qwen": (writer.qwen(), Sizes(2, 2, 2), {}),
    "Mixtral": (writer.mixtral(), Sizes(2, 1, 1, 2), {}),
    "grouped": (writer.mixtral(grouped=True), Sizes(1, 2), {}),
    "GroupedMLP": (writer.legacy_grouped(), Sizes(4), {}),
    "GPT-2": (writer.gpt2(), Sizes(4), {}),
    "before the core": (writer.legacy_gpt(0), Sizes(2), {"nested": True, "version": 0}),
    "Mamba": (writer.mixers("mamba"), Sizes(4), {}),
    "GatedDeltaNet": (writer.mixers("gdn"), Sizes(4), {}),
    "GatedDeltaProduct": (writer.mixers("gdp"), Sizes(1), {}),
}


@pytest.mark.sampled(quick=2)
@pytest.mark.parametrize("case", SPLITS)
def test_megatron_files_are_cut_as_megatron_cuts_them(case: str, tmp_path: Path) -> None:
    model, sizes, more = SPLITS[case]
    write_megatron(model, tmp_path / "in", sizes, **more)
    write_megatron(model, tmp_path / "wanted", Sizes(2, 2, 1, sizes.ep), **more)
    ckptfix.convert(tmp_path / "in", tmp_path / "out", to="megatron", tp=2, pp=2, ep=sizes.ep)
    wanted = sorted(path.relative_to(tmp_path / "wanted") for path in (tmp_path / "wanted").rglob("*.*"))
    assert wanted == sorted(path.relative_to(tmp_path / "out") for path in (tmp_path / "out").rglob("*.*"))
    for name in wanted[:-1]:
        own, other = (torch.load(tmp_path / one / name, weights_only=False) for one in ("wanted", "out"))
        same(flat(own["model"]), flat(other["model"]))
        assert (own["iteration"], own["checkpoint_version"]) == (other["iteration"], other["checkpoint_version"])
        stated, args = vars(own["args"]), vars(other["args"])
        assert {key: args[key] for key in stated if key in args} == {key: stated[key] for key in stated if key in args}
        assert set(stated) - set(args) <= {"rank", "params_dtype"}
    ckptfix.convert(tmp_path / "out", tmp_path / "again.safetensors")
    same(model.tensors, load_file(tmp_path / "again.safetensors"))


def test_a_model_without_arguments_is_cut_by_its_shapes(tmp_path: Path) -> None:
    model = writer.mixtral()
    save_file(model.tensors, tmp_path / "in.safetensors")
    done = ckptfix.convert(tmp_path / "in.safetensors", tmp_path / "out", to="megatron", tp=2, ep=4)
    saved = torch.load(tmp_path / "out/release/mp_rank_01_003/model_optim_rng.pt", weights_only=False)
    assert saved["args"].swiglu and (saved["args"].num_layers, saved["args"].num_experts) == (2, 4)
    assert "args/num_attention_heads" in [row.where for row in done.findings]
    for form in ("zip", "hf", "dcp"):
        out = tmp_path / (f"again.{form}" if form != "zip" else "again.pth")
        ckptfix.convert(tmp_path / "out", out, to=form)
        assert ckptfix.diff(out, tmp_path / "out").exit_code in (0, 1)
    same(model.tensors, torch.load(tmp_path / "again.pth")["model"])


def refused(source: Path, *words: str, kind: type[CkptfixError] = CkptfixError, **options: Any) -> None:
    """Check that a conversion is refused with these words, and writes nothing."""
    out = source.parent / "never"
    options = {"to": "safetensors", **options}
    with pytest.raises(kind) as caught:
        ckptfix.convert(source, out, **options)
    text = f"{caught.value} {caught.value.hint}"
    assert all(word in text for word in words), text
    assert not out.exists()


def test_a_file_of_one_rank_is_one_part(tmp_path: Path) -> None:
    writer.write_fairseq(tmp_path / "f", 2)
    write_meta(writer.llama(2), tmp_path / "m", 2)
    folder = write_megatron(writer.qwen(), tmp_path / "g", Sizes(2, 2))
    shutil.copy(tmp_path / "m" / "consolidated.00.pth", tmp_path)
    for path, rank in (
        (tmp_path / "f" / "checkpoint_last-model_part-1.pt", "rank 1 of 2"),
        (tmp_path / "m" / "consolidated.01.pth", "rank 1 of 2"),
        (tmp_path / "consolidated.00.pth", "rank 0 of 2"),
        (folder / "mp_rank_01_001" / "model_optim_rng.pt", "rank 3 of 4"),
    ):
        refused(path, rank, "ckptfix convert", kind=WouldLoseData)
        assert "one-rank" in [row.id for row in doctor(path).findings]


def test_a_missing_rank_is_named(tmp_path: Path) -> None:
    write_meta(writer.llama(3), tmp_path / "m", 4)
    (tmp_path / "m" / "consolidated.03.pth").unlink()
    refused(tmp_path / "m", "rank 3 of 4", "consolidated.03.pth")
    folder = write_megatron(writer.qwen(), tmp_path / "g", Sizes(2, 2))
    shutil.rmtree(folder / "mp_rank_01_001")
    refused(tmp_path / "g", "mp_rank_01_001", "one part of 4", "stage 1")
    (row,) = [row for row in doctor(tmp_path / "g").findings if row.id == "missing-rank"]
    assert row.where == str(folder / "mp_rank_01_001")
    shutil.rmtree(folder / "mp_rank_00_001")
    refused(tmp_path / "g", "mp_rank_00_001")


def test_a_file_that_cannot_be_read_is_a_missing_rank(tmp_path: Path) -> None:
    folder = write_megatron(writer.qwen(), tmp_path / "g", Sizes(2))
    (folder / "mp_rank_01" / "model_optim_rng.pt").write_bytes(b"PK\x03\x04 cut")
    refused(tmp_path / "g", "mp_rank_01", "cannot be read")


def changed(key: str, value: object) -> Callable[[tuple[int, int, int], dict[str, Any]], object]:
    def change(place: tuple[int, int, int], saved: dict[str, Any]) -> None:
        if place == (1, 0, 0):
            if key in saved:
                saved[key] = value
            else:
                setattr(saved["args"], key, value)

    return change


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [("iteration", 400, ("400", "500")), ("num_attention_heads", 8, ("num_attention_heads", "8")),
     ("rank", 2, ("rank 2 saved it",))],
)  # fmt: skip
def test_a_rank_of_another_save_is_named(key: str, value: object, words: tuple[str, ...], tmp_path: Path) -> None:
    write_megatron(writer.qwen(), tmp_path / "g", Sizes(2), change=changed(key, value))
    refused(tmp_path / "g", "mp_rank_01", *words, kind=WouldLoseData)
    assert "other-save" in [row.id for row in doctor(tmp_path / "g").findings]


def test_exchanged_files_are_found_by_the_names_of_their_records(tmp_path: Path) -> None:
    write_meta(writer.llama(2), tmp_path / "m", 2)
    first, second = (tmp_path / "m" / f"consolidated.0{rank}.pth" for rank in (0, 1))
    first.rename(tmp_path / "aside")
    second.rename(first)
    (tmp_path / "aside").rename(second)
    refused(tmp_path / "m", "saved as the file of rank")


@pytest.mark.parametrize("sizes", [Sizes(2, 2), Sizes(2, 1, 1, 2)])
def test_the_arguments_say_what_the_third_number_is(sizes: Sizes, tmp_path: Path) -> None:
    folder = write_megatron(writer.mixtral(), tmp_path / "g", sizes)
    assert (folder / "mp_rank_01_001").is_dir()
    ckptfix.convert(folder, tmp_path / "out.safetensors")
    same(writer.mixtral().tensors, load_file(tmp_path / "out.safetensors"))

    def other(place: tuple[int, int, int], saved: dict[str, Any]) -> None:
        saved["args"] = argparse.Namespace(tensor_model_parallel_size=2)

    write_megatron(writer.mixtral(), tmp_path / "h", sizes, change=other)
    refused(tmp_path / "h", "mp_rank_00_000", "args", kind=DamagedFile)

    def none(place: tuple[int, int, int], saved: dict[str, Any]) -> None:
        del saved["args"]

    write_megatron(writer.mixtral(), tmp_path / "i", sizes, change=none)
    refused(tmp_path / "i", "no args", kind=DamagedFile)


def test_a_run_with_several_saves_names_the_folder_of_one(tmp_path: Path) -> None:
    for iteration in (500, 600):
        write_megatron(writer.gpt2(), tmp_path / "g", Sizes(2), iteration=iteration)
    refused(tmp_path / "g", "2 saves", "iter_0000600")


def packed(folder: Path, mode: Literal["w:", "w:gz"]) -> Path:
    path = folder.with_suffix(".nemo")
    with tarfile.open(path, mode) as archive:
        archive.add(folder, arcname=".")
    return path


APART = "share_embeddings_and_output_weights: false"


@pytest.mark.parametrize(
    ("model", "sizes", "config"),
    [(writer.qwen(), Sizes(2), APART), (writer.qwen(), Sizes(2, 2), APART), (writer.gpt2(), Sizes(1, 2), "")],
)
def test_ranks_of_nemo_are_joined(model: Model, sizes: Sizes, config: str, tmp_path: Path) -> None:
    whole = writer.write_nemo(model, tmp_path / "n", sizes, config=config)
    ckptfix.convert(tmp_path / "n", tmp_path / "out.safetensors")
    same(whole, load_file(tmp_path / "out.safetensors"))
    for mode in ("w:", "w:gz"):
        ckptfix.convert(packed(tmp_path / "n", mode), tmp_path / "out.safetensors", force=True)
        same(whole, load_file(tmp_path / "out.safetensors"))


@pytest.mark.parametrize("command", ["ls", "inspect", "doctor", "digest", "stats", "diff"])
@pytest.mark.parametrize("archive", [False, True])
def test_every_command_that_reads_takes_ranks_of_nemo(archive: bool, command: str, tmp_path: Path) -> None:
    whole = writer.write_nemo(writer.qwen(), tmp_path / "n", Sizes(2, 2), config=APART)
    place = packed(tmp_path / "n", "w:") if archive else tmp_path / "n"
    save_file(whole, tmp_path / "whole.safetensors")
    words = [str(place), *([str(tmp_path / "whole.safetensors")] if command == "diff" else [])]
    done = CliRunner().invoke(commands, [command, *words])
    assert done.exit_code == 0, done.output
    said = {"diff": f"Same: {len(whole)} tensors", "ls": str(len(whole)), "inspect": f"{len(whole)} tensors"}
    assert said.get(command, "") in done.output


@pytest.mark.parametrize("archive", [False, True])
def test_ranks_of_nemo_are_loaded_into_a_model(archive: bool, tmp_path: Path) -> None:
    whole = writer.write_nemo(writer.qwen(), tmp_path / "n", Sizes(2, 2), config=APART)
    model = Holder(whole)
    ckptfix.load_into(model, packed(tmp_path / "n", "w:") if archive else tmp_path / "n")
    same(whole, dict(model.state_dict()))


def test_a_virtual_pipeline_of_nemo_is_refused_with_the_way_out(tmp_path: Path) -> None:
    """NeMo saves its chunks only in files of Lightning, so that nothing states the layers of each in these."""
    config = f"{APART}\nvirtual_pipeline_model_parallel_size: 2"
    writer.write_nemo(writer.qwen(), tmp_path / "n", Sizes(1, 2), config=config)
    refused(tmp_path / "n", "virtual_pipeline_model_parallel_size", "megatron_change_num_partitions.py")


def test_ranks_of_nemo_that_cannot_be_joined_are_named(tmp_path: Path) -> None:
    writer.write_nemo(writer.qwen(), tmp_path / "n", Sizes(2), config=APART)
    file = tmp_path / "n" / "mp_rank_01" / "model_weights.ckpt"
    refused(file, "rank 1 of 2", "ckptfix convert", kind=WouldLoseData)
    shutil.rmtree(file.parent)
    refused(tmp_path / "n", "mp_rank_01 is missing")
    refused(packed(tmp_path / "n", "w:"), "mp_rank_01 is missing")
    (tmp_path / "n" / "model_config.yaml").unlink()
    refused(tmp_path / "n", "model_config.yaml", kind=DamagedFile)


def test_an_archive_of_nemo_with_a_distributed_checkpoint_says_how_to_unpack_it(tmp_path: Path) -> None:
    (tmp_path / "n" / "model_weights").mkdir(parents=True)
    (tmp_path / "n" / "model_config.yaml").write_text("a: 1")
    (tmp_path / "n" / "model_weights" / "common.pt").write_bytes(b"1")
    refused(packed(tmp_path / "n", "w:"), "NeMo", "tar -xf", "convert", "model_weights")


def test_experts_in_one_matrix_of_several_groups_are_refused(tmp_path: Path) -> None:
    """Each group has other experts under the same name, which a comparison of replicas would report as unequal."""
    for sizes in (Sizes(1, 1, 1, 2), Sizes(2, 1, 1, 2)):
        folder = tmp_path / f"{sizes.tp}"
        write_megatron(writer.legacy_grouped(), folder, sizes)
        refused(folder, "experts.weight1", "torch_dist", kind=Refused)


def test_moments_and_masters_of_torch_dist_are_left_out(tmp_path: Path) -> None:
    model = writer.qwen()
    state = dict(model.tensors)
    for slot in ("exp_avg", "exp_avg_sq", "fp32_param"):
        state |= {f"optimizer.state.{slot}.{name}": whole.float() for name, whole in model.tensors.items()}
    save(state, checkpoint_id=tmp_path / "in", **ALONE)
    torch.save({"iteration": 5}, tmp_path / "in" / "common.pt")
    (tmp_path / "in" / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    done = ckptfix.convert(tmp_path / "in", tmp_path / "out.safetensors")
    same(model.tensors, load_file(tmp_path / "out.safetensors"))
    left = {row.where for row in done.findings if row.id == "left-behind"}
    assert {f"optimizer.state.{slot}.output_layer.weight" for slot in ("exp_avg", "fp32_param")} <= left


def write_torch_dist(folder: Path, tensors: State, cut: Callable[[str], tuple[int, int]], stages: int) -> None:
    """Write what Megatron-LM's ranks save: each stage has some of the stacked layers, cut along a dimension.

    Args:
        cut: name -> (dimension, parts).
    """
    folder.mkdir()
    saved = metadata.Metadata({}, {}, {}, metadata.StorageMeta(), "1.0.0")
    for name, whole in tensors.items():
        dim, parts = cut(name)
        grid = [stages if axis == 0 and ".layers." in name else parts if axis == dim else 1
                for axis in range(whole.dim())]  # fmt: skip
        chunks = []
        for number, place in enumerate(itertools.product(*map(range, grid))):
            offsets = torch.Size(size // count * at for size, count, at in zip(whole.shape, grid, place, strict=True))
            sizes = torch.Size(size // count for size, count in zip(whole.shape, grid, strict=True))
            part = whole[tuple(slice(at, at + size) for at, size in zip(offsets, sizes, strict=True))].clone()
            file = f"__{number}_0.distcp"
            with (folder / file).open("ab") as rank:
                start = rank.tell()
                torch.save(part, rank)
                info = _StorageInfo(file, start, rank.tell() - start)
            saved.storage_data[metadata.MetadataIndex(name, offsets, number)] = info
            chunks.append(metadata.ChunkStorageMetadata(offsets, sizes))
        kind = metadata.TensorProperties(whole.dtype)
        saved.state_dict_metadata[name] = metadata.TensorStorageMetadata(kind, whole.shape, chunks)
        saved.planner_data[name] = (name,)
    (folder / ".metadata").write_bytes(pickle.dumps(saved))
    (folder / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')


def stacked(model: Model) -> State:
    """The tensors of a model with all layers in one, as sharded_state_dict of a TransformerBlock makes them."""
    made: State = {}
    for name, tensor in model.tensors.items():
        key, number = re.sub(r"layers\.\d+\.", "layers.", name), re.search(r"layers\.(\d+)\.", name)
        if number is None:
            made[name] = tensor
        elif number[1] == "0":
            rows = [model.tensors[name.replace("layers.0.", f"layers.{n}.")] for n in range(model.args["num_layers"])]
            made[key] = torch.stack(rows)
    return made


def dist_cut(parts: int) -> Callable[[str], tuple[int, int]]:
    """The dimension along which tensor parallelism cuts a stacked tensor of Qwen."""

    def cut(name: str) -> tuple[int, int]:
        if "norm" in name:
            return 0, 1
        first = 1 if ".layers." in name else 0
        return first + (name.endswith(("linear_proj.weight", "linear_fc2.weight"))), parts

    return cut


@pytest.mark.slow
@pytest.mark.parametrize(("parts", "stages"), [(1, 1), (2, 1), (2, 2), (4, 4)])
def test_torch_dist_of_several_ranks_gets_a_tensor_for_each_layer(parts: int, stages: int, tmp_path: Path) -> None:
    model = writer.qwen()
    folder = tmp_path / "iter_0000005"
    write_torch_dist(folder, stacked(model), dist_cut(parts), stages)
    args = argparse.Namespace(num_attention_heads=4, num_query_groups=2, group_query_attention=True)
    torch.save({"iteration": 5, "args": args}, folder / "common.pt")
    ckptfix.convert(folder, tmp_path / "layers.safetensors", names="megatron-dist:megatron")
    same(model.tensors, load_file(tmp_path / "layers.safetensors"))
    ckptfix.convert(folder, tmp_path / "hf.safetensors", names="hf")
    save_file(model.tensors, tmp_path / "whole.safetensors")
    ckptfix.convert(tmp_path / "whole.safetensors", tmp_path / "wanted.safetensors", names="hf", heads=4, kv_heads=2)
    same(load_file(tmp_path / "wanted.safetensors"), load_file(tmp_path / "hf.safetensors"))
    ckptfix.convert(folder, tmp_path / "ranks", to="megatron", names="megatron-dist:megatron", tp=2, pp=2)
    ckptfix.convert(tmp_path / "ranks", tmp_path / "again.safetensors")
    same(model.tensors, load_file(tmp_path / "again.safetensors"))


@pytest.mark.parametrize("command", ["inspect", "doctor"])
def test_stacked_layers_are_reported_with_the_command_that_divides_them(command: str, tmp_path: Path) -> None:
    model = writer.qwen()
    moments = {f"optimizer.state.exp_avg.{name}": whole.float() for name, whole in stacked(model).items()}
    write_torch_dist(tmp_path / "in", {**stacked(model), **moments}, dist_cut(2), 2)
    done = CliRunner().invoke(commands, [command, str(tmp_path / "in")])
    assert done.exit_code == 0 and "7 tensors hold all 4 layers" in done.output, done.output
    (line,) = re.findall(r"`ckptfix (convert .*)` gives each its own", done.output)
    out = str(tmp_path / "out.safetensors")
    assert CliRunner().invoke(commands, shlex.split(line.replace("OUT.safetensors", out))).exit_code == 0
    same(model.tensors, load_file(out))


def test_stacked_layers_of_no_table_are_reported_with_a_rule(tmp_path: Path) -> None:
    tensors = {f"{at}.layers.{name}.weight": torch.rand(3, 2) for at in ("net", "tower") for name in "ab"}
    write_torch_dist(tmp_path / "in", {**tensors, "head": torch.ones(2)}, lambda name: (0, 1), 1)
    (found,) = [row for row in doctor(tmp_path / "in").findings if row.id == "stacked-layers"]
    assert "4 tensors hold all 3 layers" in found.message
    (line,) = re.findall(r"`ckptfix (rename .*)` gives each its own", found.message)
    out = str(tmp_path / "out.safetensors")
    assert CliRunner().invoke(commands, shlex.split(line.replace("OUT.safetensors", out))).exit_code == 0
    wanted = {name.replace("layers.", f"layers.{n}."): tensors[name][n] for name in tensors for n in range(3)}
    same({**wanted, "head": torch.ones(2)}, load_file(out))
    save({"layers.0.a": torch.ones(3, 2), "layers.1.a": torch.ones(3, 2)}, checkpoint_id=tmp_path / "other", **ALONE)
    assert "stacked-layers" not in [row.id for row in doctor(tmp_path / "other").findings]


def test_an_optimizer_beside_the_model_is_named(tmp_path: Path) -> None:
    folder = write_megatron(writer.gpt2(), tmp_path / "g", Sizes(2))
    torch.save({"exp_avg": torch.zeros(4)}, folder / "mp_rank_00" / "distrib_optim.pt")
    done = ckptfix.convert(tmp_path / "g", tmp_path / "out.safetensors")
    assert "distrib_optim.pt" in [row.where for row in done.findings if row.id == "left-behind"]


class Holder(torch.nn.Module):
    """A model with parameters of any names."""

    def __init__(self, tensors: State) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            module: torch.nn.Module = self
            *path, leaf = name.split(".")
            for part in path:
                if part not in module._modules:
                    module.add_module(part, torch.nn.Module())
                module = module.get_submodule(part)
            module.register_buffer(leaf, torch.zeros_like(tensor))


@pytest.mark.parametrize("case", ["Llama 3", "fairseq", "Qwen, virtual pipeline", "GroupedMLP"])
def test_a_folder_is_loaded_into_a_model(case: str, tmp_path: Path) -> None:
    whole = CASES[case](tmp_path / "in")
    model = Holder(whole)
    ckptfix.load_into(model, tmp_path / "in")
    same(whole, dict(model.state_dict()))


@pytest.mark.parametrize("command", ["ls", "inspect", "doctor", "digest", "stats", "diff"])
@pytest.mark.parametrize("case", ["Llama 3", "fairseq", "Qwen, TP 2, PP 2"])
def test_every_command_that_reads_takes_the_folder(command: str, case: str, tmp_path: Path) -> None:
    CASES[case](tmp_path / "in")
    places = [str(tmp_path / "in")] * (2 if command == "diff" else 1)
    done = CliRunner().invoke(commands, [command, *places])
    assert done.exit_code == 0, done.output
    assert "21 tensors" in done.output if (case, command) == ("Llama 3", "diff") else done.output


def test_parameters_are_written_as_far_as_they_are_known(tmp_path: Path) -> None:
    model = writer.llama(3)
    (tmp_path / "in").mkdir()
    save_file(model.tensors, tmp_path / "in" / "model.safetensors")
    dims: dict[str, int | str] = {"tok_embeddings.weight": 0}
    done = ckptfix.convert(tmp_path / "in" / "model.safetensors", tmp_path / "a", to="meta", tp=2, dims=dims)
    found = json.loads((tmp_path / "a" / "params.json").read_text())
    assert (found["dim"], found["n_layers"], found["vocab_size"]) == (16, 2, 40) and "n_heads" not in found
    assert {"params.json/n_heads", "params.json/norm_eps"} <= {row.where for row in done.findings}
    config: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
    config |= {"num_key_value_heads": 2, "head_dim": 4, "rope_scaling": {"rope_type": "llama3"}}
    (tmp_path / "in" / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-5}))
    done = ckptfix.convert(tmp_path / "in", tmp_path / "b", to="meta", tp=2, dims=dims)
    found = json.loads((tmp_path / "b" / "params.json").read_text())
    assert (found["n_heads"], found["n_kv_heads"], found["norm_eps"], found["use_scaled_rope"]) == (4, 2, 1e-5, True)
    assert not [row for row in done.findings if str(row.where).startswith("params.json")]
    refused(tmp_path / "in", "2 heads", to="meta", tp=4, dims=dims, kind=Refused)
    for name in ("a", "b"):
        ckptfix.convert(tmp_path / name, tmp_path / f"{name}.safetensors")
        same(model.tensors, load_file(tmp_path / f"{name}.safetensors"))


@pytest.mark.parametrize(("dim", "rows"), [(4096, 11008), (4096, 14336), (8192, 28672), (5120, 13824), (2048, 8192)])
def test_parameters_of_the_feed_forward_layer_give_its_rows(dim: int, rows: int) -> None:
    found: Any = shown({"norm.weight": (dim,), "layers.0.feed_forward.w1.weight": (rows, dim)}, {})
    inner = int(found.get("ffn_dim_multiplier", 1) * int(2 * 4 * dim / 3))
    assert found["multiple_of"] * -(-inner // found["multiple_of"]) == rows


def test_files_of_torch_checkpointing_are_named_with_the_command_that_joins_them(tmp_path: Path) -> None:
    (tmp_path / "t").mkdir()
    for rank in range(2):
        dtensors(tmp_path / "t" / f"checkpoint_{rank}.pt", rank)
    (tmp_path / "t" / RANKS_METADATA).write_bytes(b"")
    refused(tmp_path / "t", "torch_checkpointing", "2 ranks", "checkpoint_0.pt", "checkpoint_1.pt --output OUT.pth")
    assert any("torch_checkpointing" in row.message for row in doctor(tmp_path / "t").findings)


def layout(name: str, form: str) -> dict[str, Any]:
    return {"file_path": name, "serialization_format": {"type": f"{form}Serialization"}}


def ranks_metadata(
    folder: Path, item: str, layouts: dict[int, Any], version: str = "2.0", slices: dict[str, Any] | None = None
) -> None:
    """As torch_checkpointing 0.1.1 writes it (distributed_metadata.py, DistributedMetadata.to_dict)."""
    made: dict[str, Any] = {"world_size": len(layouts), "version": version}
    if version == "2.0":
        made["metadata"] = {item: {"nested_path_to_metadata": slices or {}, "rank_to_layout_info": layouts}}
    else:
        made |= {"metadata": {}, "rank_to_layout_info_mappings": {rank: {item: row} for rank, row in layouts.items()}}
    (folder / RANKS_METADATA).write_bytes(pickle.dumps(made))


@pytest.mark.parametrize("version", ["1.0", "2.0"])
@pytest.mark.parametrize("name", ["", "weights/part-{}.bin", "rank_{}/model.pt"])
def test_files_of_torch_checkpointing_are_named_as_its_metadata_lists_them(
    name: str, version: str, tmp_path: Path
) -> None:
    folder = tmp_path / "t"
    files = [folder / (name.format(rank) or f"model_{rank}.pt") for rank in range(2)]
    for rank, file in enumerate(files):
        file.parent.mkdir(parents=True, exist_ok=True)
        dtensors(file, rank)
    rows = {rank: layout(file.relative_to(folder).as_posix(), "Torch") if name else None
            for rank, file in enumerate(files)}  # fmt: skip
    ranks_metadata(folder, "model", rows, version)
    words = f"ckptfix convert {files[0]} {files[1]} --output OUT.pth"
    refused(folder, "torch_checkpointing", "2 ranks", words)
    refused(files[1], words, kind=WouldLoseData)
    ckptfix.convert(files, tmp_path / "out.pth")
    assert torch.load(tmp_path / "out.pth")["fc.weight"].shape == (4, 3)


def slices_of(tensor: torch.Tensor, placements: list[dict[str, Any]], mesh: tuple[int, ...], **more: Any) -> Any:
    """The groups of a tensor, as DTensorShardingMetadata.to_dict has them: here one, of all ranks."""
    ranks = tuple(range(math.prod(mesh)))
    data = {
        "global_shape": list(tensor.shape), "dtype": str(tensor.dtype), "stride": list(tensor.stride()),
        "mesh_spec": {"device_type": "cpu", "mesh_shape": mesh, "mesh_data": ranks, "mesh_dim_names": None},
        "placements": placements, **more,
    }  # fmt: skip
    return [{"sharding_metadata": {"type": "DTensorShardingMetadata", "data": data}, "ranks": ranks}]


def shard(dim: int) -> dict[str, Any]:
    return {"type": "Shard", "dim": dim}


REPLICATE = {"type": "Replicate"}


def write_items(folder: Path, name: str = "model_{}.safetensors", item: str = "model") -> State:
    """Write what four ranks on a mesh of 2 x 2 save, and return the whole tensors."""
    whole = {"a.weight": torch.randn(6, 8), "b.weight": torch.randn(5, 4), "c.weight": torch.arange(24.0).view(8, 3),
             "norm": torch.randn(3)}  # fmt: skip
    rows, columns = whole["a.weight"].chunk(2, 0), whole["b.weight"].chunk(2, 1)
    # FSDP over tensor parallelism: the second dimension of the mesh cuts first, and the first one its parts.
    striped = [whole["c.weight"].chunk(2, 0)[rank % 2].chunk(2, 0)[rank // 2] for rank in range(4)]
    for rank in range(4):
        file = folder / name.format(rank)
        file.parent.mkdir(parents=True, exist_ok=True)
        own = {"a.weight": rows[rank // 2].chunk(2, 1)[rank % 2], "b.weight": columns[rank % 2],
               "c.weight": striped[rank], "norm": whole["norm"]}  # fmt: skip
        save_file({key: value.contiguous() for key, value in own.items()}, file)
    stripes = [{"type": "StridedShard", "dim": 0, "split_factor": 2}, shard(0)]
    slices = {
        '["a","weight"]': slices_of(whole["a.weight"], [shard(0), shard(1)], (2, 2)),
        '["b","weight"]': slices_of(whole["b.weight"], [REPLICATE, shard(-1)], (2, 2)),
        '["c","weight"]': slices_of(whole["c.weight"], stripes, (2, 2)),
        '["norm"]': slices_of(whole["norm"], [REPLICATE], (4,)),
    }
    layouts = {rank: layout(name.format(rank), "Safetensors") for rank in range(4)}
    ranks_metadata(folder, item, layouts, slices=slices)
    return whole


@pytest.mark.parametrize("name", ["model_{}.safetensors", "rank_{}/weights.safetensors"])
def test_safetensors_of_torch_checkpointing_are_joined(name: str, tmp_path: Path) -> None:
    """Nothing in such a file says that its tensors are slices: the metadata of the folder does."""
    folder = tmp_path / "t"
    whole = write_items(folder, name, "net")
    ckptfix.convert(folder, tmp_path / "out.safetensors")
    same(whole, load_file(tmp_path / "out.safetensors"))
    same(whole, dict(ckptfix.load_state_dict(folder)))
    assert not [row for row in doctor(folder).findings if row.severity in ("error", "warning")]
    alone = folder / name.format(1)
    words = f"ckptfix convert {folder} OUT.safetensors"
    refused(alone, "rank 1 of 4", words, kind=WouldLoseData)
    with pytest.raises(WouldLoseData, match="rank 1 of 4"):
        ckptfix.load_into(torch.nn.Linear(3, 2), alone)
    assert [row.id for row in doctor(alone).findings if row.severity == "error"] == ["one-rank"]
    (tmp_path / "alone.safetensors").write_bytes(alone.read_bytes())
    ckptfix.convert(tmp_path / "alone.safetensors", tmp_path / "out.pth")


def test_safetensors_of_torch_checkpointing_without_places_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "t"
    write_items(folder)
    layouts = {rank: layout(f"model_{rank}.safetensors", "Safetensors") for rank in range(4)}
    ranks_metadata(folder, "net", layouts, "1.0")
    way = "consolidate_hf_safetensors_checkpoint", "item_key='net'"
    refused(folder, "torch_checkpointing", "4 ranks", *way)
    refused(folder / "model_1.safetensors", "rank 1 of 4", *way, kind=WouldLoseData)


def test_slices_of_torch_checkpointing_that_do_not_fit_are_named(tmp_path: Path) -> None:
    whole = write_items(tmp_path / "t")
    lost = tmp_path / "t" / "model_2.safetensors"
    held = lost.read_bytes()
    lost.unlink()
    refused(tmp_path / "t", "model_2.safetensors is missing", kind=WouldLoseData)
    lost.write_bytes(held[:-8])
    refused(tmp_path / "t", "model_2.safetensors", kind=WouldLoseData)
    save_file({**load_file(tmp_path / "t" / "model_1.safetensors"), "norm": torch.zeros(4)}, lost)
    refused(tmp_path / "t", "norm", "[4] in the file of rank 2", kind=WouldLoseData)
    save_file({**load_file(tmp_path / "t" / "model_0.safetensors"), "more": torch.zeros(4)}, lost)
    refused(tmp_path / "t", "more", RANKS_METADATA, kind=WouldLoseData)
    lost.write_bytes(held)
    save_file({**load_file(lost), "norm": whole["norm"] + 1}, lost)
    done = ckptfix.convert(tmp_path / "t", tmp_path / "out.safetensors")
    assert [row.where for row in done.findings if row.id == "ranks-differ"] == ["norm"]


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"global_shape": [6, -1]}, "wrongly"),
        ({"global_shape": [6, 10]}, "[3, 5]"),
        ({"global_shape": "rows"}, "wrongly"),
        ({"mesh_spec": {"mesh_shape": (1 << 40,), "mesh_data": (0,)}}, "mesh of unknown size"),
        ({"mesh_spec": {"mesh_shape": (2, 2), "mesh_data": (4, 5, 6, 7)}}, "not in its mesh"),
        ({"placements": [{"type": "Shard", "dim": 7}, REPLICATE]}, "unknown placement"),
        ({"placements": [{"type": "Partial"}, REPLICATE]}, "unknown placement: Partial"),
        ({"placements": [{"type": "StridedShard", "dim": 0, "split_factor": 3}, shard(0)]}, "3 stripes"),
        ({"placements": [shard(0)]}, "no placement for each"),
        ({"placements": [shard(0), REPLICATE]}, "in the file of rank"),
    ],
)
def test_places_that_are_impossible_are_named(change: dict[str, Any], word: str, tmp_path: Path) -> None:
    write_items(tmp_path / "t")
    layouts = {rank: layout(f"model_{rank}.safetensors", "Safetensors") for rank in range(4)}
    change = {"placements": [shard(0), shard(1)], **change}
    slices = {'["a","weight"]': slices_of(torch.zeros(6, 8), mesh=(2, 2), **change)}
    ranks_metadata(tmp_path / "t", "model", layouts, slices=slices)
    refused(tmp_path / "t", word, kind=DamagedFile)
    slices['["norm"]'] = slices_of(torch.zeros(3), [REPLICATE], (4,))
    ranks_metadata(tmp_path / "t", "model", layouts, slices=slices)
    refused(tmp_path / "t", word, kind=WouldLoseData)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        pickle.dumps({"metadata": {"model": {"rank_to_layout_info": {0: layout("/etc/a", "Torch"), 1: None}}}}),
        pickle.dumps({"metadata": {"model": {"rank_to_layout_info": {0: layout("../a", "Torch"), 1: None}}}}),
        pickle.dumps({"metadata": {"step": {"rank_to_layout_info": {0: layout("a", "Json"), 1: layout("b", "Json")}}}}),
        pickle.dumps([1, {"metadata": 5}]),
        b"cos\nsystem\n(S'echo'\ntR.",
    ],
)
def test_other_metadata_lists_no_files(content: bytes, tmp_path: Path) -> None:
    (tmp_path / RANKS_METADATA).write_bytes(content)
    assert rank_items(str(tmp_path)) == []


class Runs:
    """An object whose pickle calls os.mkdir."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., object], tuple[str]]:
        return os.mkdir, (str(self.path),)


def test_hostile_arguments_run_nothing(tmp_path: Path) -> None:
    marker = tmp_path / "marker"

    def change(place: tuple[int, int, int], saved: dict[str, Any]) -> None:
        saved["args"].hook = Runs(marker)
        saved["args"].nested = [Runs(marker), {"a": Runs(marker)}]
        saved["rng_state"] = Runs(marker)

    write_megatron(writer.qwen(), tmp_path / "g", Sizes(2), change=change)
    done = ckptfix.convert(tmp_path / "g", tmp_path / "out.pth")
    assert {"args/hook", "rng_state", "optimizer"} <= {row.where for row in done.findings}
    same(writer.qwen().tensors, torch.load(tmp_path / "out.pth")["model"])

    def all_of_it(place: tuple[int, int, int], saved: dict[str, Any]) -> None:
        saved["args"] = Runs(marker)

    write_megatron(writer.qwen(), tmp_path / "h", Sizes(2), change=all_of_it)
    refused(tmp_path / "h", "args")
    assert not marker.exists()


def test_an_unknown_name_needs_a_dimension(tmp_path: Path) -> None:
    model = writer.qwen()
    model.add("decoder.layers.0.mlp.novel.weight", writer.row, 4, 8)
    model.add("decoder.layers.1.mlp.novel.weight", writer.stacked(3), 12, 8)
    write_megatron(model, tmp_path / "g", Sizes(2, 2))
    words = f"ckptfix convert {tmp_path / 'g'} OUT.safetensors --dim 'decoder.layers.*.mlp.novel.weight=0'"
    refused(tmp_path / "g", words, "layers.1.mlp.novel", kind=WouldLoseData)
    assert [row.where for row in doctor(tmp_path / "g").findings if row.id == "cut-unknown"]
    dims: dict[str, int | str] = {"*layers.0.mlp.novel.weight": 1, "*layers.1.mlp.novel.weight": "0/3"}
    # A rank's file calls layer 0 of each stage 0, so the names of the whole model are meant.
    ckptfix.convert(tmp_path / "g", tmp_path / "out.safetensors", dims=dims)
    same(model.tensors, load_file(tmp_path / "out.safetensors"))
    refused(tmp_path / "g", "no tensor has that name", dims={**dims, "none": 0}, kind=Refused)
    refused(tmp_path / "g", "names no dimension", dims={"*": "rows"}, kind=Refused)
    refused(tmp_path / "g", "dimension 3", dims={**dims, "*novel*": 3}, kind=DamagedFile)


def test_a_mixer_of_unknown_sizes_is_not_cut_as_another_one(tmp_path: Path) -> None:
    """GatedDeltaProduct has the names of Mamba and other matrices: only its arguments state how many."""
    model = writer.mixers("gdp")
    del model.args["gdp_num_householder"]
    write_megatron(model, tmp_path / "g", Sizes(2))
    refused(tmp_path / "g", "mixer.in_proj.weight", kind=WouldLoseData)


def test_what_a_refusal_proposes_runs_as_printed(tmp_path: Path) -> None:
    model = writer.llava()
    whole = {"vision_model.tower.a": (writer.copied, 4, 8), "vision_model.tower.b": (writer.column, 4, 8)}
    for name, (cut, *shape) in whole.items():
        model.add(name, cut, *shape)
    write_megatron(model, tmp_path / "g", Sizes(2))
    place = str(tmp_path / "out.safetensors")
    said = CliRunner().invoke(commands, ["convert", str(tmp_path / "g"), place])
    assert said.exit_code == 2 and "vision_model.tower.b" in said.output
    (line,) = re.findall(r"`ckptfix (.+)` joins along", said.output)
    words = [place if word == "OUT.safetensors" else word for word in shlex.split(line)]
    assert words[3:] == ["--dim", "vision_model.tower.a=copy", "--dim", "vision_model.tower.b=0"]
    done = CliRunner().invoke(commands, words)
    assert done.exit_code == 0, done.output
    same(model.tensors, load_file(place))


def test_a_shape_that_contradicts_the_hidden_size_is_refused(tmp_path: Path) -> None:
    model = writer.llama(2)
    model.cuts["layers.0.attention.wo.weight"] = writer.column
    model.cuts["layers.1.attention.wo.weight"] = writer.column
    write_meta(model, tmp_path / "m", 2)
    refused(tmp_path / "m", "hidden size is 16", kind=DamagedFile)


def test_replicas_are_compared(tmp_path: Path) -> None:
    def change(place: tuple[int, int, int], saved: dict[str, Any]) -> None:
        if place[0]:
            saved["model"]["decoder.final_layernorm.weight"] += 1

    write_megatron(writer.gpt2(), tmp_path / "g", Sizes(2), change=change)
    done = ckptfix.convert(tmp_path / "g", tmp_path / "out.safetensors")
    assert [row.where for row in done.findings if row.id == "ranks-differ"] == ["decoder.final_layernorm.weight"]
    same(writer.gpt2().tensors, load_file(tmp_path / "out.safetensors"))


def test_a_tied_copy_that_differs_is_named(tmp_path: Path) -> None:
    def change(place: tuple[int, int, int], saved: dict[str, Any]) -> None:
        if place[1]:
            saved["model"]["output_layer.weight"] += 1

    write_megatron(writer.gpt2(), tmp_path / "g", Sizes(1, 2), change=change)
    done = ckptfix.convert(tmp_path / "g", tmp_path / "out.safetensors")
    assert [row.where for row in done.findings if row.id == "ranks-differ"] == ["embedding.word_embeddings.weight"]


def test_padding_of_the_vocabulary_is_cut_on_request(tmp_path: Path) -> None:
    model = writer.qwen()
    folder = write_megatron(model, tmp_path / "g", Sizes(2))
    (tmp_path / "g" / "config.json").write_text('{"vocab_size": 51}')
    for given_size, size in (("args", 50), ("config", 51), (40, 40)):
        out = tmp_path / f"{given_size}.safetensors"
        done = ckptfix.convert(tmp_path / "g", out, vocab_size=given_size)
        assert f"output_layer.weight[{size}:64]" in [row.where for row in done.findings]
        cut = {"embedding.word_embeddings.weight", "output_layer.weight"}
        same({name: row[:size] if name in cut else row for name, row in model.tensors.items()}, load_file(out))
    refused(tmp_path / "g", "64 rows", vocab_size=65)
    refused(folder, "config has no vocab_size", vocab_size="config")
    save_file(model.tensors, tmp_path / "one.safetensors")
    refused(tmp_path / "one.safetensors", "--vocab-size", vocab_size=8, kind=Refused, to="zip")


@pytest.mark.parametrize(
    ("options", "word"),
    [({"tp": 3}, "3 ranks"), ({"pp": 3}, "3 stages"), ({"ep": 2}, "experts"), ({"tp": 0}, "--tp 0"),
     ({"to": "meta"}, "Meta's")],
)  # fmt: skip
def test_what_does_not_divide_is_refused(options: dict[str, Any], word: str, tmp_path: Path) -> None:
    write_megatron(writer.gpt2(4), tmp_path / "g", Sizes(2))
    refused(tmp_path / "g", word, kind=Refused, **{"to": "megatron", **options})


def test_token_embeddings_of_an_unknown_version_need_a_dimension(tmp_path: Path) -> None:
    model = writer.llama(2)
    save_file(model.tensors, tmp_path / "in.safetensors")
    out = str(tmp_path / "printed")
    said = CliRunner().invoke(commands, ["convert", str(tmp_path / "in.safetensors"), out, "--to", "meta", "--tp", "2"])
    assert said.exit_code == 2 and "tok_embeddings.weight" in said.output and not (tmp_path / "printed").exists()
    (line,) = re.findall(r"`ckptfix (.+)` cuts it along dimension 0", said.output)
    assert CliRunner().invoke(commands, shlex.split(line.replace("weight=0", "weight=1"))).exit_code == 0
    same(load_file(tmp_path / "in.safetensors"), dict(ckptfix.load_state_dict(out)))
    ckptfix.convert(tmp_path / "in.safetensors", tmp_path / "out", to="meta", tp=2, dims={"tok_embeddings.weight": 1})
    write_meta(model, tmp_path / "wanted", 2)
    for name in ("consolidated.00.pth", "consolidated.01.pth"):
        same(torch.load(tmp_path / "wanted" / name), torch.load(tmp_path / "out" / name))


def test_other_commands_read_the_folder_as_any_checkpoint(tmp_path: Path) -> None:
    model = writer.qwen()
    write_megatron(model, tmp_path / "g", Sizes(2, 2))
    same(model.tensors, dict(ckptfix.load_state_dict(tmp_path / "g")))
    ckptfix.convert(tmp_path / "g", tmp_path / "one.safetensors")
    assert ckptfix.diff(tmp_path / "g", tmp_path / "one.safetensors").exit_code in (0, 1)
    assert not [row for row in doctor(tmp_path / "g").findings if row.severity in ("error", "warning")]
    ckptfix.cast(tmp_path / "g", tmp_path / "half.safetensors", to="float16")
    cast = {name: tensor.half() for name, tensor in model.tensors.items()}
    same(cast, load_file(tmp_path / "half.safetensors"))


@given(st.data())
@settings(max_examples=40, deadline=None)
def test_parts_of_any_cut_make_the_whole(data: st.DataObject) -> None:
    ranks = data.draw(st.integers(1, 4))
    stacked = tuple(data.draw(st.lists(st.integers(1, 3), max_size=3)))
    shape = data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    dim = data.draw(st.integers(0, len(shape) - 1))
    shape[dim] = ranks * max(sum(stacked), 1) * data.draw(st.integers(1, 2))
    whole = torch.arange(math.prod(shape), dtype=torch.int16).reshape(shape)
    sizes = [part * shape[dim] // sum(stacked) for part in stacked]
    parts = torch.split(whole, sizes, dim) if stacked else (whole,)
    cut = RankCut(dim, stacked)
    own = {rank: torch.cat([part.chunk(ranks, dim)[rank] for part in parts], dim) for rank in range(ranks)}
    local = {rank: _entry(tensor) for rank, tensor in own.items()}
    made = cuts.joined("whole", tuple(shape), cut, local, ranks)
    pieces = [piece for piece in made.segments if not isinstance(piece, bytes)]
    assert len(pieces) == len(made.segments)
    assert b"".join(chunk for piece in pieces for chunk in read_chunks(piece)) == _bytes(whole)
    for rank in range(ranks):
        size, piece = cuts.part_of_rank(_entry(whole), cut, rank, ranks)
        assert size == tuple(own[rank].shape)
        assert b"".join(read_chunks(piece)) == _bytes(own[rank])


def _bytes(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().view(torch.uint8).flatten().tolist())


def _entry(tensor: torch.Tensor) -> TensorEntry:
    shape, data = tuple(tensor.shape), _bytes(tensor)
    place = SplicedFile("memory", [len(data)], lambda _: SplicedPiece((data,))).place(0)
    storage = Storage("0", "int16", len(data), "cpu", place)
    return TensorEntry("whole", "", storage, "int16", shape, contiguous_stride(shape))


def test_a_model_is_renamed_and_cut_in_one_pass(tmp_path: Path) -> None:
    """A cut that is stated belongs to the output, where that is cut."""
    rows = {"model.embed_tokens.weight": (8, 6), "model.norm.weight": (6,), "lm_head.weight": (8, 6)}
    tensors = {name: torch.arange(math.prod(shape), dtype=torch.float32).reshape(shape) for name, shape in rows.items()}
    (tmp_path / "in").mkdir()
    save_file(tensors, tmp_path / "in" / "model.safetensors")
    settings = {"model_type": "llama", "num_attention_heads": 2, "hidden_size": 6, "num_hidden_layers": 0}
    (tmp_path / "in" / "config.json").write_text(json.dumps(settings))
    dims: dict[str, int | str] = {"tok_embeddings.weight": 1}
    ckptfix.convert(tmp_path / "in", tmp_path / "cut", to="meta", names="meta", tp=2, dims=dims)
    part = torch.load(tmp_path / "cut" / "consolidated.00.pth", weights_only=True)
    assert part["tok_embeddings.weight"].shape == (8, 3) and part["output.weight"].shape == (4, 6)
    ckptfix.convert(tmp_path / "cut", tmp_path / "back.safetensors", names="meta:hf", heads=2)
    same(tensors, load_file(tmp_path / "back.safetensors"))
