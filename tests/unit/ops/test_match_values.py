"""Equal bytes are proof, where both sides hold weights; nothing else is."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from torch import Tensor

import ckptfix
from ckptfix.checkpoint import Checkpoint, TensorEntry
from ckptfix.errors import Refused
from ckptfix.findings.table import found as found_in_table
from ckptfix.formats import open_checkpoint
from ckptfix.ops.diff import content
from ckptfix.ops.match import MatchResult, find

BLUNT = {"layers": "h", ".q.": ".zan.", ".k.": ".lor.", ".v.": ".mev.", ".o.": ".tus.", "norm": "kip"}


def blunt(name: str) -> str:
    for old, new in BLUNT.items():
        name = name.replace(old, new)
    return name


def weights(seed: int = 1) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    made = {f"layers.{at}.{part}.weight": torch.randn(8, 8, generator=generator) for at in range(3) for part in "qkvo"}
    return made | {f"layers.{at}.norm.weight": torch.rand(8, generator=generator) for at in range(3)}


def matched(folder: Path, source: dict[str, Tensor], target: dict[str, Tensor], suffix: str = "pth") -> MatchResult:
    paths = [folder / f"{name}.{suffix}" for name in ("source", "target")]
    for path, state in zip(paths, (source, target), strict=True):
        if suffix == "safetensors":
            from safetensors.torch import save_file

            save_file(state, path)
        else:
            torch.save(state, path)
    return ckptfix.match(paths[0], folder / f"out.{suffix}", like=paths[1], dry_run=True)


def renamed(state: dict[str, Tensor], *, seed: int = 2) -> dict[str, Tensor]:
    """The same tensors under names that say nothing, in another order."""
    names = random.Random(seed).sample(list(state), len(state))
    return {blunt(name): state[name] for name in names}


@pytest.mark.parametrize("suffix", ["pth", "safetensors"])
def test_a_copy_under_names_that_say_nothing(tmp_path: Path, suffix: str) -> None:
    state = weights()
    found = matched(tmp_path, state, renamed(state), suffix).matching
    assert found.complete
    assert found.names == {name: blunt(name) for name in state}
    assert {pair.why for pair in found.pairs} == {"same values"}


def test_a_copy_whose_blocks_are_counted_from_the_other_end(tmp_path: Path) -> None:
    """Names and numbers would say the contrary."""
    state = weights()
    turned = {name: name.replace(f".{name[7]}.", f".{2 - int(name[7])}.", 1) for name in state}
    found = matched(tmp_path, state, {turned[name]: tensor for name, tensor in state.items()}).matching
    assert found.complete and found.names == turned


def test_other_values_prove_nothing(tmp_path: Path) -> None:
    found = matched(tmp_path, weights(1), renamed(weights(2))).matching
    assert not found.complete
    assert "same values" not in {pair.why for pair in found.pairs}


def test_a_few_equal_tensors_prove_nothing(tmp_path: Path) -> None:
    """Two models that start from one embedding are not copies."""
    one, other = weights(1), weights(2)
    other["layers.0.q.weight"] = one["layers.2.v.weight"]
    found = matched(tmp_path, one, renamed(other)).matching
    assert "same values" not in {pair.why for pair in found.pairs}


def fine_tuned(width: int = 32) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Two models from one base whose first layer, with the embedding, was frozen; the other layers were trained."""
    generator = torch.Generator().manual_seed(3)
    shapes = {f"layers.{at}.{part}.weight": (width, width) for at in range(3) for part in "qkvo"}
    one = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    other = {name: tensor if ".0." in name else tensor + 0.01 for name, tensor in one.items()}
    return one, other


def test_frozen_layers_prove_their_pairs(tmp_path: Path) -> None:
    """Names that say nothing about the frozen layer are told by its values, and the rest stays in doubt."""
    one, other = fine_tuned()
    found = matched(tmp_path, one, renamed(other)).matching
    proven = {pair.source: pair.target for pair in found.pairs if pair.why == "same values"}
    assert proven == {name: blunt(name) for name in one if ".0." in name}


def test_equal_constants_prove_nothing(tmp_path: Path) -> None:
    one, other = fine_tuned()
    one["layers.1.q.weight"] = torch.full((32, 32), 0.5)
    other["layers.2.v.weight"] = torch.full((32, 32), 0.5)
    found = matched(tmp_path, one, renamed(other)).matching
    assert {pair.source for pair in found.pairs if pair.why == "same values"} == {name for name in one if ".0." in name}


def test_ones_everywhere_prove_nothing(tmp_path: Path) -> None:
    state = {name: torch.ones_like(tensor) if "norm" in name else tensor for name, tensor in weights().items()}
    state |= {name.replace("norm", "ln"): tensor for name, tensor in state.items() if "norm" in name}
    found = matched(tmp_path, state, renamed({**state})).matching
    why = {pair.source: pair.why for pair in found.pairs}
    assert why["layers.0.q.weight"] == "same values"
    assert why["layers.0.norm.weight"] != "same values"


def test_of_other_models_only_a_few_tensors_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[int] = []
    digests = content._digests

    def counted(limit, readers, batch):  # type: ignore[no-untyped-def]
        looked.append(len(batch))
        return digests(limit, readers, batch)

    monkeypatch.setattr(content, "_digests", counted)
    one = {f"a.{at}.weight": torch.rand(at + 2, 3) for at in range(40)}
    matched(tmp_path, one, {f"b.{at}.weight": torch.rand(at + 2, 3) for at in range(40)}, "safetensors")
    assert 0 < sum(looked) <= 8


def test_found_rules_that_do_not_fit_name_the_file_and_what_to_do(tmp_path: Path) -> None:
    kinds = {"q_proj": torch.float32, "k_proj": torch.float16, "v_proj": torch.float32}
    torch.save({f"h.0.attn.{name}.weight": torch.ones(8, 8, dtype=kind) for name, kind in kinds.items()},
               tmp_path / "in.pth")  # fmt: skip
    torch.save({"blocks.0.attn.qkv.weight": torch.ones(24, 8)}, tmp_path / "like.pth")
    with pytest.raises(Refused, match="have different dtypes: float32, float16") as caught:
        ckptfix.match(tmp_path / "in.pth", tmp_path / "out.pth", tmp_path / "like.pth")
    assert caught.value.path == str(tmp_path / "in.pth") and caught.value.where is None
    assert "--rules FILE" in (caught.value.hint or "") and "| concat" in (caught.value.hint or "")


@pytest.mark.parametrize("suffix", ["pth", "safetensors"])
def test_the_tensors_of_the_target_are_not_held_once_values_are_compared(tmp_path: Path, suffix: str) -> None:
    # Of a model with 100,000 tensors they need 100 MB, while names need most.
    matched(tmp_path, weights(), renamed(weights()), suffix)
    found = find(tmp_path / f"source.{suffix}", tmp_path / f"target.{suffix}")
    assert {pair.why for pair in found.matching.pairs} == {"same values"}
    assert found.target.checkpoint is None and not found.target.entries
    assert [Path(file.path).name for file in found.target.files] == [f"target.{suffix}"]


@pytest.mark.parametrize("suffix", ["pth", "safetensors"])
def test_the_tensors_of_the_source_are_not_held_while_names_are_matched(tmp_path: Path, suffix: str) -> None:
    matched(tmp_path, weights(), renamed(weights()), suffix)
    found = find(tmp_path / f"source.{suffix}", tmp_path / f"target.{suffix}")
    assert found.matching.complete and not found.source.entries
    assert "entries" not in vars(found.checkpoint)
    again = open_checkpoint(tmp_path / f"source.{suffix}").entries
    assert found.checkpoint.entries == again and len(again) == len(weights())


def test_entries_with_findings_are_not_built_twice() -> None:
    rows = []
    noted = found_in_table("bad-tensor", "too short", where="fc.weight")

    def load() -> tuple[TensorEntry, ...]:
        rows.append(noted)
        return ()

    checkpoint = Checkpoint("m.pth", "zip", 0, {}, load, lambda: iter(()), findings=rows)
    assert checkpoint.entries == () and len(rows) == 1
    checkpoint.forget_entries()
    assert checkpoint.entries == () and len(rows) == 1
