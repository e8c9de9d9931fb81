"""Two models of the next character: a GRU with a state, and a small transformer with a window."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from phaseloop import register_model

from .text import SYMBOLS


@register_model("char_gru")
class CharGRU(nn.Module):
    """Characters and a state to logits and the state after them; 56,113 parameters by default.

    Args:
        hidden: units of the recurrent layer.
        embedding: numbers that stand for a character.
    """

    def __init__(self, hidden: int = 96, embedding: int = 48) -> None:
        super().__init__()
        for name, value in (("hidden", hidden), ("embedding", embedding)):
            if value < 1:
                raise ValueError(f"{name} is {value}, but must be at least 1")
        self.embed = nn.Embedding(SYMBOLS, embedding)
        self.gru = nn.GRU(embedding, hidden, batch_first=True)
        self.head = nn.Linear(hidden, SYMBOLS)

    def forward(self, characters: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Map int64 [B, T] and a state [1, B, hidden] to logits [B, T, SYMBOLS] and a state."""
        output, state = self.gru(self.embed(characters), state)
        return self.head(output), state

    def read(self, characters: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
        """Logits [B, SYMBOLS] of the character after these, int64 [B, T], and a state for more."""
        logits, state = self(characters, state)
        return logits[:, -1], state


class _Block(nn.Module):
    """Attention to what came before, and a feed-forward layer; a norm before each."""

    def __init__(self, width: int, heads: int, feedforward: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.project = nn.Linear(width, 3 * width)
        self.join = nn.Linear(width, width)
        self.feedforward = nn.Sequential(
            nn.LayerNorm(width),
            nn.Linear(width, feedforward),
            nn.GELU(),
            nn.Linear(feedforward, width),
        )
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        """Map [B, T, width] to the same; ``bias`` [heads, T, T] is added to attention's logits."""
        parts = self.project(self.norm(x)).unflatten(2, (3, self.heads, -1))  # [B, T, 3, heads, d]
        query, key, value = parts.permute(2, 0, 3, 1, 4)  # each [B, heads, T, d]
        seen = F.scaled_dot_product_attention(query, key, value, attn_mask=bias)
        x = x + self.dropout(self.join(seen.transpose(1, 2).flatten(2)))
        return x + self.dropout(self.feedforward(x))


@register_model("char_transformer")
class CharTransformer(nn.Module):
    """Characters to logits by causal self-attention; 242,593 parameters by default.

    Places are told by attention with linear biases alone (Press, Smith, Lewis, "Train Short, Test
    Long", ICLR 2022): what is d characters back has d times a head's slope taken off its logit.

    Args:
        window: the most characters that it sees at once.
        width: numbers that stand for a character.
        layers: of attention and feed-forward.
        heads: of attention; they share out ``width``.
        feedforward: units within a feed-forward layer.
        dropout: share of the numbers that training zeroes, 0 to 1.
    """

    bias: Tensor

    def __init__(
        self,
        window: int = 128,
        width: int = 96,
        layers: int = 2,
        heads: int = 4,
        feedforward: int = 384,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(f"width is {width}, but must be a multiple of heads, {heads}")
        self.window = window
        self.embed = nn.Embedding(SYMBOLS, width)
        self.layers = nn.ModuleList(
            _Block(width, heads, feedforward, dropout) for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, SYMBOLS)
        self.register_buffer("bias", _biases(heads, window), persistent=False)

    def forward(self, characters: Tensor) -> Tensor:
        """Map int64 [B, T], T at most ``window``, to logits [B, T, SYMBOLS]."""
        steps = characters.shape[1]
        if steps > self.window:
            raise ValueError(f"{steps} characters are more than model.window, {self.window}")
        x = self.embed(characters)
        for layer in self.layers:
            x = layer(x, self.bias[:, :steps, :steps])
        return self.head(self.norm(x))

    def read(self, characters: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
        """As of :class:`CharGRU`; the state is what was read, as far back as the window goes."""
        seen = characters if state is None else torch.cat([state, characters], dim=1)
        seen = seen[:, -self.window :]
        return self(seen)[:, -1], seen


def _biases(heads: int, window: int) -> Tensor:
    """What is added to logits: float32 [heads, window, window], -inf for what comes later.

    The slopes are 2^(-8/heads), its square, and so on.
    """
    places = torch.arange(window)
    back = places[:, None] - places
    slopes = 2.0 ** (-8.0 / heads * torch.arange(1, heads + 1))
    biases = -slopes[:, None, None] * back
    return biases.masked_fill(back < 0, -torch.inf)
