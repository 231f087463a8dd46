"""GPT-NeoX (Pythia): LayerNorm, rotary positions on a part of each head, fused query-key-value head by head,
attention and MLP side by side."""

from __future__ import annotations

from engine.hybrid.description import Decoder, Names, Norm
from engine.hybrid.families import common

NAMES = Names(
    embedding="gpt_neox.embed_in",
    layers="gpt_neox.layers",
    attention_norm="input_layernorm",
    qkv="attention.query_key_value",
    qkv_order="by_head",
    attention_out="attention.dense",
    mlp_norm="post_attention_layernorm",
    up="mlp.dense_h_to_4h",
    down="mlp.dense_4h_to_h",
    final_norm="gpt_neox.final_layer_norm",
    head="lm_head",
)


def describe(config) -> Decoder:
    head_dim = config.hidden_size // config.num_attention_heads
    return Decoder(
        family=config.model_type,
        names=NAMES,
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_attention_heads,
        head_dim=head_dim,
        mlp=config.intermediate_size,
        vocabulary=config.vocab_size,
        norm=Norm("layer", config.layer_norm_eps),
        positions=common.rotary(config),
        activation=common.activation(config.hidden_act),
        attention_scale=(head_dim**-0.5,) * config.num_hidden_layers,
        windows=(None,) * config.num_hidden_layers,
        gated=False,
        residual="parallel" if config.use_parallel_residual else "sequential",
    )
