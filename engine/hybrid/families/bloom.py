"""BLOOM: LayerNorm (one on the embedding too), ALiBi, fused query-key-value head by head, tanh GELU."""

from __future__ import annotations

import math

from engine.hybrid.description import Alibi, Decoder, Names, Norm
from engine.hybrid.families import common

NAMES = Names(
    embedding="transformer.word_embeddings",
    embedding_norm="transformer.word_embeddings_layernorm",
    layers="transformer.h",
    attention_norm="input_layernorm",
    qkv="self_attention.query_key_value",
    qkv_order="by_head",
    attention_out="self_attention.dense",
    mlp_norm="post_attention_layernorm",
    up="mlp.dense_h_to_4h",
    down="mlp.dense_4h_to_h",
    final_norm="transformer.ln_f",
    head="lm_head",
)


def describe(config) -> Decoder | None:
    if config.apply_residual_connection_post_layernorm:
        return None
    head_dim = config.hidden_size // config.n_head
    return Decoder(
        family=config.model_type,
        names=NAMES,
        layers=config.n_layer,
        hidden=config.hidden_size,
        heads=config.n_head,
        kv_heads=config.n_head,
        head_dim=head_dim,
        mlp=4 * config.hidden_size,
        vocabulary=config.vocab_size,
        norm=Norm("layer", config.layer_norm_epsilon),
        positions=Alibi(slopes(config.n_head)),
        activation=common.activation("gelu_pytorch_tanh"),
        attention_scale=(head_dim**-0.5,) * config.n_layer,
        windows=(None,) * config.n_layer,
        gated=False,
    )


def slopes(heads: int) -> tuple[float, ...]:
    """ALiBi's geometric slopes: 2^(-8 i / n) for a power of two n, odd steps of 2n's for heads beyond it."""
    power = 2 ** math.floor(math.log2(heads))
    first = [2.0 ** (-8.0 * i / power) for i in range(1, power + 1)]
    rest = [2.0 ** (-4.0 * i / power) for i in range(1, 2 * (heads - power) + 1, 2)]
    return tuple(first + rest)
