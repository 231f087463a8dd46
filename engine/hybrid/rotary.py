"""Rotary positions applied in place to query and key heads."""

from __future__ import annotations

import torch

from engine.hybrid.description import Rotary


class RotaryTable:
    """Cosines and sines of a description's rotary positions, in the compute dtype.

    The tables are computed in fp32 from integer positions and rounded once, as transformers does, and hold
    every position up to the longest asked for.
    """

    def __init__(self, rotary: Rotary, dtype: torch.dtype, device: torch.device):
        self.rotary, self.dtype, self.device = rotary, dtype, device
        self.dim = rotary.dim
        self._size = 0
        self._key: int | None = None
        self._cos = self._sin = torch.empty(0)

    def at(self, positions: torch.Tensor, longest: int) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin `[tokens, 1, dim]` at `positions` `[tokens]`, all below `longest`, the length of the
        longest sequence at hand."""
        switches_at = self.rotary.switches_at
        key = longest if switches_at is not None and longest > switches_at else 0
        if key != self._key or longest > self._size:
            self._build(key, max(longest, self._size if key == self._key else 0))
        return self._cos.index_select(0, positions), self._sin.index_select(0, positions)

    def _build(self, key: int, longest: int) -> None:
        # room for the steps to come, so that a table is built once a call and not once a token
        size = longest if key else -(-(longest + 1) // 256) * 256
        inverse, factor = self.rotary.frequencies(max(longest if key else 1, 1))
        angles = torch.arange(size, dtype=torch.float)[:, None] * inverse.float()
        cos, sin = angles.cos() * factor, angles.sin() * factor
        if self.rotary.interleaved:
            cos = cos.repeat_interleave(2, dim=1)
            # the sign belongs to the first of each pair, whose partner enters negatively
            sin = torch.stack((-sin, sin), dim=-1).flatten(1)
        else:
            cos, sin = torch.cat((cos, cos), 1), torch.cat((-sin, sin), 1)
        place = {"dtype": self.dtype, "device": self.device}
        self._cos, self._sin = cos[:, None].to(**place), sin[:, None].to(**place)
        self._key, self._size = key, size

    def apply_(self, heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
        """Rotate `heads` `[tokens, heads, head_dim]` in place."""
        part = heads if self.dim == heads.shape[-1] else heads[..., : self.dim]
        if self.rotary.interleaved:
            swapped = part.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
        else:
            half = self.dim // 2
            swapped = torch.cat((part[..., half:], part[..., :half]), dim=-1)
        part.mul_(cos).addcmul_(swapped, sin)
