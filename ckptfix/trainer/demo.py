"""The demo of ``make demo``: wrapped checkpoints of real training, fixed and used, in ``.demo/``.

Every step is checked. The first one that fails ends the demo with exit status 1.
"""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ckptfix.trainer.tasks import TASKS
from ckptfix.trainer.train import outputs

FOLDER = Path(".demo")
NO_SUCH_GPU = "cuda:31"
"""A device of the machine where a checkpoint was saved that this machine does not have."""


class Unexpected(Exception):
    """Raised if a step did not do what the demo should show."""


def title(text: str) -> None:
    print(f"\n== {text}", flush=True)


def shell(command: str, *, status: int = 0) -> None:
    """Echo and run a command that starts with ``ckptfix`` or ``python``, under this interpreter."""
    print(f"$ {command}", flush=True)
    program, *arguments = shlex.split(command)
    module = ["-m", "ckptfix"] if program == "ckptfix" else []
    done = subprocess.run([sys.executable, *module, *arguments])
    if done.returncode != status:
        raise Unexpected(f"exit status {done.returncode}, not {status}: {command}")


def refused(what: str, load: Callable[[], object]) -> None:
    """Show the error message with which plain torch refuses a checkpoint."""
    try:
        load()
    except Exception as error:
        words = " ".join(str(error).split())
        print(f"{what}\n  {type(error).__name__}: {words[:300]}{' ...' if len(words) > 300 else ''}")
    else:
        raise Unexpected(f"{what}: torch accepted it")


def read(path: Path) -> Any:
    return torch.load(path, weights_only=True)


def plain(model: str, state: Mapping[str, Any]) -> Tensor:
    """Return the outputs of a new, unwrapped model after a strict load of `state`."""
    task = TASKS[model]
    made = task.model()
    made.load_state_dict(state)
    return outputs(made, task)


def works(model: str, state: Mapping[str, Any], trained: Path) -> None:
    """Check that `state` loads into a plain model, and that its outputs equal those saved in `trained`."""
    torch.testing.assert_close(plain(model, state), read(trained), rtol=1e-6, atol=1e-6)
    print("a plain model loads it, and its outputs are the trained model's")


def data_parallel() -> None:
    wrapped, fixed, trained = FOLDER / "dp.pth", FOLDER / "dp-plain.pth", FOLDER / "dp-outputs.pt"
    title("A training checkpoint of nn.DataParallel")
    shell(f"python -m ckptfix.trainer --model mlp --parallel dp --nested --save {wrapped} --outputs {trained}")
    refused("a plain model refuses it:", lambda: plain("mlp", read(wrapped)["model_state_dict"]))
    shell(f"ckptfix inspect {wrapped} --limit 4")
    shell(f"ckptfix strip-module {wrapped} {fixed}")
    works("mlp", read(fixed)["model_state_dict"], trained)
    shell(f"ckptfix diff {wrapped} {fixed}", status=1)


def losses(path: Path) -> list[float]:
    found: list[float] = read(path)["losses"]
    return found


def resumed() -> None:
    wrapped, longer, whole = FOLDER / "dp.pth", FOLDER / "dp-longer.pth", FOLDER / "whole.pth"
    title("Training continues without DataParallel, as if it had never stopped")
    shell(f"python -m ckptfix.trainer --resume {wrapped} --epochs 4 --nested --save {longer}")
    shell(f"python -m ckptfix.trainer --model mlp --epochs 4 --nested --save {whole}")
    if losses(longer) != losses(whole):
        raise Unexpected(f"losses differ: {losses(longer)} and {losses(whole)}")
    print("the losses of all epochs are the same, to the last bit")
    shell(f"ckptfix diff {longer} {whole}")


def distributed() -> None:
    wrapped, fixed, trained = FOLDER / "ddp.pth", FOLDER / "ddp-plain.pth", FOLDER / "ddp-outputs.pt"
    title("A state dict of a compiled model in DistributedDataParallel, two processes")
    shell(f"python -m ckptfix.trainer --model vgg --parallel compile,ddp --save {wrapped} --outputs {trained}")
    refused("a plain model refuses it:", lambda: plain("vgg", read(wrapped)))
    shell(f"ckptfix unwrap {wrapped} {fixed}")
    works("vgg", read(fixed), trained)


def matched() -> None:
    source, target, fixed = FOLDER / "ddp-plain.pth", FOLDER / "named.pth", FOLDER / "named-fixed.pth"
    title("The weights of one VGG for another, whose layers have different names")
    shell(f"python -m ckptfix.trainer --model vgg-named --epochs 1 --save {target}")
    refused("the other VGG refuses it:", lambda: plain("vgg-named", read(source)))
    shell(f"ckptfix match {source} {fixed} --like {target}")
    works("vgg-named", read(fixed), FOLDER / "ddp-outputs.pt")


def devices() -> None:
    source, foreign, fixed = FOLDER / "ddp-plain.pth", FOLDER / "gpu.pth", FOLDER / "cpu.pth"
    title("A checkpoint from a GPU that this machine does not have")
    shell(f"ckptfix map-location {source} {foreign} {NO_SUCH_GPU}")
    refused("torch.load refuses it:", lambda: read(foreign))
    shell(f"ckptfix to-cpu {foreign} {fixed}")
    works("vgg", read(fixed), FOLDER / "ddp-outputs.pt")


def containers() -> None:
    source, safe, back = FOLDER / "cpu.pth", FOLDER / "vgg.safetensors", FOLDER / "back.pth"
    title("To safetensors and back")
    shell(f"ckptfix convert {source} {safe}")
    shell(f"ckptfix convert {safe} {back}")
    works("vgg", read(back), FOLDER / "ddp-outputs.pt")
    shell(f"ckptfix diff {source} {back}")


def main() -> int:
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir()
    try:
        for part in (data_parallel, resumed, distributed, matched, devices, containers):
            part()
    except (Unexpected, AssertionError, RuntimeError) as error:
        print(f"\nfailed: {error}", file=sys.stderr)
        return 1
    print(f"\nall steps worked; the files are in {FOLDER}/")
    return 0


if __name__ == "__main__":
    sys.exit(main())
