"""The command line of the trainer: ``python -m ckptfix.trainer``."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from ckptfix.errors import CkptfixError, Refused
from ckptfix.io.write import check_destination
from ckptfix.trainer import devices, parallel, resume
from ckptfix.trainer import save as saving
from ckptfix.trainer.job import TrainingJob
from ckptfix.trainer.parallel import WRAPPERS
from ckptfix.trainer.processes import launch, show_error
from ckptfix.trainer.save import CONTAINERS
from ckptfix.trainer.tasks import TASKS
from ckptfix.trainer.train import built, resolved, run

START = """\
This trains small models in the wrappers of real training and saves real checkpoints of them. Use them to try ckptfix,
and to see what each wrapper does to the keys. It takes seconds, and needs no GPU.

Try these in a folder of your own:
  python -m ckptfix.trainer --gpu_ids 0,1,2,3 --nested --save dp.pth    # as on four GPUs: keys begin with module.
  ckptfix doctor dp.pth                                                 # what is wrong with it on another machine
  ckptfix fix dp.pth fixed.pth
  ckptfix diff dp.pth fixed.pth                                         # only names and devices have changed
  python -m ckptfix.trainer --resume fixed.pth --epochs 4 --nested --save longer.pth

--help lists the models, wrappers and formats, with more examples. Continue with `ckptfix help recipes`."""
"""Text shown if there are no arguments."""

EPILOG = """
examples:
  several GPUs, the first one as the main one (without GPUs: the CPU, with the same keys)
    python -m ckptfix.trainer --gpu_ids 0,1,2,3 --model mlp --nested --save dp.pth
  the same, with clean keys
    python -m ckptfix.trainer --gpu_ids 0,1,2,3 --model mlp --nested --unwrapped --save clean.pth
  log what each of three replicas sees, on one device
    python -m ckptfix.trainer --model tutorial --replicas 3 --log-steps --epochs 1
  several processes, then the same under torchrun
    python -m ckptfix.trainer --model vgg --parallel compile,ddp --processes 2 --save stacked.pth
    torchrun --nproc-per-node 2 -m ckptfix.trainer --parallel ddp --save ddp.pth
    torchrun --nproc-per-node 2 -m ckptfix.trainer --parallel fsdp2 --nested --format dcp --save sharded
  whatever is available: DDP under torchrun, DataParallel on several GPUs, else neither
    python -m ckptfix.trainer --parallel auto --save auto.pth
  continue from a checkpoint to epoch 4, without its wrapper; then with a different learning rate
    python -m ckptfix.trainer --resume dp.pth --epochs 4 --nested --save longer.pth
    python -m ckptfix.trainer --resume longer.pth --epochs 6 --rate 0.001 --nested --save slower.pth
  a BERT-style classifier with one loss per replica, averaged
    python -m ckptfix.trainer --model bert --replicas 2 --save bert.pth
  a VGG under two sets of keys, for `ckptfix match`
    python -m ckptfix.trainer --model vgg --save vgg.pth
    python -m ckptfix.trainer --model vgg-named --save named.pth

the optimizer:
  Only the model is wrapped. Some old code wraps the optimizer in nn.DataParallel too, which does not work: torch may
  accept it, but it has no step(), its zero_grad() keeps every gradient, its state_dict() is empty, and a scheduler
  refuses it. Call optimizer.step(), set the rate in optimizer.param_groups, and save optimizer.state_dict(), as
  --nested does: its state is keyed by the number of each parameter, without a wrapper's prefix.

resuming:
  A training checkpoint (--nested) continues exactly: the losses equal those of a run that never stopped. This holds
  for any container and any wrapper, as long as the numbers of processes, replicas and GPUs are the same. --model,
  --seed, --amp, --averaged and --full-size are remembered; --parallel is not. Any other checkpoint restores only the
  weights. Pickles are read but never run, even those of whole modules and folders.

GPUs:
  CUDA_VISIBLE_DEVICES renumbers GPUs: with CUDA_VISIBLE_DEVICES=3, GPU 3 is cuda:0 here and in the checkpoint, as the
  log says. Tensors are tagged with the device that they are saved from.

exit status: 0 done, 2 wrong usage, or a file that cannot be read or written.
"""


def wrappers(text: str) -> tuple[str, ...] | None:
    """Parse ``"compile,ddp"`` into names; ``"none"`` is empty, and ``"auto"`` is None."""
    if text == "auto":
        return None
    names = () if text == "none" else tuple(text.split(","))
    for name in names:
        if name not in WRAPPERS:
            raise argparse.ArgumentTypeError(f"{name!r} is unknown; use none, auto, {', '.join(WRAPPERS)}")
    return names


def gpu_ids(text: str) -> tuple[int, ...]:
    """Parse ``"0,1,2,3"`` into numbers."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() for part in parts) or len(set(parts)) < len(parts):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of different GPU numbers, such as 0,1,2,3")
    return tuple(map(int, parts))


def count(text: str) -> int:
    """Parse a positive integer."""
    if not (text.isascii() and text.isdigit() and int(text)):
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer of at least 1")
    return int(text)


def whole(text: str) -> int:
    """Parse an integer that is 0 or more."""
    if not (text.isascii() and text.isdigit()):
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer of at least 0")
    return int(text)


def rate(text: str) -> float:
    """Parse a learning rate."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a learning rate, which must be above 0")
    return value


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m ckptfix.trainer",
        description="Train a small model, wrapped as for several GPUs, and save a checkpoint of it.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=EPILOG,
        allow_abbrev=False,
    )
    what = made.add_argument_group("what to train")
    listed = "; ".join(f"{task.name}: {task.about}" for task in TASKS.values())
    what.add_argument("--model", choices=TASKS, help=f"{listed} (demo, or --resume's)")
    sizes = ", ".join(task.name for task in TASKS.values() if task.full)
    what.add_argument("--full-size", action="store_true", help=f"the published shapes, for {sizes}")
    what.add_argument("--epochs", type=whole, default=2, help="passes over the data, including resumed ones (2)")
    what.add_argument("--seed", type=int, help="seed of model, data and order (0, or --resume's)")
    what.add_argument("--rate", type=rate, help="learning rate from here on (the model's own, or --resume's)")
    what.add_argument("--amp", action="store_true", help="autocast (float16 on a GPU, else bfloat16), with a scaler")
    what.add_argument("--averaged", action="store_true", help="keep a running average of the weights, and save that")
    what.add_argument("--resume", type=Path, metavar="PATH", help="continue from a checkpoint; see below")

    how = made.add_argument_group("how to distribute it")
    listed = "; ".join(f"{name}: {wrapper.about}" for name, wrapper in WRAPPERS.items())
    how.add_argument(
        "--parallel",
        type=wrappers,
        default=(),
        metavar="WRAPPERS",
        help=f"none, auto, or one or more, the innermost first, as in compile,ddp; {listed} "
        "(dp with two or more --gpu_ids, else none)",
    )
    how.add_argument(
        *("--gpu_ids", "--gpu-ids"), type=gpu_ids, default=(), metavar="IDS", help="the main one first, such as 0,1,2,3"
    )
    how.add_argument("--output-device", type=whole, metavar="ID", help="where dp gathers outputs (its first GPU)")
    how.add_argument("--processes", type=count, default=2, help="for ddp and fsdp2, without torchrun (2)")
    how.add_argument(
        "--replicas",
        type=count,
        metavar="N",
        help="run dp as N copies on the devices present; log what each sees of the first batches",
    )
    how.add_argument("--log-replicas", action="store_true", help="log them in all batches")
    how.add_argument("--log-steps", action="store_true", help="log dp's scatter, replicate, parallel_apply, gather too")

    out = made.add_argument_group("what to save")
    out.add_argument("--save", type=Path, metavar="PATH", help="checkpoint to write; replaces an existing one")
    out.add_argument("--nested", action="store_true", help="write a training checkpoint: with optimizer, epoch etc.")
    names = out.add_mutually_exclusive_group()
    names.add_argument("--wrapped", action="store_true", help="save the wrapper's keys, such as module.fc (default)")
    names.add_argument("--unwrapped", action="store_true", help="save the keys of the model inside")
    listed = "; ".join(f"{name}: {container.about}" for name, container in CONTAINERS.items())
    out.add_argument("--format", choices=CONTAINERS, default="zip", help=f"{listed} (zip)")
    out.add_argument("--param-names", action="store_true", help="make the optimizer list the names of its parameters")
    out.add_argument("--outputs", type=Path, metavar="FILE", help="also save the outputs of the trained model")
    return made


def job_of(chosen: argparse.Namespace) -> TrainingJob:
    """Return the job that the options describe.

    Raises:
        Refused: they contradict each other, or the way in which this process was started.
    """
    stack: tuple[str, ...] = devices.automatic(chosen.gpu_ids) if chosen.parallel is None else chosen.parallel
    if chosen.parallel is None:
        print(f"--parallel auto: {','.join(stack) or 'none'}")
    several = chosen.parallel == () and len(chosen.gpu_ids) > 1
    if (chosen.replicas or several) and not any(WRAPPERS[name].spreads for name in stack):
        stack = (*stack, "dp")
    parallel.check(stack)
    for option, value in (("--replicas", chosen.replicas), ("--output-device", chosen.output_device)):
        if value is not None and "dp" not in stack:
            raise Refused(f"{option} requires DataParallel, but the model is wrapped in {','.join(stack) or 'nothing'}")
    replicas = chosen.replicas
    if (chosen.log_replicas or chosen.log_steps) and replicas is None:
        replicas = len(chosen.gpu_ids) or devices.visible()
        if "dp" not in stack or replicas < 2 or not devices.visible():
            raise Refused("there is nothing to log on one device: use --replicas N to run N copies there")
    elif replicas and chosen.gpu_ids and replicas != len(chosen.gpu_ids):
        raise Refused(f"--replicas {replicas} and {len(chosen.gpu_ids)} --gpu_ids contradict each other")
    if chosen.averaged and "fsdp2" in stack:
        raise Refused("--averaged copies the model, and a sharded model cannot be copied")
    if devices.in_group() and int(os.environ.get("WORLD_SIZE", "1")) > 1 and not parallel.in_group(stack):
        raise Refused("torchrun started several processes, but this job needs one: add --parallel ddp or fsdp2")
    return TrainingJob(
        model=chosen.model,
        parallel=stack,
        epochs=chosen.epochs,
        seed=chosen.seed,
        rate=chosen.rate,
        gpus=chosen.gpu_ids,
        output_device=chosen.output_device,
        replicas=replicas,
        log_replicas=chosen.log_replicas,
        log_steps=chosen.log_steps,
        amp=chosen.amp,
        averaged=chosen.averaged,
        full_size=chosen.full_size,
        param_names=chosen.param_names,
        resume=chosen.resume,
        save=chosen.save,
        wrapped=not chosen.unwrapped,
        nested=chosen.nested,
        container=chosen.format,
        outputs=chosen.outputs,
    )


def check(job: TrainingJob) -> None:
    """Raise an error for anything that prevents `job`, before training and before other processes start.

    Raises:
        CkptfixError: something that it is to read or write is at fault.
    """
    sharded = any(name == "fsdp2" for name in job.parallel)
    if job.save is not None:
        saving.check(job.save, job.container, nested=job.nested, sharded=sharded)
    if job.outputs is not None:
        check_destination(job.outputs, overwrite=True)
    complete, saved = resolved(job)
    if sharded and complete.averaged:
        raise Refused("--averaged copies the model, and a sharded model cannot be copied")
    _, model = built(complete)
    if saved:
        resume.mismatch(saved, model)
    devices.choose(job.gpus, job.output_device)


def main(arguments: Sequence[str] | None = None) -> int:
    given = sys.argv[1:] if arguments is None else list(arguments)
    if not given:
        print(START)
        return 0
    chosen = parser().parse_args(given)
    try:
        job = job_of(chosen)
        check(job)
        if not job.full_size:
            # The small models gain nothing from threads, which wait for each other on a busy machine.
            torch.set_num_threads(1)
        if parallel.in_group(job.parallel):
            return launch(run, job, chosen.processes, job.gpus)
        run(job)
    except CkptfixError as error:
        show_error(error)
        return 2
    except KeyboardInterrupt:
        print("ckptfix.trainer: interrupted; no partial file is left", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader of the log has exited. Discard buffered output, so that Python also ends quietly.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    return 0


if __name__ == "__main__":
    sys.exit(main())
