"""The keys and shapes of loaders' messages, in the forms of many frameworks."""

from __future__ import annotations

import time

import pytest

from ckptfix.findings.message_names import FORMS, ShapeConflict, listed

A, B = "layers.0.q.weight", "model.layers.0.q.weight"

MISSING_AND_UNEXPECTED = {
    "torch": f'Missing key(s) in state_dict: "{A}". \n\tUnexpected key(s) in state_dict: "{B}". ',
    "shortened": f'Missing key(s) in state_dict: "{A}", ... \nUnexpected key(s) in state_dict: "{B}", ...',
    "single quotes": f"Missing key(s) in state_dict: '{A}'.\nUnexpected key(s) in state_dict: '{B}'.",
    "strict=False": f"_IncompatibleKeys(missing_keys=['{A}'], unexpected_keys=['{B}'])",
    "torch before 0.4": f"missing keys in state_dict: \"{{'{A}'}}\"\nKeyError: 'unexpected key \"{B}\" in state_dict'",
    "mmengine": f"unexpected key in source state_dict: {B}\n\nmissing keys in source state_dict: {A}\n",
    "fvcore": f"not found in the checkpoint:\nlayers.0.{{k}}\nx parameters or buffers are not found in the "
    f"checkpoint:\n"
    f"\x1b[34m{A}\x1b[0m\nThe checkpoint state_dict contains keys that are not used by the model:\n  {B}\n",
    "transformers": f"Some weights of the model checkpoint at x were not used when initializing Y: ['{B}']\n- This IS\n"
    f"Some weights of Y were not initialized from the model checkpoint at x and are newly initialized: ['{A}']\nYou",
    "transformers 5": f"Key | Status | \n---+---\n{B} | UNEXPECTED |  | \n{A} | MISSING |  | \n",
    "PEFT": f"Found missing adapter keys while loading the checkpoint: ['{A}'].\nled to unexpected keys not "
    f"found in the "
    f"model: ['{B}']. ",
    "MLX": f"ValueError: Received 1 parameters not in model: \n{B}.\nValueError: Missing 1 parameters: \n{A}.",
    "ComfyUI": f"unet missing: ['{A}']\nunet unexpected: ['{B}']",
    "Forge": f"Missing VAE keys ['{A}']\nCLIPTextModel Unexpected: ['{B}']",
    "Megatron": f"Missing keys (not found in the checkpoint): {{'{A}'}}\nUnexpected keys (not found in x): {{'{B}'}}",
    "in a traceback": 'Traceback (most recent call last):\n  File "a.py", line 3, in f\n    raise RuntimeError(\n'
    f'RuntimeError: Error(s) in loading state_dict for M:\n\tMissing key(s) in state_dict: "{A}". \n\tUnexpected '
    f'key(s) in state_dict: "{B}". \n\nDuring handling of the above exception, another exception occurred:\n',
}


@pytest.mark.parametrize("message", MISSING_AND_UNEXPECTED.values(), ids=list(MISSING_AND_UNEXPECTED))
def test_missing_and_unexpected_keys(message: str) -> None:
    names = listed(message)
    assert names is not None and (names.missing, names.unexpected) == ((A,), (B,))
    assert names.shortened == ("..." in message)


ONE_KEY = {
    "diffusers": (f"because the following keys are missing: \n {A}, a.b. \n Please make sure", "missing", (A, "a.b")),
    "torchtune": (f"ValueError: Missing LoRA key {A} from adapter state dict", "missing", (A,)),
    "DCP": (f"RuntimeError: Missing key in checkpoint state_dict: {A}.", "missing", (A,)),
    "vLLM": ("There is no module or parameter named 'a.visual' in Gemma3ForCausalLM", "modules", ("a.visual",)),
    "vLLM KeyError": (f"    param = params_dict[name]\nKeyError: '{A}'", "seen", (A,)),
    "llama.cpp": (f"ValueError: Can not map tensor '{B}'", "unexpected", (B,)),
    "llama.cpp lora": (f"Error: could not map tensor name {B}\n Note: the arch", "unexpected", (B,)),
    "ComfyUI lora": (f"lora key not loaded: {A}\nlora key not loaded: {B}\n", "unexpected", (A, B)),
    "groups": ("x | UNEXPECTED |\nblocks.{0...2}.{a, b} | MISSING | |\n", "missing",
               tuple(f"blocks.{n}.{leaf}" for n in range(3) for leaf in "ab")),
    "DeepSpeed": ("The following zero checkpoints paths are missing: ['./a/zero_pp_rank_1.pt']", "files",
                  ("./a/zero_pp_rank_1.pt",)),
}  # fmt: skip


@pytest.mark.parametrize(("message", "role", "names"), ONE_KEY.values(), ids=list(ONE_KEY))
def test_forms_that_name_one_side(message: str, role: str, names: tuple[str, ...]) -> None:
    assert getattr(listed(message), role) == names


SHAPES = {
    "torch": f"size mismatch for {A}: copying a param with shape torch.Size([3, 4]) from checkpoint, the "
    f"shape in current "
    "model is torch.Size([2, 4]).",
    "wrapped by a terminal": f"size mismatch for {A}: copying a param with shape torch.Size([3, 4]) from "
    f"checkpoint, the "
    "shape in\n   current model is torch.Size([2, 4]).",
    "transformers": f"- {A}: found shape torch.Size([3, 4]) in the checkpoint and torch.Size([2, 4]) in the model "
    "instantiated",
    "transformers 5": f"{A} | MISMATCH | Reinit due to size mismatch - ckpt: torch.Size([3, 4]) vs "
    f"model:torch.Size([2, 4])",
    "fvcore": f"Skip loading parameter '{A}' to the model due to incompatible shapes: (3, 4) in the "
    f"checkpoint but (2, 4) in "
    "the model!",
    "MLX": f"ValueError: Expected shape (2, 4) but received shape (3, 4) for parameter {A}",
    "DCP": f"Size mismatch between saved torch.Size([3, 4]) and current: torch.Size([2, 4]) for {A}",
}


@pytest.mark.parametrize("message", SHAPES.values(), ids=list(SHAPES))
def test_shapes_that_differ(message: str) -> None:
    names = listed(message)
    assert names is not None and names.conflicts == (ShapeConflict(A, (3, 4), (2, 4)),)


def test_a_message_without_keys() -> None:
    configs = "config['qwen3']\nKeyError: 'qwen3'"
    for text in ("KeyError: 'qwen3'", configs, "EOFError: Ran out of input", "missing key", "", "size mismatch for"):
        assert listed(text) is None
    assert len({form.head for form in FORMS}) == len(FORMS)


@pytest.mark.sampled(quick=3)
@pytest.mark.parametrize(
    "text", ["a" * 99_000, "a." * 50_000, " " * 99_000, "| " * 50_000, "'a', " * 20_000,
        "missing keys: " + "a, " * 30_000,
             "x |\n" * 30_000, "missing key(s): ['a'" * 5_000, "{" * 99_000, "size mismatch for a: " * 5_000],
)  # fmt: skip
def test_a_hostile_message_takes_no_time(text: str) -> None:
    start = time.process_time()
    listed(text)
    assert time.process_time() - start < 3


@pytest.mark.parametrize(
    ("text", "role", "names"),
    [
        ("KeyError: 'model'", "parts", ("model",)),
        ('    net.load_state_dict(state_dict["Adapter"])\nKeyError: \'Adapter\'', "parts", ("Adapter",)),
        ("    x = torch.load(path)['g']\n        ~~~~^^\nKeyError: 'g'", "parts", ("g",)),
        ("KeyError: 'exp_avg'", "states", ("exp_avg",)),
        ("ERROR: Could not detect model type of: a.safetensors", "wholes", ("model.diffusion_model",)),
    ],
)
def test_parts_of_a_file(text: str, role: str, names: tuple[str, ...]) -> None:
    found = listed(text)
    assert found is not None and getattr(found, role) == names and not found.names
