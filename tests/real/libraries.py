"""``match`` on the models of other libraries: weights of one, renamed, must give its outputs in the other.

    PYTHONPATH=tests python tests/real/libraries.py [--start N] [--limit N] [--only TEXT]

Libraries that are not installed are left out (`models.build` has their names). Nothing
says which of their models are the same: two are tried against one another where the shapes of all their tensors are
the same. The truth of a pair is any renaming by which the outputs are equal: the one that `match` gives, the one by
order of definition, or the one by the order in which the modules run; where none is found, a pair is not counted.

Prints a row for each ordered pair, and a sum. Exit status: 0 no complete answer is wrong, 1 one is.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec

import torch
from real.models import build, inputs
from torch import Tensor, nn

from ckptfix.align.match import match
from ckptfix.names.rules import NameRule, renamed
from ckptfix.names.slots import Slot

Names = Mapping[str, str]

CONSTANT = ("num_batches_tracked", "relative_position_index", "attn_mask", "position_ids", "relative_coords_table")
SAME = 1e-3
"""Outputs of equal models in float32 differ by less, as part of the largest one."""

SIZES = {"inception": 299, "polynet": 331, "efficientnet-b1": 240}
"""Part of a name -> the size of images that it takes, where this is not any."""

KNOWN = (
    """
        stem.conv.{*} -> stem.0.{*}
        stem.bn.{*} -> stem.1.{*}
        s{n}.b{m}.conv1.conv.{*} -> trunk_output.block{n}.block{n}-{m-1}.f.a.0.{*}
        s{n}.b{m}.conv1.bn.{*} -> trunk_output.block{n}.block{n}-{m-1}.f.a.1.{*}
        s{n}.b{m}.conv2.conv.{*} -> trunk_output.block{n}.block{n}-{m-1}.f.b.0.{*}
        s{n}.b{m}.conv2.bn.{*} -> trunk_output.block{n}.block{n}-{m-1}.f.b.1.{*}
        s{n}.b{m}.se.{*} -> trunk_output.block{n}.block{n}-{m-1}.f.se.{*}
        s{n}.b{m}.conv3.conv.{*} -> trunk_output.block{n}.block{n}-{m-1}.f.c.0.{*}
        s{n}.b{m}.conv3.bn.{*} -> trunk_output.block{n}.block{n}-{m-1}.f.c.1.{*}
        s{n}.b{m}.downsample.conv.{*} -> trunk_output.block{n}.block{n}-{m-1}.proj.0.{*}
        s{n}.b{m}.downsample.bn.{*} -> trunk_output.block{n}.block{n}-{m-1}.proj.1.{*}
        head.fc.{*} -> fc.{*}
    """,
    """
        head.fc.{*} -> head.{*}
        patch_embed.proj.{*} -> features.0.0.{*}
        patch_embed.norm.{*} -> features.0.2.{*}
        layers.0.blocks.{m}.mlp.fc1.{*} -> features.1.{m}.mlp.0.{*}
        layers.1.blocks.{m}.mlp.fc1.{*} -> features.3.{m}.mlp.0.{*}
        layers.2.blocks.{m}.mlp.fc1.{*} -> features.5.{m}.mlp.0.{*}
        layers.3.blocks.{m}.mlp.fc1.{*} -> features.7.{m}.mlp.0.{*}
        layers.0.blocks.{m}.mlp.fc2.{*} -> features.1.{m}.mlp.3.{*}
        layers.1.blocks.{m}.mlp.fc2.{*} -> features.3.{m}.mlp.3.{*}
        layers.2.blocks.{m}.mlp.fc2.{*} -> features.5.{m}.mlp.3.{*}
        layers.3.blocks.{m}.mlp.fc2.{*} -> features.7.{m}.mlp.3.{*}
        layers.0.blocks.{*} -> features.1.{*}
        layers.1.blocks.{*} -> features.3.{*}
        layers.2.blocks.{*} -> features.5.{*}
        layers.3.blocks.{*} -> features.7.{*}
        layers.1.downsample.{*} -> features.2.{*}
        layers.2.downsample.{*} -> features.4.{*}
        layers.3.downsample.{*} -> features.6.{*}
    """,
)
"""Renamings from timm to torchvision that neither order nor `match` finds: RegNet and Swin."""

GROUPS: tuple[dict[str, str], ...] = (
    {"pytorchcv": "dla46xc", "timm": "dla46x_c"},
    {"pytorchcv": "squeezenet_v1_1", "torchvision": "squeezenet1_1"},
    {"pytorchcv": "squeezenet_v1_0", "torchvision": "squeezenet1_0"},
    {"pytorchcv": "dla46c", "timm": "dla46_c"},
    {"pytorchcv": "dla60xc", "timm": "dla60x_c"},
    {"pytorchcv": "shufflenetv2_wd2", "torchvision": "shufflenet_v2_x0_5"},
    {"pytorchcv": "mnasnet_small", "timm": "mnasnet_small"},
    {"timm": "mnasnet_050", "torchvision": "mnasnet0_5"},
    {"pytorchcv": "shufflenetv2_w1", "torchvision": "shufflenet_v2_x1_0"},
    {"pytorchcv": "regnetx002", "timm": "regnetx_002"},
    {"pytorchcv": "regnety002", "timm": "regnety_002"},
    {"timm": "mnasnet_075", "torchvision": "mnasnet0_75"},
    {"timm": "mobilenetv2_100", "torchvision": "mobilenet_v2"},
    {"pytorchcv": "mnasnet_a1", "timm": "semnasnet_100"},
    {"pytorchcv": "mixnet_s", "timm": "mixnet_s"},
    {"pytorchcv": "mobilenet_w1", "timm": "mobilenetv1_100"},
    {"pytorchcv": "regnety004", "timm": "regnety_004", "torchvision": "regnet_y_400mf"},
    {"pytorchcv": "mnasnet_b1", "timm": "mnasnet_100", "torchvision": "mnasnet1_0"},
    {"pytorchcv": "spnasnet", "timm": "spnasnet_100"},
    {"pytorchcv": "mixnet_m", "timm": "mixnet_m"},
    {"pytorchcv": "regnetx004", "timm": "regnetx_004"},
    {"pytorchcv": "efficientnet_b0", "timm": "efficientnet_b0", "torchvision": "efficientnet_b0"},
    {"pytorchcv": "efficientnet_edge_small_b", "timm": "efficientnet_es"},
    {"pytorchcv": "fbnet_cb", "timm": "fbnetc_100"},
    {"pytorchcv": "regnety006", "timm": "regnety_006"},
    {"pytorchcv": "regnetx006", "timm": "regnetx_006"},
    {"pytorchcv": "regnety008", "timm": "regnety_008"},
    {"pytorchcv": "efficientnet_edge_medium_b", "timm": "efficientnet_em"},
    {"pytorchcv": "regnetx008", "timm": "regnetx_008", "torchvision": "regnet_x_800mf"},
    {"pytorchcv": "mixnet_l", "timm": "mixnet_l"},
    {"pytorchcv": "efficientnet_b1", "timm": "efficientnet_b1", "torchvision": "efficientnet_b1"},
    {"pytorchcv": "densenet121", "timm": "densenet121", "torchvision": "densenet121", "monai": "densenet121"},
    {"pytorchcv": "efficientnet_b2", "timm": "efficientnet_b2", "torchvision": "efficientnet_b2"},
    {"pytorchcv": "regnetx016", "timm": "regnetx_016", "torchvision": "regnet_x_1_6gf"},
    {"pytorchcv": "resnestabc14", "timm": "resnest14d"},
    {"pytorchcv": "efficientnet_edge_large_b", "timm": "efficientnet_el"},
    {"pytorchcv": "regnety016", "timm": "regnety_016", "torchvision": "regnet_y_1_6gf"},
    {"pytorchcv": "resnet18", "timm": "resnet18", "torchvision": "resnet18"},
    {"pytorchcv": "resneta18", "timm": "resnet18d"},
    {"pytorchcv": "seresnet18", "timm": "legacy_seresnet18"},
    {"pytorchcv": "efficientnet_b3", "timm": "efficientnet_b3", "torchvision": "efficientnet_b3"},
    {"pytorchcv": "dpn68", "timm": "dpn68", "pretrainedmodels": "dpn68"},
    {"pytorchcv": "dpn68b", "timm": "dpn68b"},
    {"pytorchcv": "hrnet_w18_small_v1", "timm": "hrnet_w18_small"},
    {"pytorchcv": "densenet169", "timm": "densenet169", "torchvision": "densenet169"},
    {"pytorchcv": "regnetx032", "timm": "regnetx_032", "torchvision": "regnet_x_3_2gf"},
    {"pytorchcv": "hrnet_w18_small_v2", "timm": "hrnet_w18_small_v2"},
    {"pytorchcv": "dla34", "timm": "dla34"},
    {"pytorchcv": "resnetbc26b", "timm": "resnet26"},
    {"pytorchcv": "resnestabc26", "timm": "resnest26d"},
    {"pytorchcv": "dla60x", "timm": "dla60x"},
    {"pytorchcv": "efficientnet_b4", "timm": "efficientnet_b4", "torchvision": "efficientnet_b4"},
    {"pytorchcv": "regnety032", "timm": "regnety_032", "torchvision": "regnet_y_3_2gf"},
    {"pytorchcv": "densenet201", "timm": "densenet201", "torchvision": "densenet201"},
    {"pytorchcv": "regnety040", "timm": "regnety_040"},
    {"pytorchcv": "hrnetv2_w18", "timm": "hrnet_w18"},
    {"timm": "efficientnetv2_s", "torchvision": "efficientnet_v2_s"},
    {"pytorchcv": "resnet34", "timm": "resnet34", "torchvision": "resnet34"},
    {"pytorchcv": "seresnet34", "timm": "legacy_seresnet34"},
    {"pytorchcv": "dla60", "timm": "dla60"},
    {"pytorchcv": "regnetx040", "timm": "regnetx_040"},
    {"pytorchcv": "vovnet39", "timm": "vovnet39a"},
    {"pytorchcv": "xception", "timm": "legacy_xception", "pretrainedmodels": "xception"},
    {"pytorchcv": "inceptionv3", "timm": "inception_v3"},
    {"pytorchcv": "resnext50_32x4d", "timm": "resnext50_32x4d", "torchvision": "resnext50_32x4d"},
    {"pytorchcv": "resnet50b", "timm": "resnet50", "torchvision": "resnet50"},
    {"pytorchcv": "resneta50b", "timm": "resnet50c"},
    {"pytorchcv": "resnetd50b", "timm": "resnet50s"},
    {"pytorchcv": "regnetx064", "timm": "regnetx_064"},
    {"pytorchcv": "dla102x", "timm": "dla102x"},
    {"pytorchcv": "resnesta50", "timm": "resnest50d", "resnest": "resnest50"},
    {"pytorchcv": "sknet50", "timm": "skresnext50_32x4d"},
    {"pytorchcv": "seresnext50_32x4d", "timm": "legacy_seresnext50_32x4d", "pretrainedmodels": "se_resnext50_32x4d"},
    {"pytorchcv": "seresnet50", "timm": "legacy_seresnet50", "pretrainedmodels": "se_resnet50"},
    {"timm": "swin_tiny_patch4_window7_224", "torchvision": "swin_t"},
    {"pytorchcv": "densenet161", "timm": "densenet161", "torchvision": "densenet161"},
    *({"pytorch": depth, "open_clip": depth, "timm.Block": depth, "torchvision.EncoderBlock": depth} for depth in "2"),
    *({"timm": f"regnet{row}", "transformers": f"regnet{row}"} for row in
      ("x_002", "y_002", "x_004", "y_004", "x_006", "y_006")),
    *({"timm": name, "transformers": name} for name in
      ("resnet18", "resnet26", "resnet34", "poolformer_s12", "convnext_femto", "mobilenetv1_100")),
    {"timm": "regnetx_004_tv", "torchvision": "regnet_x_400mf"},
    {"timm": "regnety_008_tv", "torchvision": "regnet_y_800mf"},
    {"pytorchcv": "resnet101b", "timm": "resnet101", "torchvision": "resnet101", "transformers": "resnet101"},
    {"timm": "resnet50", "transformers": "resnet50", "torchvision": "resnet50"},
    {"pytorchcv": "resnet152b", "timm": "resnet152", "torchvision": "resnet152"},
    *({"timm": name, "torchvision": name} for name in ("wide_resnet50_2", "wide_resnet101_2", "resnext101_32x8d")),
    {"pytorchcv": "inceptionv4", "timm": "inception_v4", "pretrainedmodels": "inceptionv4"},
    {"pytorchcv": "inceptionresnetv2", "timm": "inception_resnet_v2", "pretrainedmodels": "inceptionresnetv2"},
    {"pytorchcv": "polynet", "pretrainedmodels": "polynet"},
    *({"pytorchcv": f"{bn}vgg{depth}{bn and 'b'}", "torchvision": f"vgg{depth}{bn and '_bn'}"}
      for depth in (11, 13) for bn in ("", "bn_")),
    *({"pytorchcv": f"efficientnet_b{at}b", "timm": f"tf_efficientnet_b{at}", "monai": f"efficientnet-b{at}",
       "efficientnet_pytorch": f"efficientnet-b{at}"} for at in (0, 1)),
    *({"curated_transformers": name, "transformers": name}
      for name in ("bert", "roberta", "llama", "llama, grouped", "gpt-neox", "falcon")),
)
"""Models of one architecture, the smallest first: library -> name. Found by the shapes of all tensors."""

def installed(library: str) -> bool:
    root = library.partition(".")[0]
    return root == "pytorch" or find_spec(root) is not None


def without_starting_values() -> None:
    """All weights are drawn here: what libraries would draw takes longer than all else."""
    for name in list(vars(nn.init)):
        if name.endswith("_") and not name.startswith("_"):
            setattr(nn.init, name, lambda tensor, *args, **kwargs: tensor)


def learned(name: str, tensor: Tensor) -> bool:
    return tensor.is_floating_point() and name.rpartition(".")[2] not in CONSTANT


def randomise(model: nn.Module, seed: int) -> nn.Module:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if learned(name, tensor):
                drawn = torch.randn(tensor.shape, generator=generator)
                fan = max(1, tensor[0].numel()) if tensor.dim() > 1 else 1
                tensor.copy_(drawn * (1.5 / fan) ** 0.5 if tensor.dim() > 1 else 0.8 + 0.1 * drawn.abs())
    return model.eval()


def output(model: nn.Module, given: Tensor) -> Tensor:
    with torch.no_grad():
        found = model(given)
    first: Tensor = found[0] if isinstance(found, tuple | list) else found
    return first


def slots(model: nn.Module) -> list[Slot]:
    return [Slot(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
            for name, tensor in model.state_dict().items()]  # fmt: skip


def as_run(model: nn.Module, given: Tensor) -> list[str]:
    """The learned names of `model` in the order in which its modules run; the others behind."""
    names = {id(module): name for name, module in model.named_modules()}
    order: dict[str, None] = {}
    hooks = [
        module.register_forward_pre_hook(lambda module, _: order.setdefault(names[id(module)], None))
        for module in model.modules()
    ]
    output(model, given)
    for hook in hooks:
        hook.remove()
    owned: dict[str, list[str]] = {}
    for name, tensor in model.state_dict().items():
        if learned(name, tensor):
            owned.setdefault(name.rpartition(".")[0], []).append(name)
    return [name for owner in (*order, *(owner for owner in owned if owner not in order))
            for name in owned.get(owner, ())]  # fmt: skip


@dataclass(slots=True)
class Model:
    """One library's model with weights, and what it makes of the inputs."""

    library: str
    name: str
    module: nn.Module
    given: Tensor
    made: Tensor
    state: dict[str, Tensor]
    ran: list[str]


def model_of(library: str, name: str, size: int) -> Model:
    module = randomise(build(library, name), 1)
    given = inputs(name, size)
    made = output(module, given)
    state = {key: tensor.clone() for key, tensor in module.state_dict().items()}
    return Model(library, name, module, given, made, state, as_run(module, given))


def gives_the_same(one: Model, other: Model, names: Names) -> bool:
    """Whether the weights of `one`, under these names, give its outputs in `other`."""
    wanted = {key for key, tensor in other.state.items() if learned(key, tensor)}
    if not wanted <= set(names.values()):
        return False
    filled = other.module.state_dict()
    with torch.no_grad():
        for old, new in names.items():
            if filled[new].shape != one.state[old].shape:
                return False
            filled[new].copy_(one.state[old])
        found = output(other.module, one.given)
        for name, tensor in other.state.items():
            filled[name].copy_(tensor)
    if found.shape != one.made.shape:
        return False
    return float((found - one.made).abs().max() / one.made.abs().max()) < SAME


def known(rules: str, one: Model, other: Model) -> Names:
    lines = [line.split(" -> ") for line in rules.split("\n") if line.strip()]
    made = renamed(list(one.state), [NameRule(old.strip(), new) for old, new in lines])
    names = {key: made.get(key, key) for key in one.state}
    return {old: new for old, new in names.items() if new in other.state and learned(old, one.state[old])}


def candidates(one: Model, other: Model) -> Iterator[Names]:
    """Renamings that may be the true one: as `KNOWN` has it, as the modules run, and as they are defined."""
    for rules in KNOWN:
        if one.library == "timm":
            yield known(rules, one, other)
        if other.library == "timm":
            yield {new: old for old, new in known(rules, other, one).items()}
    ours, theirs = ([key for key, tensor in model.state.items() if learned(key, tensor)] for model in (one, other))
    for rows in (zip(one.ran, other.ran, strict=False), zip(ours, theirs, strict=False)):
        names = dict(rows)
        if all(one.state[old].shape == other.state[new].shape for old, new in names.items()):
            yield names


def judged(one: Model, other: Model, back: Names | None) -> tuple[str, Names | None, str]:
    """(verdict, the true renaming or None, what else there is to say)."""
    found = match(slots(one.module), slots(other.module))
    if found.complete and gives_the_same(one, other, found.names):
        return "right", found.names, ""
    known = [back] if back is not None else []
    truth = next((names for names in (*known, *candidates(one, other)) if gives_the_same(one, other, names)), None)
    certain = {row.source: row.target for row in found.pairs if not row.instead}
    slips = [f"{old} -> {new}, not {truth[old]}" for old, new in certain.items()
             if truth is not None and truth.get(old, new) != new]  # fmt: skip
    counts = f"{len(found.ambiguous)} ambiguous, {len(found.left)} and {len(found.missing)} left"
    if found.complete:
        return ("wrong" if truth is not None else "unknown"), truth, "; ".join(slips[:3])
    verdict = "refused" if truth is not None else "unknown, refused"
    return verdict, truth, f"{counts}{'; certain and wrong: ' if slips else ''}{'; '.join(slips[:3])}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit", type=int, default=len(GROUPS), help="the first N architectures only")
    parser.add_argument("--start", type=int, default=0, help="leave out the first N")
    parser.add_argument("--only", default="", help="architectures with this in a name")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    sums: Counter[str] = Counter()
    without_starting_values()
    for group in GROUPS[options.start : options.limit]:
        if options.only not in " ".join(group.values()):
            continue
        fixed = "pytorchcv" in group or "swin_t" in group.values()
        size = next((size for part, size in SIZES.items() if part in " ".join(group.values())), 224 if fixed else 64)
        models: list[Model] = []
        for library, name in group.items():
            if installed(library):
                try:
                    models.append(model_of(library, name, size))
                except Exception as error:  # a library may have changed; the others still count
                    print(f"{library} {name}: {type(error).__name__}: {str(error)[:100]}", file=sys.stderr)
        truths: dict[tuple[str, str], Names] = {}
        for one in models:
            for other in models:
                if one is other:
                    continue
                there = truths.get((other.library, one.library))
                back = None if there is None else {new: old for old, new in there.items()}
                verdict, truth, more = judged(one, other, back)
                if truth is not None:
                    truths[one.library, other.library] = truth
                sums[verdict] += 1
                sums["certain and wrong"] += "certain and wrong" in more
                row = f"{verdict:17} {one.library} {one.name} -> {other.library} {other.name}  {more}"
                print(row[:400], flush=True)
    print(dict(sums))
    return int(sums["wrong"] > 0)


if __name__ == "__main__":
    sys.exit(main())
