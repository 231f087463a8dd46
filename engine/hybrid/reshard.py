"""The swap: training weights into the inference layout, planned once and run whenever the weights changed.

Where parameters rest as rows on all ranks, each bucket (some layers) is one all-to-all in which every rank
sends, already in the compute dtype, exactly those rows and columns that others keep. Both sides derive the
same order of segments from the same plan, so no description travels with the data. Beside the two layouts a
rank holds what it sends and receives of one bucket, and its own rows of that bucket's adapted weights, merged.
Replicated parameters need no traffic at all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain

import torch
import torch.distributed as dist

from engine.hybrid.layout import Piece, Target
from engine.hybrid.sources import Sources


@dataclass(frozen=True)
class _Segment:
    """A rectangle of one source's rows that `sender` holds and `receiver` keeps in target `target`."""

    target: int
    piece: Piece
    rows: tuple[int, int]
    sender: int
    receiver: int

    @property
    def numel(self) -> int:
        return (self.rows[1] - self.rows[0]) * (self.piece.cols[1] - self.piece.cols[0])


class Swap:
    """Plan of one module's swap. `bytes_received` counts what the last `run` took off the wire."""

    def __init__(
        self,
        sources: Sources,
        layouts: Callable[[int], list[Target]],
        dtype: torch.dtype,
        layers_per_bucket: int,
    ):
        """`layouts(rank)` is the layout that a global rank keeps."""
        self.sources, self.dtype = sources, dtype
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.targets = layouts(self.rank)
        self.sharded = sources.is_sharded()
        self.bytes_received = 0
        self._buckets = _bucket(self.targets, layers_per_bucket)
        self._spans: dict[str, list[tuple[int, int, list[int]]]] = {}
        self._segments: list[list[_Segment]] = [[] for _ in self._buckets]
        self._names: list[dict[str, None]] = [{} for _ in self._buckets]
        for receiver in range(dist.get_world_size() if self.sharded else 0):
            plan = layouts(receiver)
            for number, bucket in enumerate(_bucket(plan, layers_per_bucket)):
                for segment in self._cut(plan, bucket, receiver):
                    self._names[number][segment.piece.source] = None
                    if self.rank in (segment.sender, receiver):
                        self._segments[number].append(segment)

    def run(self) -> Iterator[dict[str, torch.Tensor]]:
        """Filled tensors by target name, one bucket after another. Collective: exhaust it on every rank."""
        self.bytes_received = 0
        self.sources.refresh()
        for number, bucket in enumerate(self._buckets):
            tensors = {i: self._empty(self.targets[i]) for i in bucket}
            if self.sharded:
                self._exchange(self._segments[number], self._names[number], tensors)
            else:
                self._copy(tensors)
            yield {self.targets[i].name: tensors.pop(i) for i in bucket}

    # -- planning --------------------------------------------------------------------------------------

    def _cut(self, targets: list[Target], bucket: list[int], receiver: int) -> list[_Segment]:
        segments = []
        for i in bucket:
            for piece in targets[i].pieces:
                for start, stop, holders in self._spans_of(piece.source):
                    rows = max(start, piece.rows[0]), min(stop, piece.rows[1])
                    if rows[0] < rows[1]:
                        # of several that hold these rows the receiver itself, else the nearest
                        sender = min(holders, key=lambda r: (abs(r - receiver), r)) if holders else receiver
                        segments.append(_Segment(i, piece, rows, sender, receiver))
        return segments

    def _spans_of(self, source: str) -> list[tuple[int, int, list[int]]]:
        """(start, stop, ranks that hold these rows) of a source; no ranks listed when all hold all."""
        if source not in self._spans:
            owners = self.sources.owners(source)
            if owners is None:
                self._spans[source] = [(0, self.sources.parameter(source).shape[0], [])]
            else:
                holders: dict[tuple[int, int], list[int]] = {}
                for rank, spans in enumerate(owners):
                    for span in spans:
                        holders.setdefault(span, []).append(rank)
                self._spans[source] = [(*span, ranks) for span, ranks in sorted(holders.items())]
        return self._spans[source]

    # -- running ---------------------------------------------------------------------------------------

    def _empty(self, target: Target) -> torch.Tensor:
        covered = sum((p.rows[1] - p.rows[0]) * (p.cols[1] - p.cols[0]) for p in target.pieces) == target.numel
        return (torch.empty if covered else torch.zeros)(target.shape, dtype=self.dtype, device=self.sources.device)

    def _copy(self, tensors: dict[int, torch.Tensor]) -> None:
        for i, tensor in tensors.items():
            for piece in self.targets[i].pieces:
                rows = self.sources.local_rows(piece.source)
                _region(tensor, piece, piece.rows).copy_(rows[slice(*piece.rows), slice(*piece.cols)])

    def _exchange(self, segments: list[_Segment], names: dict[str, None], tensors: dict[int, torch.Tensor]) -> None:
        world, me = dist.get_world_size(), self.rank
        sent = {segment.piece.source for segment in segments if segment.sender == me}
        # reading adapters may be collective: every rank reads every adapted weight, in the same order
        local = {name: self._rows(name) for name in names if name in sent or self.sources.adapter_factors(name)}
        for segment in segments:
            if segment.sender == segment.receiver == me:
                _region(tensors[segment.target], segment.piece, segment.rows).copy_(self._block(local, segment))
        leaving = [[s for s in segments if s.sender == me and s.receiver == r != me] for r in range(world)]
        arriving = [[s for s in segments if s.receiver == me and s.sender == r != me] for r in range(world)]
        send_sizes, receive_sizes = ([sum(s.numel for s in row) for row in rows] for rows in (leaving, arriving))
        send = torch.empty(sum(send_sizes), dtype=self.dtype, device=self.sources.device)
        receive = torch.empty(sum(receive_sizes), dtype=self.dtype, device=self.sources.device)
        offset = 0
        for segment in chain.from_iterable(leaving):
            block = self._block(local, segment)
            send[offset : offset + segment.numel].view(block.shape).copy_(block)
            offset += segment.numel
        del local
        # as bytes: not every backend carries every floating-point type
        size = receive.element_size()
        dist.all_to_all_single(
            receive.view(torch.uint8),
            send.view(torch.uint8),
            [n * size for n in receive_sizes],
            [n * size for n in send_sizes],
        )
        self.bytes_received += receive.numel() * size
        offset = 0
        for segment in chain.from_iterable(arriving):
            region = _region(tensors[segment.target], segment.piece, segment.rows)
            block = receive[offset : offset + segment.numel]
            region.copy_(block.view(segment.rows[1] - segment.rows[0], -1))
            offset += segment.numel

    def _rows(self, name: str) -> torch.Tensor:
        rows = self.sources.local_rows(name)
        # merged ones are a copy, which may as well be in the smaller type
        return rows.to(self.dtype) if self.sources.adapter_factors(name) else rows

    def _block(self, local: dict[str, torch.Tensor], segment: _Segment) -> torch.Tensor:
        owners = self.sources.owners(segment.piece.source)
        start = owners[self.rank][0][0] if owners is not None else 0
        rows = slice(segment.rows[0] - start, segment.rows[1] - start)
        return local[segment.piece.source][rows, slice(*segment.piece.cols)]


def _region(tensor: torch.Tensor, piece: Piece, rows: tuple[int, int]) -> torch.Tensor:
    """Where rows `rows` of the piece's source lie in its target, shaped like the source's rectangle."""
    tensor = tensor if tensor.dim() == 2 else tensor[:, None]
    before, height = rows[0] - piece.rows[0], rows[1] - rows[0]
    width = piece.cols[1] - piece.cols[0]
    row, col = piece.at
    if piece.flipped:
        return tensor[row : row + width, col + before : col + before + height].t()
    return tensor[row + before : row + before + height, col : col + width]


def _bucket(targets: list[Target], layers_per_bucket: int) -> list[list[int]]:
    """Indices of targets that travel together: `layers_per_bucket` layers, or what is outside the layers."""
    groups: dict[int, list[int]] = {}
    for i, target in enumerate(targets):
        inside = 0 <= target.bucket < (1 << 30)
        key = target.bucket // layers_per_bucket if inside else target.bucket
        groups.setdefault(key, []).append(i)
    return [groups[key] for key in sorted(groups)]
