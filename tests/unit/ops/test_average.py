"""The mean of checkpoints: against torch in float64, rounded once, and everything else of the last."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

import ckptfix
from ckptfix.errors import Refused, WouldOverwrite
from ckptfix.ops import average as average_module
from ckptfix.ops.average import last_of

DTYPES = ("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")


def weights(seed: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    found = {name: torch.randn(5000).to(getattr(torch, name)) for name in DTYPES}
    found["complex64"] = torch.randn(500, dtype=torch.complex64)
    found["bn.num_batches_tracked"] = torch.tensor(10 + seed)
    found["long"] = torch.randn(400_000)
    shared = torch.randn(6, 4)
    found |= {"tied": shared, "also": shared, "view": shared[1:3], "column": torch.randn(7, 5)[:, 2]}
    found["odd"] = torch.tensor(
        [math.nan if seed == 1 else 1.0, math.inf, -math.inf if seed else math.inf, -0.0, 1e-45]
    )
    return found


def expected(tensors: list[torch.Tensor], shares: list[float]) -> torch.Tensor:
    """The mean in float64, rounded once: to the bits of numbers in the dtype, by searching for the nearest."""
    wide = torch.complex128 if tensors[0].is_complex() else torch.float64
    return sum(
        (tensor.to(wide) * share for tensor, share in zip(tensors, shares, strict=True)), torch.zeros((), dtype=wide)
    ) / sum(shares)


def nearest(mean: torch.Tensor, made: torch.Tensor) -> bool:
    """Whether no neighbour of `made` in its dtype is nearer to `mean`."""
    if made.dtype in (torch.float64, torch.complex64):
        return bool(
            torch.allclose(
                made.to(mean.dtype), mean, rtol=1e-15 if made.dtype is torch.float64 else 1e-7, equal_nan=True
            )
        )
    back = made.double()
    distance = (back - mean).abs()
    raw = made.view(torch.uint8 if made.itemsize == 1 else torch.int16 if made.itemsize == 2 else torch.int32)
    for step in (1, -1):
        other = (raw + step).view(made.dtype).double()
        if not bool(((other - mean).abs() >= distance).logical_or(~other.isfinite()).logical_or(mean.isnan()).all()):
            return False
    return bool(torch.equal(back.isnan(), mean.isnan()))


@pytest.mark.sampled(quick=2)
@pytest.mark.parametrize("kind", ["zip", "legacy", "mixed"])
@pytest.mark.parametrize("shares", [None, [1.0, 2.0, 0.5]])
def test_the_mean_is_rounded_once(tmp_path: Path, kind: str, shares: list[float] | None) -> None:
    whole = [weights(seed) for seed in range(3)]
    paths = [tmp_path / f"{seed}.pth" for seed in range(3)]
    for path, state in zip(paths, whole, strict=True):
        torch.save(
            {"model": state, "step": path.stem},
            path,
            _use_new_zipfile_serialization=kind != "legacy" or path is paths[0],
        )
    if kind == "mixed":
        ckptfix.convert(paths[1], tmp_path / "1.safetensors", at="model")
        paths[1] = tmp_path / "1.safetensors"
    if kind == "legacy":
        paths[0].unlink()
        for seed, path in enumerate(paths):
            plain = {name: tensor for name, tensor in whole[seed].items() if "float8" not in name}
            whole[seed] = plain
            torch.save({"model": plain, "step": path.stem}, path, _use_new_zipfile_serialization=False)
    done = ckptfix.average(paths, tmp_path / "out.pth", weights=shares)
    found = torch.load(tmp_path / "out.pth", weights_only=True)
    assert found["step"] == "2" and list(found["model"]) == list(whole[0])
    for name, tensor in found["model"].items():
        inputs = [state[name] for state in whole]
        assert tensor.dtype is inputs[0].dtype and tensor.shape == inputs[0].shape
        if name == "bn.num_batches_tracked":
            assert int(tensor) == 12
        elif name == "odd":
            mean = expected(inputs, shares or [1.0] * 3)
            assert torch.allclose(tensor.double(), mean, rtol=1e-6, equal_nan=True) and bool(tensor[3].signbit())
        else:
            assert nearest(expected(inputs, shares or [1.0] * 3), tensor), name
    assert found["model"]["tied"].data_ptr() == found["model"]["also"].data_ptr()
    assert done.taken == ("model/bn.num_batches_tracked",) and not done.account.lost and done.exit_code == 0
    assert sum(share for _, share in done.inputs) == pytest.approx(1)


def test_the_mean_of_equal_files_is_the_file(tmp_path: Path) -> None:
    state = {name: tensor for name, tensor in weights(0).items() if name != "complex64"}
    torch.save(state, tmp_path / "in.pth")
    ckptfix.average([tmp_path / "in.pth"] * 3, tmp_path / "out.pth")
    assert ckptfix.digest(tmp_path / "out.pth", check=tmp_path / "in.pth").exit_code == 0


@pytest.mark.parametrize("to", ["safetensors", "hf", "dcp"])
def test_other_formats_and_folders(tmp_path: Path, to: str) -> None:
    suffix = ".safetensors" if to == "safetensors" else ""
    states: list[dict[str, Any]] = []
    for seed in range(2):
        torch.manual_seed(seed)
        shared = torch.randn(30, 20)
        states.append({"a": shared, "b": shared, "c": torch.randn(70_000).bfloat16(), "n": torch.tensor(seed)})
        torch.save(states[-1], tmp_path / f"{seed}.pth")
        size = 20_000 if to == "hf" else None
        ckptfix.convert(tmp_path / f"{seed}.pth", tmp_path / f"in{seed}{suffix}", to=to, shard_size=size)  # type: ignore[arg-type,unused-ignore]
    ckptfix.average([tmp_path / f"in{seed}{suffix}" for seed in range(2)], tmp_path / f"out{suffix}")
    found = ckptfix.load_state_dict(tmp_path / f"out{suffix}")
    for name in ("a", "b", "c"):
        assert nearest(expected([state[name] for state in states], [1, 1]), found[name]), name
    assert int(found["n"]) == 1
    assert not ckptfix.doctor(tmp_path / f"out{suffix}").exit_code(fail_on="warning")


def test_an_exponential_moving_average(tmp_path: Path) -> None:
    values = [torch.randn(50, dtype=torch.float64) for _ in range(4)]
    for index, value in enumerate(values):
        torch.save({"w": value}, tmp_path / f"{index}.pth")
    ckptfix.average([tmp_path / f"{index}.pth" for index in range(4)], tmp_path / "out.pth", ema=0.9)
    mean = values[0]
    for value in values[1:]:
        mean = 0.9 * mean + 0.1 * value
    assert torch.allclose(torch.load(tmp_path / "out.pth")["w"], mean, rtol=1e-14)


def test_the_last_of_a_folder(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    for step in (9, 10, 100):
        torch.save({"w": torch.tensor([float(step)])}, run / f"step_{step}.pth")
    torch.save({"w": torch.zeros(1)}, run / "best.pth")
    (run / "log_1.txt").write_text("x")
    assert last_of(str(run), 2) == [str(run / "step_10.pth"), str(run / "step_100.pth")]
    ckptfix.average([run], tmp_path / "out.pth", last=2)
    assert torch.load(tmp_path / "out.pth")["w"].tolist() == [55]
    with pytest.raises(Refused, match="only 3 checkpoints"):
        last_of(str(run), 4)
    torch.save({"w": torch.zeros(1)}, run / "other-1.pth")
    with pytest.raises(Refused, match="several series"):
        last_of(str(run), 2)


def test_what_differs_is_refused_by_name(tmp_path: Path) -> None:
    base = {"a": torch.ones(2), "b": torch.ones(3), "c": torch.ones(1)}
    torch.save(base, tmp_path / "one.pth")
    for other, message in (
        ({"a": torch.ones(2), "b": torch.ones(3), "d": torch.ones(1)}, "missing: c; not in the first: d"),
        ({**base, "a": torch.ones(3), "b": torch.ones(4)}, "different shape: a, b"),
        ({**base, "a": torch.ones(2).half()}, "different dtype: a"),
    ):
        torch.save(other, tmp_path / "two.pth")
        with pytest.raises(Refused, match=message):
            ckptfix.average([tmp_path / "one.pth", tmp_path / "two.pth"], tmp_path / "out.pth")
    assert not (tmp_path / "out.pth").exists()


def test_statistics_of_batchnorm_are_said(tmp_path: Path) -> None:
    for seed in range(2):
        torch.save(torch.nn.BatchNorm1d(3).state_dict(), tmp_path / f"{seed}.pth")
    done = ckptfix.average([tmp_path / "0.pth", tmp_path / "1.pth"], tmp_path / "out.pth")
    assert [row.id for row in done.findings] == ["batchnorm"] and "update_bn" in str(done)


def test_damage_in_any_input_ends_it(tmp_path: Path) -> None:
    for seed in range(2):
        torch.save({"w": torch.randn(3000)}, tmp_path / f"{seed}.pth")
    raw = bytearray((tmp_path / "0.pth").read_bytes())
    raw[len(raw) // 2] ^= 1
    (tmp_path / "0.pth").write_bytes(raw)
    with pytest.raises(ckptfix.CkptfixError):
        ckptfix.average([tmp_path / "0.pth", tmp_path / "1.pth"], tmp_path / "out.pth")
    assert not (tmp_path / "out.pth").exists()


def test_wrong_arguments(tmp_path: Path) -> None:
    for seed in range(2):
        safetensors.torch.save_file({"w": torch.ones(1)}, tmp_path / f"{seed}.safetensors")
    paths = [tmp_path / "0.safetensors", tmp_path / "1.safetensors"]
    for options in (
        {"weights": [1.0]},
        {"weights": [1, -1]},
        {"ema": 1.0},
        {"ema": 0.5, "weights": [1, 1]},
        {"last": 2},
    ):
        with pytest.raises(Refused):
            ckptfix.average(paths, tmp_path / "out.safetensors", **options)
    with pytest.raises(Refused, match="two inputs"):
        ckptfix.average(paths[:1], tmp_path / "out.safetensors")
    with pytest.raises(WouldOverwrite):
        ckptfix.average(paths, paths[0], force=True)


def test_views_of_one_storage_are_compared_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundred thousand views of one storage are one mean, and not a set of all names for each of them."""
    count = 500
    whole = torch.arange(2.0 * count)
    torch.save({f"v{number}": whole[2 * number : 2 * number + 2] for number in range(count)}, tmp_path / "in.pth")
    made = 0
    view = average_module._view

    def counted(entry: Any, name: str) -> Any:
        nonlocal made
        made += 1
        return view(entry, name)

    monkeypatch.setattr(average_module, "_view", counted)
    ckptfix.average([tmp_path / "in.pth"] * 3, tmp_path / "out.pth")
    assert made == 3 * count
    state = torch.load(tmp_path / "out.pth", weights_only=True)
    assert all(torch.equal(state[f"v{number}"], whole[2 * number : 2 * number + 2]) for number in range(count))


@pytest.mark.sampled(quick=2)
@pytest.mark.parametrize("dtype", [*DTYPES[:4], "float8_e5m2", "complex64"])
def test_what_is_not_finite_is_named_with_its_file(dtype: str, tmp_path: Path) -> None:
    """Every count is torch's, in tensors of several pieces, of views and of two names."""
    torch.manual_seed(0)
    paths = [tmp_path / f"{number}.pth" for number in range(3)]
    states = []
    for number, path in enumerate(paths):
        long = torch.randn(400_000)
        long[torch.randint(0, len(long), (number * 7,))] = math.nan
        long[torch.randint(0, len(long), (number,))] = math.inf
        mask = torch.full((4, 4), -math.inf).triu(1)
        made = {name: value.to(getattr(torch, dtype)) for name, value in (("long", long), ("mask", mask))}
        states.append({**made, "rows": made["mask"][1:3].t(), "fine": torch.ones(3), "steps": torch.tensor(3)})
        torch.save(states[-1], path)
    result = ckptfix.average(paths, tmp_path / "mean.pth")
    found = [row for row in result.findings if row.id in ("nan-values", "infinite-values")]
    nan = [int(state["long"].to(torch.complex64).isnan().sum()) for state in states]
    infinite = [int(state["long"].to(torch.complex64).isinf().sum()) for state in states]
    for number, path in enumerate(paths):
        own = {row.id: row for row in found if row.where == str(path)}
        assert ("nan-values" in own) == (nan[number] > 0)
        if nan[number]:
            assert f"long ({nan[number]:,})" in own["nan-values"].message
            assert own["nan-values"].severity == "warning"
        assert "mask (6)" in own["infinite-values"].message
        assert (f"long ({infinite[number]})" in own["infinite-values"].message) == (infinite[number] > 0)
        assert own["infinite-values"].severity == ("warning" if infinite[number] else "info")
    assert result.exit_code == 0


def test_finite_weights_are_averaged_without_a_word(tmp_path: Path) -> None:
    """Sums that leave the range of the dtype, or of float64, are no fault of an input."""
    for number in range(2):
        state = {"a": torch.full((3,), 3e38), "b": torch.full((3,), 1.7e308, dtype=torch.float64)}
        torch.save(state, tmp_path / f"{number}.pth")
    result = ckptfix.average([tmp_path / "0.pth", tmp_path / "1.pth"], tmp_path / "mean.pth")
    assert not result.findings


@pytest.mark.parametrize("names", ["optimizer.state.{kind}.{name}", "state.{name}.{kind}"])
def test_moments_of_an_optimizer_are_said_to_be_of_the_last(tmp_path: Path, names: str) -> None:
    for seed in (1, 2):
        own = {f"layers.{n}.weight": torch.full((4, 4), float(seed)) for n in range(3)}
        kinds = ("exp_avg", "exp_avg_sq")
        moments = {names.format(kind=kind, name=name): row * 10 for kind in kinds for name, row in own.items()}
        torch.save({**own, **moments}, tmp_path / f"{seed}.pth")
    done = ckptfix.average([tmp_path / "1.pth", tmp_path / "2.pth"], tmp_path / "out.pth")
    assert set(done.averaged) == set(own) and set(done.taken) == set(moments)
    (line,) = (line for line in done.lines if line.startswith("not averaged"))
    assert "2.pth" in line and next(iter(moments)) in line
    found = torch.load(tmp_path / "out.pth")
    assert all(bool((found[name] == (1.5 if name in own else 20)).all()) for name in found)
