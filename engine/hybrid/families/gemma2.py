"""Gemma 2: RMS norms (1 + weight) before and after each branch, soft-capped scores and logits, a scaled
embedding, and a sliding window on every other layer."""

from __future__ import annotations

from dataclasses import replace

from engine.hybrid.description import Decoder, Norm
from engine.hybrid.families import common, llama

NAMES = replace(
    llama.NAMES,
    after_attention_norm="post_attention_layernorm",
    mlp_norm="pre_feedforward_layernorm",
    after_mlp_norm="post_feedforward_layernorm",
)


def describe(config) -> Decoder | None:
    if getattr(config, "use_bidirectional_attention", None):
        return None
    return llama.variant(
        config,
        names=NAMES,
        norm=Norm("rms_plus_one", config.rms_norm_eps),
        windows=common.windows(config),
        attention_scale=(config.query_pre_attn_scalar**-0.5,) * config.num_hidden_layers,
        attention_softcap=config.attn_logit_softcapping,
        logit_softcap=config.final_logit_softcapping,
        embedding_scale=config.hidden_size**0.5,
    )
