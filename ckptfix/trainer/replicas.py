"""nn.DataParallel over any number of copies, with fewer GPUs than that or none, and a log of what each copy sees.

DataParallel takes four steps around the model in every call:

    scatter         cuts the batch along its first dimension as torch.chunk does: 30 over 8 is 4 4 4 4 4 4 4 2,
                    and 10 over 8 is 2 2 2 2 2, so that three of the eight have nothing to do
    replicate       makes a copy of the model for each share; the copies lead back to the one set of parameters
    parallel_apply  calls each copy with its share
    gather          joins the outputs along the first dimension

torch's own steps need a GPU for each copy. `Replicas` performs the same steps on the single device of the model, under
torch's own DataParallel.forward, which calls them. It is an nn.DataParallel: state dicts have its keys, `module.*`. If
there are enough GPUs, the steps are torch's, and only the log is added.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo import OptimizedModule
from torch._utils import ExceptionWrapper

from ckptfix.errors import Unsupported
from ckptfix.words import plural

Shares = tuple[tuple[Any, ...], tuple[dict[str, Any], ...]]

SCALARS = (
    "Was asked to gather along dimension 0, but all input tensors were scalars; "
    "will instead unsqueeze and return a vector."
)
"""The warning in torch's words, so that users' warning filters match it."""


class Replicas(nn.DataParallel[nn.Module]):
    """`module` in DataParallel over `replicas` copies.

    On one device, the copies share the module's parameters and run one after another, in order, so that equal seeds
    give equal numbers. On several GPUs they run at the same time. As in torch, only the first copy has the module's own
    buffers: BatchNorm's running statistics come from the first share, and those of other copies are dropped.

    Args:
        module: the module to copy; it remains on its device unless each copy gets its own GPU.
        replicas: number of copies. A small batch may leave some without a share.
        device_ids: GPUs to use, one for each copy. None uses the first `replicas` GPUs if there are that many, and
            otherwise the device of the module for all copies.
        output_device: device where outputs are gathered; None is the first of `device_ids`. dim: the dimension that is
        cut. log: called with a line for each replica and one for the whole; None is silent. A pickle or a copy does not
        keep it. steps: log the four steps too.

    Raises:
        Unsupported: there are no replicas, or not one GPU for each, or an output device although copies share one. Or
            the model inside is compiled, which torch's DataParallel empties when it copies it: compile the outside.
    """

    def __init__(
        self,
        module: nn.Module,
        replicas: int,
        *,
        device_ids: Sequence[int] | None = None,
        output_device: int | None = None,
        dim: int = 0,
        log: Callable[[str], None] | None = None,
        steps: bool = False,
    ) -> None:
        if replicas < 1:
            raise Unsupported(f"a model needs at least one replica, not {replicas}")
        if replicas > 1 and any(isinstance(part, OptimizedModule) for part in module.modules()):
            raise Unsupported("DataParallel cannot copy a compiled model", hint="compile it after wrapping: dp,compile")
        if device_ids is None and torch.cuda.device_count() >= replicas:
            device_ids = range(replicas)
        if device_ids is not None:
            if len(device_ids) != replicas:
                raise Unsupported(f"{replicas} replicas need the same number of GPUs, not {len(device_ids)}")
            super().__init__(module, list(device_ids), output_device, dim)
        else:
            if output_device is not None:
                raise Unsupported(f"{replicas} replicas on one device cannot have another output device")
            # DataParallel's __init__ would forget `replicas` and, if there is one GPU, move the module to it.
            nn.Module.__init__(self)
            self.module = module
            self.dim = dim
        self.one_device = device_ids is None
        self.replicas = replicas
        self.log = log
        self.steps = steps

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "log": None}

    def forward(self, *inputs: object, **kwargs: object) -> object:
        """Return the result of ``module(*inputs, **kwargs)`` from shares of the batch; a scalar becomes a vector."""
        if self.one_device:
            # The device is looked up in each call, because the module may have been moved.
            tensors_of_module = chain(self.module.parameters(), self.module.buffers())
            device = next((tensor.device for tensor in tensors_of_module), torch.device("cpu"))
            devices: Any = [device] * self.replicas
            self.src_device_obj = device
            self.device_ids = devices
            self.output_device = devices[0]
        outputs = super().forward(*inputs, **kwargs)
        # With one device, torch passes the batch on unchanged, and performs only the first step.
        what = "gathered" if self.replicas > 1 else "replica 1 of 1"
        self.report(f"{what}: input {arguments(inputs, kwargs)} -> output {shapes(outputs)}")
        return outputs

    def scatter(self, inputs: tuple[object, ...], kwargs: dict[str, Any] | None, device_ids: Sequence[Any]) -> Shares:
        """Return the arguments of each copy: tensors cut, containers entered, other values passed to each."""
        if self.one_device:
            placed = scattered(inputs, device_ids, self.dim) if inputs else []
            named = scattered(kwargs, device_ids, self.dim) if kwargs else []
            # As in torch, a value that is not a tensor goes to each copy, even to those without a share.
            placed += [()] * (len(named) - len(placed))
            if len(named) < len(inputs):
                named += [{} for _ in placed[len(named) :]]
            shares = tuple(placed), tuple(named)
        else:
            shares = super().scatter(inputs, kwargs, device_ids)
        if self.steps:
            cut = sizes(zip(*shares, strict=True), self.dim)
            self.report(f"scatter: {sizes([(inputs, kwargs)], self.dim)} -> {cut or '-'}")
        return shares

    def replicate(self, module: nn.Module, device_ids: Sequence[Any]) -> list[nn.Module]:
        """Return a copy for each device in use."""
        if self.one_device:
            copies = [replica(module, first=number == 0) for number in range(len(device_ids))]
        else:
            copies = super().replicate(module, device_ids)
        if self.steps:
            self.report(f"replicate: {plural(len(copies), 'copy')}")
        return copies

    def parallel_apply(
        self, replicas: Sequence[nn.Module], inputs: Sequence[Sequence[object]], kwargs: Sequence[Mapping[str, object]]
    ) -> list[object]:
        """Return the outputs of each copy.

        Raises:
            Exception: of the class of the first error in a copy, with its replica named in the message.
        """
        if self.steps:
            self.report("parallel_apply")
        if self.one_device:
            calls = enumerate(zip(replicas, inputs, kwargs, strict=True), 1)
            outputs = [called(*call, f"replica {number} of {len(replicas)}") for number, call in calls]
        else:
            outputs = super().parallel_apply(replicas, inputs, kwargs)
        for number, (placed, named, output) in enumerate(zip(inputs, kwargs, outputs, strict=True), 1):
            self.report(
                f"replica {number} of {len(outputs)}: input {arguments(placed, named)} -> output {shapes(output)}"
            )
        return outputs

    def gather(self, outputs: Sequence[object], output_device: int | torch.device) -> object:
        """Join the copies' outputs into one. Tensors are joined, containers entered, and None stays None."""
        if self.steps:
            self.report("gather")
        return gathered(outputs, self.dim) if self.one_device else super().gather(outputs, output_device)

    def report(self, line: str) -> None:
        """Log `line`, if a log is set."""
        if self.log is not None:
            self.log(line)


def scattered(value: object, devices: Sequence[torch.device], dim: int) -> list[Any]:
    """Return the share of `value` for each device. There are fewer shares than devices if a tensor is too short."""
    if isinstance(value, Tensor):
        return [chunk.to(device) for chunk, device in zip(value.chunk(len(devices), dim), devices, strict=False)]
    if not isinstance(value, tuple | list | dict) or not value:
        return [value] * len(devices)
    parts = value.items() if isinstance(value, dict) else value
    shares = zip(*(scattered(part, devices, dim) for part in parts), strict=False)
    return [like(value, share) for share in shares]


def called(copy: nn.Module, inputs: Sequence[object], kwargs: Mapping[str, object], name: str) -> object:
    """Return the result of `copy`; re-raise its errors as torch's parallel_apply does, with `name` put in front."""
    try:
        return copy(*inputs, **kwargs)
    except Exception:
        failure = ExceptionWrapper(where=f"in {name}")
    return failure.reraise()


def gathered(outputs: Sequence[Any], dim: int) -> object:
    """Join the outputs of all copies into one.

    Raises:
        RuntimeError: tensors differ in a dimension other than `dim`.
        ValueError: containers differ in length.
        TypeError: an output is not a tensor, None, or a container of these.
    """
    first = outputs[0]
    if isinstance(first, Tensor):
        if dim == 0 and all(output.dim() == 0 for output in outputs):
            warnings.warn(SCALARS, stacklevel=2)
            return torch.stack(list(outputs))
        return torch.cat(list(outputs), dim)
    if first is None:
        return None
    if isinstance(first, dict):
        if any(len(output) != len(first) for output in outputs):
            raise ValueError("replicas returned dicts of different lengths")
        return type(first)((key, gathered([output[key] for output in outputs], dim)) for key in first)
    if not isinstance(first, tuple | list):
        raise TypeError(f"replicas returned {type(first).__name__}, which cannot be gathered")
    return like(first, [gathered(parts, dim) for parts in zip(*outputs, strict=True)])


def like(value: Any, parts: Sequence[object]) -> object:
    """Return a container of the class of `value` with these parts."""
    # The constructor of a named tuple takes its parts one by one.
    return value._make(parts) if hasattr(value, "_make") else type(value)(parts)


def replica(module: nn.Module, *, first: bool) -> nn.Module:
    """Copy `module` and all modules in it, with the same parameters; only the first copy has the same buffers.

    A copy has plain attributes in place of parameters, and lists no parameters. So an optimizer finds nothing there,
    and neither does a model that calls ``next(self.parameters())``. The same is true on GPUs.
    """
    copies: dict[nn.Module, Any] = {part: part._replicate_for_data_parallel() for part in module.modules()}
    for part, copy in copies.items():
        for name, child in part._modules.items():
            copy._modules[name] = None if child is None else copies[child]
        for name, parameter in part._parameters.items():
            # nn.Module's own setattr would register it as a parameter.
            (copy._parameters if parameter is None else vars(copy))[name] = parameter
        if not first:
            for name, buffer in part._buffers.items():
                copy._buffers[name] = None if buffer is None else buffer.clone()
    made: nn.Module = copies[module]
    return made


def tensors(value: object) -> Iterator[Tensor]:
    """Yield the tensors in `value` and in the containers in it, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from tensors(tuple(value.values()))
    elif isinstance(value, tuple | list):
        for part in value:
            yield from tensors(part)


def sizes(shares: Iterable[object], dim: int) -> str:
    """Return the length in `dim` of each share's first tensor, which stands for the batch; - without tensors."""
    return " ".join(next((str(tensor.shape[dim]) for tensor in tensors(share)), "-") for share in shares)


def shapes(value: object) -> str:
    """Return `value` as text, with the shape of each tensor in its place, and the class name of anything else."""
    if isinstance(value, Tensor):
        return str(list(value.shape))
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key}: {shapes(part)}' for key, part in value.items())}}}"
    if isinstance(value, tuple | list):
        return f"({', '.join(map(shapes, value))})"
    return type(value).__name__


def arguments(inputs: Sequence[object], kwargs: Mapping[str, object]) -> str:
    """Return the shapes of a call's arguments: ``[30, 5], mask=[30]``."""
    return ", ".join([*map(shapes, inputs), *(f"{name}={shapes(value)}" for name, value in kwargs.items())]) or "none"
