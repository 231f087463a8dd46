"""Qwen3: Llama with an RMS norm on each query and key head, and a sliding window on some layers when asked."""

from __future__ import annotations

from dataclasses import replace

from engine.hybrid.description import Decoder, Norm
from engine.hybrid.families import common, llama

NAMES = replace(llama.NAMES, query_norm="self_attn.q_norm", key_norm="self_attn.k_norm")


def describe(config) -> Decoder:
    return llama.variant(
        config, names=NAMES, head_norm=Norm("rms", config.rms_norm_eps), windows=common.windows(config)
    )
