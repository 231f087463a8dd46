"""Mistral: Llama with a sliding window on every layer."""

from __future__ import annotations

from engine.hybrid.description import Decoder
from engine.hybrid.families import common, llama


def describe(config) -> Decoder:
    return llama.variant(config, windows=common.windows(config))
