"""The key/value workspace: one allocation, cut into slots that sequences enter and leave.

Keys lie as `[layer, slot, kv head, feature, position]` and values as `[layer, slot, kv head, position, feature]`,
so that both products of a single-query attention read contiguous rows. In low precision only as many positions
as the longest sequence alive needs are laid out, `STRIDE` more whenever it outgrows them, since products of
such types copy operands that are not contiguous: every step takes the whole width laid out. fp32 products
take part of the width as it lies, so there all of it is laid out at once.
"""

from __future__ import annotations

import os

import torch

STRIDE = 16


class Workspace:
    """Memory for the keys and values of up to `slots` sequences of up to `limit` tokens each."""

    def __init__(self, layers: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device):
        self.layers, self.kv_heads, self.head_dim = layers, kv_heads, head_dim
        self.dtype, self.device = dtype, device
        self.grows = dtype != torch.float32
        self.release()

    def release(self) -> None:
        """Give the memory back; the next `open` takes it again."""
        self._storage = torch.empty(0, dtype=self.dtype, device=self.device)
        self.keys = self.values = self._storage
        self.slots = self.limit = self.width = 0

    @property
    def nbytes(self) -> int:
        return self._storage.numel() * self._storage.element_size()

    def room(self, limit: int) -> int:
        """How many sequences of `limit` tokens fit into this memory and half of what the device has left."""
        if self.device.type == "cuda":
            free = torch.cuda.mem_get_info(self.device)[0]
        else:
            free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        each = 2 * self.layers * self.kv_heads * self.head_dim * self.dtype.itemsize * (-(-limit // STRIDE) * STRIDE)
        return (self.nbytes + free // 2) // each

    def open(self, slots: int, limit: int, reserve: int) -> None:
        """Make room for `slots` sequences of up to `limit` tokens, empty.

        New memory is taken only when what is there is too small, then for sequences of `reserve` tokens if there
        is room for those.
        """
        limit = -(-limit // STRIDE) * STRIDE
        token = 2 * self.layers * self.kv_heads * self.head_dim
        if token * slots * limit > self._storage.numel():
            self._storage = torch.empty(0, dtype=self.dtype, device=self.device)  # freed before the next is taken
            # zeros: a masked position must hold a finite number, whatever it is
            length = reserve if reserve > limit and self.room(reserve) >= slots else limit
            self._storage = torch.zeros(token * slots * length, dtype=self.dtype, device=self.device)
        self.slots, self.limit = slots, limit
        self._cut(0 if self.grows else limit)

    def widen(self, width: int, rows: int) -> None:
        """Lay out at least `width` positions, keeping what the first `rows` slots hold."""
        if width <= self.width:
            return
        old_width, keys, values = self.width, self.keys, self.values
        self._cut(min(-(-width // STRIDE) * STRIDE, self.limit))
        for layer in range(self.layers if rows else 0):
            # both layouts share their memory, so one layer at a time goes through a copy
            held_keys, held_values = keys[layer, :rows].clone(), values[layer, :rows].clone()
            self.keys[layer, :rows, :, :, :old_width] = held_keys
            self.values[layer, :rows, :, :old_width] = held_values

    def move(self, source: torch.Tensor, target: torch.Tensor, width: int) -> None:
        """Copy the first `width` positions of slots `source` to slots `target` (disjoint index tensors)."""
        self.keys[:, target, :, :, :width] = self.keys[:, source, :, :, :width]
        self.values[:, target, :, :width] = self.values[:, source, :, :width]

    def _cut(self, width: int) -> None:
        """Views of the first `width` positions; each layer keeps a region that `limit` positions fit into."""
        heads, dim = self.kv_heads, self.head_dim
        region = self.slots * heads * dim * self.limit
        layout = (region, heads * dim * width, dim * width)
        shape = (self.layers, self.slots, heads)
        self.keys = self._storage.as_strided((*shape, dim, width), (*layout, width, 1))
        self.values = self._storage.as_strided((*shape, width, dim), (*layout, dim, 1), self.layers * region)
        self.width = width
