"""Qwen2: Llama with biases on query, key and value, and a sliding window on the upper layers when asked."""

from __future__ import annotations

from engine.hybrid.description import Decoder
from engine.hybrid.families import common, llama


def describe(config) -> Decoder:
    return llama.variant(config, windows=common.windows(config))
