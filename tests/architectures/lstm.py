"""A bidirectional LSTM tagger, and an LSTM language model whose output weights are its embeddings."""

from __future__ import annotations

from typing import Any

import torch
from architectures.family import Family, Style, tokens
from torch import Tensor, nn
from torch.nn import functional

VOCABULARY = 30
WIDTH = 12
HIDDEN = 8
TAGS = 6
BIASES = (("bias_ih", "bias_hh"),)
"""An LSTM adds them, so that nothing distinguishes them."""


class Tagger(nn.Module):
    """embedding, lstm.weight_ih_l0, lstm.weight_ih_l0_reverse ... fc."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.lstm = nn.LSTM(WIDTH, HIDDEN, depth, batch_first=True, bidirectional=True)
        self.fc = nn.Linear(2 * HIDDEN, TAGS)

    def forward(self, ids: Tensor) -> Any:
        return self.fc(self.lstm(self.embedding(ids))[0])


class Wrapped(nn.Module):
    """One module in another, as AllenNLP wraps what it takes from torch."""

    def __init__(self, name: str, module: nn.Module) -> None:
        super().__init__()
        self.name = name
        self.add_module(name, module)

    def forward(self, x: Tensor) -> Any:
        return self.get_submodule(self.name)(x)


class AllenTagger(nn.Module):
    """The projection before the encoder; names go through token_embedder_tokens and _module."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.text_field_embedder = Wrapped("token_embedder_tokens", nn.Embedding(VOCABULARY, WIDTH))
        self.tag_projection_layer = Wrapped("_module", nn.Linear(2 * HIDDEN, TAGS))
        lstm = nn.LSTM(WIDTH, HIDDEN, depth, batch_first=True, bidirectional=True)
        self.encoder = Wrapped("_module", lstm)

    def forward(self, ids: Tensor) -> Any:
        return self.tag_projection_layer(self.encoder(self.text_field_embedder(ids))[0])


class ListTagger(nn.Module):
    """rnns.N.weight_ih_l0: one LSTM for each layer."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.word_embeds = nn.Embedding(VOCABULARY, WIDTH)
        self.rnns = nn.ModuleList(
            nn.LSTM(2 * HIDDEN if layer else WIDTH, HIDDEN, batch_first=True, bidirectional=True)
            for layer in range(depth)
        )
        self.hidden2tag = nn.Linear(2 * HIDDEN, TAGS)

    def forward(self, ids: Tensor) -> Any:
        x = self.word_embeds(ids)
        for rnn in self.rnns:
            x = rnn(x)[0]
        return self.hidden2tag(x)


class CellTagger(nn.Module):
    """forward_cells.N.weight_ih, then all backward_cells: two orders in one model."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        widths = [2 * HIDDEN if layer else WIDTH for layer in range(depth)]
        self.forward_cells = nn.ModuleList(nn.LSTMCell(width, HIDDEN) for width in widths)
        self.backward_cells = nn.ModuleList(nn.LSTMCell(width, HIDDEN) for width in widths)
        self.output = nn.Linear(2 * HIDDEN, TAGS)

    def forward(self, ids: Tensor) -> Any:
        x = self.embed(ids)
        for ahead, back in zip(self.forward_cells, self.backward_cells, strict=True):
            x = torch.cat([run(ahead, x), run(back, x.flip(1)).flip(1)], 2)
        return self.output(x)


def run(cell: nn.Module, x: Tensor) -> Tensor:
    """Hidden states of `cell` over [batch, length, width]."""
    state = None
    found = []
    for step in x.unbind(1):
        state = cell(step, state)
        found.append(state[0])
    return torch.stack(found, 1)


class TiedModel(nn.Module):
    """encoder, rnn.weight_ih_l0 ..., decoder, as torch's word language model; decoder.weight is encoder.weight."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.encoder = nn.Embedding(VOCABULARY, WIDTH)
        self.rnn = nn.LSTM(WIDTH, WIDTH, depth, batch_first=True)
        self.decoder = nn.Linear(WIDTH, VOCABULARY)
        self.decoder.weight = self.encoder.weight

    def forward(self, ids: Tensor) -> Any:
        return self.decoder(self.rnn(self.encoder(ids))[0])


class AwdModel(nn.Module):
    """0.encoder, 0.rnns.N.weight_ih_l0, 1.decoder: two parts, numbered; tied."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        first, last = nn.Module(), nn.Module()
        first.encoder = nn.Embedding(VOCABULARY, WIDTH)
        first.rnns = nn.ModuleList(nn.LSTM(WIDTH, WIDTH, batch_first=True) for _ in range(depth))
        last.decoder = nn.Linear(WIDTH, VOCABULARY)
        last.decoder.weight = first.encoder.weight
        self.add_module("0", first)
        self.add_module("1", last)
        self.depth = depth

    def forward(self, ids: Tensor) -> Any:
        x = self.get_submodule("0.encoder")(ids)
        for layer in range(self.depth):
            x = self.get_submodule(f"0.rnns.{layer}")(x)[0]
        return self.get_submodule("1.decoder")(x)


class BareModel(nn.Module):
    """The embedding is used twice and has one name; the output's bias is a parameter of its own, defined first."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.out_bias = nn.Parameter(torch.zeros(VOCABULARY))
        self.lookup = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(nn.LSTM(WIDTH, WIDTH, batch_first=True) for _ in range(depth))

    def forward(self, ids: Tensor) -> Any:
        x = self.lookup(ids)
        for layer in self.layers:
            x = layer(x)[0]
        return functional.linear(x, self.lookup.weight, self.out_bias)


def texts() -> tuple[Tensor, ...]:
    return (tokens(3, 7, VOCABULARY),)


TAGGER = Family(
    "LSTM tagger",
    (
        Style("torch", Tagger),
        Style("AllenNLP", AllenTagger),
        Style("list", ListTagger),
        Style("cells", CellTagger),
    ),
    texts,
    symmetric=BIASES,
)

LANGUAGE = Family(
    "LSTM language model, tied",
    (Style("torch", TiedModel), Style("AWD", AwdModel), Style("one name", BareModel)),
    texts,
    symmetric=BIASES,
)
