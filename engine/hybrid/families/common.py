"""What several families share: rotary frequencies, windows and activations, read from a Hugging Face config."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F
from transformers.activations import ACT2FN
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from engine.hybrid.description import Activation, Rotary

# Scalings whose frequencies change once a sequence is longer than the model was made for.
LENGTH_DEPENDENT = {"dynamic": "max_position_embeddings", "longrope": "original_max_position_embeddings"}


def head_dim(config) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def rotary(config) -> Rotary:
    """Rotary positions of a config with transformers' `rope_parameters`, every scaling kind it knows."""
    parameters = config.rope_parameters
    kind = parameters["rope_type"]
    dim = int(head_dim(config) * parameters.get("partial_rotary_factor", 1.0))

    def frequencies(length: int) -> tuple[torch.Tensor, float]:
        if kind == "default":
            return plain_frequencies(parameters["rope_theta"], dim), 1.0
        inverse, factor = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), seq_len=length)
        if kind == "longrope":  # the module fixes this factor when it is built, before any length is known
            factor = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))[1]
        return inverse, factor

    switches_at = None
    if kind in LENGTH_DEPENDENT:
        name = LENGTH_DEPENDENT[kind]
        switches_at = parameters.get(name) or getattr(config, name)
    return Rotary(dim, frequencies, switches_at)


def plain_frequencies(theta: float, dim: int) -> torch.Tensor:
    return 1.0 / (theta ** (torch.arange(0, dim, 2, dtype=torch.float) / dim))


def windows(config) -> tuple[int | None, ...]:
    """The sliding window of each layer, from `layer_types` where the config has them."""
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def activation(name: str) -> Activation:
    """The activation that transformers calls `name`, as one fused torch function where there is one."""
    fused = {
        "silu": F.silu,
        "swish": F.silu,
        "relu": F.relu,
        "gelu": F.gelu,
        "gelu_new": _gelu_tanh,
        "gelu_pytorch_tanh": _gelu_tanh,
    }
    found = fused.get(name) or ACT2FN[name]
    return found.eval() if isinstance(found, nn.Module) else found


def _gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x, approximate="tanh")
