"""GPT-J: one LayerNorm for attention and MLP side by side, interleaved rotary positions on a part of each head."""

from __future__ import annotations

from engine.hybrid.description import Decoder, Names, Norm, Rotary
from engine.hybrid.families import common

NAMES = Names(
    embedding="transformer.wte",
    layers="transformer.h",
    attention_norm="ln_1",
    query="attn.q_proj",
    key="attn.k_proj",
    value="attn.v_proj",
    attention_out="attn.out_proj",
    mlp_norm=None,
    up="mlp.fc_in",
    down="mlp.fc_out",
    final_norm="transformer.ln_f",
    head="lm_head",
)


def describe(config) -> Decoder | None:
    if config.rotary_dim is None:
        return None
    head_dim = config.n_embd // config.n_head
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
        positions=Rotary(
            config.rotary_dim,
            lambda length: (common.plain_frequencies(10000.0, config.rotary_dim), 1.0),
            interleaved=True,
        ),
        activation=common.activation(config.activation_function),
        attention_scale=(head_dim**-0.5,) * config.n_layer,
        windows=(None,) * config.n_layer,
        gated=False,
        residual="parallel_shared_norm",
        max_positions=config.n_positions,
    )
