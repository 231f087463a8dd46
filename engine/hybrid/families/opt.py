"""OPT: LayerNorm before each branch (after it in the 350M model), learned positions from row 2 on, plain MLP."""

from __future__ import annotations

from engine.hybrid.description import Decoder, Learned, Names, Norm
from engine.hybrid.families import common


def describe(config) -> Decoder | None:
    if not config.layer_norm_elementwise_affine:
        return None
    narrow = config.word_embed_proj_dim != config.hidden_size
    has_final_norm = config.do_layer_norm_before and not config._remove_final_layer_norm
    names = Names(
        embedding="model.decoder.embed_tokens",
        positions="model.decoder.embed_positions",
        project_in="model.decoder.project_in" if narrow else None,
        layers="model.decoder.layers",
        attention_norm="self_attn_layer_norm",
        query="self_attn.q_proj",
        key="self_attn.k_proj",
        value="self_attn.v_proj",
        attention_out="self_attn.out_proj",
        mlp_norm="final_layer_norm",
        up="fc1",
        down="fc2",
        final_norm="model.decoder.final_layer_norm" if has_final_norm else None,
        project_out="model.decoder.project_out" if narrow else None,
        head="lm_head",
    )
    head_dim = config.hidden_size // config.num_attention_heads
    return Decoder(
        family=config.model_type,
        names=names,
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_attention_heads,
        head_dim=head_dim,
        mlp=config.ffn_dim,
        vocabulary=config.vocab_size,
        norm=Norm("layer", 1e-5),
        positions=Learned(offset=2, size=config.max_position_embeddings + 2),
        activation=common.activation(config.activation_function),
        attention_scale=(head_dim**-0.5,) * config.num_hidden_layers,
        windows=(None,) * config.num_hidden_layers,
        gated=False,
        norm_after=not config.do_layer_norm_before,
        embedding_width=config.word_embed_proj_dim,
        max_positions=config.max_position_embeddings,
    )
