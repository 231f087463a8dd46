"""The hybrid engine's decoder over a plain Hugging Face causal model, for chat and evaluation:

answers = Generator(model).generate(input_ids, attention_mask, max_new_tokens=64, do_sample=True, seed=1)
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from engine.hybrid.core import Core
from engine.hybrid.requests import (
    GenerateOutput,
    answer_limits,
    assemble,
    check_call,
    longest_pair,
    no_answers,
    padding_id,
    request_keys,
    stop_ids,
    unpad,
)
from engine.hybrid.sampling import Sampling
from engine.hybrid.scheduler import OnToken


class Generator:
    """Generates from a plain Hugging Face causal model, through the decoder of the hybrid engine.

    Keeps a copy of the weights in the inference layout, made anew when a parameter has changed since.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype | None = None):
        """`dtype` is what to compute in; the model's own by default."""
        parameter = next(model.parameters())
        self.core = Core(model, dtype or parameter.dtype, parameter.device)

    def generate(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        *,
        max_new_tokens: int | Sequence[int],
        do_sample: bool = False,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_new_tokens: int = 0,
        num_return_sequences: int = 1,
        eos_token_id: int | Sequence[int] | None = None,
        pad_token_id: int | None = None,
        seed: int | Sequence[int] | None = None,
        return_dict_in_generate: bool = False,
        on_token: OnToken | None = None,
    ) -> torch.Tensor | GenerateOutput:
        """As `HybridEngine.generate`, in this process alone; `on_token(row, token)` hears each token at once."""
        core = self.core
        generation_config = getattr(core.module, "generation_config", None)
        stop = stop_ids(core.config, generation_config, eos_token_id)
        sampling = Sampling(do_sample, temperature, top_k or 0, top_p, min_new_tokens or 0, stop)
        check_call(sampling, num_return_sequences)
        prompts = unpad(input_ids, attention_mask)
        limits = answer_limits(max_new_tokens, len(prompts))
        keys = request_keys(seed, len(prompts), num_return_sequences, 0)
        if prompts:
            core.check_positions(*longest_pair(prompts, limits))
            core.sync(tuple((p.data_ptr(), p._version) for p in core.module.parameters()))
            prompt_of = [i for i in range(len(prompts)) for _ in range(num_return_sequences)]
            answers = core.run(prompts, prompt_of, keys, [limits[i] for i in prompt_of], sampling, on_token=on_token)
        else:
            answers = no_answers(input_ids.device)
        pad = padding_id(core.config, generation_config, pad_token_id, stop)
        output = assemble(input_ids, answers, num_return_sequences, stop, pad)
        return output if return_dict_in_generate else output.sequences

    def release_inference_cache(self) -> None:
        """Give the workspace and the laid-out weights back; the next call makes them again."""
        self.core.release()
