"""Training tasks: each has a model, synthetic data that it can learn, and a loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Generator, Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

from ckptfix.dataclass import dataclass
from ckptfix.errors import Unsupported
from ckptfix.trainer import models, text

Data = Callable[[Generator, int], tuple[tuple[Tensor, ...], Tensor]]


@dataclass(frozen=True, slots=True)
class LearningTask:
    """A model and what it learns.

    Attributes:
        name: as on the command line.
        about: one line for its help.
        model: makes the model, freshly initialized from torch's default generator.
        data: makes inputs of ``model(*inputs)`` and targets, as many of each as requested, from a generator.
        loss: computes the loss from the model's result and the targets; it may have a value for each replica, which the
            trainer averages.
        rate: learning rate for Adam.
        samples: number of samples to learn from.
        batch: samples in a step, over all processes together.
        full: makes the model with its published shapes; None if there are no such shapes.
        with_targets: whether the model takes the targets after its inputs and returns the loss before its scores.
        full_rate: learning rate for `full`, which would diverge with `rate`.
    """

    name: str
    about: str
    model: Callable[[], nn.Module]
    data: Data
    loss: Callable[[Any, Tensor], Tensor]
    rate: float
    samples: int = 512
    batch: int = 32
    full: Callable[[], nn.Module] | None = None
    with_targets: bool = False
    full_rate: float = 1e-4

    def full_size(self) -> LearningTask:
        """Return the same task with the model of published shapes, at its learning rate.

        Raises:
            Unsupported: the task has no such model.
        """
        if self.full is None:
            raise Unsupported(f"{self.name} has no other size")
        return replace(self, model=self.full, rate=self.full_rate)


def linear_map(features: int, outputs: int) -> Data:
    """Return a maker of points, with targets computed by a linear map that the generator draws."""

    def data(generator: Generator, count: int) -> tuple[tuple[Tensor, ...], Tensor]:
        weight = torch.randn(features, outputs, generator=generator)
        inputs = torch.randn(count, features, generator=generator)
        return (inputs,), inputs @ weight + 1

    return data


def clusters(*shape: int) -> Data:
    """Return a maker of points or images in `models.CLASSES` classes, each scattered around a center."""

    def data(generator: Generator, count: int) -> tuple[tuple[Tensor, ...], Tensor]:
        centres = torch.randn(models.CLASSES, *shape, generator=generator)
        labels = torch.randint(models.CLASSES, (count,), generator=generator)
        return (centres[labels] + torch.randn(count, *shape, generator=generator),), labels

    return data


def cut(words: Tensor, generator: Generator, shortest: int) -> tuple[Tensor, Tensor]:
    """Cut each row to a random length of at least `shortest`: return padded words, and the lengths [N]."""
    lengths = torch.randint(shortest, words.shape[1] + 1, (len(words),), generator=generator)
    beyond = torch.arange(words.shape[1]) >= lengths[:, None]
    return words.masked_fill(beyond, text.PADDING), lengths


def tagged(generator: Generator, count: int) -> tuple[tuple[Tensor, ...], Tensor]:
    """Make words [N, 12] and lengths [N]; a word has a label of its own, and a different one after an even word."""
    labels = torch.randint(5, (2, 50), generator=generator)
    drawn = torch.randint(1, 50, (count, 12), generator=generator)
    words, lengths = cut(drawn, generator, 3)
    even_before = torch.nn.functional.pad(1 - words[:, :-1] % 2, (1, 0))
    return (words, lengths), labels[even_before, words].masked_fill(words == text.PADDING, text.IGNORED)


def names(generator: Generator, count: int) -> tuple[tuple[Tensor, ...], Tensor]:
    """Make words [N, 16] of 18 kinds, four of each. Kind 0 is O; others are B-, or I- after a word of their kind."""
    kinds = torch.randint(18, (count, 16), generator=generator)
    goes_on = torch.rand(count, 16, generator=generator) < 0.4
    for place in range(1, 16):
        kinds[:, place] = torch.where(goes_on[:, place], kinds[:, place - 1], kinds[:, place])
    words, _ = cut(1 + 4 * kinds + torch.randint(4, kinds.shape, generator=generator), generator, 3)
    inside = torch.zeros_like(kinds)
    inside[:, 1:] = kinds[:, 1:] == kinds[:, :-1]
    labels = torch.where(kinds == 0, 0, 2 * kinds - 1 + inside)
    return (words,), labels.masked_fill(words == text.PADDING, text.IGNORED)


def masked(generator: Generator, count: int) -> tuple[tuple[Tensor, ...], Tensor]:
    """Make words [N, 16], each row from one of 8 topics of 8 words; some are hidden, and these are the targets."""
    topics = torch.randint(8, (count, 1), generator=generator)
    words = 1 + 8 * topics + torch.randint(8, (count, 16), generator=generator)
    hidden = torch.rand(count, 16, generator=generator) < 0.2
    # At least one word per row is hidden: a mean over no targets would be NaN.
    hidden[:, 0] = True
    mask = 65
    return (words.masked_fill(hidden, mask),), words.masked_fill(~hidden, text.IGNORED)


def returned(outputs: Any, targets: Tensor) -> Tensor:
    """Return the loss that the model itself computed: a scalar, or a vector with one loss per replica."""
    loss: Tensor = outputs[0]
    return loss


IMAGES = clusters(3, 32, 32)

TASKS: dict[str, LearningTask] = {
    task.name: task
    for task in (
        LearningTask("demo", "one linear layer, fc, 3 -> 5", models.Demo, linear_map(3, 5), mse_loss, 0.05),
        LearningTask("mlp", "two linear layers around a BatchNorm", models.MLP, clusters(16), cross_entropy, 0.01),
        LearningTask(
            "tutorial",
            "the DataParallel tutorial's linear layer, 5 -> 2, with 100 samples in batches of 30",
            models.Tutorial,
            linear_map(5, 2),
            mse_loss,
            0.05,
            samples=100,
            batch=30,
        ),
        LearningTask("vgg", "a narrow VGG", models.VGG, IMAGES, cross_entropy, 0.003, full=models.vgg16),
        LearningTask(
            "vgg19", "a narrow, deeper VGG", models.deeper_vgg, IMAGES, cross_entropy, 0.003, full=models.vgg19
        ),
        LearningTask(
            "vgg-named",
            "the layers of vgg under different names (conv1_1, fc6)",
            models.NamedVGG,
            IMAGES,
            cross_entropy,
            0.003,
            full=models.named_vgg16,
        ),
        LearningTask("tagger", "an LSTM over packed sequences of words", text.Tagger, tagged, text.word_loss, 0.02),
        LearningTask(
            "bert",
            "a BERT-style token classifier with 35 labels",
            text.TokenClassifier,
            names,
            returned,
            0.005,
            with_targets=True,
        ),
        LearningTask(
            "bert-tied",
            "a BERT-style model for hidden words, with output weights tied to its embeddings",
            text.MaskedWords,
            masked,
            returned,
            0.005,
            with_targets=True,
        ),
    )
}
