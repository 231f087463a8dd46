"""Shapes of models by name, for dry runs: a large model can be planned where neither it nor the hub is at hand.

A folder needs a `config.json` only. Of the names below the shape is known here; any other is asked of the hub.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoConfig, PretrainedConfig

from rlhf import recipes
from rlhf.model_files import read_config


def _opt(hidden: int, layers: int, heads: int, **more: Any) -> dict[str, Any]:
    shape = {"hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads, "ffn_dim": 4 * hidden}
    return {"model_type": "opt", "vocab_size": 50272, "word_embed_proj_dim": hidden, **shape, **more}


def _llama(hidden: int, layers: int, heads: int, groups: int, inner: int, vocabulary: int, **more: Any) -> dict:
    return {
        "model_type": "llama",
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "intermediate_size": inner,
        **more,
    }


def _qwen3(hidden: int, layers: int, heads: int, inner: int, tied: bool) -> dict[str, Any]:
    more = {"model_type": "qwen3", "head_dim": 128, "tie_word_embeddings": tied}
    return _llama(hidden, layers, heads, 8, inner, 151936, **more)


KNOWN: dict[str, dict[str, Any]] = {
    "facebook/opt-125m": _opt(768, 12, 12),
    "facebook/opt-350m": _opt(1024, 24, 16, word_embed_proj_dim=512, do_layer_norm_before=False),
    "facebook/opt-1.3b": _opt(2048, 24, 32),
    "facebook/opt-2.7b": _opt(2560, 32, 32),
    "facebook/opt-6.7b": _opt(4096, 32, 32),
    "facebook/opt-13b": _opt(5120, 40, 40),
    "facebook/opt-30b": _opt(7168, 48, 56),
    "facebook/opt-66b": _opt(9216, 64, 72),
    "meta-llama/Llama-2-7b-hf": _llama(4096, 32, 32, 32, 11008, 32000),
    "meta-llama/Llama-2-13b-hf": _llama(5120, 40, 40, 40, 13824, 32000),
    "meta-llama/Llama-2-70b-hf": _llama(8192, 80, 64, 8, 28672, 32000),
    "Qwen/Qwen3-0.6B": _qwen3(1024, 28, 16, 3072, tied=True),
    "Qwen/Qwen3-1.7B": _qwen3(2048, 28, 16, 6144, tied=True),
    "Qwen/Qwen3-4B": _qwen3(2560, 36, 32, 9728, tied=True),
    "Qwen/Qwen3-8B": _qwen3(4096, 36, 32, 12288, tied=False),
    "HuggingFaceTB/SmolLM2-135M-Instruct": _llama(576, 30, 9, 3, 1536, 49152, tie_word_embeddings=True),
}


def architecture(name: str) -> PretrainedConfig:
    """The configuration of a folder, a recipe, or a name; no weights are read.

    Raises:
        FileNotFoundError, ValueError: there is none, in one line.
    """
    if recipes.is_recipe(name):
        recipe = recipes.find(name)
        return AutoConfig.for_model(recipe.model_type, vocab_size=recipe.vocab_size, **recipe.shape)
    if name in KNOWN and not Path(name).is_dir():
        return AutoConfig.for_model(**KNOWN[name])
    return read_config(name)
