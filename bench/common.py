"""What several measurements share: the Llamas by size, and a free port."""

from __future__ import annotations

import socket

import torch
from transformers import LlamaConfig, LlamaForCausalLM

SIZES = {  # hidden, intermediate, layers, heads, vocabulary
    "tiny": (64, 176, 2, 4, 512),
    "1.3m": (128, 352, 4, 4, 2048),
    "34m": (512, 1376, 8, 8, 8192),
    "134m": (768, 2048, 12, 12, 32000),
}


def make_llama(size: str, tied: bool) -> LlamaForCausalLM:
    """A Llama with random fp32 weights, the same wherever it is made; `tied`: its embedding is its head."""
    hidden, intermediate, layers, heads, vocabulary = SIZES[size]
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        tie_word_embeddings=tied,
    )
    return LlamaForCausalLM(config).float()


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]
