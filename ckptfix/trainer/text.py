"""Models that read sequences of words: an LSTM tagger, and a small BERT with two heads.

Words are numbers from 1; `PADDING` fills the rest of a row, and `IGNORED` is the target of words without one.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

PADDING = 0
"""The word that fills a row after its last word."""

IGNORED = -100
"""A target that is not counted; torch's cross_entropy ignores this value by default."""


def word_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross entropy over the words that have a target: logits [N, T, C], targets [N, T]."""
    return cross_entropy(logits.flatten(0, -2), targets.flatten(), ignore_index=IGNORED)


class Tagger(nn.Module):
    """A tagger that labels each word, with an LSTM over packed sequences.

    Packing uses the true length of each row, so the longest row of a batch decides how far unpacking pads. In
    DataParallel that is the longest row of a replica's share: replicas return different widths, and gathering them
    fails. `total_length` pads to the width of the input, which is the same for all replicas
    (https://docs.pytorch.org/docs/stable/notes/faq.html#pack-rnn-unpack-with-data-parallelism).

    Args:
        total_length: pad to the width of the input; False shows the failure.
    """

    def __init__(
        self, words: int = 50, labels: int = 5, width: int = 16, hidden: int = 24, *, total_length: bool = True
    ) -> None:
        super().__init__()
        self.total_length = total_length
        self.embedding = nn.Embedding(words, width, padding_idx=PADDING)
        self.lstm = nn.LSTM(width, hidden, batch_first=True)
        self.output = nn.Linear(hidden, labels)

    def forward(self, words: Tensor, lengths: Tensor) -> Tensor:
        """Return scores [N, T, labels] for words [N, T], counting only the first `lengths` [N] words of each row."""
        embedded = self.embedding(words)
        # The replica on the second GPU gets its words there, so the state must not be made on a fixed device.
        state = embedded.new_zeros(self.lstm.num_layers, len(words), self.lstm.hidden_size)
        # Lengths are read on the CPU, but DataParallel has moved them along with the words.
        packed = pack_padded_sequence(embedded, lengths.cpu(), batch_first=True, enforce_sorted=False)
        found, _ = self.lstm(packed, (state, state.clone()))
        width = words.shape[1] if self.total_length else None
        padded, _ = pad_packed_sequence(found, batch_first=True, total_length=width)
        scores: Tensor = self.output(padded)
        return scores


class Embeddings(nn.Module):
    """Word and position embeddings, added and normalized; `position_ids` is a buffer, as in BERT's checkpoints."""

    position_ids: Tensor

    def __init__(self, words: int, positions: int, width: int) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(words, width, padding_idx=PADDING)
        self.position_embeddings = nn.Embedding(positions, width)
        self.norm = nn.LayerNorm(width)
        self.dropout = nn.Dropout(0.1)
        self.register_buffer("position_ids", torch.arange(positions).unsqueeze(0))

    def forward(self, words: Tensor) -> Tensor:
        places = self.position_embeddings(self.position_ids[:, : words.shape[1]])
        embedded: Tensor = self.dropout(self.norm(self.word_embeddings(words) + places))
        return embedded


class Bert(nn.Module):
    """Embeddings and a transformer encoder: words [N, T] to features [N, T, width]. It does not attend to padding."""

    def __init__(self, words: int, positions: int, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.embeddings = Embeddings(words, positions, width)
        layer = nn.TransformerEncoderLayer(
            width, heads, 2 * width, dropout=0.1, activation="gelu", batch_first=True
        )
        # Nested tensors would be used only in evaluation, with a warning that they are a prototype.
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        # BERT's choice (https://arxiv.org/abs/1810.04805, from GPT). It is small, so that tied scores start small.
        for part in self.modules():
            if isinstance(part, nn.Embedding):
                nn.init.normal_(part.weight, std=0.02)

    def forward(self, words: Tensor) -> Tensor:
        features: Tensor = self.encoder(self.embeddings(words), src_key_padding_mask=words == PADDING)
        return features


class TokenClassifier(nn.Module):
    """A classifier that gives each word one of 35 labels: B- and I- for 17 kinds of names, and O.

    With targets, the model returns its loss first. In DataParallel each replica has its own loss, gathering makes a
    vector of them (torch warns about it), and one trains on ``loss.mean()``. This is a mean of means, in which every
    replica counts the same, however few words its share has.
    """

    def __init__(
        self,
        words: int = 73,
        positions: int = 16,
        labels: int = 35,
        width: int = 32,
        layers: int = 2,
        heads: int = 4,
    ) -> None:
        super().__init__()
        self.bert = Bert(words, positions, width, layers, heads)
        self.classifier = nn.Linear(width, labels)

    def forward(self, words: Tensor, targets: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """Return scores [N, T, labels] for words [N, T]; with targets [N, T], the loss (a scalar) and the scores."""
        scores: Tensor = self.classifier(self.bert(words))
        return scores if targets is None else (word_loss(scores, targets), scores)


class MaskedWords(nn.Module):
    """A model that guesses the hidden word at each place from those around it; it returns what `TokenClassifier` does.

    Args:
        tied: make ``decoder.weight`` the same parameter as ``bert.embeddings.word_embeddings.weight``; a state dict
            then lists both names over one storage.
    """

    def __init__(
        self,
        words: int = 66,
        positions: int = 16,
        width: int = 32,
        layers: int = 2,
        heads: int = 4,
        *,
        tied: bool = True,
    ) -> None:
        super().__init__()
        self.bert = Bert(words, positions, width, layers, heads)
        self.dense = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)
        self.decoder = nn.Linear(width, words)
        if tied:
            self.decoder.weight = self.bert.embeddings.word_embeddings.weight

    def forward(self, words: Tensor, targets: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """Return scores [N, T, words] for words [N, T]; with targets [N, T], the loss (a scalar) and the scores."""
        features = self.norm(nn.functional.gelu(self.dense(self.bert(words))))
        scores: Tensor = self.decoder(features)
        return scores if targets is None else (word_loss(scores, targets), scores)
