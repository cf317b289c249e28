"""load_into: names, shapes, ties, modules that load in a way of their own, and what the report says."""

from __future__ import annotations

import json
import warnings
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any, cast

import pytest
import safetensors.torch
import torch
from kinds import tensor
from torch import nn
from torch.nn.utils import parametrizations

import ckptfix
from ckptfix.errors import CkptfixError, DamagedFile, LoadMismatch, NoSuchTensor, Refused
from ckptfix.loaders import reading


def saved(path: Path, value: Any, **how: Any) -> Path:
    torch.save(value, path, **how)
    return path


def net(width: int = 4) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, width), nn.BatchNorm1d(width), nn.Linear(width, 2))


def blank(model: nn.Module) -> nn.Module:
    """`model` with every tensor at 7."""
    with torch.no_grad():
        for value in model.state_dict().values():
            value.fill_(7)
    return model


def untouched(model: nn.Module) -> bool:
    return all(bool((value == 7).all()) for value in model.state_dict().values())


def same(model: nn.Module, other: nn.Module) -> bool:
    pairs = zip(model.state_dict().values(), other.state_dict().values(), strict=True)
    return all(torch.equal(one.cpu(), two.cpu()) for one, two in pairs)


def test_exact_names_and_what_the_report_says(tmp_path: Path) -> None:
    path = saved(tmp_path / "a.pth", net().state_dict())
    model = blank(net())
    report = ckptfix.load_into(model, path)
    assert same(model, net())
    assert (report.rule, report.at, report.format, report.done, report.complete) == ("exact", "", "zip", True, True)
    assert report.loaded == tuple(net().state_dict())
    assert str(report) == f"loaded 9 of 9 tensors from {path}: keys match exactly"
    json.dumps(report.as_dict())


def test_parameters_are_copied_in_place(tmp_path: Path) -> None:
    path = saved(tmp_path / "a.pth", net().state_dict())
    model = blank(net())
    before = [(id(parameter), parameter.data_ptr()) for parameter in model.parameters()]
    ckptfix.load_into(model, path)
    assert [(id(parameter), parameter.data_ptr()) for parameter in model.parameters()] == before
    assert all(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize("prefix", ["model", "backbone", "net", "bert"])
def test_a_base_prefix_on_either_side(tmp_path: Path, prefix: str) -> None:
    held = nn.ModuleDict({prefix: net()})
    model = blank(net())
    report = ckptfix.load_into(model, saved(tmp_path / "a.pth", held.state_dict()))
    assert same(model, net()) and report.rule == f"base prefix {prefix}."
    holder = nn.ModuleDict({prefix: blank(net())})
    report = ckptfix.load_into(holder, saved(tmp_path / "b.pth", net().state_dict()))
    assert same(holder, net()) and report.rule == f"base prefix {prefix}."
    assert report.renamed["0.weight"] == f"{prefix}.0.weight"


def test_a_base_prefix_inside_a_wrapper(tmp_path: Path) -> None:
    held = nn.DataParallel(nn.ModuleDict({"model": net()}))
    model = blank(net())
    report = ckptfix.load_into(model, saved(tmp_path / "a.pth", {"state_dict": held.state_dict(), "epoch": 3}))
    assert same(model, net())
    assert (report.rule, report.at) == ("wrapper module. and base prefix model.", "state_dict")


def test_data_parallel_around_a_part(tmp_path: Path) -> None:
    trained = nn.ModuleDict({"features": nn.DataParallel(net()), "head": nn.Linear(2, 2)})
    model = blank(nn.ModuleDict({"features": net(), "head": nn.Linear(2, 2)}))
    report = ckptfix.load_into(model, saved(tmp_path / "a.pth", trained.state_dict()))
    assert same(model, trained) and report.rule == "wrapper module."


def test_the_averaged_model_keeps_its_count(tmp_path: Path) -> None:
    averaged = torch.optim.swa_utils.AveragedModel(net())
    model = blank(net())
    report = ckptfix.load_into(model, saved(tmp_path / "a.pth", averaged.state_dict()))
    assert same(model, net()) and [skip.name for skip in report.skipped] == ["n_averaged"]
    averaged.n_averaged.fill_(5)
    report = ckptfix.load_into(averaged, saved(tmp_path / "b.pth", net().state_dict()))
    assert same(averaged.module, net()) and averaged.n_averaged.item() == 5
    assert [skip.name for skip in report.skipped] == ["n_averaged"]


def test_other_names_are_not_guessed_in_part(tmp_path: Path) -> None:
    """A complete alignment by structure would be used (test_structure_in_auto); here two weights have other shapes."""
    other = OrderedDict((f"x{name}", value) for name, value in net().state_dict().items())
    wide = max(other, key=lambda name: other[name].numel())
    other[wide] = torch.cat([other[wide], other[wide]])
    model = blank(net())
    with pytest.raises(LoadMismatch) as caught:
        ckptfix.load_into(model, saved(tmp_path / "a.pth", other))
    assert untouched(model)
    report = caught.value.report
    assert isinstance(report, ckptfix.LoadReport)
    assert report.rule == "exact" and not report.done and not report.loaded
    assert len(report.missing) == 8 and len(report.unexpected) == 8  # a count on each side is passed over by rule


def test_a_strict_load_raises_before_anything_is_changed(tmp_path: Path) -> None:
    state = net(5).state_dict()
    state["classifier.weight"] = tensor(2, 3)
    del state["2.bias"]
    model = blank(net())
    with pytest.raises(LoadMismatch) as caught:
        ckptfix.load_into(model, saved(tmp_path / "a.pth", {"model": state}))
    assert untouched(model)
    error = caught.value
    assert error.path == str(tmp_path / "a.pth") and error.where == "model" and "strict=False" in str(error.hint)
    assert "missing 1: 2.bias" in error.message and "unexpected 1: classifier.weight" in error.message
    assert "0.weight: [5, 3] in the file, [4, 3] in the model" in error.message
    report: Any = error.report
    shapes = {row.name: (row.found, row.expected) for row in report.mismatched}
    assert shapes["0.weight"] == ((5, 3), (4, 3)) and len(shapes) == 7


def test_a_load_that_is_not_strict_copies_what_fits_and_nothing_in_part(tmp_path: Path) -> None:
    state = net().state_dict()
    state["0.weight"] = torch.ones(5, 3)
    del state["2.bias"]
    model = blank(net())
    report = ckptfix.load_into(model, saved(tmp_path / "a.pth", state), strict=False)
    loaded = model.state_dict()
    assert (loaded["0.weight"] == 7).all() and (loaded["2.bias"] == 7).all()
    assert torch.equal(loaded["2.weight"], net().state_dict()["2.weight"])
    assert report.done and not report.complete and "0.weight" not in report.loaded
    assert str(report).splitlines()[0].startswith("loaded 7 of 9 tensors")
    assert report.missing == ("2.bias",) and [row.name for row in report.mismatched] == ["0.weight"]


def test_layers_are_told_as_ranges_and_the_nearest_name_is_named(tmp_path: Path) -> None:
    def block() -> nn.Module:
        attention = nn.ModuleDict({"q": nn.Linear(2, 2), "k": nn.Linear(2, 2)})
        return nn.ModuleDict({"attn": attention, "mlp": nn.Linear(2, 2)})

    model = nn.ModuleDict({"layers": nn.ModuleList(block() for _ in range(12)), "head": nn.Linear(2, 3)})
    state = {name: value for name, value in model.state_dict().items() if "attn" not in name}
    state["classifier.weight"], state["classifier.bias"] = state.pop("head.weight"), state.pop("head.bias")
    with pytest.raises(LoadMismatch) as caught:
        ckptfix.load_into(model, saved(tmp_path / "a.pth", state))
    message = caught.value.message
    assert "missing 50: layers.0-11.attn.* (48), head.* (2)" in message
    assert "missing head.weight: nearest in the file is classifier.weight" in message
    assert "unexpected 2: classifier.* (2)" in message


def test_a_head_of_another_name_leaves_the_base_loaded(tmp_path: Path) -> None:
    """The best of the tries is reported, here a base in a model with a head."""
    model = nn.ModuleDict({"bert": net(), "head": nn.Linear(2, 2)})
    path = saved(tmp_path / "a.pth", net().state_dict())
    with pytest.raises(LoadMismatch, match=r"missing 2: head\.\* \(2\)"):
        ckptfix.load_into(model, path)
    report = ckptfix.load_into(model, path, strict=False)
    assert report.rule == "base prefix bert." and same(model["bert"], net())


def test_dtypes_are_cast_and_counted(tmp_path: Path) -> None:
    path = saved(tmp_path / "a.pth", net().half().state_dict())
    model = blank(net())
    report = ckptfix.load_into(model, path)
    assert report.complete and model.state_dict()["0.weight"].dtype == torch.float32
    assert report.casts["0.weight"] == ("float16", "float32") and len(report.casts) == 8
    assert "cast 8 (float16 -> float32)" in str(report)


def test_a_scalar_of_old_torch(tmp_path: Path) -> None:
    module = nn.Module()
    module.scale = nn.Parameter(torch.tensor(1.0))
    path = saved(tmp_path / "a.pth", {"scale": torch.tensor([3.0]), "x.y": torch.ones(1)})
    ckptfix.load_into(module, path, strict=False)
    assert module.scale.item() == 3


# --- ties -------------------------------------------------------------------------------------------------------


class Tied(nn.Module):
    def __init__(self, tie: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.lm_head = nn.Linear(3, 5, bias=False)
        if tie:
            self.lm_head.weight = self.embed.weight


@pytest.mark.parametrize("kept", ["embed.weight", "lm_head.weight"])
def test_one_name_of_a_tied_parameter_is_enough(tmp_path: Path, kept: str) -> None:
    value = tensor(5, 3)
    safetensors.torch.save_file({kept: value}, tmp_path / "a.safetensors")
    model = Tied()
    report = ckptfix.load_into(model, tmp_path / "a.safetensors")
    assert torch.equal(model.lm_head.weight, value) and model.lm_head.weight is model.embed.weight
    assert report.complete and list(report.tied.values()) == [kept] and len(report.loaded) == 2


def test_both_names_of_a_tied_parameter(tmp_path: Path) -> None:
    model, trained = Tied(), Tied()
    report = ckptfix.load_into(model, saved(tmp_path / "a.pth", trained.state_dict()))
    assert same(model, trained) and report.tied == {"lm_head.weight": "embed.weight"}
    state = {name: value.clone() for name, value in trained.state_dict().items()}
    assert ckptfix.load_into(model, saved(tmp_path / "b.pth", state)).complete


def test_two_values_for_one_parameter(tmp_path: Path) -> None:
    path = saved(tmp_path / "a.pth", Tied(tie=False).state_dict())
    model = blank(Tied())
    with pytest.raises(LoadMismatch, match=r"tied to embed\.weight in the model, but .* differ in the file"):
        ckptfix.load_into(model, path)
    report = ckptfix.load_into(model, path, strict=False, allow_empty=True)
    assert untouched(model) and report.loaded == ()


def test_assigning_keeps_ties_and_makes_none(tmp_path: Path) -> None:
    path = saved(tmp_path / "a.pth", Tied().state_dict())
    model = Tied()
    ckptfix.load_into(model, path, assign=True)
    assert model.lm_head.weight is model.embed.weight
    apart = Tied(tie=False)
    ckptfix.load_into(apart, path, assign=True)
    assert torch.equal(apart.lm_head.weight, apart.embed.weight)
    assert apart.lm_head.weight.data_ptr() != apart.embed.weight.data_ptr()


# --- assign, meta -----------------------------------------------------------------------------------------------


def test_the_meta_device_wants_assign(tmp_path: Path) -> None:
    path = saved(tmp_path / "a.pth", net().state_dict())
    with torch.device("meta"):
        model = net()
    with pytest.raises(Refused, match="meta device") as caught:
        ckptfix.load_into(model, path)
    assert "assign=True" in str(caught.value.hint)
    report = ckptfix.load_into(model, path, assign=True)
    assert same(model, net()) and report.assigned
    assert [parameter.requires_grad for parameter in model.parameters()] == [True] * 6


@pytest.mark.parametrize("mmap", [False, True])
def test_assign_maps_the_file_if_asked_and_keeps_requires_grad(tmp_path: Path, mmap: bool) -> None:
    path = saved(tmp_path / "a.pth", net().half().state_dict())
    before = path.read_bytes()
    model = net()
    model[0].weight.requires_grad_(False)
    report = ckptfix.load_into(model, path, assign=True, mmap=mmap)
    weight = model[0].weight
    assert weight.dtype == torch.float16 and isinstance(weight, nn.Parameter) and not weight.requires_grad
    assert model[2].weight.requires_grad and "took the file's dtype" in str(report)
    if Path("/proc/self/maps").exists():
        assert (str(path) in Path("/proc/self/maps").read_text()) == mmap
    with torch.no_grad():
        weight.zero_()
    assert path.read_bytes() == before


def test_a_map_is_for_what_is_assigned(tmp_path: Path) -> None:
    path = saved(tmp_path / "a.pth", net().state_dict())
    with pytest.raises(Refused, match="mmap=True requires assign=True"):
        ckptfix.load_into(net(), path, mmap=True)


def test_map_location_is_where_assigned_tensors_go(tmp_path: Path) -> None:
    path = saved(tmp_path / "a.pth", net().state_dict())
    model = net()
    ckptfix.load_into(model, path, assign=True, map_location="meta")
    assert model[0].weight.is_meta
    with pytest.raises(Refused, match="map_location"):
        ckptfix.load_into(net(), path, map_location="gpu")


def test_a_tag_of_a_device_that_is_not_here_does_not_matter_for_copies(tmp_path: Path) -> None:
    path = saved(tmp_path / "a.pth", net().state_dict())
    ckptfix.map_location(path, tmp_path / "cuda.pth", "cuda:7")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = blank(net())
        ckptfix.load_into(model, tmp_path / "cuda.pth")
    assert same(model, net())


# --- which state dict -------------------------------------------------------------------------------------------


def test_the_state_dict_that_fits_is_taken(tmp_path: Path) -> None:
    other = nn.Linear(9, 9)
    path = saved(tmp_path / "a.pth", {"g": other.state_dict(), "d": net().state_dict()})
    model = blank(net())
    assert ckptfix.load_into(model, path).at == "d"
    assert same(model, net())


def test_two_that_fit_want_a_choice(tmp_path: Path) -> None:
    path = saved(tmp_path / "a.pth", {"a": net().state_dict(), "b": net().double().state_dict()})
    model = blank(net())
    with pytest.raises(Refused, match="2 state dicts fit equally well: a, b") as caught:
        ckptfix.load_into(model, path)
    assert untouched(model) and caught.value.hint == "choose one with at='a'"
    assert ckptfix.load_into(model, path, at="b").casts
    with pytest.raises(NoSuchTensor, match="'emma'"):
        ckptfix.load_into(model, path, at="emma")


def test_a_whole_pickled_module(tmp_path: Path) -> None:
    trained = nn.DataParallel(net())
    trained.module.register_buffer("passing", torch.ones(1), persistent=False)
    path = saved(tmp_path / "a.pth", {"model": trained, "epoch": 1})
    model = blank(net())
    report = ckptfix.load_into(model, path)
    assert same(model, net()) and (report.at, report.rule) == ("model", "wrapper module.")


# --- buffers, extra state, modules with ways of their own ---------------------------------------------------------


@pytest.mark.parametrize("versions", [True, False])
def test_a_count_that_one_side_lacks_is_passed_over_and_said(tmp_path: Path, versions: bool) -> None:
    state = net().state_dict()
    del state["1.num_batches_tracked"]
    if not versions:
        state = OrderedDict(state)
    model = blank(net())
    report = ckptfix.load_into(model, saved(tmp_path / "a.pth", state))
    assert [(skip.name, skip.rule) for skip in report.skipped] == [("1.num_batches_tracked", "num_batches_tracked")]
    assert model.state_dict()["1.num_batches_tracked"].item() == 7
    bare = nn.Sequential(nn.Linear(3, 4))
    bare.load_state_dict({"0.weight": state["0.weight"], "0.bias": state["0.bias"]})
    state = OrderedDict(bare.state_dict(), **{"0.num_batches_tracked": torch.tensor(3)})
    assert ckptfix.load_into(bare, saved(tmp_path / "b.pth", state)).skipped[0].name == "0.num_batches_tracked"


class WithExtra(nn.Module):
    def __init__(self, extra: Any = None) -> None:
        super().__init__()
        self.fc = nn.Linear(2, 2)
        self.extra = extra

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("extra", [{"scale": 3, "seen": [1, (2, None)]}, 5, torch.ones(2)], ids=type)
def test_extra_state(tmp_path: Path, extra: Any, wrapped: bool) -> None:
    trained: nn.Module = nn.Sequential(WithExtra(extra))
    path = saved(tmp_path / "a.pth", (nn.DataParallel(trained) if wrapped else trained).state_dict())
    model: Any = nn.Sequential(WithExtra())
    report = ckptfix.load_into(model, path)
    assert "0._extra_state" in report.loaded
    got = model[0].extra
    assert torch.equal(got, extra) if isinstance(extra, torch.Tensor) else got == extra


@pytest.mark.parametrize("extra", [torch.empty(0, dtype=torch.uint8), None, {"scale": 1}])
def test_extra_state_that_the_model_has_no_place_for_is_optional(tmp_path: Path, extra: Any) -> None:
    """Transformer Engine writes it, and a model that runs without fp8 does not have it."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    torch.save({**model.state_dict(), "0._extra_state": extra}, tmp_path / "in.pth")
    report = ckptfix.load_into(model, tmp_path / "in.pth")
    assert [(row.name, row.rule) for row in report.skipped] == [("0._extra_state", "extra-state")]


def test_extra_state_of_a_foreign_class_is_said(tmp_path: Path) -> None:
    path = saved(tmp_path / "a.pth", WithExtra(pytest.ExitCode.OK).state_dict())
    model = WithExtra("before")
    with pytest.raises(LoadMismatch, match=r"_extra_state: holds an object of class .*ExitCode"):
        ckptfix.load_into(model, path)
    with pytest.raises(LoadMismatch, match="missing 1: _extra_state"):
        ckptfix.load_into(model, saved(tmp_path / "b.pth", nn.ModuleDict({"fc": nn.Linear(2, 2)}).state_dict()))
    assert model.extra == "before"


def weight_norm_pair() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        old = nn.Sequential(nn.utils.weight_norm(nn.Linear(3, 2)), nn.Linear(2, 2))
    return old, nn.Sequential(parametrizations.weight_norm(nn.Linear(3, 2)), nn.Linear(2, 2))


@pytest.mark.parametrize("wrap_file", [False, True])
@pytest.mark.parametrize("wrap_model", [False, True])
@pytest.mark.parametrize("assign", [False, True])
def test_weight_norm_of_old_files(tmp_path: Path, wrap_file: bool, wrap_model: bool, assign: bool) -> None:
    """The parametrization's pre-hook turns weight_g and weight_v into its own names."""
    old, new = weight_norm_pair()
    path = saved(tmp_path / "a.pth", (nn.DataParallel(old) if wrap_file else old).state_dict())
    report = ckptfix.load_into(nn.DataParallel(new) if wrap_model else new, path, assign=assign)
    assert report.complete
    x = tensor(4, 3)
    assert torch.allclose(new(x), old(x))


def test_a_rehearsal_changes_nothing(tmp_path: Path) -> None:
    old, new = weight_norm_pair()
    state = {name: value for name, value in old.state_dict().items() if name != "1.bias"}
    blank(new)
    with pytest.raises(LoadMismatch, match=r"missing 1: 1\.bias"):
        ckptfix.load_into(new, saved(tmp_path / "a.pth", state))
    assert untouched(new)


class Renames(nn.Module):
    """Loads files in which its layer had another name and a transposed weight."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 2)
        self.scale = nn.Parameter(torch.ones(1))

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        if f"{prefix}dense.kernel" in state_dict:
            state_dict[f"{prefix}fc.weight"] = state_dict.pop(f"{prefix}dense.kernel").t()
        super()._load_from_state_dict(state_dict, prefix, *args)


@pytest.mark.parametrize("strict", [True, False])
def test_a_method_of_the_module_is_honoured(tmp_path: Path, strict: bool) -> None:
    state = {"a.dense.kernel": tensor(3, 2), "a.fc.bias": tensor(2), "a.scale": tensor(1), "b.bias": tensor(1)}
    state["b.weight"] = tensor(1, 1)
    model: Any = nn.ModuleDict({"a": Renames(), "b": nn.Linear(1, 1)})
    report = ckptfix.load_into(model, saved(tmp_path / "a.pth", state), strict=strict)
    assert torch.equal(model["a"].fc.weight, state["a.dense.kernel"].t())
    assert report.complete and "a.fc.weight" in report.loaded
    state["a.dense.kernel"] = tensor(5, 2)
    with pytest.raises(LoadMismatch, match=r"a\.fc\.weight: \[2, 5\] in the file, \[2, 3\] in the model"):
        ckptfix.load_into(blank(model), saved(tmp_path / "b.pth", state))
    assert untouched(model)


def test_the_version_of_a_module_reaches_it(tmp_path: Path) -> None:
    seen: list[Any] = []

    class Versioned(nn.Linear):
        _version = 4

        def _load_from_state_dict(self, state_dict: Any, prefix: str, local_metadata: Any, *args: Any) -> None:
            seen.append(local_metadata.get("version"))
            super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)

    path = saved(tmp_path / "a.pth", nn.DataParallel(nn.Sequential(Versioned(2, 2))).state_dict())
    ckptfix.load_into(nn.Sequential(Versioned(2, 2)), path)
    assert seen == [4, 4]


def test_a_post_hook_may_forgive(tmp_path: Path) -> None:
    model = net()
    hook: Any = model.register_load_state_dict_post_hook
    hook(lambda module, keys: keys.missing_keys.clear())
    state = net().state_dict()
    del state["2.bias"]
    assert ckptfix.load_into(model, saved(tmp_path / "a.pth", state)).complete


def test_lazy_modules_take_the_shape_of_the_file(tmp_path: Path) -> None:
    path = saved(tmp_path / "a.pth", net().state_dict())
    model: Any = nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d(), nn.LazyLinear(2))
    state = net().state_dict()
    del state["2.bias"]
    with pytest.raises(LoadMismatch):
        ckptfix.load_into(model, saved(tmp_path / "b.pth", state))
    assert nn.parameter.is_lazy(model[0].weight)
    ckptfix.load_into(model, path)
    x = tensor(5, 3)
    assert torch.equal(model.eval()(x), net().eval()(x))


def test_attention_and_a_checkpoint_wrapper(tmp_path: Path) -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    def make() -> nn.Module:
        return nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)

    trained = make()
    raw = {name.replace("linear1", "linear1._checkpoint_wrapped_module"): v for name, v in trained.state_dict().items()}
    model: Any = blank(make())
    model.linear1 = checkpoint_wrapper(model.linear1)
    for state in (trained.state_dict(), raw):
        report = ckptfix.load_into(blank(model), saved(tmp_path / "a.pth", state))
        assert same(model, trained) and report.complete
    plain = blank(make())
    assert ckptfix.load_into(plain, tmp_path / "a.pth").rule == "wrapper _checkpoint_wrapped_module."
    assert same(plain, trained)
    del state["linear1._checkpoint_wrapped_module.bias"]
    with pytest.raises(LoadMismatch, match=r"missing 1: linear1\.bias"):
        ckptfix.load_into(model, saved(tmp_path / "b.pth", state))


def test_a_quantized_module(tmp_path: Path) -> None:
    import torch.ao.nn.quantized

    quantized: Any = torch.ao.nn.quantized
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trained, model = quantized.Linear(3, 2), quantized.Linear(3, 2)
        weight = torch.quantize_per_tensor(tensor(2, 3), 0.1, 0, torch.qint8)
        trained.set_weight_bias(weight, tensor(2))
        report = ckptfix.load_into(model, saved(tmp_path / "a.pth", trained.state_dict()))
        assert torch.equal(model.weight().int_repr(), weight.int_repr())
    assert report.complete and "_packed_params._packed_params" in report.loaded


def test_what_cannot_be_copied_is_said_before(tmp_path: Path) -> None:
    state: dict[str, Any] = OrderedDict(weight=torch.eye(3).to_sparse(), bias=torch.ones(3, dtype=torch.complex64))
    path = saved(tmp_path / "a.pth", state)
    model = blank(nn.Linear(3, 3))
    with pytest.raises(LoadMismatch, match=r"weight: sparse_coo.*bias: complex in the file"):
        ckptfix.load_into(model, path)
    assert untouched(model)
    nothing = saved(tmp_path / "b.pth", OrderedDict(weight=torch.ones(3, 3, device="meta"), bias=torch.ones(3)))
    with pytest.raises(LoadMismatch, match="no data for it"):
        ckptfix.load_into(model, nothing)


# --- position and structure ---------------------------------------------------------------------------------------


def test_by_position(tmp_path: Path) -> None:
    items = enumerate(net().state_dict().items())
    state = OrderedDict((f"layer{index}.{name.rpartition('.')[2]}", value) for index, (name, value) in items)
    model = blank(net())
    report = ckptfix.load_into(model, saved(tmp_path / "a.pth", state), match="position")
    assert same(model, net()) and report.rule == "position" and report.renamed["layer0.weight"] == "0.weight"
    with pytest.raises(Refused, match="is unknown"):
        ckptfix.load_into(model, tmp_path / "a.pth", match=cast(Any, "luck"))


def test_by_structure(tmp_path: Path) -> None:
    state = OrderedDict((f"stem.{name}", value) for name, value in net().state_dict().items())
    state = OrderedDict((name.replace("stem.2", "head.out"), value) for name, value in state.items())
    model = blank(net())
    report = ckptfix.load_into(model, saved(tmp_path / "a.pth", state), match="structure")
    assert same(model, net()) and report.rule == "structure"


def test_what_a_matcher_is_not_sure_of_is_not_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ckptfix.align.result import MatchedPair, Matching, Skipped

    def unsure(source: Any, target: Any, *, by: str) -> Matching:
        assert [slot.name for slot in source] == ["x", "y", "p", "q"] and target[1].name == "0.bias"
        pairs = (MatchedPair("x", "0.weight"), MatchedPair("y", "0.bias", 0.5, instead=("1.bias",)))
        skipped = (Skipped("q", "rotary"),)
        return Matching(by, pairs, (), left=("p",), missing=("1.weight", "1.bias"), skipped_source=skipped)

    monkeypatch.setattr("ckptfix.align.match.match", unsure)
    state = OrderedDict(x=tensor(2, 2), y=tensor(2), p=tensor(1), q=tensor(1))
    model = blank(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    path = saved(tmp_path / "a.pth", state)
    with pytest.raises(LoadMismatch, match=r"0\.bias: y could equally be 0\.bias or 1\.bias"):
        ckptfix.load_into(model, path, match="structure")
    assert untouched(model)
    report = ckptfix.load_into(model, path, match="structure", strict=False)
    assert report.loaded == ("0.weight",) and report.missing == ("1.weight", "1.bias")
    assert report.unexpected == ("p",) and [skip.name for skip in report.skipped] == ["q"]
    assert torch.equal(model.state_dict()["0.weight"], state["x"])


# --- what is not certain, or cannot be changed ----------------------------------------------------------------------


@pytest.mark.parametrize("fronts", [("student", "teacher"), ("model", "ema")])
def test_two_base_prefixes_that_fit_want_a_choice(tmp_path: Path, fronts: tuple[str, str]) -> None:
    state = nn.ModuleDict({front: net() for front in fronts}).state_dict()
    path = saved(tmp_path / "a.pth", {"state_dict": state, "epoch": 1})
    model = blank(net())
    with pytest.raises(Refused, match=rf"equally well by base prefix {fronts[0]}\. and by base prefix {fronts[1]}\."):
        ckptfix.load_into(model, path, strict=False)
    with pytest.raises(LoadMismatch, match=rf"unexpected 8: {fronts[1]}"):
        ckptfix.load_into(model, path)
    assert untouched(model)


def test_two_parts_of_the_model_that_fit_want_a_choice(tmp_path: Path) -> None:
    path = saved(tmp_path / "a.pth", net().state_dict())
    model: Any = blank(nn.ModuleDict({"encoder_q": net(), "encoder_k": net()}))
    with pytest.raises(Refused, match=r"encoder_q.*encoder_k"):
        ckptfix.load_into(model, path, strict=False)
    assert untouched(model)
    ckptfix.load_into(model["encoder_k"], path)
    assert same(model["encoder_k"], net()) and untouched(model["encoder_q"])


def test_an_expanded_tensor_is_reported_before_anything_is_changed(tmp_path: Path) -> None:
    model: Any = nn.Linear(3, 4)
    model.register_buffer("scale", torch.zeros(1, 3).expand(4, 3))
    state = {**nn.Linear(3, 4).state_dict(), "scale": tensor(4, 3)}
    before = model.weight.clone()
    with pytest.raises(LoadMismatch, match="scale: expanded in the model"):
        ckptfix.load_into(model, saved(tmp_path / "a.pth", state))
    assert torch.equal(model.weight, before)
    assert ckptfix.load_into(model, tmp_path / "a.pth", assign=True).complete
    assert torch.equal(model.scale, state["scale"])


class Shared(nn.Module):
    """Two parameters that overlap by one element, and one beside them in the same memory."""

    def __init__(self) -> None:
        super().__init__()
        memory = torch.zeros(8)
        self.a = nn.Parameter(memory[:3])
        self.b = nn.Parameter(memory[2:5])
        self.c = nn.Parameter(memory[5:])


def test_parameters_that_share_memory(tmp_path: Path) -> None:
    model = Shared()
    state = {"a": torch.tensor([1.0, 2, 3]), "b": torch.tensor([3.0, 4, 5]), "c": tensor(3)}
    report = ckptfix.load_into(model, saved(tmp_path / "a.pth", state))
    assert report.complete and all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    state["b"][0] = 9
    model = Shared()
    with pytest.raises(LoadMismatch, match="a: shares memory with b in the model, where the file has different values"):
        ckptfix.load_into(model, saved(tmp_path / "b.pth", state))
    assert not model.a.any()
    report = ckptfix.load_into(model, tmp_path / "b.pth", strict=False)
    assert report.loaded == ("c",) and not model.a.any() and torch.equal(model.c, state["c"])


def test_a_model_made_in_inference_mode(tmp_path: Path) -> None:
    path = saved(tmp_path / "a.pth", net().state_dict())
    with torch.inference_mode():
        model = net()
        blank(model)
    with pytest.raises(Refused, match="made in inference mode"):
        ckptfix.load_into(model, path)
    with torch.inference_mode():
        ckptfix.load_into(model, path)
    assert same(model, net())


def test_only_a_module_is_a_model(tmp_path: Path) -> None:
    path = saved(tmp_path / "a.pth", net().state_dict())
    not_a_model: Any = net().state_dict()
    with pytest.raises(Refused, match=r"not a torch\.nn\.Module but a OrderedDict"):
        ckptfix.load_into(not_a_model, path)


@pytest.mark.parametrize("how", ["method", "bound hook", "hook"])
@pytest.mark.parametrize("above", [False, True])
def test_a_module_may_take_another_shape_when_it_is_loaded(tmp_path: Path, how: str, above: bool) -> None:
    class Grows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("cache", torch.zeros(0))
            this: Any = self
            if how == "bound hook":
                this._register_load_state_dict_pre_hook(self.grow)
            elif how == "hook":
                if not hasattr(this, "register_load_state_dict_pre_hook"):
                    pytest.skip("the hook is public since torch 2.5")
                this.register_load_state_dict_pre_hook(Grows.grow)

        def grow(self, state: Any, prefix: str, *rest: Any) -> None:
            self.cache = torch.zeros(state[f"{prefix}cache"].shape)

        def _load_from_state_dict(self, state: Any, prefix: str, *rest: Any) -> None:
            if how == "method":
                self.grow(state, prefix)
            super()._load_from_state_dict(state, prefix, *rest)

    class Crops(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(2, 3)
            this: Any = self
            this._register_load_state_dict_pre_hook(self.crop)

        def crop(self, state: Any, prefix: str, *rest: Any) -> None:
            state[f"{prefix}table.weight"] = state[f"{prefix}table.weight"][:2]

    model: Any = nn.ModuleDict({"part": Crops() if above else Grows(), "fc": nn.Linear(2, 2)})
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = nn.ModuleDict({"fc": nn.Linear(2, 2)}).state_dict()
    name = "part.table.weight" if above else "part.cache"
    state[name] = tensor(5, 3)
    incomplete = {key: value for key, value in state.items() if key != "fc.bias"}
    with pytest.raises(LoadMismatch, match=r": missing 1: fc\.bias") as caught:
        ckptfix.load_into(model, saved(tmp_path / "a.pth", incomplete))
    assert isinstance(caught.value.report, ckptfix.LoadReport) and not caught.value.report.mismatched
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert ckptfix.load_into(model, saved(tmp_path / "b.pth", state)).complete
    assert torch.equal(model.state_dict()[name], state[name][:2] if above else state[name])


# --- data that proves damaged while it is read --------------------------------------------------------------------


def deflated(path: Path, damage: str) -> Path:
    """The same file with deflated records; one of them damaged in its data or its checksum."""
    packed = path.with_suffix(".deflated")
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as new:
        for name in old.namelist():
            new.writestr(name, old.read(name))
        row = next(row for row in new.infolist() if row.filename.endswith("data/2"))
    content = bytearray(packed.read_bytes())
    if damage == "data":
        middle = row.header_offset + 30 + len(row.filename) + row.compress_size // 2
        content[middle : middle + 4] = bytes(byte ^ 0xFF for byte in content[middle : middle + 4])
    elif damage == "checksum":
        content = content.replace(row.CRC.to_bytes(4, "little"), (row.CRC ^ 1).to_bytes(4, "little"))
    packed.write_bytes(content)
    return packed


@pytest.mark.parametrize("how", ["copy", "assign", "own way"])
@pytest.mark.parametrize(
    ("damage", "match"), [("data", "deflated data|checksum"), ("checksum", "its checksum is"), ("", None)]
)
def test_a_damaged_record_is_found_before_anything_is_changed(
    tmp_path: Path, how: str, damage: str, match: str | None
) -> None:
    def make() -> Any:
        return nn.Sequential(nn.Linear(40, 30), nn.Linear(30, 30))

    trained = make()
    path = deflated(saved(tmp_path / "a.pth", trained.state_dict()), damage)
    model: Any = blank(make())
    if how == "own way":
        model._register_load_state_dict_pre_hook(lambda *_: None)
    if match is None:
        ckptfix.load_into(model, path, assign=how == "assign")
        assert same(model, trained)
        return
    with pytest.raises(DamagedFile, match=match) as caught:
        ckptfix.load_into(model, path, assign=how == "assign")
    assert untouched(model)
    assert caught.value.where == "1.weight" and caught.value.path == str(path) and caught.value.offset


@pytest.mark.parametrize("fails", [0, 3])
@pytest.mark.parametrize("how", ["read", "converted", "own way"])
def test_an_error_on_the_way_says_what_was_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: int, how: str
) -> None:
    """As when the disk fails under the reader, which nothing can know before."""
    path = saved(tmp_path / "a.pth", (net().double() if how == "converted" else net()).state_dict())
    names = list(net().state_dict())
    make, filled = ckptfix.loaders.tensors.TensorMaker.make, reading.Reading._filled
    read: list[object] = []

    def failing(self: Any, entry: Any) -> Any:
        if entry.key == names[fails]:
            raise DamagedFile("gone", path=path, where=entry.key)
        return make(self, entry)

    def unreadable(self: Any, row: Any) -> int:
        read.append(row)
        if len(read) > fails:
            raise DamagedFile("gone", path=path)
        return filled(self, row)

    if how == "read":
        monkeypatch.setattr(reading.Reading, "_filled", unreadable)
    else:
        monkeypatch.setattr("ckptfix.loaders.tensors.TensorMaker.make", failing)
    model: Any = blank(net())
    if how == "own way":
        model._register_load_state_dict_pre_hook(lambda *_: None)
    with pytest.raises(CkptfixError) as caught:
        ckptfix.load_into(model, path)
    tracked = "1.num_batches_tracked"  # an integer, which is read as it is: before those that are converted
    texts = {
        (0, "read"): "gone; 0.weight may be partly overwritten, and the rest of the model was not changed",
        (3, "read"): "gone; 3 of 9 tensors of the model were loaded before (0.* (2), 1.weight), "
        "1.bias may be partly overwritten, and the others were not",
        (0, "converted"): f"gone; 1 of 9 tensors of the model were loaded before ({tracked}), and the others were not",
        (3, "converted"): "gone; 4 of 9 tensors of the model were loaded before (0.* (2), 1.weight, "
        f"{tracked}), and the others were not",
        (0, "own way"): "gone; the model's modules had already received nothing",
        (3, "own way"): "gone; the model's modules had already received 0.* (2), 1.weight",
    }
    assert texts[fails, how] in str(caught.value)
    changed = {name for name, value in model.state_dict().items() if not (value == 7).all()}
    assert changed == {*names[:fails], *([tracked] if how == "converted" else ())}


# --- checkpoints of other libraries -------------------------------------------------------------------------------


class Language(nn.Module):
    """A base under ``model.``, and a head that may be tied to its embedding, as transformers build them."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.ModuleDict({"embed": nn.Embedding(5, 3), "fc": nn.Linear(3, 3)})
        self.lm_head = nn.Linear(3, 5, bias=False)
        self.lm_head.weight = self.model.get_parameter("embed.weight")


@pytest.mark.parametrize("front", ["model.", ""])
def test_a_base_model_with_position_ids_into_a_model_with_a_tied_head(tmp_path: Path, front: str) -> None:
    torch.manual_seed(2)
    trained = Language()
    state = {name: value for name, value in trained.state_dict().items() if name != "lm_head.weight"}
    state["model.position_ids"] = torch.arange(4)[None]
    state = {front + name.removeprefix("model."): value for name, value in state.items()}
    safetensors.torch.save_file(state, tmp_path / "a.safetensors")
    model = blank(Language())
    report = ckptfix.load_into(model, tmp_path / "a.safetensors")
    assert same(model, trained) and report.complete
    assert [(skip.name, skip.rule) for skip in report.skipped] == [(f"{front}position_ids", "position_ids")]
    assert report.rule == ("exact" if front else "base prefix model.")
    assert report.tied == {"lm_head.weight": "model.embed.weight"}


def test_a_model_with_a_head_into_its_base(tmp_path: Path) -> None:
    trained = nn.ModuleDict({"bert": net(), "classifier": nn.Linear(2, 3)})
    path = saved(tmp_path / "pytorch_model.bin", trained.state_dict())
    model = blank(net())
    with pytest.raises(LoadMismatch, match=r": unexpected 2: classifier\.\* \(2\)"):
        ckptfix.load_into(model, path)
    assert untouched(model)
    assert ckptfix.load_into(model, path, strict=False).unexpected == ("classifier.weight", "classifier.bias")
    assert same(model, trained["bert"])


class Settings:
    """Hyperparameters of a class that the reader does not import."""

    def __init__(self) -> None:
        self.lr = 0.5


def test_a_lightning_checkpoint_with_foreign_objects(tmp_path: Path) -> None:
    trained = nn.ModuleDict({"model": net(), "loss": nn.Identity()})
    value = {
        "epoch": 2,
        "state_dict": trained.state_dict(),
        "hyper_parameters": {"settings": Settings(), "kind": Settings},
        "optimizer_states": [torch.optim.Adam(trained.parameters()).state_dict()],
        "callbacks": {"ModelCheckpoint{'monitor': None}": {"best_model_score": torch.tensor(0.5)}},
    }
    path = saved(tmp_path / "last.ckpt", value)
    model = blank(net())
    report = ckptfix.load_into(model, path)
    assert same(model, net()) and (report.at, report.rule) == ("state_dict", "base prefix model.")
    settings = ckptfix.load_checkpoint(path)["hyper_parameters"]["settings"]
    assert isinstance(settings, ckptfix.ForeignObject) and settings.state == {"lr": 0.5}


def test_a_classifier_of_other_classes(tmp_path: Path) -> None:
    """As torchvision's: the head has another shape, and everything else is loaded."""
    path = saved(tmp_path / "resnet.pth", net().state_dict())
    model: Any = blank(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 20)))
    with pytest.raises(LoadMismatch, match=r"mismatched 2: 2\.weight: \[2, 4\] in the file, \[20, 4\] in the model"):
        ckptfix.load_into(model, path)
    assert untouched(model)
    ckptfix.load_into(model, path, strict=False)
    assert same(model[:2], net()[:2]) and untouched(model[2])


@pytest.mark.parametrize("assign", [False, True])
def test_a_fused_projection_is_taken_apart(tmp_path: Path, assign: bool) -> None:
    fused = nn.ModuleDict({"attn": nn.MultiheadAttention(8, 2), "fc": nn.Linear(8, 3)})
    parts = {name: nn.Linear(8, 8) for name in ("q_proj", "k_proj", "v_proj", "out_proj")}
    apart = nn.ModuleDict({"attn": nn.ModuleDict(parts), "fc": nn.Linear(8, 3)})
    torch.save({"state_dict": fused.state_dict(), "epoch": 3}, tmp_path / "fused.pth")
    report = ckptfix.load_into(apart, tmp_path / "fused.pth", match="structure", assign=assign)
    assert len(report.loaded) == len(apart.state_dict())
    rows = fused.state_dict()["attn.in_proj_weight"].split(8)
    for name, wanted in zip(("q_proj", "k_proj", "v_proj"), rows, strict=True):
        assert torch.equal(apart.state_dict()[f"attn.{name}.weight"], wanted)
    torch.save(apart.state_dict(), tmp_path / "apart.pth")
    again = nn.ModuleDict({"attn": nn.MultiheadAttention(8, 2), "fc": nn.Linear(8, 3)})
    ckptfix.load_into(again, tmp_path / "apart.pth", match="structure", assign=assign)
    assert all(torch.equal(again.state_dict()[name], value) for name, value in fused.state_dict().items())


def test_rotary_pairs_of_another_layout_are_refused(tmp_path: Path) -> None:
    names = {"tok_embeddings": "model.embed_tokens", **{
        f"layers.0.attention.{one}": f"model.layers.0.self_attn.{other}"
        for one, other in zip(("wq", "wk", "wv", "wo"), ("q_proj", "k_proj", "v_proj", "o_proj"), strict=True)
    }}  # fmt: skip
    torch.save({f"{name}.weight": torch.randn(8, 8) for name in names}, tmp_path / "meta.pth")
    model = nn.Module()
    for name in names.values():
        at = model
        *above, last = name.split(".")
        for part in above:
            if not hasattr(at, part):
                at.add_module(part, nn.Module())
            at = at.get_submodule(part)
        at.add_module(last, nn.Linear(8, 8, bias=False))
    with pytest.raises(Refused, match="rotary") as caught:
        ckptfix.load_into(model, tmp_path / "meta.pth", match="structure")
    assert "--heads N" in str(caught.value.hint)
