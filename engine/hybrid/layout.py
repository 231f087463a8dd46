"""Which part of which training weight each tensor-parallel rank keeps, and where: the inference layout.

Query, key and value lie fused as `[q heads, k heads, v heads]` rows, gate and up as `[gate, up]` rows. The
attention and MLP inputs are split by rows (heads, MLP features), their outputs by columns, the embedding and
the head by vocabulary rows, padded to equal slices. Norms and position tables are whole on every rank, and
the biases of column-split layers are kept by rank 0 of the group alone, since the partial sums are added.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import gcd

from engine.hybrid.description import Decoder

# A bucket of weights that travel together: a layer's number, or what comes before and after the layers.
FIRST, LAST = -1, 1 << 30


@dataclass(frozen=True)
class Piece:
    """Rows `rows` and columns `cols` of the training weight `source` go to `at` (row, column) of a target,
    transposed when `flipped`. One-dimensional weights count as one column."""

    source: str
    rows: tuple[int, int]
    cols: tuple[int, int]
    at: tuple[int, int]
    flipped: bool = False


@dataclass
class Target:
    """One tensor of the inference layout. `shape` has one or two dimensions; what no piece covers is zero."""

    name: str
    bucket: int
    shape: tuple[int, ...]
    pieces: list[Piece] = field(default_factory=list)

    @property
    def numel(self) -> int:
        return self.shape[0] * (self.shape[1] if len(self.shape) == 2 else 1)


def check_sizes(decoder: Decoder, tp_size: int) -> None:
    """Refuse sizes that `tp_size` ranks cannot share.

    Raises:
        ValueError: one line with every offending dimension and the tensor-parallel sizes that would do.
    """
    wrong = []
    if decoder.heads % tp_size:
        wrong.append(f"{decoder.heads} attention heads")
    if decoder.kv_heads % tp_size and tp_size % decoder.kv_heads:
        wrong.append(f"{decoder.kv_heads} key/value heads")
    if decoder.mlp % tp_size:
        wrong.append(f"{decoder.mlp} MLP features")
    if wrong:
        common = gcd(decoder.heads, decoder.mlp)
        fits = [
            n
            for n in range(1, common + 1)
            if common % n == 0 and (decoder.kv_heads % n == 0 or n % decoder.kv_heads == 0)
        ]
        raise ValueError(
            f"hybrid_engine.inference_tp_size={tp_size} does not divide {', '.join(wrong)} of this "
            f"{decoder.family} model: use one of {fits}"
        )


def vocabulary_slice(decoder: Decoder, tp_size: int) -> int:
    """Vocabulary rows of each rank, padding included."""
    return -(-decoder.vocabulary // tp_size)


def kv_head_range(decoder: Decoder, tp_rank: int, tp_size: int) -> tuple[int, int]:
    """Key/value heads of a rank; where there are fewer heads than ranks, neighbours keep the same one."""
    if decoder.kv_heads >= tp_size:
        each = decoder.kv_heads // tp_size
        return tp_rank * each, (tp_rank + 1) * each
    head = tp_rank * decoder.kv_heads // tp_size
    return head, head + 1


def plan_layout(decoder: Decoder, has: Callable[[str], bool], tied: bool, tp_rank: int, tp_size: int) -> list[Target]:
    """The tensors that rank `tp_rank` of a group of `tp_size` keeps.

    `has(name)` says whether the training module has a parameter of that name (biases differ by model);
    `tied`: the head is the embedding, and is not laid out a second time.
    """
    return _Planner(decoder, has, tied, tp_rank, tp_size).plan()


class _Planner:
    def __init__(self, decoder: Decoder, has: Callable[[str], bool], tied: bool, tp_rank: int, tp_size: int):
        self.decoder, self.names, self.has, self.tied = decoder, decoder.names, has, tied
        self.tp_rank, self.tp_size = tp_rank, tp_size
        self.targets: list[Target] = []

    def plan(self) -> list[Target]:
        decoder, names = self.decoder, self.names
        width = decoder.embedding_width or decoder.hidden
        each = vocabulary_slice(decoder, self.tp_size)
        rows = (self.tp_rank * each, min((self.tp_rank + 1) * each, decoder.vocabulary))
        rows = (min(rows[0], rows[1]), rows[1])
        self.add("embedding.weight", FIRST, (each, width), [(names.embedding, rows, (0, width))])
        if names.positions:
            size = decoder.positions.size
            self.add(
                "positions.weight", FIRST, (size, decoder.hidden), [(names.positions, (0, size), (0, decoder.hidden))]
            )
        if names.project_in:
            self.whole("project_in", names.project_in, FIRST, decoder.hidden, width)
        self.norm("embedding_norm", "", names.embedding_norm, FIRST, decoder.hidden)
        for layer in range(decoder.layers):
            self.layer(layer)
        self.norm("final_norm", "", names.final_norm, LAST, decoder.hidden)
        if names.project_out:
            self.whole("project_out", names.project_out, LAST, width, decoder.hidden)
        if not self.tied:
            self.add("head.weight", LAST, (each, width), [(names.head, rows, (0, width))])
        if self.has(f"{names.head}.bias"):
            self.add("head.bias", LAST, (each,), [(names.head, rows, None)])
        return self.targets

    def layer(self, layer: int) -> None:
        decoder, names = self.decoder, self.names
        prefix, path = f"{layer}.", f"{names.layers}.{layer}."
        hidden, dim = decoder.hidden, decoder.head_dim
        for role in ("attention_norm", "after_attention_norm", "mlp_norm", "after_mlp_norm"):
            self.norm(prefix + role, path, getattr(names, role), layer, hidden)
        for role in ("query_norm", "key_norm"):
            self.norm(prefix + role, path, getattr(names, role), layer, dim)
        blocks = self.qkv_blocks(path)
        self.split_rows(prefix + "qkv", layer, blocks, hidden)
        heads = decoder.heads // self.tp_size * dim
        self.split_columns(prefix + "attention_out", path + names.attention_out, layer, heads)
        mlp = decoder.mlp // self.tp_size
        mine = (self.tp_rank * mlp, (self.tp_rank + 1) * mlp)
        if names.gate_up:
            shifted = (mine[0] + decoder.mlp, mine[1] + decoder.mlp)
            blocks = [(path + names.gate_up, mine), (path + names.gate_up, shifted)]
        else:
            blocks = [(path + name, mine) for name in (names.gate, names.up) if name]
        self.split_rows(prefix + "up", layer, blocks, hidden)
        self.split_columns(prefix + "down", path + names.down, layer, mlp)

    def qkv_blocks(self, path: str) -> list[tuple[str, tuple[int, int]]]:
        """(weight, its rows) of this rank's query, key and value heads, in the fused order."""
        decoder, names, dim = self.decoder, self.names, self.decoder.head_dim
        heads = decoder.heads // self.tp_size
        q = (self.tp_rank * heads, (self.tp_rank + 1) * heads)
        kv = kv_head_range(decoder, self.tp_rank, self.tp_size)
        ranges = (q, kv, kv)
        if names.qkv is None:
            return [
                (path + name, (a * dim, b * dim))
                for name, (a, b) in zip((names.query, names.key, names.value), ranges, strict=True)
            ]
        fused = path + names.qkv
        if names.qkv_order == "stacked":
            starts = (0, decoder.heads * dim, (decoder.heads + decoder.kv_heads) * dim)
            return [(fused, (s + a * dim, s + b * dim)) for s, (a, b) in zip(starts, ranges, strict=True)]
        return [
            (fused, ((3 * head + part) * dim, (3 * head + part + 1) * dim))
            for part, (a, b) in enumerate(ranges)
            for head in range(a, b)
        ]

    # -- kinds of targets ------------------------------------------------------------------------------

    def add(self, name, bucket, shape, blocks, flipped=False) -> None:
        """`blocks`: (module, output rows, input columns or None for a bias), stacked from row 0 on."""
        target = Target(name, bucket, shape)
        row = 0
        for module, rows, cols in blocks:
            count = rows[1] - rows[0]
            if count and cols is None:
                target.pieces.append(Piece(f"{module}.bias", rows, (0, 1), (row, 0)))
            elif count and flipped:
                target.pieces.append(Piece(f"{module}.weight", cols, rows, (row, 0), True))
            elif count:
                target.pieces.append(Piece(f"{module}.weight", rows, cols, (row, 0)))
            row += count
        self.targets.append(target)

    def norm(self, role: str, path: str, name: str | None, bucket: int, size: int) -> None:
        if name is None:
            return
        name = path + name
        target = Target(f"{role}.weight", bucket, (size,), [Piece(f"{name}.weight", (0, size), (0, 1), (0, 0))])
        self.targets.append(target)
        if self.has(f"{name}.bias"):
            self.add(f"{role}.bias", bucket, (size,), [(name, (0, size), None)])

    def whole(self, role: str, name: str, bucket: int, rows: int, cols: int) -> None:
        self.add(f"{role}.weight", bucket, (rows, cols), [(name, (0, rows), (0, cols))])

    def split_rows(self, role: str, bucket: int, blocks: list, cols: int) -> None:
        total = sum(b - a for _, (a, b) in blocks)
        self.add(
            f"{role}.weight",
            bucket,
            (total, cols),
            [(name, rows, (0, cols)) for name, rows in blocks],
            self.names.input_major,
        )
        if any(self.has(f"{name}.bias") for name, _ in blocks):
            # a part without a bias stays zero
            target = Target(f"{role}.bias", bucket, (total,))
            row = 0
            for name, (a, b) in blocks:
                if self.has(f"{name}.bias"):
                    target.pieces.append(Piece(f"{name}.bias", (a, b), (0, 1), (row, 0)))
                row += b - a
            self.targets.append(target)

    def split_columns(self, role: str, name: str, bucket: int, each: int) -> None:
        hidden = self.decoder.hidden
        cols = (self.tp_rank * each, (self.tp_rank + 1) * each)
        self.add(f"{role}.weight", bucket, (hidden, each), [(name, (0, hidden), cols)], self.names.input_major)
        if self.tp_rank == 0 and self.has(f"{name}.bias"):
            self.add(f"{role}.bias", bucket, (hidden,), [(name, (0, hidden), None)])
