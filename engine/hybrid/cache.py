"""The key/value workspace: one allocation, cut into slots that sequences enter and leave.

Keys lie as `[layer, slot, kv head, feature, position]` and values as `[layer, slot, kv head, position, feature]`,
so that both products of a single-query attention read contiguous rows. A call uses only as many positions
as its longest sequence can reach, packed tightly: a stride of the full workspace would spread a short
sequence's keys over many more cache lines.
"""

from __future__ import annotations

import torch


class Workspace:
    """Memory for `slots` sequences of up to `tokens` tokens each; `shape_for` cuts it for one call."""

    def __init__(self, layers: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device):
        self.layers, self.kv_heads, self.head_dim = layers, kv_heads, head_dim
        self.dtype, self.device = dtype, device
        self._storage = torch.empty(0, dtype=dtype, device=device)
        self.keys = self.values = self._storage
        self.slots = self.width = 0

    def bytes_per_token(self) -> int:
        return 2 * self.layers * self.kv_heads * self.head_dim * self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        return self._storage.numel() * self._storage.element_size()

    def shape_for(self, slots: int, width: int, reserve: int) -> None:
        """Cut the workspace into `slots` of `width` positions; grown to `slots * reserve` when too small."""
        half = self.layers * slots * self.kv_heads * self.head_dim * width
        if 2 * half > self._storage.numel():
            self._storage = torch.empty(0, dtype=self.dtype, device=self.device)  # freed before the next is taken
            size = 2 * self.layers * slots * self.kv_heads * self.head_dim * max(width, reserve)
            # zeros: a masked position must hold a finite number, whatever it is
            self._storage = torch.zeros(size, dtype=self.dtype, device=self.device)
        heads = (self.layers, slots, self.kv_heads)
        self.keys = self._storage[:half].view(*heads, self.head_dim, width)
        self.values = self._storage[half : 2 * half].view(*heads, width, self.head_dim)
        self.slots, self.width = slots, width

    def move(self, source: torch.Tensor, target: torch.Tensor, width: int) -> None:
        """Copy the first `width` positions of slots `source` to slots `target` (disjoint index tensors)."""
        self.keys[:, target, :, :, :width] = self.keys[:, source, :, :, :width]
        self.values[:, target, :, :width] = self.values[:, source, :, :width]

    def release(self) -> None:
        """Give the memory back; the next `shape_for` takes it again."""
        self._storage = torch.empty(0, dtype=self.dtype, device=self.device)
        self.keys = self.values = self._storage
        self.slots = self.width = 0
