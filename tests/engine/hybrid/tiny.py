"""Tiny models of every family, made here with random weights, and a padded batch for them."""

from __future__ import annotations

import torch
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    Gemma2Config,
    GPT2Config,
    GPTJConfig,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    OPTConfig,
    Phi3Config,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
    StableLmConfig,
)

VOCABULARY = 97
_SPECIAL = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_BASE = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, **_SPECIAL}
_GATED = {**_BASE, "intermediate_size": 48, "num_key_value_heads": 2}
_OLD = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, **_SPECIAL}
_PARTIAL = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}


def llama(**changes) -> LlamaConfig:
    return LlamaConfig(**{**_GATED, **changes})


def _rope(kind: str, **changes) -> LlamaConfig:
    return llama(rope_parameters={"rope_type": kind, "rope_theta": 10000.0, **changes}, max_position_embeddings=16)


FAMILIES: dict[str, PretrainedConfig] = {
    "llama": llama(),
    "llama tied, biases, one head each": llama(
        tie_word_embeddings=True, attention_bias=True, mlp_bias=True, num_key_value_heads=4
    ),
    "llama head_dim": llama(head_dim=12),
    "mistral": MistralConfig(**_GATED, sliding_window=6),
    "qwen2": Qwen2Config(**_GATED, use_sliding_window=True, sliding_window=6, max_window_layers=1),
    "qwen3": Qwen3Config(**_GATED, head_dim=16),
    "phi3": Phi3Config(**_GATED, sliding_window=7, rope_parameters=_PARTIAL),
    "gemma2": Gemma2Config(**_GATED, head_dim=8, sliding_window=6, query_pre_attn_scalar=8),
    "opt": OPTConfig(**_BASE, ffn_dim=48, max_position_embeddings=64, word_embed_proj_dim=32),
    "opt, norms behind, narrow embedding": OPTConfig(
        **_BASE, ffn_dim=48, max_position_embeddings=64, word_embed_proj_dim=16, do_layer_norm_before=False
    ),
    "gpt2": GPT2Config(**_OLD),
    "gpt2 scaled by layer": GPT2Config(**_OLD, scale_attn_by_inverse_layer_idx=True),
    "gpt_neox": GPTNeoXConfig(**_BASE, intermediate_size=48),
    "gpt_neox one after the other": GPTNeoXConfig(**_BASE, intermediate_size=48, use_parallel_residual=False),
    "gptj": GPTJConfig(**_OLD, rotary_dim=4, tie_word_embeddings=False),
    "bloom": BloomConfig(vocab_size=VOCABULARY, hidden_size=32, n_layer=2, n_head=4, **_SPECIAL),
    "bloom, six heads": BloomConfig(vocab_size=VOCABULARY, hidden_size=48, n_layer=2, n_head=6, **_SPECIAL),
}
ROTARY: dict[str, PretrainedConfig] = {
    "linear": _rope("linear", factor=2.0),
    "dynamic": _rope("dynamic", factor=2.0),
    "yarn": _rope("yarn", factor=4.0, original_max_position_embeddings=8),
    "llama3": _rope(
        "llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8
    ),
    "longrope": _rope(
        "longrope",
        factor=4.0,
        original_max_position_embeddings=16,
        short_factor=[1.0, 1.1, 1.2, 1.3],
        long_factor=[1.0, 2.0, 3.0, 4.0],
    ),
}
NO_ADAPTER = StableLmConfig(**{**_GATED, "num_key_value_heads": 4})


def build(config: PretrainedConfig, seed: int = 1):
    """A model whose distributions are far from flat, so that a wrong mask or position changes the argmax."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def batch(seed: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    """Five prompts of 9, 6, 4, 8 and 2 tokens, padded left to 9: ids and mask `[5, 9]`."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCABULARY, (5, 9), generator=generator)
    mask = torch.ones_like(ids)
    for row, missing in enumerate((0, 3, 5, 1, 7)):
        ids[row, :missing] = 0
        mask[row, :missing] = 0
    return ids, mask


def reference(model, ids: torch.Tensor, mask: torch.Tensor, new: int, **settings) -> torch.Tensor:
    """Greedy generation by transformers."""
    return model.generate(ids, attention_mask=mask, max_new_tokens=new, do_sample=False, **settings)


def forward_logprobs(model, sequences: torch.Tensor, mask: torch.Tensor, prompt: int, temperature: float = 1.0):
    """Log-probabilities `[B, N, V]` of every token at the answer's positions, from the model's forward pass."""
    new = sequences.shape[1] - prompt
    mask = torch.cat([mask, torch.ones(len(mask), new, dtype=mask.dtype)], dim=1)
    positions = {} if model.config.model_type == "bloom" else {"position_ids": (mask.cumsum(1) - 1).clamp(0)}
    with torch.no_grad():
        logits = model(sequences, attention_mask=mask, **positions).logits.float()
    return (logits[:, prompt - 1 : -1] / temperature).log_softmax(-1)
