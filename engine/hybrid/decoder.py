"""The generic decoder: runs any description over weights in the inference layout and the workspace.

Shapes: tokens and positions `[tokens]`, hidden states `[tokens, hidden]`. There is no batch dimension: a
prompt's tokens follow one another, and a step has one token for each sequence.

Weights that arrive in bf16 on a CPU without kernels for it are kept, and everything runs, in fp32: the weights are
those of bf16, in twice the memory; what is computed from them is rounded less and several times as fast.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from engine.cpu_linear import lacks_bf16
from engine.hybrid import description
from engine.hybrid.attention import Heads, Prompts, Step, turn_
from engine.hybrid.cache import Workspace
from engine.hybrid.description import Decoder, Learned, Rotary
from engine.hybrid.groups import TensorParallel
from engine.hybrid.layout import vocabulary_slice
from engine.hybrid.linear import LinearFunction, can_pack, make_linear
from engine.hybrid.rotary import RotaryTable

NormFunction = Callable[[torch.Tensor], torch.Tensor]


@dataclass
class _Layer:
    attention_norm: NormFunction
    qkv: LinearFunction
    attention_out: LinearFunction
    up: LinearFunction
    down: LinearFunction
    mlp_norm: NormFunction | None
    query_norm: NormFunction | None
    key_norm: NormFunction | None
    after_attention_norm: NormFunction | None
    after_mlp_norm: NormFunction | None


class Model:
    """A decoder with its weights, on one rank of a tensor-parallel group."""

    def __init__(self, decoder: Decoder, dtype: torch.dtype, device: torch.device, tp: TensorParallel):
        if dtype == torch.bfloat16 and device.type == "cpu" and lacks_bf16():
            dtype = torch.float32
        self.decoder, self.dtype, self.device, self.tp = decoder, dtype, device, tp
        self.heads = Heads(decoder, tp.rank, tp.size, device)
        self.workspace = Workspace(decoder.layers, self.heads.kv, decoder.head_dim, dtype, device)
        self.rotary = RotaryTable(decoder.positions, dtype, device) if isinstance(decoder.positions, Rotary) else None
        self.packed = can_pack(dtype, device)
        self.release_weights()

    # -- weights ---------------------------------------------------------------------------------------

    @property
    def has_weights(self) -> bool:
        return bool(self.layers)

    def release_weights(self) -> None:
        self.layers: list[_Layer] = []
        self.tables: dict[str, torch.Tensor] = {}
        self.outer: dict[str, Callable] = {}

    def load(self, buckets: Iterable[dict[str, torch.Tensor]]) -> None:
        """Take the swap's tensors, in the order it yields them; what is packed is not kept twice."""
        self.release_weights()
        layers: list[_Layer] = []
        head: dict[str, torch.Tensor] = {}
        for bucket in buckets:
            bucket = {name: tensor.to(self.dtype) for name, tensor in bucket.items()}
            for index in sorted({int(name.split(".")[0]) for name in bucket if name[0].isdigit()}):
                layers.append(self._layer(bucket, f"{index}."))
            for role in ("embedding", "positions"):
                if f"{role}.weight" in bucket:
                    self.tables[role] = bucket[f"{role}.weight"]
            for role in ("embedding_norm", "final_norm"):
                self.outer[role] = self._norm(bucket, role) or self.outer.get(role)
            for role in ("project_in", "project_out"):
                if f"{role}.weight" in bucket:
                    self.outer[role] = self._linear(bucket, role)
            head = {**head, **{name: bucket[name] for name in ("head.weight", "head.bias") if name in bucket}}
            del bucket  # what was packed goes before the next bucket is taken
        weight = head.get("head.weight", self.tables["embedding"])  # none of its own: tied
        self.outer["head"] = make_linear(weight, head.get("head.bias"), self.packed)
        self.layers = layers

    def _layer(self, bucket: dict[str, torch.Tensor], prefix: str) -> _Layer:
        linears = {r: self._linear(bucket, prefix + r) for r in ("qkv", "attention_out", "up", "down")}
        roles = ("attention_norm", "mlp_norm", "after_attention_norm", "after_mlp_norm")
        norms = {r: self._norm(bucket, prefix + r) for r in roles}
        heads = {r: self._norm(bucket, prefix + r, self.decoder.head_norm) for r in ("query_norm", "key_norm")}
        return _Layer(**linears, **norms, **heads)

    def _linear(self, bucket: dict[str, torch.Tensor], role: str) -> LinearFunction:
        return make_linear(bucket[f"{role}.weight"], bucket.get(f"{role}.bias"), self.packed)

    def _norm(self, bucket, role: str, kind: description.Norm | None = None) -> NormFunction | None:
        weight = bucket.get(f"{role}.weight")
        if weight is None:
            return None
        return make_norm(kind or self.decoder.norm, weight, bucket.get(f"{role}.bias"))

    # -- running ---------------------------------------------------------------------------------------

    def prompts(
        self, tokens: torch.Tensor, lengths: list[int], first: int, offset: int = 0, whole: int = 0
    ) -> torch.Tensor:
        """Read prompts into neighbouring slots.

        Args:
            tokens: `[sum(lengths)]`, the prompts one after another.
            first: the slot of the first one.
            offset: how many tokens of the (then single) prompt the workspace has already.
            whole: how many it has in all, which some rotary frequencies depend on.

        Returns:
            logits `[prompts, vocabulary]` after each prompt's last token, fp32.
        """
        plan = Prompts(self.heads, lengths, first, offset, self.device)
        return self._run(tokens, plan.positions, whole or max(lengths), plan, plan.last)

    def step(self, tokens: torch.Tensor, positions: torch.Tensor, width: int) -> torch.Tensor:
        """One token further in the first `len(tokens)` slots.

        Args:
            tokens, positions: `[rows]`, the newest token of each sequence and where it stands.
            width: one more than the highest position.

        Returns:
            logits `[rows, vocabulary]`, fp32.
        """
        return self._run(tokens, positions, width, Step(self.heads, positions, width, self.workspace), None)

    def _run(self, tokens, positions, longest: int, attention: Prompts | Step, keep) -> torch.Tensor:
        decoder = self.decoder
        x = self._embed(tokens, positions)
        angles = self.rotary.at(positions, longest) if self.rotary is not None else None
        block = self._parallel_block if decoder.residual != "sequential" else self._sequential_block
        for index, layer in enumerate(self.layers):
            last = index + 1 == len(self.layers)
            x = block(index, layer, x, angles, attention, keep if last else None)
        if self.outer["final_norm"] is not None:
            x = self.outer["final_norm"](x)
        if "project_out" in self.outer:
            x = self.outer["project_out"](x)
        logits = self.tp.concatenate(self.outer["head"](x))[:, : decoder.vocabulary].float()
        if decoder.logit_softcap is not None:
            logits = logits.div(decoder.logit_softcap).tanh_().mul_(decoder.logit_softcap)
        return logits

    def _embed(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        decoder, table = self.decoder, self.tables["embedding"]
        if self.tp.size > 1:
            each = vocabulary_slice(decoder, self.tp.size)
            tokens = tokens - self.tp.rank * each
            elsewhere = (tokens < 0) | (tokens >= each)
            x = F.embedding(tokens.masked_fill(elsewhere, 0), table).masked_fill_(elsewhere[:, None], 0)
            x = self.tp.sum_(x)
        else:
            x = table.index_select(0, tokens)
        if decoder.embedding_scale is not None:
            # rounded like the embedding it multiplies, as the reference implementations do
            x = x * torch.tensor(decoder.embedding_scale, dtype=self.dtype, device=self.device)
        if self.outer.get("embedding_norm") is not None:
            x = self.outer["embedding_norm"](x)
        if "project_in" in self.outer:
            x = self.outer["project_in"](x)
        if isinstance(decoder.positions, Learned):
            x = x + self.tables["positions"].index_select(0, positions + decoder.positions.offset)
        return x

    def _attend(self, index: int, layer: _Layer, x: torch.Tensor, angles, attention) -> torch.Tensor:
        heads = self.heads.split(layer.qkv(x))
        turn_(heads, self.heads, self.rotary, angles, layer.query_norm, layer.key_norm)
        return attention.attend(self.workspace, index, heads)

    def _mlp(self, layer: _Layer, x: torch.Tensor) -> torch.Tensor:
        up = layer.up(x)
        if not self.decoder.gated:
            return self.decoder.activation(up)
        gate, up = up.chunk(2, dim=-1)
        return self.decoder.activation(gate).mul_(up)

    def _branch(self, linear: LinearFunction, y: torch.Tensor, x: torch.Tensor, norm: NormFunction | None):
        """`x + linear(y)`, summed over the group; `norm` applies to the branch before it is added."""
        if norm is not None:
            return x + norm(self.tp.sum_(linear(y)))
        # the residual joins the partial sum of one rank, and so the total once
        return self.tp.sum_(linear(y, x if self.tp.rank == 0 else None))

    def _sequential_block(self, index, layer: _Layer, x, angles, attention, keep) -> torch.Tensor:
        after = self.decoder.norm_after
        y = self._attend(index, layer, x if after else layer.attention_norm(x), angles, attention)
        if keep is not None:  # after the last attention only the last token of each prompt matters
            x, y = x.index_select(0, keep), y.index_select(0, keep)
        x = self._branch(layer.attention_out, y, x, layer.after_attention_norm)
        if after:
            x = layer.attention_norm(x)
        y = self._mlp(layer, x if after else layer.mlp_norm(x))
        x = self._branch(layer.down, y, x, layer.after_mlp_norm)
        return layer.mlp_norm(x) if after else x

    def _parallel_block(self, index, layer: _Layer, x, angles, attention, keep) -> torch.Tensor:
        y = self._attend(index, layer, layer.attention_norm(x), angles, attention)
        if keep is not None:
            x, y = x.index_select(0, keep), y.index_select(0, keep)
        shared = self.decoder.residual == "parallel_shared_norm"
        z = self._mlp(layer, (layer.attention_norm if shared else layer.mlp_norm)(x))
        partial = layer.attention_out(y, x if self.tp.rank == 0 else None)
        return self.tp.sum_(layer.down(z, partial))


def make_norm(norm: description.Norm, weight: torch.Tensor, bias: torch.Tensor | None) -> NormFunction:
    """The norm as a function of `[..., features]`."""
    size, eps = weight.shape, norm.eps
    if norm.kind == "layer":
        return lambda x: F.layer_norm(x, size, weight, bias, eps)
    if norm.kind == "rms":
        return lambda x: F.rms_norm(x, size, weight, eps)
    shifted = weight.float() + 1.0
    return lambda x: F.rms_norm(x.float(), size, shifted, eps).to(x.dtype)
