"""What loaders of adapters do not accept is explained and fixed, with their message and without it."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from adapters import LAYOUTS, PATHS, PEFT, Made, Tensors, base, merged, peft, write
from cli.conftest import Cli
from safetensors.torch import load_file, save_file

import ckptfix

TARGETS = {**PEFT, "target_modules": ["q_proj", "down_proj"], "task_type": "CAUSAL_LM"}
FRONT = "base_model.model."


def doubled() -> Made:
    return Made({f"{FRONT}{key}": value for key, value in peft(base()).tensors.items()}, TARGETS)


ADAPTERS: dict[str, tuple[Callable[[], Made], str]] = {
    "doubled prefix": (doubled, f"Found missing adapter keys while loading the checkpoint: ['{FRONT}{PATHS[0]}."
                       f"lora_A.default.weight', '{FRONT}{PATHS[0]}.lora_B.default.weight']."),
    "name in the keys": (lambda: Made(peft(base(), ".default").tensors, TARGETS),
                         f"Found missing adapter keys while loading the checkpoint: ['{FRONT}{PATHS[0]}."
                         "lora_A.default.weight']."),
    "another name in the keys": (lambda: Made(peft(base(), ".style").tensors, TARGETS),
                                 f'Unexpected key(s) in state_dict: "{FRONT}{PATHS[0]}.lora_A.style.weight".'),
    "wrong rank": (lambda: Made(peft(base()).tensors, {**TARGETS, "r": 16}),
                   "Error(s) in loading state_dict for PeftModel:\n\tsize mismatch for "
                   f"{FRONT}{PATHS[0]}.lora_A.default.weight: copying a param with shape torch.Size([3, 6]) from "
                   "checkpoint, the shape in current model is torch.Size([16, 6])."),
    "wrong targets": (lambda: Made(peft(base()).tensors, {**TARGETS, "target_modules": ["q_proj"]}),
                      f'Unexpected key(s) in state_dict: "{FRONT}{PATHS[2]}.lora_A.weight".'),
    "a pattern that leaves one out": (
        lambda: Made(peft(base()).tensors, {**TARGETS, "target_modules": r".*\.0\..*_proj"}),
        f'Unexpected key(s) in state_dict: "{FRONT}{PATHS[1]}.lora_A.weight".'),
    "keys of kohya": (lambda: LAYOUTS["kohya"](base()), "ValueError: Can't find 'adapter_config.json' at 'adapter'"),
}  # fmt: skip


@pytest.mark.sampled(1_000)
@pytest.mark.parametrize("pasted", [False, True], ids=["file", "message"])
@pytest.mark.parametrize("name", ADAPTERS)
def test_the_printed_command_makes_what_peft_reads(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, pasted: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    make, message = ADAPTERS[name]
    write(make(), tmp_path / "adapter")
    save_file(base(), "base.safetensors")
    done = cli("doctor", "adapter", *(["--error", message] if pasted else []))
    assert "[adapter-names]" in done.stdout.splitlines()[0]
    assert not pasted or "This matches your error message (adapter-names)" in done.stdout
    (line,) = [row for row in done.stdout.splitlines() if row.startswith("Fix: ")]
    words = shlex.split(line.removeprefix("Fix: ckptfix "))
    assert cli(*words).exit_code == 0
    home = Path(words[words.index("--to") - 1])
    right(home)
    assert "No problems found" in cli("doctor", str(home)).stdout
    assert cli("fix", "adapter", "fixed").exit_code == 0
    for row in home.iterdir():
        assert row.read_bytes() == (tmp_path / "fixed" / row.name).read_bytes()


@pytest.mark.parametrize("pasted", [False, True], ids=["file", "message"])
def test_the_name_of_an_adapter_in_keys_of_diffusers(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pasted: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    front = "transformer.transformer_blocks.0.attn.to_q"
    tensors = {f"{front}.lora_A.default.weight": torch.ones(2, 4), f"{front}.lora_B.default.weight": torch.ones(4, 2)}
    save_file(tensors, "style.safetensors", {"format": "pt"})
    message = ("Loading adapter weights from state_dict led to unexpected keys found in the model: "
               "transformer_blocks.0.attn.to_q.lora_A.default.weight.")  # fmt: skip
    done = cli("doctor", "style.safetensors", *(["--error", message] if pasted else []))
    assert "'default' in them" in done.stdout
    (line,) = [row for row in done.stdout.splitlines() if row.startswith("Fix: ")]
    words = shlex.split(line.removeprefix("Fix: ckptfix "))
    assert cli(*words).exit_code == 0
    made = load_file(next(word for word in words[3:] if word.endswith(".safetensors")))
    assert list(made) == [f"{front}.lora_A.weight", f"{front}.lora_B.weight"]


def right(home: Path) -> None:
    """The folder is as PEFT saves it, and merges as the original adapter does."""
    config = json.loads((home / "adapter_config.json").read_text())
    tensors = load_file(home / "adapter_model.safetensors")
    assert tensors.keys() == peft(base()).tensors.keys()
    assert config["r"] == 3 and set(config["target_modules"]) == {"q_proj", "down_proj"}
    ckptfix.lora_merge("base.safetensors", [home], "merged.safetensors", force=True)
    found, truth = load_file("merged.safetensors"), merged(base())
    assert all(torch.equal(found[key], truth[key]) for key in truth)


UNET = ("down_blocks.0.attentions.0.transformer_blocks.0.attn1.to_q",
        "mid_block.attentions.0.transformer_blocks.0.attn1.to_v")  # fmt: skip
FLUX = ("double_blocks.0.img_attn.proj", "single_blocks.0.modulation.lin")
OF_FLUX = ("transformer_blocks.0.attn.to_out.0", "single_transformer_blocks.0.norm.linear")
LLAMA = PATHS[:2]


def lora(paths: tuple[str, ...], form: str) -> Tensors:
    """Return a LoRA with keys such as ``form`` says: the path, with or without dots, and two ends."""
    start, flat, down, up = form.split("|")
    names = [f"{start}{path.replace('.', '_') if flat else path}" for path in paths]
    made = {f"{name}.{down}.weight": torch.ones(2, 4) for name in names}
    made |= {f"{name}.{up}.weight": torch.full((6, 2), 3.0) for name in names}
    return made | ({f"{name}.alpha": torch.tensor(2.0) for name in names} if flat else {})


IN_PEFT, KOHYA = f"{FRONT}||lora_A|lora_B", "lora_unet_|flat|lora_down|lora_up"
DIFFUSERS, OF_COMFY = "transformer.||lora_A|lora_B", "diffusion_model.||lora_A|lora_B"
NO_KEYS = ("No LoRA keys associated to {0} found with the prefix={1!r}. This is safe to ignore if LoRA state dict "
           "didn't originally have any {0} related params.")  # fmt: skip
UNET_MESSAGE = NO_KEYS.format("UNet2DConditionModel", "unet")
COMFY = "lora key not loaded: {}"
WEBUI = "Failed to match keys when loading network style.safetensors: {{'{}': '?'}}"

LOADED: dict[str, tuple[Tensors, str, str, Tensors]] = {
    "PEFT in diffusers, a U-Net": (lora(UNET, IN_PEFT), UNET_MESSAGE, "diffusers", lora(UNET, "unet.||lora_A|lora_B")),
    "PEFT in diffusers, Flux": (lora(OF_FLUX, IN_PEFT), NO_KEYS.format("FluxTransformer2DModel", "transformer"),
                                "diffusers", lora(OF_FLUX, DIFFUSERS)),
    "kohya in diffusers": (lora(UNET, KOHYA), UNET_MESSAGE, "diffusers", lora(UNET, "unet.||lora_A|lora_B")),
    "ComfyUI in diffusers": (lora(FLUX, OF_COMFY), NO_KEYS.format("FluxTransformer2DModel", "transformer"),
                             "diffusers", lora(OF_FLUX, DIFFUSERS)),
    "PEFT in ComfyUI, a U-Net": (lora(UNET, IN_PEFT), COMFY, "kohya", lora(UNET, KOHYA)),
    "PEFT in ComfyUI, Flux": (lora(OF_FLUX, IN_PEFT), COMFY, "comfy",
                              lora(FLUX, OF_COMFY) | {f"diffusion_model.{path}.alpha": torch.tensor(2.0)
                                                      for path in FLUX}),
    "PEFT in a loader of kohya's files": (lora(UNET, IN_PEFT), WEBUI, "kohya", lora(UNET, KOHYA)),
    "diffusers in a loader of kohya's files": (lora(OF_FLUX, DIFFUSERS), WEBUI, "kohya", lora(FLUX, KOHYA)),
    "ComfyUI in a loader of kohya's files": (lora(FLUX, OF_COMFY), "Bad Lora layer name: {} - must end in "
                                             "lora_up.weight, lora_down.weight or alpha", "kohya", lora(FLUX, KOHYA)),
}  # fmt: skip


@pytest.mark.parametrize("name", LOADED)
def test_the_printed_command_makes_what_another_loader_reads(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    tensors, message, to, wanted = LOADED[name]
    save_file(tensors, "style.safetensors", {"format": "pt"})
    if "PEFT in" in name:
        Path("adapter_config.json").write_text(json.dumps({**PEFT, "r": 2, "lora_alpha": 2}))
    done = cli("doctor", "style.safetensors", "--error", message.format(next(iter(tensors))))
    assert "This matches your error message (adapter-names)" in done.stdout
    (line,) = [row for row in done.stdout.splitlines() if row.startswith("Fix: ")]
    words = shlex.split(line.removeprefix("Fix: ckptfix "))
    assert words[:2] == ["lora", "convert"] and words[-2:] == ["--to", to]
    assert cli(*words).exit_code == 0
    assert load_file(words[3]).keys() == wanted.keys()
    before, after = (ckptfix.lora_info(path).as_dict() for path in ("style.safetensors", words[3]))
    assert (before["ranks"], after["layout"]) == (after["ranks"], to)


NOT_LOADED: dict[str, tuple[Tensors, str]] = {
    "kohya in ComfyUI, which reads it": (lora(UNET, KOHYA), COMFY),
    "kohya in a loader of kohya's files": (lora(UNET, KOHYA), WEBUI),
    "a language model in diffusers": (lora(LLAMA, IN_PEFT), UNET_MESSAGE),
    "a language model in ComfyUI": (lora(LLAMA, IN_PEFT), COMFY),
    "names of several models": (lora(("transformer_blocks.0.attn1.to_q",), IN_PEFT), COMFY),
    "dots that are ambiguous": (lora(("my_block.0.to_x",), KOHYA), UNET_MESSAGE),
    "a message of PEFT too": (lora(UNET, IN_PEFT), "ValueError: Target modules ['to_q'] not found in the base model."),
}


@pytest.mark.parametrize("name", NOT_LOADED)
def test_no_command_is_printed_where_it_may_not_help(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    tensors, message = NOT_LOADED[name]
    save_file(tensors, "style.safetensors", {"format": "pt"})
    Path("adapter_config.json").write_text(json.dumps({**PEFT, "r": 2, "lora_alpha": 2}))
    done = cli("doctor", "style.safetensors", "--error", message.format(next(iter(tensors))))
    assert "adapter-names" not in done.stdout


def test_settings_that_tensors_do_not_decide_stay(tmp_path: Path) -> None:
    home = write(Made(doubled().tensors, {**TARGETS, "lora_dropout": 0.5, "revision": "x"}), tmp_path / "a").parent
    (home / "README.md").write_text("card")
    ckptfix.lora_convert(home, tmp_path / "b", to="peft")
    config = json.loads((tmp_path / "b/adapter_config.json").read_text())
    assert {key: config[key] for key in ("task_type", "lora_dropout", "revision")} == {
        "task_type": "CAUSAL_LM", "lora_dropout": 0.5, "revision": "x"}  # fmt: skip
    assert (tmp_path / "b/README.md").read_text() == "card"
    with pytest.raises(ckptfix.CkptfixError, match="the output is a folder"):
        ckptfix.fix(home, tmp_path / "c.safetensors")


def levels(*, both: bool) -> Tensors:
    state = {f"{FRONT}{key.replace('_proj.', '_proj.base_layer.')}": value for key, value in base().items()}
    return {**state, **(peft(base(), ".default").tensors if both else {})}


@pytest.mark.parametrize("both", [False, True])
def test_a_base_in_a_model_of_peft(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, both: bool) -> None:
    monkeypatch.chdir(tmp_path)
    save_file(levels(both=both), "model.safetensors", {"format": "pt"})
    if both:
        assert "--alpha A` merges it" in cli("doctor", "model.safetensors").stdout
        Path("adapter_config.json").write_text(json.dumps(TARGETS))
    done = cli("doctor", "model.safetensors")
    assert "[adapter-base]" in done.stdout
    (line,) = [row for row in done.stdout.splitlines() if row.startswith("Fix: ")]
    words = shlex.split(line.removeprefix("Fix: ckptfix "))
    assert cli(*words).exit_code == 0
    out = next(word for word in reversed(words) if word.endswith(".safetensors"))
    found, truth = load_file(out), merged(base()) if both else base()
    assert found.keys() == truth.keys() and all(torch.equal(found[key], truth[key]) for key in truth)
    assert cli("fix", "model.safetensors", "fixed.safetensors").exit_code == 0
    assert load_file("fixed.safetensors").keys() == truth.keys()


def test_a_base_for_a_model_of_peft(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    save_file(base(), "base.safetensors", {"format": "pt"})
    wanted = list(levels(both=False))
    listed = [", ".join(f'"{key}"' for key in keys) for keys in (wanted, base())]
    message = f"Missing key(s) in state_dict: {listed[0]}.\n\tUnexpected key(s) in state_dict: {listed[1]}."
    done = cli("doctor", "base.safetensors", "--error", message)
    (line,) = [row for row in done.stdout.splitlines() if row.startswith("Fix: ")]
    words = shlex.split(line.removeprefix("Fix: ckptfix "))
    assert cli(*words).exit_code == 0
    assert set(load_file(words[2])) == set(wanted)


def test_peft_itself_loads_what_was_fixed(tmp_path: Path) -> None:
    library: Any = pytest.importorskip("peft", reason="PEFT is not installed")
    for number, (make, _) in enumerate(ADAPTERS.values()):
        home = tmp_path / str(number)
        made = make()
        source = write(made._replace(config={**(made.config or {}), "task_type": None}), tmp_path / f"{number}.bad")
        ckptfix.fix(source.parent, home)
        inner: dict[str, Any] = {}
        for path in PATHS:
            *parts, last = path.split(".")
            here = inner
            for part in parts:
                here = here.setdefault(part, {})
            rows, columns = base()[f"{path}.weight"].shape
            here[last] = torch.nn.Linear(columns, rows, bias=False)
        model = library.PeftModel.from_pretrained(_module(inner), str(home))
        ups = {key: value for key, value in model.state_dict().items() if "lora_B" in key}
        assert len(ups) == 3 and all(value.abs().sum() > 0 for value in ups.values())


def _module(tree: dict[str, Any]) -> torch.nn.Module:
    return torch.nn.ModuleDict(
        {name: row if isinstance(row, torch.nn.Module) else _module(row) for name, row in tree.items()}
    )
