"""One rank's piece of a model is never written or loaded as if it were the whole."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import types
from collections.abc import Callable
from pathlib import Path

import builders
import pytest
import torch
from conftest import ROOT
from nestings import found_in, key_of, tensors_of
from torch import nn

import ckptfix
from ckptfix.errors import CkptfixError, DistributedPart, WouldLoseData
from ckptfix.formats import open_checkpoint
from ckptfix.ops.doctor.examine import examine
from ckptfix.ops.rank_shards import piece_of

LOCAL = {"fc.weight": torch.arange(6.0).view(2, 3), "fc.bias": torch.tensor([1.0, 2.0, 3.0])}
"""What lies in the fixtures of rank 0."""


def fixture(name: str) -> Callable[[Path], object]:
    return lambda path: path.write_bytes((ROOT / "fixtures" / name).read_bytes())


def slices(path: Path) -> None:
    said = {"format": "pt", "DCP_SHARDING_INFO": json.dumps({"fc.weight": {"saved_offsets": [2, 0]}})}
    data = bytes(24)
    builders.written(path, builders.safetensors([("fc.weight", "F32", (2, 3), data)], metadata=said))


def megatron(tensor: int = 2, pipeline: int = 1, expert: int = 1, model: str = "model") -> dict[str, object]:
    """A rank's object, as megatron/training/checkpointing.py ``generate_state_dict`` has it."""
    sizes = {"tensor_model_parallel_size": tensor, "pipeline_model_parallel_size": pipeline}
    args = argparse.Namespace(**sizes, expert_model_parallel_size=expert, world_size=64, rank=0)
    weights = {"embedding.weight": torch.ones(4, 3), "fc.weight": LOCAL["fc.weight"], "fc.bias": LOCAL["fc.bias"]}
    return {"args": args, "checkpoint_version": 3.0, "iteration": 7, model: weights, "opt_param_scheduler": {"lr": 1}}


def states(**fields: object) -> dict[str, object]:
    """The model states of DeepSpeed, whose module is whole on a rank but for what others have of it."""
    shapes = [{name: value.shape for name, value in LOCAL.items()}]
    return {"module": dict(LOCAL), "param_shapes": shapes, "ds_version": "0.19.8", "dp_world_size": 1, **fields}


def saved(value: object) -> Callable[[Path], object]:
    def write(path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(value, path)

    return write


MAKE: dict[str, tuple[str, Callable[[Path], object]]] = {
    "DTensor": ("rank0.pt", fixture("rank0-dtensor.pt")),
    "ShardedTensor": ("rank0.pt", fixture("rank0-sharded.pt")),
    "ZeRO-3": ("zero_pp_rank_0_mp_rank_00_model_states.pt", fixture("rank0-zero3.pt")),
    "model parallel": ("mp_rank_00/model_optim_rng.pt", saved(megatron())),
    "model parallel, DeepSpeed": ("mp_rank_00_model_states.pt", saved(states(mp_world_size=2))),
    "safetensors shard": ("shard-00001-model-00001-of-00001.safetensors", slices),
}


@pytest.fixture(params=MAKE)
def piece(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, Path]:
    name, make = MAKE[request.param]
    make(tmp_path / name)
    return request.param.partition(",")[0], tmp_path / name


def test_it_is_known_for_what_it_is(piece: tuple[str, Path]) -> None:
    kind, path = piece
    found = piece_of(open_checkpoint(path))
    assert found is not None and (found.kind, found.rank) == (kind, 0)
    if kind != "safetensors shard":
        assert found.world == 2 and found.message.startswith(f"rank 0 of 2 ({kind})")
    diagnosis = examine(path)
    assert diagnosis.cause is not None and diagnosis.cause.id == "one-rank"
    assert diagnosis.cause.fix and not any("sanitize" in (row.fix or "") for row in diagnosis.findings)


def test_inspect_and_repair_say_so_and_keep_it(piece: tuple[str, Path], tmp_path: Path) -> None:
    kind, path = piece
    said = ckptfix.doctor(path).findings
    (message,) = [found.message for found in said if found.id == "one-rank" and found.severity == "error"]
    assert kind in message
    for findings in (ckptfix.inspect(path).findings, ckptfix.repair(path, tmp_path / "kept").findings):
        (remark,) = [found for found in findings if found.id == "one-rank"]
        assert (remark.severity, remark.message) == ("warning", message)


def test_it_is_not_written_or_loaded_as_the_whole(piece: tuple[str, Path], tmp_path: Path) -> None:
    kind, path = piece
    out = tmp_path / ("out.pth" if kind == "safetensors shard" else "out.safetensors")
    for run in (
        lambda: ckptfix.convert(path, out),
        lambda: ckptfix.convert(path, out, drop_unsupported=True),
        lambda: ckptfix.convert(path, tmp_path / "out.pth"),
        lambda: ckptfix.convert(path, tmp_path / "out.pth", to="legacy"),
        lambda: ckptfix.extract(path, out),
        lambda: ckptfix.extract(path, tmp_path / "out.pt"),
        lambda: ckptfix.load_state_dict(path),
        lambda: ckptfix.load_into(nn.ModuleDict({"fc": nn.Linear(3, 4)}), path),
        lambda: ckptfix.load_into(nn.ModuleDict({"fc": nn.Linear(3, 4)}), path, strict=False),
    ):
        with pytest.raises(WouldLoseData, match="rank 0"):
            run()
        assert not out.exists() and not (tmp_path / "out.pth").exists()


@pytest.mark.parametrize(
    ("folder", "value", "said"),
    [
        ("mp_rank_01", megatron(), "rank 1 of 2"),
        ("mp_rank_00_001", megatron(1, 2), "rank 1 of 2"),
        ("mp_rank_01_001", megatron(2, 2), "rank 3 of 4"),
        ("mp_rank_01_001_002", megatron(2, 2, 4), "rank 11 of 16"),
        ("mp_rank_01_002", megatron(2, 1, 4), "rank 5 of 8"),
        ("renamed", megatron(4), "one rank's piece of 4 ranks"),
        ("mp_rank_07", megatron(4), "one rank's piece of 4 ranks"),
        ("mp_rank_00", megatron(2, 2, model="model0"), "one rank's piece of 4 ranks"),
        ("mp_rank_00", {"args": {"model_parallel_size": 8}, "model": dict(LOCAL)}, "rank 0 of 8"),
    ],
)  # fmt: skip
def test_which_rank_of_a_model_it_is(folder: str, value: object, said: str, tmp_path: Path) -> None:
    path = tmp_path / folder / "model_optim_rng.pt"
    saved(value)(path)
    found = piece_of(open_checkpoint(path))
    assert found is not None and found.message.startswith(f"{said} (model parallel)")
    with pytest.raises(WouldLoseData, match=said):
        ckptfix.convert(path.parent, tmp_path / "out.pth")


@pytest.mark.parametrize(
    "value",
    [
        megatron(1),
        {"args": {"tensor_model_parallel_size": 2}, "model": dict(LOCAL)},
        {"args": argparse.Namespace(tensor_model_parallel_size=2), "checkpoint_version": 3.0, "iteration": 7},
        states(mp_world_size=1),
        {"mp_world_size": 2, "weight": torch.ones(2)},
    ],
)
def test_a_file_that_is_whole_is_no_piece(value: object, tmp_path: Path) -> None:
    """Sizes of a job are settings: only Megatron's own files, and DeepSpeed's, say by them what they hold."""
    torch.save(value, tmp_path / "model.pt")
    assert piece_of(open_checkpoint(tmp_path / "model.pt")) is None


def nemo(tensor: int, pipeline: int = 1, *, omegaconf: bool = False, **config: object) -> dict[str, object]:
    """A rank's object, as NeMo's Lightning trainer saves it."""
    sizes = {"tensor_model_parallel_size": tensor, "pipeline_model_parallel_size": pipeline}
    settings: object = {"nemo_version": "1.23.0", "micro_batch_size": 4, **sizes, **config}
    if omegaconf:
        settings = in_omegaconf(settings)
    return {
        "epoch": 0, "global_step": 7, "pytorch-lightning_version": "2.0.7", "state_dict": dict(LOCAL),
        "hyper_parameters": {"cfg": settings}, "loops": {}, "callbacks": {},
    }  # fmt: skip


def in_omegaconf(value: object) -> object:
    """Objects of classes with the names and the state of omegaconf 2's, which is not installed."""
    known = sys.modules.get("omegaconf")
    if known is None:
        known = sys.modules["omegaconf"] = types.ModuleType("omegaconf")
        for name in ("DictConfig", "AnyNode"):
            setattr(known, name, type(name, (), {"__module__": "omegaconf"}))
    made = known.DictConfig() if isinstance(value, dict) else known.AnyNode()
    content = {key: in_omegaconf(own) for key, own in value.items()} if isinstance(value, dict) else value
    made.__dict__.update({"_content" if isinstance(value, dict) else "_val": content, "_parent": None})
    return made


@pytest.mark.parametrize("name", ["model_weights.ckpt", "megatron_gpt--val_loss=5.67-step=100.ckpt"])
@pytest.mark.parametrize(
    ("folder", "value", "said"),
    [
        ("mp_rank_01", lambda: nemo(2), "rank 1 of 2"),
        ("mp_rank_01", lambda: nemo(2, omegaconf=True), "rank 1 of 2"),
        ("tp_rank_01_pp_rank_002", lambda: nemo(2, 4), "rank 5 of 8"),
        ("tp_rank_00_pp_rank_001", lambda: nemo(1, 2), "rank 1 of 2"),
        ("renamed", lambda: nemo(4), "one rank's piece of 4 ranks"),
        ("renamed", lambda: nemo(2, target="nemo.collections.nlp.models.MegatronGPTModel", nemo_version=None),
         "one rank's piece of 2 ranks"),
    ],
)  # fmt: skip
def test_which_rank_of_a_nemo_model_it_is(
    folder: str, value: Callable[[], object], said: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / folder / name
    monkeypatch.delitem(sys.modules, "omegaconf", raising=False)
    saved(value())(path)
    monkeypatch.delitem(sys.modules, "omegaconf", raising=False)
    found = piece_of(open_checkpoint(path))
    assert found is not None and found.message.startswith(f"{said} (model parallel)")
    assert "_size in its hyper_parameters is" in found.message and "NeMo" in found.way_out
    for run in (
        lambda: ckptfix.convert(path, tmp_path / "out.safetensors"),
        lambda: ckptfix.extract(path, tmp_path / "out.pth"),
        lambda: ckptfix.load_state_dict(path),
        lambda: ckptfix.load_into(nn.ModuleDict({"fc": nn.Linear(3, 4)}), path, strict=False),
    ):
        with pytest.raises(WouldLoseData, match=said):
            run()
    assert [row.severity for row in ckptfix.doctor(path).findings if row.id == "one-rank"] == ["error"]


def test_a_nemo_model_in_one_piece_is_no_piece(tmp_path: Path) -> None:
    settings = {"tensor_model_parallel_size": 2}
    for number, (folder, value) in enumerate((
        ("mp_rank_00", nemo(1)),
        ("whole", nemo(1)),
        ("whole", {"state_dict": dict(LOCAL), "hyper_parameters": settings}),
        ("whole", {"state_dict": dict(LOCAL), "hyper_parameters": {"cfg": settings}}),
        ("mp_rank_00", dict(LOCAL)),
    )):
        path = tmp_path / str(number) / folder / "model_weights.ckpt"
        saved(value)(path)
        assert piece_of(open_checkpoint(path)) is None


def test_the_folders_of_other_ranks_show_what_the_file_does_not_state(tmp_path: Path) -> None:
    """The members of a .nemo are bare state dicts: one for each rank."""
    for folder in ("mp_rank_00", "mp_rank_01", "mp_rank_02", "tokenizer"):
        saved(dict(LOCAL))(tmp_path / "a" / folder / "model_weights.ckpt")
    path = tmp_path / "a" / "mp_rank_01" / "model_weights.ckpt"
    with pytest.raises(WouldLoseData, match=r"rank 1 of 3 .*model_weights\.ckpt is in mp_rank_00, mp_rank_02 too"):
        ckptfix.convert(path, tmp_path / "out.safetensors")
    assert piece_of(open_checkpoint(tmp_path / "a" / "tokenizer" / "model_weights.ckpt")) is None
    for number in range(2):
        saved(dict(LOCAL))(tmp_path / "b" / f"tp_rank_00_pp_rank_{number:03}" / "model_weights.ckpt")
    path = tmp_path / "b" / "tp_rank_00_pp_rank_001" / "model_weights.ckpt"
    with pytest.raises(WouldLoseData, match="one rank's piece of 2 ranks"):
        ckptfix.load_state_dict(path)
    (tmp_path / "b" / "tp_rank_00_pp_rank_000" / "model_weights.ckpt").unlink()
    assert piece_of(open_checkpoint(path)) is None


def test_a_deepspeed_folder_of_one_slice_is_refused(tmp_path: Path) -> None:
    saved(states(mp_world_size=2))(tmp_path / "global_step3" / "mp_rank_00_model_states.pt")
    with pytest.raises(CkptfixError, match="one of 2 model-parallel ranks"):
        ckptfix.convert(tmp_path / "global_step3", tmp_path / "out.pth")
    assert not (tmp_path / "out.pth").exists() and ckptfix.doctor(tmp_path / "global_step3").exit_code() == 1


@pytest.mark.parametrize("out", ["out.pth", "out.safetensors"])
def test_a_folder_of_one_rank_is_refused_whatever_it_becomes(out: str, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "rank0.pt").write_bytes((ROOT / "fixtures" / "rank0-dtensor.pt").read_bytes())
    with pytest.raises(WouldLoseData, match="rank 0 of 2"):
        ckptfix.convert(tmp_path / "in", tmp_path / out)


def test_an_edit_of_names_leaves_it_what_it_is(piece: tuple[str, Path], tmp_path: Path) -> None:
    kind, path = piece
    ckptfix.add_module(path, tmp_path / f"other-{path.name}")
    ckptfix.to_cpu(path, tmp_path / f"moved-{path.name}")
    for edited in ("other", "moved"):
        found = piece_of(open_checkpoint(tmp_path / f"{edited}-{path.name}"))
        assert kind != "model parallel" or (found is not None and found.kind == kind)
    assert ckptfix.diff(path, path).same


@pytest.mark.parametrize("name", ["rank0-dtensor.pt", "rank0-sharded.pt"])
def test_sanitize_keeps_every_shard(name: str, tmp_path: Path) -> None:
    done = ckptfix.sanitize(ROOT / "fixtures" / name, tmp_path / "plain.pt")
    loaded = torch.load(tmp_path / "plain.pt", weights_only=True)
    assert not done.dropped and not tensors_of(LOCAL.values()) - tensors_of(found_in(loaded))
    assert key_of(LOCAL["fc.weight"]) in {key_of(tensor) for tensor in found_in(loaded["fc.weight"])}


def test_what_is_replicated_is_whole(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(ROOT / "fixtures" / "rank0-dtensor.pt")
    found = piece_of(checkpoint)
    assert found is not None and found.where == "fc.weight" and "more" not in found.missing


def archives(folder: Path, name: str = "renamed.bin") -> Path:
    fixture("rank0.distcp")(folder / name)
    return folder / name


@pytest.mark.parametrize("name", ["__0_0.distcp", "renamed.bin", "renamed.pth"])
def test_archives_end_to_end_are_refused_by_every_verb(name: str, tmp_path: Path) -> None:
    path, out = archives(tmp_path, name), tmp_path / "out.pth"
    before = path.read_bytes()
    for run in (
        lambda: open_checkpoint(path),
        lambda: ckptfix.convert(path, tmp_path / "out.safetensors"),
        lambda: ckptfix.extract(path, out),
        lambda: ckptfix.sanitize(path, out),
        lambda: ckptfix.slim(path, out),
        lambda: ckptfix.strip_module(path, out),
        lambda: ckptfix.to_cpu(path, out),
        lambda: ckptfix.repair(path, out),
        lambda: ckptfix.diff(path, path),
        lambda: ckptfix.load_state_dict(path),
    ):
        with pytest.raises(DistributedPart, match="distributed checkpoint"):
            run()
    assert path.read_bytes() == before and not out.exists()
    (finding,) = examine(path).findings
    assert finding.id == "distributed-shard"


def test_with_its_metadata_the_folder_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "a b"
    folder.mkdir()
    (folder / ".metadata").write_bytes(b"")
    fix = examine(archives(folder, "__0_0.distcp")).findings[0].fix
    assert fix is not None
    assert shlex.split(fix)[3:7] == ["ckptfix", "convert", str(folder), "OUT"]


def test_a_cut_one_and_raw_bytes_between(tmp_path: Path) -> None:
    whole = archives(tmp_path).read_bytes()
    one = whole[: len(whole) // 2]
    for data in (whole + whole[:700], whole[:-1] + b"x" + whole, one + b"raw bytes" + whole, b"\0" * 700 + whole):
        path = builders.written(tmp_path / "odd.bin", data)
        with pytest.raises(DistributedPart):
            ckptfix.repair(path, tmp_path / "out.bin")
    for data in (one, whole[:900], whole[900:]):
        path = builders.written(tmp_path / "__0_0.distcp", data)
        with pytest.raises((DistributedPart, CkptfixError)):
            ckptfix.repair(path, tmp_path / "out.bin")


def test_one_archive_is_one(tmp_path: Path) -> None:
    """Archives inside a tensor, and other bytes before or behind, do not make several of one."""
    inner = archives(tmp_path).read_bytes()
    path = tmp_path / "outer.pth"
    torch.save({"blob": torch.frombuffer(bytearray(inner), dtype=torch.uint8), "w": torch.ones(3)}, path)
    assert len(open_checkpoint(path).entries) == 2
    data = path.read_bytes()
    for odd in (b"junk" * 99 + data, data + b"junk" * 99, data[: data.rindex(b"PK\x06\x06")]):
        broken = builders.written(tmp_path / "broken.pth", odd)
        assert len(ckptfix.repair(broken, tmp_path / "fixed.pth", force=True).kept) == 2
