"""What a decoder-only language model looks like, in terms that one generic decoder can run.

A family (see `families/`) turns a Hugging Face config into a `Decoder`: sizes, kinds of norm, positions and
attention, and a table of where each weight lives in the Hugging Face module. Nothing here holds tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import torch

Activation = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Norm:
    """`rms`: x / sqrt(mean(x^2) + eps) * weight; `rms_plus_one` multiplies by 1 + weight, in fp32;
    `layer`: with mean subtraction and bias."""

    kind: Literal["rms", "rms_plus_one", "layer"]
    eps: float


@dataclass(frozen=True)
class Rotary:
    """Rotary positions on the first `dim` features of each head.

    `frequencies(length)` gives (inverse frequencies `[dim / 2]` in fp32, factor on cos and sin) for a
    sequence of `length` tokens; `switches_at` is the length beyond which they depend on it, None when they
    never do. `interleaved`: features (0, 1), (2, 3) ... form the rotated pairs, else (0, dim / 2) ...
    """

    dim: int
    frequencies: Callable[[int], tuple[torch.Tensor, float]]
    switches_at: int | None = None
    interleaved: bool = False


@dataclass(frozen=True)
class Learned:
    """A table of position embeddings, added to the token's; position p is row p + `offset` of `size`."""

    offset: int
    size: int


@dataclass(frozen=True)
class Alibi:
    """A bias of `slopes[head] * (key position - query position)` on every score."""

    slopes: tuple[float, ...]


@dataclass(frozen=True)
class Names:
    """Where the weights are: Hugging Face module paths, without `.weight` and `.bias`.

    Layer paths are relative to `{layers}.{index}.`. None: the family has no such weight. Either `query`, `key`
    and `value` are given, or `qkv`, whose rows are ordered as `qkv_order` says: `stacked` is all query heads,
    all key heads, all value heads; `by_head` is query, key, value of head 0, then of head 1 ... The same goes
    for `gate` and `up` against `gate_up` (gate rows first). `input_major` marks linear layers that store
    `[in, out]`. Biases are used wherever the module has them.
    """

    layers: str
    embedding: str
    final_norm: str | None
    head: str
    attention_norm: str
    mlp_norm: str | None
    attention_out: str
    down: str
    query: str | None = None
    key: str | None = None
    value: str | None = None
    qkv: str | None = None
    qkv_order: Literal["stacked", "by_head"] = "stacked"
    gate: str | None = None
    up: str | None = None
    gate_up: str | None = None
    query_norm: str | None = None
    key_norm: str | None = None
    after_attention_norm: str | None = None
    after_mlp_norm: str | None = None
    positions: str | None = None
    embedding_norm: str | None = None
    project_in: str | None = None
    project_out: str | None = None
    input_major: bool = False


@dataclass(frozen=True)
class Decoder:
    """One family at one size. `[hidden]` is the width between layers.

    `residual`: `sequential` (attention, then MLP), `parallel` (both read the layer's input, each through its
    own norm) or `parallel_shared_norm` (through one). `norm_after`: norms follow the residual sum instead of
    opening the branch. `windows[layer]`: how many latest keys a query sees, itself included; None for all.
    `attention_scale[layer]` multiplies the scores; `attention_softcap` and `logit_softcap` are c in
    c * tanh(x / c).
    """

    family: str
    names: Names
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    vocabulary: int
    norm: Norm
    positions: Rotary | Learned | Alibi
    activation: Activation
    attention_scale: tuple[float, ...]
    windows: tuple[int | None, ...]
    gated: bool = True
    residual: Literal["sequential", "parallel", "parallel_shared_norm"] = "sequential"
    norm_after: bool = False
    embedding_width: int | None = None
    embedding_scale: float | None = None
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    head_norm: Norm | None = None
    max_positions: int | None = field(default=None)

    @property
    def kv_groups(self) -> int:
        """Query heads that share one key and value head."""
        return self.heads // self.kv_heads
