"""GPT-2: LayerNorm, learned positions, fused query-key-value and plain GELU MLP, weights stored `[in, out]`."""

from __future__ import annotations

from engine.hybrid.description import Decoder, Learned, Names, Norm
from engine.hybrid.families import common

NAMES = Names(
    embedding="transformer.wte",
    positions="transformer.wpe",
    layers="transformer.h",
    attention_norm="ln_1",
    qkv="attn.c_attn",
    qkv_order="stacked",
    attention_out="attn.c_proj",
    mlp_norm="ln_2",
    up="mlp.c_fc",
    down="mlp.c_proj",
    final_norm="transformer.ln_f",
    head="lm_head",
    input_major=True,
)


def describe(config) -> Decoder | None:
    if config.add_cross_attention:
        return None
    head_dim = config.n_embd // config.n_head
    scale = head_dim**-0.5 if config.scale_attn_weights else 1.0
    by_layer = config.scale_attn_by_inverse_layer_idx
    return Decoder(
        family=config.model_type,
        names=NAMES,
        layers=config.n_layer,
        hidden=config.n_embd,
        heads=config.n_head,
        kv_heads=config.n_head,
        head_dim=head_dim,
        mlp=config.n_inner or 4 * config.n_embd,
        vocabulary=config.vocab_size,
        norm=Norm("layer", config.layer_norm_epsilon),
        positions=Learned(offset=0, size=config.n_positions),
        activation=common.activation(config.activation_function),
        attention_scale=tuple(scale / (layer + 1 if by_layer else 1) for layer in range(config.n_layer)),
        windows=(None,) * config.n_layer,
        gated=False,
        max_positions=config.n_positions,
    )
