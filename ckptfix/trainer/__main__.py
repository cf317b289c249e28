"""The command line of the trainer: ``python -m ckptfix.trainer``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from ckptfix.trainer.models import TASKS
from ckptfix.trainer.parallel import WRAPPERS, launch
from ckptfix.trainer.save import FORMATS
from ckptfix.trainer.train import Job, run

EXAMPLES = """
examples:
  python -m ckptfix.trainer --model mlp --parallel dp --nested --save dp.pth
  python -m ckptfix.trainer --model vgg --parallel compile,ddp --processes 2 --save stacked.pth
  torchrun --nproc-per-node 2 -m ckptfix.trainer --parallel ddp --save ddp.pth
"""


def wrappers(text: str) -> tuple[str, ...]:
    """The names in ``"compile,ddp"``; none in ``"none"``."""
    names = () if text == "none" else tuple(text.split(","))
    for name in names:
        if name not in WRAPPERS:
            raise argparse.ArgumentTypeError(f"{name!r} is none of none, {', '.join(WRAPPERS)}")
    return names


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m ckptfix.trainer",
        description="Train a small model, wrapped as for several GPUs, and save a checkpoint of it.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=EXAMPLES,
    )
    told = "; ".join(f"{task.name}: {task.about}" for task in TASKS.values())
    made.add_argument("--model", choices=TASKS, default="demo", help=f"{told} (demo)")
    told = "; ".join(f"{name}: {wrapper.about}" for name, wrapper in WRAPPERS.items())
    made.add_argument(
        "--parallel",
        type=wrappers,
        default=(),
        metavar="WRAPPERS",
        help=f"none, or one or more, the innermost first, as in compile,ddp; {told} (none)",
    )
    made.add_argument("--processes", type=int, default=2, help="for ddp without torchrun (2)")
    made.add_argument("--epochs", type=int, default=2, help="passes over the data (2)")
    made.add_argument("--seed", type=int, default=0, help="of model, data and order (0)")
    made.add_argument("--save", type=Path, metavar="FILE", help="checkpoint to write")
    made.add_argument("--nested", action="store_true", help="with optimizer, scheduler and epoch")
    keys = made.add_mutually_exclusive_group()
    keys.add_argument("--wrapped", action="store_true", help="save the keys of the wrapper, as in module.fc (default)")
    keys.add_argument("--unwrapped", action="store_true", help="save the keys of the model inside")
    told = "; ".join(f"{name}: {about}" for name, about in FORMATS.items())
    made.add_argument("--format", choices=FORMATS, default="zip", help=f"{told} (zip)")
    made.add_argument("--outputs", type=Path, metavar="FILE", help="also save what the trained model puts out")
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    reader = parser()
    chosen = reader.parse_args(arguments)
    if chosen.nested and chosen.format == "safetensors":
        reader.error("safetensors holds tensors by name and nothing else: leave out --nested")
    job = Job(
        model=chosen.model,
        parallel=chosen.parallel,
        epochs=chosen.epochs,
        seed=chosen.seed,
        save=chosen.save,
        wrapped=not chosen.unwrapped,
        nested=chosen.nested,
        container=chosen.format,
        outputs=chosen.outputs,
    )
    if "ddp" in job.parallel:
        launch(run, job, chosen.processes)
    else:
        run(job)
    return 0


if __name__ == "__main__":
    sys.exit(main())
