"""The trainer's tasks: each is learned, each model has the shapes and the habits that the scenarios need."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.autograd import backward
from torch.nn.functional import pad
from torch.nn.parallel import DistributedDataParallel

from ckptfix.errors import Unsupported
from ckptfix.trainer import models, text
from ckptfix.trainer.replicas import Replicas
from ckptfix.trainer.tasks import TASKS, LearningTask

pytestmark = pytest.mark.slow

FULL = [name for name, task in TASKS.items() if task.full is not None]
WITH_TARGETS = [name for name, task in TASKS.items() if task.with_targets]

BLOCKS = {"vgg": (2, 2, 3, 3, 3), "vgg19": (2, 2, 4, 4, 4), "vgg-named": (2, 2, 3, 3, 3)}
CONVOLUTIONS = {
    "vgg": [0, 2, 5, 7, 10, 12, 14, 17, 19, 21, 24, 26, 28],
    "vgg19": [0, 2, 5, 7, 10, 12, 14, 16, 19, 21, 23, 25, 28, 30, 32, 34],
}
"""The N of ``features.N`` in torchvision's vgg16 and vgg19."""


def made(task: str) -> Any:
    torch.manual_seed(0)
    return TASKS[task].model()


def samples(task: str, count: int, seed: int = 0) -> tuple[tuple[Tensor, ...], Tensor]:
    return TASKS[task].data(torch.Generator().manual_seed(seed), count)


def called(model: nn.Module, task: LearningTask, inputs: tuple[Tensor, ...], targets: Tensor) -> Any:
    return model(*inputs, targets) if task.with_targets else model(*inputs)


def learned(model: nn.Module, task: LearningTask, epochs: int) -> list[float]:
    """The mean loss of each epoch."""
    inputs, targets = task.data(torch.Generator().manual_seed(0), task.samples)
    optimizer = torch.optim.Adam(model.parameters(), task.rate)
    losses = []
    for epoch in range(epochs):
        order = torch.randperm(task.samples, generator=torch.Generator().manual_seed(epoch))
        total = 0.0
        for start in range(0, task.samples, task.batch):
            chosen = order[start : start + task.batch]
            outputs = called(model, task, tuple(each[chosen] for each in inputs), targets[chosen])
            loss = task.loss(outputs, targets[chosen]).mean()
            optimizer.zero_grad()
            backward(loss)
            optimizer.step()
            total += loss.item() * len(chosen) / task.samples
        losses.append(total)
    return losses


# Every task


@pytest.mark.sampled(2, test_all=5)
@pytest.mark.parametrize("name", TASKS)
def test_the_loss_falls_within_four_epochs(name: str) -> None:
    losses = learned(made(name), TASKS[name], 4)
    assert losses[-1] < 0.65 * losses[0], losses
    assert losses == sorted(losses, reverse=True)


def test_names_are_those_of_the_table() -> None:
    assert list(TASKS) == ["demo", "mlp", "tutorial", "vgg", "vgg19", "vgg-named", "tagger", "bert", "bert-tied"]
    assert all(name == task.name for name, task in TASKS.items())


@pytest.mark.parametrize("name", TASKS)
def test_data_is_as_many_samples_as_asked_and_repeats_with_its_seed(name: str) -> None:
    inputs, targets = samples(name, 10)
    assert [len(each) for each in (*inputs, targets)] == [10] * (len(inputs) + 1)
    again, other = samples(name, 10), samples(name, 10, seed=1)
    for each, same, different in zip((*inputs, targets), (*again[0], again[1]), (*other[0], other[1]), strict=True):
        assert torch.equal(each, same)
        assert not torch.equal(each, different)


@pytest.mark.parametrize("name", TASKS)
def test_a_checkpoint_is_small(name: str) -> None:
    state = made(name).state_dict()
    assert sum(value.nbytes for value in state.values()) < 200_000


@pytest.mark.parametrize("name", TASKS)
def test_without_targets_a_model_returns_one_tensor_with_a_row_for_each_sample(name: str) -> None:
    inputs, _ = samples(name, 6)
    outputs = made(name).eval()(*inputs)
    assert isinstance(outputs, Tensor)
    assert len(outputs) == 6
    assert outputs.isfinite().all()


def test_the_tutorial_has_its_sizes() -> None:
    task = TASKS["tutorial"]
    assert {key: tuple(value.shape) for key, value in made("tutorial").state_dict().items()} == {
        "fc.weight": (2, 5),
        "fc.bias": (2,),
    }
    assert (task.samples, task.batch) == (100, 30)


# VGG


def full(name: str) -> nn.Module:
    """The full-size model, without memory for its parameters."""
    with torch.device("meta"):
        return TASKS[name].full_size().model()


@pytest.mark.parametrize(
    ("name", "parameters"), [("vgg", 138_357_544), ("vgg19", 143_667_240), ("vgg-named", 138_357_544)]
)
def test_the_full_size_has_the_published_number_of_parameters(name: str, parameters: int) -> None:
    model = full(name)
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters
    assert model(torch.empty(2, 3, 224, 224, device="meta")).shape == (2, 1000)


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_the_full_size_has_the_published_keys_and_shapes(name: str) -> None:
    channels = [3, *(width for width, n in zip((64, 128, 256, 512, 512), BLOCKS[name], strict=True) for _ in range(n))]
    expected: dict[str, tuple[int, ...]] = {}
    for number, before, after in zip(CONVOLUTIONS[name], channels, channels[1:], strict=False):
        expected[f"features.{number}.weight"] = (after, before, 3, 3)
        expected[f"features.{number}.bias"] = (after,)
    for number, (before, after) in zip((0, 3, 6), ((25088, 4096), (4096, 4096), (4096, 1000)), strict=True):
        expected[f"classifier.{number}.weight"] = (after, before)
        expected[f"classifier.{number}.bias"] = (after,)
    found = {key: tuple(value.shape) for key, value in full(name).state_dict().items()}
    assert list(found.items()) == list(expected.items())
    assert len(channels) - 1 + 3 == (16 if name == "vgg" else 19)


@pytest.mark.parametrize("name", FULL)
def test_the_full_size_takes_the_data_of_the_task(name: str) -> None:
    (images,), _ = samples(name, 2)
    assert full(name)(images.to("meta")).shape == (2, 1000)


def test_the_full_size_learns_at_its_own_rate_and_others_have_none() -> None:
    assert TASKS["vgg"].full_size().rate < TASKS["vgg"].rate
    assert FULL == ["vgg", "vgg19", "vgg-named"]
    for name in set(TASKS) - set(FULL):
        with pytest.raises(Unsupported, match=f"{name} has no other size"):
            TASKS[name].full_size()


def test_the_named_vgg_has_other_names_and_the_same_shapes_in_the_same_order() -> None:
    for one, other in ((made("vgg"), made("vgg-named")), (full("vgg"), full("vgg-named"))):
        ours, theirs = one.state_dict(), other.state_dict()
        assert not set(ours) & set(theirs)
        assert [value.shape for value in ours.values()] == [value.shape for value in theirs.values()]
    names = [key.removesuffix(".weight") for key in full("vgg-named").state_dict() if key.endswith(".weight")]
    assert names == [
        *(f"conv{block}_{place}" for block, count in enumerate(BLOCKS["vgg"], 1) for place in range(1, count + 1)),
        *("fc6", "fc7", "fc8"),
    ]


def test_parameters_given_by_position_make_the_named_vgg_the_other_one() -> None:
    learned(vgg := made("vgg"), TASKS["vgg"], 1)
    named = models.NamedVGG().eval()
    (images,), _ = samples("vgg", 8)
    expected = vgg.eval()(images)
    assert not torch.allclose(named(images), expected)
    named.load_state_dict(dict(zip(named.state_dict(), vgg.state_dict().values(), strict=True)))
    torch.testing.assert_close(named(images), expected)


def test_the_named_vgg_drops_out_in_training_only() -> None:
    named = made("vgg-named")
    (images,), _ = samples("vgg-named", 4)
    assert not torch.equal(named(images), named(images))
    named.eval()
    assert torch.equal(named(images), named(images))


# The tagger


def test_padding_changes_no_label_of_the_tagger() -> None:
    (words, lengths), targets = samples("tagger", 8)
    tagger = made("tagger")
    expected = tagger(words, lengths)
    wider = tagger(pad(words, (0, 5)), lengths)
    assert wider.shape[1] == words.shape[1] + 5
    torch.testing.assert_close(wider[:, : words.shape[1]], expected)
    wider_loss = text.word_loss(wider, pad(targets, (0, 5), value=text.IGNORED))
    torch.testing.assert_close(wider_loss, text.word_loss(expected, targets))


def test_the_tagger_returns_the_width_of_its_input_or_of_its_longest_row() -> None:
    words = torch.tensor([[3, 4, 0, 0], [5, 0, 0, 0]])
    lengths = torch.tensor([2, 1])
    assert text.Tagger()(words, lengths).shape == (2, 4, 5)
    assert text.Tagger(total_length=False)(words, lengths).shape == (2, 2, 5)


def test_the_tagger_makes_its_state_where_its_words_are_and_in_their_precision() -> None:
    """A state made by torch.zeros alone would be float32, and on the default device."""
    (words, lengths), _ = samples("tagger", 4)
    tagger = made("tagger").double()
    with torch.device("meta"):
        outputs = tagger(words, lengths)
    assert (outputs.device.type, outputs.dtype) == ("cpu", torch.float64)


def test_words_beyond_a_length_have_no_target_and_all_others_have_one() -> None:
    (words, lengths), targets = samples("tagger", 200)
    beyond = torch.arange(words.shape[1]) >= lengths[:, None]
    assert torch.equal(words == text.PADDING, beyond)
    assert torch.equal(targets == text.IGNORED, beyond)
    assert set(targets[~beyond].tolist()) == set(range(5))
    assert set(lengths.tolist()) == set(range(3, 13))


def test_what_the_tagger_says_of_padding_counts_for_nothing() -> None:
    (words, lengths), targets = samples("tagger", 8)
    scores = made("tagger")(words, lengths).detach().requires_grad_()
    backward(text.word_loss(scores, targets))
    assert scores.grad is not None
    touched = scores.grad.abs().sum(-1) > 0
    assert torch.equal(touched, words != text.PADDING)


# The BERT-style models


@pytest.mark.parametrize("name", WITH_TARGETS)
def test_padding_is_not_attended_to(name: str) -> None:
    model = made(name).eval()
    words = torch.randint(1, 60, (4, 10), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(model(pad(words, (0, 6)))[:, :10], model(words))


@pytest.mark.parametrize("name", WITH_TARGETS)
@pytest.mark.parametrize("training", [False, True])
def test_short_rows_leave_the_width_as_it_is(name: str, training: bool) -> None:
    """Else the outputs of replicas would not fit together, as the tagger's without its total length."""
    words = torch.tensor([[3, 4, 0, 0], [5, 0, 0, 0]])
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        assert made(name).train(training)(words).shape[:2] == (2, 4)


@pytest.mark.parametrize("name", WITH_TARGETS)
def test_with_targets_the_loss_comes_first(name: str) -> None:
    model = made(name).eval()
    inputs, targets = samples(name, 8)
    loss, scores = model(*inputs, targets)
    assert loss.shape == ()
    assert torch.equal(scores, model(*inputs))
    assert torch.equal(loss, text.word_loss(scores, targets))
    assert TASKS[name].loss((loss, scores), targets) is loss


@pytest.mark.parametrize("name", WITH_TARGETS)
def test_every_row_has_a_target_and_so_every_share_a_loss(name: str) -> None:
    inputs, targets = samples(name, 512)
    assert (targets != text.IGNORED).any(1).all()
    with pytest.warns(UserWarning, match="scalars"):
        losses = Replicas(made(name), 64)(inputs[0][:64], targets[:64])[0]
    assert losses.shape == (64,)
    assert losses.isfinite().all()


def test_the_classifier_has_35_labels_and_the_data_too() -> None:
    (words,), labels = samples("bert", 512)
    assert made("bert").state_dict()["classifier.weight"].shape[0] == 35
    assert set(labels[labels != text.IGNORED].tolist()) == set(range(35))
    assert torch.equal(labels == text.IGNORED, words == text.PADDING)


def test_inside_labels_follow_a_word_of_their_kind_and_no_others_do() -> None:
    _, labels = samples("bert", 512)
    labels = pad(labels, (1, 0))
    before, here = labels[:, :-1], labels[:, 1:]
    named = here > 0
    kind_before, kind = (before + 1) // 2, (here + 1) // 2
    inside = named & (here % 2 == 0)
    assert inside.any()
    assert torch.equal(inside, named & (before > 0) & (kind_before == kind))


def test_hidden_words_are_the_targets() -> None:
    (words,), targets = samples("bert-tied", 100)
    hidden = targets != text.IGNORED
    assert torch.equal(words == 65, hidden)
    assert 0.15 < hidden.float().mean() < 0.35
    restored = torch.where(hidden, targets, words) - 1
    assert (restored // 8 == restored[:, :1] // 8).all()


def test_tied_weights_are_one_parameter_under_two_names() -> None:
    words, decoder = "bert.embeddings.word_embeddings.weight", "decoder.weight"
    for tied in (True, False):
        model = text.MaskedWords(tied=tied)
        state = model.state_dict()
        assert {words, decoder} <= set(state)
        assert (state[words].data_ptr() == state[decoder].data_ptr()) == tied
        assert (decoder in dict(model.named_parameters())) != tied
    learned(model := made("bert-tied"), TASKS["bert-tied"], 1)
    assert model.decoder.weight is model.bert.embeddings.word_embeddings.weight


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    """A process group of this process alone: a new one, or an earlier test's."""
    if distributed.is_initialized():
        yield
        return
    distributed.init_process_group("gloo", init_method=(tmp_path / "meeting").as_uri(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.mark.parametrize("name", TASKS)
@pytest.mark.usefixtures("group")
@pytest.mark.filterwarnings("ignore:Was asked to gather along dimension 0:UserWarning")
def test_a_step_is_the_same_plain_in_data_parallel_and_in_ddp(name: str) -> None:
    """Shares of equal size and, for the losses of replicas, of equally many targets."""
    task = TASKS[name]
    inputs, targets = samples(name, 8)
    inputs = tuple(torch.cat([each, each]) for each in inputs)
    targets = torch.cat([targets, targets])
    gradients = []
    for wrap in (lambda model: model, nn.DataParallel, lambda model: Replicas(model, 2), DistributedDataParallel):
        model = wrap(made(name).eval())
        backward(task.loss(called(model, task, inputs, targets), targets).mean())
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert all(gradient is not None for gradient in gradients[0])
    for found in gradients[1:]:
        torch.testing.assert_close(found, gradients[0])
