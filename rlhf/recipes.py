"""Small models from scratch: `--model_name_or_path recipe:llama-1m` instead of a folder.

`build` trains a tokenizer on the run's own texts, makes a model of the recipe's shape from a seed, and writes
both as a normal Hugging Face folder, from which everything goes on as from any other.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedTokenizerBase

from engine import distributed
from rlhf.model_files import quiet
from rlhf.tokenizer_training import train_tokenizer

PREFIX = "recipe:"


@dataclass(frozen=True)
class Recipe:
    """A model's shape: transformers' `model_type` and its config's keys; the vocabulary is at most `vocab_size`."""

    model_type: str
    vocab_size: int
    max_positions: int
    shape: dict[str, Any] = field(default_factory=dict)


RECIPES = {
    # 0.85 M parameters: 4 layers of 197 k and a tied embedding of 61 k. The wide start (near 1 / sqrt(hidden)) and
    # the small vocabulary suit a narrow model and little text: after the same steps on the bundled dialogues it was
    # right twice as often as with 0.02 and 1024.
    "llama-1m": Recipe(
        "llama",
        vocab_size=480,
        max_positions=512,
        shape={
            "initializer_range": 0.06,
            "hidden_size": 128,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "intermediate_size": 384,
            "max_position_embeddings": 512,
            "tie_word_embeddings": True,
        },
    ),
    "gpt2-1m": Recipe(
        "gpt2",
        vocab_size=1024,
        max_positions=512,
        shape={
            "n_embd": 128,
            "n_layer": 4,
            "n_head": 4,
            "n_positions": 512,
            "resid_pdrop": 0.0,
            "embd_pdrop": 0.0,
            "attn_pdrop": 0.0,
        },
    ),
    "opt-1m": Recipe(
        "opt",
        vocab_size=1024,
        max_positions=512,
        shape={
            "hidden_size": 128,
            "word_embed_proj_dim": 128,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "ffn_dim": 512,
            "max_position_embeddings": 512,
            "dropout": 0.0,
            "attention_dropout": 0.0,
        },
    ),
}


def is_recipe(name: str) -> bool:
    return name.startswith(PREFIX)


def find(name: str) -> Recipe:
    """The recipe called `name`, with or without the prefix.

    Raises:
        ValueError: there is none of that name; the line has those there are.
    """
    bare = name.removeprefix(PREFIX)
    if bare not in RECIPES:
        known = ", ".join(PREFIX + key for key in RECIPES)
        raise ValueError(f"unknown recipe {name}: the recipes are {known}")
    return RECIPES[bare]


def build(name: str, texts: Iterable[str], folder: str | Path, seed: int) -> None:
    """Write a new model and a tokenizer trained on `texts` to `folder`, whole or not at all. Collective.

    Rank 0 does the work and alone consumes `texts`; the others wait for it and fail with it. The same texts and
    seed give the same files. A folder of that name is replaced.

    Raises:
        ValueError: unknown recipe, or no text.
    """
    recipe = find(name)
    problem = None
    if distributed.is_main():
        try:
            _write(recipe, texts, Path(folder), seed)
        except (ValueError, OSError) as error:
            problem = error
    # what went wrong must reach the ranks that wait, or they would wait until the time limit
    told = distributed.broadcast_object(None if problem is None else str(problem))
    if problem is not None:
        raise problem
    if told is not None:
        raise ValueError(told)


def _write(recipe: Recipe, texts: Iterable[str], folder: Path, seed: int) -> None:
    tokenizer = train_tokenizer(texts, recipe.vocab_size, recipe.max_positions, seed)
    model = new_model(recipe, tokenizer, seed)
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        with quiet():
            model.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)
        temporary.chmod(0o755)  # mkdtemp's folders are private
        if folder.exists():
            shutil.rmtree(folder)
        os.replace(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def new_model(recipe: Recipe, tokenizer: PreTrainedTokenizerBase, seed: int):
    """A model of the recipe's shape for the tokenizer, initialised from `seed`; the caller's random state stays."""
    special = {
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    # a multiple of 8: splits over tensor-parallel ranks, and matrix units like it
    vocab_size = -(-len(tokenizer) // 8) * 8
    config = AutoConfig.for_model(recipe.model_type, vocab_size=vocab_size, **recipe.shape, **special)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.generation_config = GenerationConfig(**special)
    return model
