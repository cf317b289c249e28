"""Replicas does what DataParallel does on GPUs: the same shares, outputs, gradients, buffers, errors and keys."""

from __future__ import annotations

import copy
import io
import pickle
import sys
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import pytest
import torch
from compare import assert_same
from torch import Tensor, nn
from torch._dynamo import OptimizedModule
from torch.autograd import backward
from torch.nn.functional import mse_loss
from torch.nn.parallel import scatter_gather
from torch.utils.data import DataLoader, TensorDataset

from ckptfix.errors import Unsupported
from ckptfix.trainer.replicas import Replicas, gathered, scattered, shapes
from ckptfix.trainer.tasks import TASKS
from ckptfix.trainer.text import Tagger

CPU = torch.device("cpu")

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:Was asked to gather along dimension 0:UserWarning")]


class Pair(NamedTuple):
    left: Any
    right: Any


class Calls(nn.Module):
    """Returns what `answer` makes of its arguments; scaled by a parameter so that it has one."""

    def __init__(self, answer: Callable[..., Any]) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.answer = answer

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        return self.answer(*inputs, **kwargs)


def made(task: str) -> nn.Module:
    torch.manual_seed(0)
    return TASKS[task].model()


def compiled(model: nn.Module) -> OptimizedModule:
    return cast(OptimizedModule, torch.compile(model, backend="eager"))


def samples(task: str, count: int) -> tuple[tuple[Tensor, ...], Tensor]:
    return TASKS[task].data(torch.Generator().manual_seed(1), count)


# The shares


@pytest.mark.parametrize(
    ("replicas", "shares", "last"),
    [
        (2, [15, 15], [5, 5]),
        (3, [10, 10, 10], [4, 4, 2]),
        (8, [4, 4, 4, 4, 4, 4, 4, 2], [2, 2, 2, 2, 2]),
    ],
)
def test_the_tutorial_splits_as_published(replicas: int, shares: list[int], last: list[int]) -> None:
    """Each epoch of the tutorial is 100 samples by 30: three batches of 30, and one of 10."""
    lines: list[str] = []
    model = Replicas(made("tutorial"), replicas, log=lines.append)
    (inputs,), _ = samples("tutorial", TASKS["tutorial"].samples)
    expected = []
    for (batch,) in DataLoader(TensorDataset(inputs), TASKS["tutorial"].batch):
        assert model(batch).shape == (len(batch), 2)
        sizes = shares if len(batch) == 30 else last
        for number, size in enumerate(sizes, 1):
            expected.append(f"replica {number} of {len(sizes)}: input [{size}, 5] -> output [{size}, 2]")
        expected.append(f"gathered: input [{len(batch)}, 5] -> output [{len(batch)}, 2]")
    assert lines == expected
    assert sum("gathered" in line for line in lines) == 4


def test_the_four_steps_are_logged_on_request() -> None:
    lines: list[str] = []
    Replicas(made("tutorial"), 8, log=lines.append, steps=True)(torch.randn(30, 5))
    steps = [line for line in lines if not line.startswith("replica ")]
    assert steps == [
        "scatter: 30 -> 4 4 4 4 4 4 4 2",
        "replicate: 8 copies",
        "parallel_apply",
        "gather",
        "gathered: input [30, 5] -> output [30, 2]",
    ]
    assert len(lines) == len(steps) + 8


def test_one_replica_is_the_module_itself() -> None:
    lines: list[str] = []
    seen: list[nn.Module] = []
    module = made("tutorial")
    module.register_forward_hook(lambda called, inputs, output: seen.append(called))
    inputs = torch.randn(30, 5)
    assert torch.equal(Replicas(module, 1, log=lines.append)(inputs), module(inputs))
    assert seen == [module, module]
    assert lines == ["replica 1 of 1: input [30, 5] -> output [30, 2]"]


def test_without_a_log_nothing_is_logged(capsys: pytest.CaptureFixture[str]) -> None:
    Replicas(made("tutorial"), 3, steps=True)(torch.randn(30, 5))
    assert capsys.readouterr() == ("", "")


class OnCpu:
    """In place of torch's functions for GPUs in scatter_gather: the same cuts and joins, without the moves."""

    class Scatter:
        @staticmethod
        def apply(devices: Sequence[int], sizes: None, dim: int, value: Tensor) -> tuple[Tensor, ...]:
            return value.chunk(len(devices), dim)

    class Gather:
        @staticmethod
        def apply(device: int, dim: int, *outputs: Tensor) -> Tensor:
            return torch.cat([output.reshape(1) if output.dim() == 0 else output for output in outputs], dim)


ROWS = torch.arange(20).reshape(10, 2)
CALLS: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "a tensor": ((ROWS,), {}),
    "two": ((ROWS, ROWS[:, 0]), {}),
    "of different lengths": ((ROWS, ROWS[:3]), {}),
    "kwargs": ((ROWS,), {"other": ROWS + 1, "mask": ROWS > 3}),
    "kwargs alone": ((), {"rows": ROWS}),
    "plain values": ((ROWS, 3, "text", None, 0.5), {}),
    "plain kwargs": ((ROWS,), {"flag": True}),
    "nothing but plain values": ((1,), {"flag": True}),
    "plain values and a short kwarg": ((1,), {"rows": ROWS[:2]}),
    "none": ((), {}),
    "a list": (([ROWS, ROWS + 1],), {}),
    "a tuple in a list": (([(ROWS, 1), (ROWS, 2)],), {}),
    "a dict": (({"a": ROWS, "b": {"c": [ROWS]}, "n": 1},), {}),
    "an ordered dict": ((OrderedDict(z=ROWS, a=ROWS),), {}),
    "a named tuple": ((Pair(ROWS, (ROWS, "x")),), {"pair": Pair(1, ROWS)}),
    "empty containers": ((ROWS, (), [], {}), {}),
    "an empty batch": ((ROWS[:0],), {}),
}


@pytest.mark.parametrize("replicas", [2, 3, 8, 12])
@pytest.mark.parametrize("case", CALLS)
def test_arguments_are_cut_as_torch_cuts_them(case: str, replicas: int, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs, kwargs = CALLS[case]
    model = Replicas(Calls(lambda: None), replicas)
    shares = model.scatter(inputs, kwargs, [CPU] * replicas)
    monkeypatch.setattr(scatter_gather, "Scatter", OnCpu.Scatter)
    expected = scatter_gather.scatter_kwargs(inputs, kwargs, list(range(replicas)))
    assert_same(expected, shares)


OUTPUTS: dict[str, Any] = {
    "tensors": ROWS,
    "scalars": torch.tensor(2.5),
    "none": None,
    "a tuple": (ROWS, torch.tensor(1.0)),
    "a list": [ROWS, [ROWS, None]],
    "a dict": {"loss": torch.tensor(1.0), "rows": ROWS, "more": {"deep": (ROWS,)}},
    "an ordered dict": OrderedDict(z=ROWS, a=ROWS),
    "a named tuple": Pair(ROWS, (ROWS, None)),
}


@pytest.mark.parametrize("case", OUTPUTS)
def test_outputs_are_joined_as_torch_joins_them(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    outputs = [OUTPUTS[case]] * 3
    joined = gathered(outputs, 0)
    monkeypatch.setattr(scatter_gather, "Gather", OnCpu.Gather)
    assert_same(scatter_gather.gather(outputs, 0), joined)


def test_another_dimension_is_cut_and_joined() -> None:
    lines: list[str] = []
    model = Replicas(Calls(lambda rows: rows * 2), 2, dim=1, log=lines.append, steps=True)
    batch = torch.arange(15).reshape(3, 5)
    assert torch.equal(model(batch), batch * 2)
    assert lines[0] == "scatter: 5 -> 3 2"
    assert lines[3:5] == [
        "replica 1 of 2: input [3, 3] -> output [3, 3]",
        "replica 2 of 2: input [3, 2] -> output [3, 2]",
    ]


def test_arguments_reach_each_copy_and_are_logged() -> None:
    lines: list[str] = []

    def answer(rows: Tensor, how: str, *, options: dict[str, Any]) -> dict[str, Tensor]:
        assert how == "sum"
        return {"sums": rows.sum(1) + options["bias"][0], "loss": rows.sum()}

    model = Replicas(Calls(answer), 2, log=lines.append)
    found = model(ROWS, "sum", options={"bias": (torch.ones(10, dtype=torch.int64), 7)})
    assert torch.equal(found["sums"], ROWS.sum(1) + 1)
    assert found["loss"].tolist() == [45, 145]
    assert lines == [
        *(
            f"replica {number} of 2: input [5, 2], str, options={{bias: ([5], int)}} -> output {{sums: [5], loss: []}}"
            for number in (1, 2)
        ),
        "gathered: input [10, 2], str, options={bias: ([10], int)} -> output {sums: [10], loss: [2]}",
    ]


def test_a_model_without_inputs_runs_once() -> None:
    lines: list[str] = []
    model = Replicas(Calls(lambda: torch.ones(2)), 4, log=lines.append, steps=True)
    assert model().tolist() == [1, 1]
    assert lines == [
        "scatter: - -> -",
        "replicate: 1 copy",
        "parallel_apply",
        "replica 1 of 1: input none -> output [2]",
        "gather",
        "gathered: input none -> output [2]",
    ]


def test_shapes_stand_for_values() -> None:
    assert shapes(Pair(ROWS, [None, {"x": torch.tensor(1)}])) == "([10, 2], (NoneType, {x: []}))"


# Outputs and gradients


@pytest.mark.parametrize("replicas", [1, 2, 3, 8])
@pytest.mark.parametrize("task", [name for name, task in TASKS.items() if not task.with_targets])
def test_outputs_and_gradients_are_those_of_the_plain_model(task: str, replicas: int) -> None:
    plain = made(task).eval()
    wrapped = Replicas(copy.deepcopy(plain), replicas)
    inputs, targets = samples(task, 30)
    for model in (plain, wrapped):
        backward(TASKS[task].loss(model(*inputs), targets).mean())
    torch.testing.assert_close(wrapped(*inputs), plain(*inputs))
    found = dict(wrapped.module.named_parameters())
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(found[name].grad, parameter.grad)
    assert any(parameter.grad.abs().sum() > 0 for parameter in found.values() if parameter.grad is not None)


@pytest.mark.parametrize("task", ["bert", "bert-tied"])
def test_the_mean_of_the_losses_of_replicas_is_trained_on(task: str) -> None:
    """Its gradients come from the mean of each share's mean, computed without replicas."""
    plain = made(task).eval()
    wrapped = Replicas(copy.deepcopy(plain), 3)
    inputs, targets = samples(task, 30)
    outputs = wrapped(*inputs, targets)
    losses = [plain(words, target)[0] for words, target in zip(inputs[0].chunk(3), targets.chunk(3), strict=True)]
    torch.testing.assert_close(outputs[0], torch.stack(losses))
    torch.testing.assert_close(outputs[1], plain(*inputs))
    backward(TASKS[task].loss(outputs, targets).mean())
    backward(torch.stack(losses).mean())
    for expected, found in zip(plain.parameters(), wrapped.parameters(), strict=True):
        torch.testing.assert_close(found.grad, expected.grad)


def test_a_scalar_of_each_replica_becomes_a_vector_and_torch_s_warning() -> None:
    model = Replicas(Calls(lambda rows: rows.float().mean()), 4)
    with pytest.warns(UserWarning, match="all input tensors were scalars; will instead unsqueeze and return a vector"):
        found = model(torch.arange(8))
    assert found.tolist() == [0.5, 2.5, 4.5, 6.5]


def test_training_with_replicas_is_training_without() -> None:
    states = []
    for replicas in (1, 3):
        model = Replicas(made("demo"), replicas)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        (inputs,), targets = samples("demo", 32)
        losses = []
        for _ in range(10):
            optimizer.zero_grad()
            loss = mse_loss(model(inputs), targets)
            backward(loss)
            optimizer.step()
            losses.append(loss.item())
        assert losses[-1] < 0.8 * losses[0]
        states.append(model.state_dict())
    torch.testing.assert_close(states[0], states[1])


def test_gradients_flow_to_inputs_and_not_without_grad_mode() -> None:
    inputs = torch.randn(6, 5, requires_grad=True)
    model = Replicas(made("tutorial"), 4)
    backward(model(inputs).sum())
    torch.testing.assert_close(inputs.grad, model.module.get_parameter("fc.weight").sum(0).expand(6, 5))
    with torch.no_grad():
        assert not model(inputs).requires_grad


def test_frozen_and_sparse_parameters_stay_what_they_are() -> None:
    embedding = nn.Embedding(10, 4, sparse=True)
    frozen = nn.Linear(4, 2).requires_grad_(False)
    model = Replicas(nn.Sequential(embedding, frozen), 2)
    backward(model(torch.tensor([1, 2, 3, 1])).sum())
    assert embedding.weight.grad is not None
    assert embedding.weight.grad.is_sparse
    assert embedding.weight.grad.coalesce().indices().tolist() == [[1, 2, 3]]
    assert all(parameter.grad is None for parameter in frozen.parameters())


def test_autocast_reaches_the_copies() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert Replicas(made("tutorial"), 2)(torch.randn(4, 5)).dtype is torch.bfloat16


# The copies


def test_copies_have_no_parameters_of_their_own_and_hooks_run_in_each() -> None:
    module = made("mlp")
    seen: list[nn.Module] = []
    module.register_forward_hook(lambda called, inputs, output: seen.append(called))
    model = Replicas(module, 3).eval()
    before = {key: id(value) for key, value in model.state_dict(keep_vars=True).items()}
    model(torch.randn(6, 16))
    assert len(set(seen)) == 3
    assert module not in seen
    for copied in seen:
        assert type(copied) is type(module)
        assert not list(copied.parameters())
        assert copied.get_submodule("head").weight is module.get_submodule("head").weight
    assert {key: id(value) for key, value in model.state_dict(keep_vars=True).items()} == before
    assert list(module.parameters())


@pytest.mark.parametrize("task", ["mlp", "vgg-named", "tagger", "bert-tied"])
def test_copies_are_built_as_torch_builds_them(task: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.nn.parallel.replicate is a function that hides the module of its name."""
    torch_s = sys.modules["torch.nn.parallel.replicate"]

    def broadcast(tensors: Sequence[Tensor], devices: Sequence[int], detach: bool = False) -> list[list[Tensor]]:
        return [[tensor.clone() for tensor in tensors] for _ in devices]

    monkeypatch.setattr(torch_s, "_broadcast_coalesced_reshape", broadcast)
    monkeypatch.setattr(torch_s, "_get_device_index", lambda device, optional: device)
    module = made(task).eval()
    inputs, _ = samples(task, 4)
    expected = torch_s.replicate(module, [0, 1])
    found = Replicas(module, 2).replicate(module, [CPU, CPU])
    assert len(found) == len(expected) == 2
    for theirs, ours in zip(expected, found, strict=True):
        torch.testing.assert_close(ours(*inputs), theirs(*inputs))
        assert not list(theirs.parameters())
        for (name, one), (same, other) in zip(theirs.named_modules(), ours.named_modules(), strict=True):
            assert (name, type(one)) == (same, type(other))
            assert one._parameters == other._parameters
            assert vars(one).keys() - {"_former_parameters"} == vars(other).keys()
            assert_same(dict(one.named_buffers()), dict(other.named_buffers()))


def test_only_the_first_replica_updates_running_statistics() -> None:
    inputs = torch.randn(30, 16) * torch.arange(1, 31)[:, None]
    plain = made("mlp")
    wrapped = Replicas(copy.deepcopy(plain), 3)
    plain(inputs[:10])
    wrapped(inputs)
    assert_same(dict(plain.named_buffers()), dict(wrapped.module.named_buffers()))
    assert int(wrapped.state_dict()["module.body.1.num_batches_tracked"]) == 1


def test_shared_modules_and_tied_parameters_are_shared_in_each_copy() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    module.append(module[0])
    module[1].weight = module[0].weight
    module[1].register_module("absent", None)
    module[1].register_buffer("empty", None)
    found: list[nn.Module] = []
    module.register_forward_hook(lambda called, inputs, output: found.append(called))
    inputs = torch.randn(6, 4)
    torch.testing.assert_close(Replicas(module, 2)(inputs), module(inputs))
    for copied in found[:2]:
        first, second, third = (copied.get_submodule(name) for name in "012")
        assert first is third
        assert first is not module[0]
        assert first.weight is second.weight
        assert second.absent is None
        assert second.empty is None


def test_an_error_in_a_replica_names_it() -> None:
    def answer(rows: Tensor) -> Tensor:
        if rows.min() >= 20:
            raise KeyError("no such row")
        return rows

    model = Replicas(Calls(answer), 4)
    with pytest.raises(KeyError, match=r"Caught KeyError in replica 3 of 4(?s:.*)no such row") as caught:
        model(torch.arange(40))
    assert caught.value.__context__ is None


@pytest.mark.parametrize(
    ("answer", "error", "words"),
    [
        (lambda rows: 3, TypeError, "returned int"),
        (lambda rows: "text", TypeError, "returned str"),
        (lambda rows: {int(rows[0]) + n: rows for n in range(len(rows))}, ValueError, "different lengths"),
        (lambda rows: (rows,) * len(rows), ValueError, "shorter"),
        (lambda rows: rows.expand(2, len(rows)), RuntimeError, "must match except in dimension 0"),
    ],
)
def test_what_cannot_be_gathered_is_refused(
    answer: Callable[[Tensor], Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        Replicas(Calls(answer), 2)(torch.arange(3))


def test_a_module_on_two_devices_is_refused_in_torch_s_words() -> None:
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3, device="meta"))
    with pytest.raises(RuntimeError, match=r"on device cpu \(device_ids\[0\]\) but found one of them on device: meta"):
        Replicas(module, 2)(torch.randn(4, 3))


def test_the_device_is_where_the_module_is_now() -> None:
    model = Replicas(made("tutorial"), 3)
    assert model(torch.randn(6, 5)).device == CPU
    model.to("meta")
    assert model(torch.randn(6, 5)).device.type == "meta"


def test_a_compiled_model_is_not_copied_because_that_empties_it() -> None:
    model = compiled(made("demo"))
    with pytest.raises(Unsupported, match="cannot copy a compiled model") as refused:
        Replicas(model, 2)
    assert refused.value.hint == "compile it after wrapping: dp,compile"
    assert Replicas(model, 1)(torch.randn(4, 3)).shape == (4, 5)
    model._replicate_for_data_parallel()  # type: ignore[no-untyped-call]
    assert not list(model._orig_mod.parameters())


def test_replicas_in_compile_have_both_prefixes_and_equal_outputs() -> None:
    model = Replicas(made("tutorial"), 3)
    outer = compiled(model)
    assert list(outer.state_dict()) == ["_orig_mod.module.fc.weight", "_orig_mod.module.fc.bias"]
    inputs = torch.randn(30, 5)
    torch.testing.assert_close(outer(inputs), model.module(inputs))


# An nn.DataParallel


def test_keys_and_class_are_those_of_data_parallel() -> None:
    model = Replicas(made("mlp"), 2)
    assert isinstance(model, nn.DataParallel)
    assert_same(nn.DataParallel(made("mlp")).state_dict(), model.state_dict())
    nn.DataParallel(made("mlp")).load_state_dict(model.state_dict())
    fresh = TASKS["mlp"].model()
    Replicas(fresh, 3).load_state_dict(nn.DataParallel(made("mlp")).state_dict())
    assert_same(made("mlp").state_dict(), fresh.state_dict())
    with pytest.raises(RuntimeError, match="Missing key"):
        fresh.load_state_dict(model.state_dict())


def through_torch(model: nn.Module) -> Any:
    stream = io.BytesIO()
    torch.save(model, stream)
    stream.seek(0)
    return torch.load(stream, weights_only=False)


@pytest.mark.parametrize("called_before", [False, True])
@pytest.mark.parametrize(
    "again",
    [copy.deepcopy, copy.copy, lambda model: pickle.loads(pickle.dumps(model)), through_torch],
    ids=["deepcopy", "copy", "pickle", "torch"],
)
def test_a_copy_or_a_pickle_works_like_the_original_and_is_silent(
    again: Callable[[Any], Any], called_before: bool
) -> None:
    lines: list[str] = []
    model = Replicas(made("mlp"), 3, log=lambda line: lines.append(line), steps=True).eval()
    inputs = torch.randn(6, 16)
    if called_before:
        model(inputs)
    found = again(model)
    assert type(found) is Replicas
    assert (found.replicas, found.steps, found.dim, found.log) == (3, True, 0, None)
    assert_same(model.state_dict(), found.state_dict())
    expected = model(inputs)
    told = len(lines)
    torch.testing.assert_close(found(inputs), expected)
    assert len(lines) == told > 0
    found.log = lines.append
    found(inputs)
    assert len(lines) > told


@pytest.mark.parametrize(
    ("replicas", "options", "words"),
    [
        (0, {}, "at least one replica, not 0"),
        (3, {"device_ids": [0, 1]}, "3 replicas need the same number of GPUs, not 2"),
        (3, {"output_device": 1}, "cannot have another output device"),
    ],
)
def test_impossible_arguments_are_refused(replicas: int, options: dict[str, Any], words: str) -> None:
    with pytest.raises(Unsupported, match=words):
        Replicas(made("demo"), replicas, **options)


def test_with_gpus_enough_the_steps_are_torch_s_and_only_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without GPUs here, what DataParallel does on them is stood in for; that and how it is called is shown."""
    called: list[tuple[str, Any]] = []

    def init(self: Any, module: nn.Module, ids: list[int], output: int | None, dim: int) -> None:
        nn.Module.__init__(self)
        self.module, self.device_ids, self.dim, self.src_device_obj = module, ids, dim, CPU
        self.output_device = ids[0] if output is None else output

    def scatter(self: Any, inputs: Any, kwargs: Any, ids: Any) -> Any:
        called.append(("scatter", ids))
        return tuple((share,) for share in inputs[0].chunk(len(ids))), ({},) * len(ids)

    def replicate(self: Any, module: nn.Module, ids: Any) -> list[nn.Module]:
        called.append(("replicate", ids))
        return [module] * len(ids)

    def parallel_apply(self: Any, replicas: Any, inputs: Any, kwargs: Any) -> list[Any]:
        called.append(("parallel_apply", self.device_ids))
        return [each(*share) for each, share in zip(replicas, inputs, strict=True)]

    def gather(self: Any, outputs: Any, device: Any) -> Any:
        called.append(("gather", device))
        return torch.cat(outputs)

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(nn.DataParallel, "__init__", init)
    for step in (scatter, replicate, parallel_apply, gather):
        monkeypatch.setattr(nn.DataParallel, step.__name__, step)
    lines: list[str] = []
    module = made("tutorial")
    inputs = torch.randn(30, 5)
    first = Replicas(module, 2, log=lines.append, steps=True)
    chosen = Replicas(module, 2, device_ids=[3, 1], output_device=1, log=lines.append)
    for model in (first, chosen):
        torch.testing.assert_close(model(inputs), module(inputs))
    assert called == [
        *[("scatter", [0, 1]), ("replicate", [0, 1]), ("parallel_apply", [0, 1]), ("gather", 0)],
        *[("scatter", [3, 1]), ("replicate", [3, 1]), ("parallel_apply", [3, 1]), ("gather", 1)],
    ]
    told = [
        "replica 1 of 2: input [15, 5] -> output [15, 2]",
        "replica 2 of 2: input [15, 5] -> output [15, 2]",
    ]
    whole = "gathered: input [30, 5] -> output [30, 2]"
    assert lines == [
        *["scatter: 30 -> 15 15", "replicate: 2 copies", "parallel_apply", *told, "gather", whole],
        *[*told, whole],
    ]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_on_two_gpus() -> None:
    lines: list[str] = []
    module = made("tutorial").to("cuda:0")
    model = Replicas(module, 2, log=lines.append, steps=True)
    inputs = torch.randn(30, 5)
    torch.testing.assert_close(model(inputs), module(inputs.to("cuda:0")))
    assert lines[0] == "scatter: 30 -> 15 15"
    assert lines[-1] == "gathered: input [30, 5] -> output [30, 2]"


@pytest.mark.skipif(torch.cuda.device_count() != 1, reason="needs one GPU")
def test_copies_share_one_gpu() -> None:
    module = made("tutorial").to("cuda")
    model = Replicas(module, 8)
    inputs = torch.randn(30, 5)
    torch.testing.assert_close(model(inputs), module(inputs.to("cuda")))


# Packed sequences (https://docs.pytorch.org/docs/stable/notes/faq.html#pack-rnn-unpack-with-data-parallelism)


def sentences() -> tuple[Tensor, Tensor]:
    """Two short rows, then two long ones: the halves of the batch differ in their longest."""
    lengths = torch.tensor([3, 2, 7, 5])
    words = torch.randint(1, 50, (4, 7), generator=torch.Generator().manual_seed(0))
    return words.masked_fill(torch.arange(7) >= lengths[:, None], 0), lengths


def test_without_total_length_replicas_return_different_lengths_and_gathering_fails() -> None:
    torch.manual_seed(0)
    lines: list[str] = []
    model = Replicas(Tagger(total_length=False), 2, log=lines.append)
    with pytest.raises(RuntimeError, match=r"Sizes of tensors must match except in dimension 0.*3 but got size 7"):
        model(*sentences())
    assert lines == [
        "replica 1 of 2: input [2, 7], [2] -> output [2, 3, 5]",
        "replica 2 of 2: input [2, 7], [2] -> output [2, 7, 5]",
    ]


def test_with_total_length_they_are_gathered() -> None:
    torch.manual_seed(0)
    lines: list[str] = []
    tagger = Tagger()
    words, lengths = sentences()
    found = Replicas(tagger, 2, log=lines.append)(words, lengths)
    torch.testing.assert_close(found, tagger(words, lengths))
    assert [line.split(" -> ")[1] for line in lines] == ["output [2, 7, 5]", "output [2, 7, 5]", "output [4, 7, 5]"]


def test_a_share_is_cut_to_the_devices_there_are() -> None:
    assert [len(share) for share in scattered(torch.arange(10), [CPU] * 8, 0)] == [2, 2, 2, 2, 2]
    assert scattered("text", [CPU] * 3, 0) == ["text"] * 3
