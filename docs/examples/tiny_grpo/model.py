"""The policy: a small decoder-only transformer, the same code for the server and for the trainer."""

from __future__ import annotations

import hashlib
import io
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from hpcroll.fs import replace
from tiny_grpo.language import PIECES, SAYABLE

CONTEXT = 128
"""Longest prompt plus reply, in tokens."""
_WIDTH, _LAYERS, _HEADS = 64, 2, 4


@dataclass(frozen=True, slots=True)
class Cache:
    """Keys and values of S conversations: (layers, 2, S, heads, CONTEXT, head width)."""

    entries: Tensor

    @classmethod
    def empty(cls, slots: int) -> Cache:
        return cls(torch.zeros(_LAYERS, 2, slots, _HEADS, CONTEXT, _WIDTH // _HEADS))


class Block(nn.Module):
    """Attention and a feed-forward layer, both on a normalised residual stream."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_attention, self.norm_feed = nn.LayerNorm(_WIDTH), nn.LayerNorm(_WIDTH)
        self.project_in, self.project_out = nn.Linear(_WIDTH, 3 * _WIDTH), nn.Linear(_WIDTH, _WIDTH)
        self.feed = nn.Sequential(nn.Linear(_WIDTH, 4 * _WIDTH), nn.GELU(), nn.Linear(4 * _WIDTH, _WIDTH))

    def forward(self, x: Tensor, positions: Tensor, kept: tuple[Tensor, Tensor] | None) -> Tensor:
        """`x` (B, T, width) at `positions` (B, T); `kept`: a layer of the cache, and the rows' slots."""
        batch, length, _ = x.shape
        projected = self.project_in(self.norm_attention(x)).view(batch, length, 3, _HEADS, -1)
        query, key, value = projected.permute(2, 0, 3, 1, 4)
        if kept is not None:
            layer, slots = kept
            layer[0, slots[:, None], :, positions] = key.transpose(1, 2)
            layer[1, slots[:, None], :, positions] = value.transpose(1, 2)
            key, value = layer[0, slots], layer[1, slots]
        # A key at place p is seen from p on; what an earlier conversation left behind it is not.
        seen = torch.arange(key.shape[2]) <= positions[:, :, None]
        mixed = functional.scaled_dot_product_attention(query, key, value, attn_mask=seen[:, None])
        x = x + self.project_out(mixed.transpose(1, 2).reshape(batch, length, _WIDTH))
        return x + self.feed(self.norm_feed(x))


class Policy(nn.Module):
    """Token ids to the log-probabilities of the next token, at temperature 1."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(len(PIECES), _WIDTH)
        self.places = nn.Embedding(CONTEXT, _WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(_LAYERS))
        self.norm = nn.LayerNorm(_WIDTH)
        self.head = nn.Linear(_WIDTH, len(SAYABLE))

    def forward(
        self, ids: Tensor, positions: Tensor, *, cache: Cache | None = None, slots: Tensor | None = None
    ) -> Tensor:
        """float32 (B, T, sayable) for `ids` (B, T) at `positions` (B, T).

        Without a cache `positions` must be 0 to T - 1 in each row. With one, row b adds to and looks at the
        conversation in slot `slots[b]`.
        """
        x = self.tokens(ids) + self.places(positions)
        for number, block in enumerate(self.blocks):
            kept = None if cache is None or slots is None else (cache.entries[number], slots)
            x = block(x, positions, kept)
        return self.head(self.norm(x)).log_softmax(-1)


def token_logprobs(policy: Policy, ids: Tensor) -> Tensor:
    """float32 (B, T): the log-probability of each of `ids` (B, T), 0 for the first.

    Entry t speaks of token t itself, as everywhere in hpcroll. Tokens that the model cannot say get the
    value of token 0; nobody asks for them.
    """
    positions = torch.arange(ids.shape[1]).expand_as(ids)
    ahead = policy(ids[:, :-1], positions[:, :-1])
    said = torch.where(ids < len(SAYABLE), ids, 0)[:, 1:]
    return functional.pad(ahead.gather(-1, said[:, :, None])[:, :, 0], (1, 0))


def save_weights(policy: Policy, path: Path) -> str:
    """Writes the weights, durable and visible as a whole; returns their SHA-256 (hex)."""
    buffer = io.BytesIO()
    torch.save(policy.state_dict(), buffer)
    replace(path, buffer.getvalue())
    return hashlib.sha256(buffer.getvalue()).hexdigest()


def load_policy(path: Path) -> Policy:
    """The policy with the weights in file `path`."""
    policy = Policy()
    policy.load_state_dict(torch.load(path, weights_only=True))
    return policy
