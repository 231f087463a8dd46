"""The hybrid engine's decoder over a plain Hugging Face causal model, for chat and evaluation:

answers = Generator(model).generate(input_ids, attention_mask, max_new_tokens=64, do_sample=True, seed=1)
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from engine.hybrid.core import Core
from engine.hybrid.requests import GenerateOutput, assemble, no_answers, read_call
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
        call = read_call(
            core.module,
            core.config,
            0,
            input_ids,
            attention_mask,
            max_new_tokens=max_new_tokens,
            do_sample=do_sample,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_new_tokens=min_new_tokens,
            num_return_sequences=num_return_sequences,
            eos_token_id=eos_token_id,
            pad_token_id=pad_token_id,
            seed=seed,
        )
        if call.prompts:
            core.check_positions(*call.longest)
            if not core.is_current():
                core.sync()
            limits = [call.limits[i] for i in call.prompt_of]
            answers = core.run(call.prompts, call.prompt_of, call.keys, limits, call.sampling, on_token=on_token)
        else:
            answers = no_answers(input_ids.device)
        output = assemble(input_ids, answers, call.samples, call.sampling.stop, call.pad)
        return output if return_dict_in_generate else output.sequences

    def release_inference_cache(self) -> None:
        """Give the workspace and the laid-out weights back; the next call makes them again."""
        self.core.release()
