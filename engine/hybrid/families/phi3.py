"""Phi-3: Llama with fused projections, rotary positions on a part of each head, and a sliding window."""

from __future__ import annotations

from dataclasses import replace

from engine.hybrid.description import Decoder
from engine.hybrid.families import common, llama

NAMES = replace(
    llama.NAMES,
    query=None,
    key=None,
    value=None,
    qkv="self_attn.qkv_proj",
    qkv_order="stacked",
    gate=None,
    up=None,
    gate_up="mlp.gate_up_proj",
)


def describe(config) -> Decoder:
    return llama.variant(config, names=NAMES, windows=common.windows(config))
