"""A small language model of bytes whose layers attend sparsely, with the widths of DeepSeek's attention."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from mla_backend import backward_order, reference, sparse_mla

LATENT, ROPE, HEAD = 512, 64, 32
SCALE = (HEAD + ROPE) ** -0.5
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
"""From q [T, H, 576], kv [T, 576] and lists to out [T, H, 512]."""


def lists(tokens: int, recent: int = 32, every: int = 8) -> Tensor:
    """What each token of a sequence attends to, int32 `[tokens, topk]`: itself, the tokens just before, and of older
    ones every eighth. It stands in for an indexer."""
    own = torch.arange(tokens).unsqueeze(1)
    near = own - torch.arange(recent)
    far = torch.arange(0, tokens, every).expand(tokens, -1)
    far = torch.where(far <= own - recent, far, -1)
    return torch.cat([near, far], 1).clamp(min=-1).int()


def trained_attention(indices: Tensor) -> Attention:
    """This package's: queries and rows in bf16. All layers share the order in which gradients are added."""
    order = backward_order(indices, len(indices))

    def attend(q: Tensor, kv: Tensor, lists: Tensor) -> Tensor:
        return sparse_mla(q.bfloat16(), kv.bfloat16(), lists, scale=SCALE, order=order)[0].to(q.dtype)

    return attend


def reference_attention(q: Tensor, kv: Tensor, lists: Tensor) -> Tensor:
    """Plain PyTorch in the dtype of q, and its autograd."""
    return reference.sparse_mla(q, kv, lists, scale=SCALE)[0]


class Layer(nn.Module):
    """Latent attention with the up-projections absorbed into queries and outputs, then an MLP."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList([nn.RMSNorm(hidden), nn.RMSNorm(hidden), nn.RMSNorm(LATENT)])
        self.queries = nn.Linear(hidden, heads * (HEAD + ROPE), bias=False)
        self.rows = nn.Linear(hidden, LATENT + ROPE, bias=False)
        self.up_keys = nn.Parameter(torch.randn(heads, HEAD, LATENT) * HEAD**-0.5)
        self.up_values = nn.Parameter(torch.randn(heads, LATENT, HEAD) * LATENT**-0.5)
        self.output = nn.Linear(heads * HEAD, hidden, bias=False)
        self.mlp = nn.Sequential(nn.Linear(hidden, 4 * hidden), nn.GELU(), nn.Linear(4 * hidden, hidden))

    def forward(self, x: Tensor, indices: Tensor, attend: Attention) -> Tensor:
        y = self.norms[0](x)
        nope, rope = self.queries(y).view(-1, self.heads, HEAD + ROPE).split([HEAD, ROPE], -1)
        q = torch.cat([torch.einsum("thd,hdl->thl", nope, self.up_keys), rotated(rope)], -1)
        latent, key = self.rows(y).split([LATENT, ROPE], -1)
        kv = torch.cat([self.norms[2](latent), rotated(key.unsqueeze(1)).squeeze(1)], -1)
        values = torch.einsum("thl,hld->thd", attend(q, kv, indices), self.up_values)
        x = x + self.output(values.flatten(1))
        return x + self.mlp(self.norms[1](x))


def rotated(x: Tensor) -> Tensor:
    """Rotary embedding of `[T, heads, 64]` by the tokens' positions."""
    angles = torch.arange(len(x), device=x.device).unsqueeze(1) * 10000.0 ** (-torch.arange(32, device=x.device) / 32)
    cos, sin = angles.cos().unsqueeze(1), angles.sin().unsqueeze(1)
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


class Model(nn.Module):
    """`layers` such layers between an embedding of bytes and its transpose."""

    def __init__(self, hidden: int = 128, heads: int = 8, layers: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, hidden)
        nn.init.normal_(self.embedding.weight, std=hidden**-0.5)
        self.layers = nn.ModuleList(Layer(hidden, heads) for _ in range(layers))
        self.norm = nn.RMSNorm(hidden)

    def loss(self, text: Tensor, indices: Tensor, attend: Attention) -> Tensor:
        """Mean cross entropy of each next byte of `text` uint8 `[T + 1]`."""
        x = self.embedding(text[:-1].long())
        for layer in self.layers:
            x = layer(x, indices, attend)
        return functional.cross_entropy(self.norm(x) @ self.embedding.weight.t(), text[1:].long())
