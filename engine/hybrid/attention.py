"""Attention over the key/value workspace: whole prompts, and one query a sequence.

Sequences lie in the workspace from position 0 on, whatever padding the caller's batch had, so a causal mask
is all that a prompt needs, and one comparison with the sequence's length all that a step needs.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

from engine.hybrid.cache import Workspace
from engine.hybrid.description import Alibi, Decoder
from engine.hybrid.layout import kv_head_range
from engine.hybrid.rotary import RotaryTable

# Up to this many keys two plain matrix products were faster on CPU than the fused attention kernel.
SHORT = 64


class Heads:
    """This rank's share of the heads, and how queries and keys are turned before they meet."""

    def __init__(self, decoder: Decoder, tp_rank: int, tp_size: int, device: torch.device):
        self.decoder = decoder
        self.q = decoder.heads // tp_size
        first, last = kv_head_range(decoder, tp_rank, tp_size)
        self.kv = last - first
        self.groups = self.q // self.kv
        self.dim = decoder.head_dim
        self.slopes = None
        if isinstance(decoder.positions, Alibi):
            mine = decoder.positions.slopes[tp_rank * self.q : (tp_rank + 1) * self.q]
            self.slopes = torch.tensor(mine, dtype=torch.float32, device=device)

    def split(self, qkv: torch.Tensor) -> torch.Tensor:
        """`[tokens, features]` -> `[tokens, q + 2 kv heads, head_dim]`."""
        return qkv.view(-1, self.q + 2 * self.kv, self.dim)


class Prompts:
    """Attention of whole prompts that enter neighbouring slots, `first` on.

    The tokens of `lengths` are packed one prompt after another, `[sum(lengths)]`; `offset` tokens of the (then
    only) prompt are in the workspace already.
    """

    def __init__(self, heads: Heads, lengths: list[int], first: int, offset: int, device: torch.device):
        self.heads, self.first, self.offset = heads, first, offset
        self.count, self.longest = len(lengths), max(lengths)
        each = torch.tensor(lengths, device=device)
        starts = each.cumsum(0) - each
        columns = torch.arange(self.longest, device=device)
        real = columns < each[:, None]
        self.positions = columns.expand(self.count, -1)[real] + offset
        self.last = starts + each - 1
        self.even = min(lengths) == self.longest
        if not self.even:
            self.padded = torch.where(real, starts[:, None] + columns, 0).flatten()
            self.real = real.flatten().nonzero().squeeze(1)
        self._masks: dict[int | None, torch.Tensor | None] = {}

    def attend(self, workspace: Workspace, layer: int, heads: torch.Tensor) -> torch.Tensor:
        """`heads` `[tokens, q + 2 kv, dim]`, already rotated -> `[tokens, q * dim]`."""
        share, decoder = self.heads, self.heads.decoder
        if not self.even:
            heads = heads.index_select(0, self.padded)
        heads = heads.view(self.count, self.longest, -1, share.dim).transpose(1, 2)
        q, k, v = heads.split((share.q, share.kv, share.kv), dim=1)
        slots = slice(self.first, self.first + self.count)
        end = self.offset + self.longest
        workspace.keys[layer, slots, :, :, self.offset : end] = k.transpose(2, 3)
        workspace.values[layer, slots, :, self.offset : end] = v
        if self.offset:
            k = workspace.keys[layer, slots, :, :, :end].transpose(2, 3)
            v = workspace.values[layer, slots, :, :end]
        if share.groups > 1:
            k, v = k.repeat_interleave(share.groups, 1), v.repeat_interleave(share.groups, 1)
        scale, window = decoder.attention_scale[layer], decoder.windows[layer]
        special = decoder.attention_softcap is not None or share.slopes is not None
        if special or (end <= SHORT and q.device.type == "cpu"):
            scores = torch.matmul(q, k.transpose(-1, -2)).mul_(scale)
            scores = _softcap(scores, decoder.attention_softcap)
            if share.slopes is not None:
                keys = torch.arange(end, device=q.device)
                scores += (share.slopes[:, None, None] * keys).to(scores.dtype)
            scores += self._bias(window, q)
            out = torch.matmul(torch.softmax(scores, dim=-1), v)
        elif self.offset or (window is not None and self.longest > window):
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=self._visible(window, q.device), scale=scale)
        else:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
        out = out.transpose(1, 2).reshape(self.count * self.longest, share.q * share.dim)
        return out if self.even else out.index_select(0, self.real)

    def _bias(self, window: int | None, q: torch.Tensor) -> torch.Tensor:
        """0 where a query sees a key, -inf elsewhere, `[queries, keys]`."""
        visible = self._visible(window, q.device)
        return torch.zeros(visible.shape, dtype=q.dtype, device=q.device).masked_fill_(~visible, -torch.inf)

    def _visible(self, window: int | None, device: torch.device) -> torch.Tensor:
        """`[queries, keys]`, True where a query sees a key."""
        if window not in self._masks:
            queries = torch.arange(self.offset, self.offset + self.longest, device=device)[:, None]
            keys = torch.arange(self.offset + self.longest, device=device)
            visible = keys <= queries
            if window is not None:
                visible &= keys > queries - window
            self._masks[window] = visible
        return self._masks[window]


class Step:
    """Attention of one new token in each of the first `rows` slots.

    `positions` `[rows]` is where the new token goes; `width` is beyond the highest of them.
    """

    def __init__(self, heads: Heads, positions: torch.Tensor, width: int, workspace: Workspace):
        width = workspace.width if workspace.grows else width
        self.heads, self.positions, self.width, self.dtype = heads, positions, width, workspace.dtype
        self.rows = positions.shape[0]
        self.row_index = torch.arange(self.rows, device=positions.device)
        # where each new value's row lies in a layer's flat memory: the same for all layers
        rows = torch.arange(self.rows * heads.kv, device=positions.device).view(self.rows, heads.kv)
        self.value_index = (rows * workspace.width + positions[:, None]).flatten()
        self._masks: dict[int | None, torch.Tensor] = {}

    def attend(self, workspace: Workspace, layer: int, heads: torch.Tensor) -> torch.Tensor:
        """`heads` `[rows, q + 2 kv, dim]`, already rotated -> `[rows, q * dim]`."""
        share, decoder = self.heads, self.heads.decoder
        keys, values = workspace.keys[layer], workspace.values[layer]
        keys[self.row_index, :, :, self.positions] = heads[:, share.q : share.q + share.kv]
        new_values = heads[:, share.q + share.kv :].reshape(-1, share.dim)
        values.view(-1, share.dim).index_copy_(0, self.value_index, new_values)
        batch = self.rows * share.kv
        q = heads[:, : share.q].reshape(batch, share.groups, share.dim)
        k = keys.flatten(0, 1)[:batch, :, : self.width]
        v = values.flatten(0, 1)[:batch, : self.width]
        mask = self._mask(decoder.windows[layer])
        scale = decoder.attention_scale[layer]
        if decoder.attention_softcap is None:
            scores = torch.baddbmm(mask, q, k, alpha=scale)
        else:
            scores = _softcap(torch.bmm(q, k).mul_(scale), decoder.attention_softcap).add_(mask)
        return torch.bmm(torch.softmax(scores, dim=-1), v).view(self.rows, share.q * share.dim)

    def _mask(self, window: int | None) -> torch.Tensor:
        """What is added to the scores, `[rows * kv, groups or 1, width]`: the same for all layers of a window."""
        if window not in self._masks:
            share = self.heads
            columns = torch.arange(self.width, device=self.positions.device)
            hidden = columns > self.positions[:, None]
            if window is not None:
                hidden |= columns <= self.positions[:, None] - window
            mask = torch.zeros(hidden.shape, dtype=self.dtype, device=hidden.device)
            mask = mask.masked_fill_(hidden, -torch.inf)[:, None, None]
            if share.slopes is not None:
                bias = (share.slopes[:, None] * columns).to(self.dtype)
                mask = mask + bias.view(share.kv, share.groups, self.width)
            mask = mask.expand(self.rows, share.kv, -1, self.width)
            self._masks[window] = mask.reshape(self.rows * share.kv, -1, self.width)
        return self._masks[window]


def turn_(heads: torch.Tensor, share: Heads, table: RotaryTable | None, angles, query_norm, key_norm) -> None:
    """Norm (where the family has it) and rotate the query and key heads of `heads`, in place."""
    if query_norm is not None:
        heads[:, : share.q] = query_norm(heads[:, : share.q])
        heads[:, share.q : share.q + share.kv] = key_norm(heads[:, share.q : share.q + share.kv])
    if table is not None:
        table.apply_(heads[:, : share.q + share.kv], *angles)


def _softcap(scores: torch.Tensor, cap: float | None) -> torch.Tensor:
    return scores if cap is None else scores.div_(cap).tanh_().mul_(cap)
