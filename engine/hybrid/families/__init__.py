"""The decoder families that the hybrid engine knows, by `config.model_type`.

Each module here has `describe(config) -> Decoder | None`; None means that this config uses an option the
generic decoder has not, so that the model generates through its own forward.
"""

from __future__ import annotations

from engine.hybrid.description import Decoder
from engine.hybrid.families import bloom, gemma2, gpt2, gpt_neox, gptj, llama, mistral, opt, phi3, qwen2, qwen3

FAMILIES = {
    "bloom": bloom,
    "gemma2": gemma2,
    "gpt2": gpt2,
    "gpt_neox": gpt_neox,
    "gptj": gptj,
    "llama": llama,
    "mistral": mistral,
    "opt": opt,
    "phi3": phi3,
    "qwen2": qwen2,
    "qwen3": qwen3,
}


def describe(config) -> Decoder | None:
    """The description of a Hugging Face config's decoder, None when no family here covers it."""
    family = FAMILIES.get(config.model_type)
    return None if family is None else family.describe(config)
