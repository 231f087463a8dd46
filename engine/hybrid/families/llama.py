"""Llama: RMS norms, rotary positions, gated SiLU MLP, grouped-query attention."""

from __future__ import annotations

from dataclasses import replace

from engine.hybrid.description import Decoder, Names, Norm
from engine.hybrid.families import common

NAMES = Names(
    embedding="model.embed_tokens",
    layers="model.layers",
    attention_norm="input_layernorm",
    query="self_attn.q_proj",
    key="self_attn.k_proj",
    value="self_attn.v_proj",
    attention_out="self_attn.o_proj",
    mlp_norm="post_attention_layernorm",
    gate="mlp.gate_proj",
    up="mlp.up_proj",
    down="mlp.down_proj",
    final_norm="model.norm",
    head="lm_head",
)


def describe(config) -> Decoder:
    head_dim = common.head_dim(config)
    return Decoder(
        family=config.model_type,
        names=NAMES,
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=head_dim,
        mlp=config.intermediate_size,
        vocabulary=config.vocab_size,
        norm=Norm("rms", config.rms_norm_eps),
        positions=common.rotary(config),
        activation=common.activation(getattr(config, "hidden_activation", None) or config.hidden_act),
        attention_scale=(head_dim**-0.5,) * config.num_hidden_layers,
        windows=(None,) * config.num_hidden_layers,
    )


def variant(config, **changes) -> Decoder:
    """Llama's description with some entries replaced: the families that are Llama but for a detail."""
    return replace(describe(config), **changes)
