"""Tiny random models and a tokenizer, made once a test session."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from rlhf.model_files import quiet
from rlhf.tokenizer_training import train_tokenizer

VOCABULARY = 400

FAMILIES = {
    "llama": {"num_key_value_heads": 2, "intermediate_size": 48},
    "qwen2": {"num_key_value_heads": 2, "intermediate_size": 48, "tie_word_embeddings": True},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 16, "max_position_embeddings": 64},
    "gpt2": {"n_positions": 64},
    "gpt_neo": {
        "num_layers": 2,
        "num_heads": 4,
        "attention_types": [[["global", "local"], 1]],
        "window_size": 8,
        "max_position_embeddings": 64,
    },
    "gpt_neox": {"intermediate_size": 48},
    "bloom": {},
}
SHAPE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}

TEXTS = [
    "\n\nHuman: What is 4 plus 2?\n\nAssistant: It is 6.",
    "\n\nHuman: Hello! Tell me the opposite of hot.\n\nAssistant: The opposite of hot is cold, and I am sure of that.",
    "\n\nHuman: Spell cat.\n\nAssistant: c a t\n\nHuman: Thank you.\n\nAssistant: You are welcome.",
]


def causal_model(family: str = "llama", seed: int = 0, **changes) -> PreTrainedModel:
    """A random causal model with a vocabulary of `VOCABULARY`, in evaluation mode."""
    own = {"num_layers", "num_heads"} & FAMILIES[family].keys()
    shape = {"hidden_size": 32} if own else SHAPE
    special = {"pad_token_id": None, "bos_token_id": 1, "eos_token_id": 2}
    config = AutoConfig.for_model(family, vocab_size=VOCABULARY, **shape, **FAMILIES[family], **special)
    for key, value in changes.items():
        setattr(config, key, value)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config)
        # fresh weights are so small that a wrong position or mask would hardly show
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.data.mul_(4.0)
    return model.eval()


def tokenizer(pad: str = "own"):
    """A tokenizer for `VOCABULARY`; pad: "own" token, "eos" as pad, or "none"."""
    tokenizer = train_tokenizer(TEXTS, VOCABULARY, 64, seed=0)
    if pad == "eos":
        tokenizer.pad_token = tokenizer.eos_token
    elif pad == "none":
        tokenizer.pad_token = None
    return tokenizer


@cache
def folder(family: str = "llama", pad: str = "own", seed: int = 0) -> Path:
    """A saved causal model with its tokenizer. Do not write to it."""
    path = Path(mkdtemp(prefix=f"tiny-{family}-"))
    with quiet():
        causal_model(family, seed).save_pretrained(path)
    tokenizer(pad).save_pretrained(path)
    return path


def padded(rows: list[list[int]], pad: int, side: str, extra: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """ids and bool mask `[B, L]` of rows padded on `side` to the longest plus `extra`."""
    width = max(map(len, rows)) + extra
    ids = torch.full((len(rows), width), pad)
    mask = torch.zeros(len(rows), width, dtype=torch.bool)
    for i, row in enumerate(rows):
        place = slice(width - len(row), width) if side == "left" else slice(0, len(row))
        ids[i, place] = torch.tensor(row)
        mask[i, place] = True
    return ids, mask
