"""One model that generates: keeps the inference layout in step with the training weights, and runs requests.

`Generator(model)` is the same decoder over a plain Hugging Face causal model, for chat and evaluation:

    answers = Generator(model).generate(input_ids, attention_mask, max_new_tokens=64, do_sample=True, seed=1)
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from engine.hybrid import passthrough, scheduler
from engine.hybrid.decoder import Model
from engine.hybrid.families import describe
from engine.hybrid.groups import TensorParallel
from engine.hybrid.layout import check_sizes, plan_layout
from engine.hybrid.reshard import Swap
from engine.hybrid.sampling import Sampling, mix
from engine.hybrid.scheduler import Answers, OnToken
from engine.hybrid.sources import Sources

logger = logging.getLogger(__name__)


@dataclass
class GenerateOutput:
    """What `generate` returns with `return_dict_in_generate=True`; `B` rows, `N` the longest answer.

    sequences `[B, P + N]`: the given ids, then the answer, then padding. logprobs `[B, N]` fp32: of each answer
    token under the whole distribution at the sampling temperature; 0 beyond the answer. lengths `[B]`: tokens
    of the answer, its end token included. finished `[B]`: it ended with an end token.
    """

    sequences: torch.Tensor
    logprobs: torch.Tensor
    lengths: torch.Tensor
    finished: torch.Tensor


class Core:
    """The inference side of one module: its layout, its workspace and the runs over them."""

    def __init__(
        self, module: nn.Module, dtype: torch.dtype, device: torch.device, tp_size: int = 1, layers_per_bucket: int = 8
    ):
        self.module, self.dtype, self.device = module, dtype, device
        self.tp = TensorParallel(tp_size)
        self.sources = Sources(module)
        self.sources.refresh()
        self.version: object = None
        self.replica: nn.Module | None = None
        plain = module.get_base_model() if hasattr(module, "get_base_model") else module
        self.config = plain.config
        decoder = describe(plain.config) if _is_plain_causal(plain, self.sources) else None
        self.model: Model | None = None
        if decoder is None:
            if tp_size > 1:
                raise ValueError(
                    f"hybrid_engine.inference_tp_size={tp_size}: {self.config.model_type} has no tensor-parallel "
                    "layout, use 1"
                )
            logger.warning(
                "%s has no inference layout: it generates through its own forward, with whole weights on every rank",
                self.config.model_type,
            )
            return
        check_sizes(decoder, tp_size)
        self.model = Model(decoder, dtype, device, self.tp)
        names = decoder.names
        head, embedding = f"{names.head}.weight", f"{names.embedding}.weight"
        tied = not self.sources.has(head) or self.sources.parameter(head) is self.sources.parameter(embedding)
        self.swap = Swap(
            self.sources,
            lambda rank: plan_layout(decoder, self.sources.has, tied, rank % tp_size, tp_size),
            dtype,
            layers_per_bucket,
        )

    def sync(self, version: object) -> None:
        """Lay the weights out again if `version` is not the one laid out. Collective."""
        if version == self.version and (self.replica is not None or (self.model and self.model.has_weights)):
            return
        self.release_weights()
        with torch.no_grad():
            if self.model is not None:
                self.model.load(self.swap.run())
            else:
                self.sources.refresh()
                whole = self.sources.is_sharded()
                self.replica = passthrough.gathered_copy(self.module, self.sources, self.dtype) if whole else self.module
        self.version = version

    def release_weights(self) -> None:
        self.version = self.replica = None
        if self.model is not None:
            self.model.release_weights()

    def release(self) -> None:
        """Give back the inference weights and the workspace."""
        self.release_weights()
        if self.model is not None:
            self.model.workspace.release()

    def run(
        self,
        prompts: list[torch.Tensor],
        prompt_of: list[int],
        keys: list[int],
        max_new_tokens: int,
        sampling: Sampling,
        *,
        reserve: int = 0,
        on_token: OnToken | None = None,
    ) -> Answers:
        """Answer requests that every rank of the tensor-parallel group knows."""
        if self.model is None:
            return passthrough.generate(
                self.replica, prompts, prompt_of, keys, max_new_tokens, sampling, on_token=on_token
            )
        return scheduler.generate(
            self.model, prompts, prompt_of, keys, max_new_tokens, sampling, reserve=reserve, on_token=on_token
        )


def stop_ids(config, generation_config, eos_token_id) -> tuple[int, ...]:
    """The end tokens: the caller's, else the model's. An empty list means none."""
    if eos_token_id is None:
        eos_token_id = getattr(generation_config, "eos_token_id", None)
    if eos_token_id is None:
        eos_token_id = getattr(config, "eos_token_id", None)
    if eos_token_id is None:
        return ()
    return (eos_token_id,) if isinstance(eos_token_id, int) else tuple(int(t) for t in eos_token_id)


def padding_id(config, generation_config, pad_token_id: int | None, stop: tuple[int, ...]) -> int:
    """What fills rows after their answer: the caller's, else the model's, else the end token."""
    for candidate in (pad_token_id, getattr(generation_config, "pad_token_id", None), getattr(config, "pad_token_id", None)):
        if candidate is not None:
            return candidate
    return stop[0] if stop else 0


def request_keys(seed: int | Sequence[int] | None, prompts: int, samples: int, replica: int) -> list[int]:
    """A sampling key for each of `prompts * samples` requests.

    One seed for the call is mixed with the rank and the row, so that rows and replicas differ; a seed for
    each prompt is used as it is, so that a prompt's answer depends on nothing else.
    """
    if seed is None:
        seed = int(torch.randint(1 << 62, (1,)))
    if isinstance(seed, int):
        return [mix(seed, replica, row, sample) for row in range(prompts) for sample in range(samples)]
    if len(seed) != prompts:
        raise ValueError(f"seed has {len(seed)} entries for {prompts} prompts: give one number, or one a prompt")
    return [mix(int(s), sample) for s in seed for sample in range(samples)]


def unpad(input_ids: torch.Tensor, attention_mask: torch.Tensor | None) -> list[torch.Tensor]:
    """The real tokens of each row.

    Raises:
        ValueError: the mask has another shape, or a row has no token.
    """
    if input_ids.dim() != 2:
        raise ValueError(f"input_ids must be [batch, length], not {list(input_ids.shape)}")
    if attention_mask is None:
        attention_mask = torch.ones_like(input_ids)
    if attention_mask.shape != input_ids.shape:
        raise ValueError(
            f"attention_mask {list(attention_mask.shape)} does not match input_ids {list(input_ids.shape)}"
        )
    mask = attention_mask.bool()
    lengths = mask.sum(dim=1).tolist()
    if 0 in lengths:
        raise ValueError(f"row {lengths.index(0)} of attention_mask has no token: a prompt needs at least one")
    return list(input_ids[mask].long().split(lengths))


def assemble(
    input_ids: torch.Tensor, answers: Answers, samples: int, stop: tuple[int, ...], pad: int
) -> GenerateOutput:
    """Answers behind their prompts, as wide as the longest."""
    longest = int(answers.lengths.max()) if len(answers.lengths) else 0
    columns = torch.arange(longest, device=input_ids.device)
    beyond = columns >= answers.lengths[:, None]
    tokens = answers.tokens[:, :longest].masked_fill(beyond, pad)
    logprobs = answers.logprobs[:, :longest].masked_fill(beyond, 0.0)
    finished = torch.zeros_like(answers.lengths, dtype=torch.bool)
    if longest:
        final = answers.tokens.gather(1, answers.lengths[:, None] - 1).squeeze(1)
        for token in stop:
            finished |= final == token
    prompts = input_ids.repeat_interleave(samples, dim=0)
    return GenerateOutput(torch.cat((prompts, tokens.to(prompts.dtype)), dim=1), logprobs, answers.lengths, finished)


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
        max_new_tokens: int,
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
        check_call(sampling, max_new_tokens, num_return_sequences)
        prompts = unpad(input_ids, attention_mask)
        keys = request_keys(seed, len(prompts), num_return_sequences, 0)
        if prompts:
            check_positions(core, max(map(len, prompts)), max_new_tokens)
            core.sync(tuple((p.data_ptr(), p._version) for p in core.module.parameters()))
            prompt_of = [i for i in range(len(prompts)) for _ in range(num_return_sequences)]
            answers = core.run(prompts, prompt_of, keys, max_new_tokens, sampling, on_token=on_token)
        else:
            answers = no_answers(max_new_tokens, input_ids.device)
        pad = padding_id(core.config, generation_config, pad_token_id, stop)
        output = assemble(input_ids, answers, num_return_sequences, stop, pad)
        return output if return_dict_in_generate else output.sequences

    def release_inference_cache(self) -> None:
        """Give the workspace and the laid-out weights back; the next call makes them again."""
        self.core.release()


def no_answers(max_new_tokens: int, device: torch.device) -> Answers:
    return Answers(
        torch.zeros(0, max_new_tokens, dtype=torch.int64, device=device),
        torch.zeros(0, max_new_tokens, device=device),
        torch.zeros(0, dtype=torch.int64, device=device),
    )


def check_call(sampling: Sampling, max_new_tokens: int, num_return_sequences: int) -> None:
    sampling.check()
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens={max_new_tokens} must be at least 1")
    if num_return_sequences < 1:
        raise ValueError(f"num_return_sequences={num_return_sequences} must be at least 1")


def check_positions(core: Core, longest_prompt: int, max_new_tokens: int) -> None:
    """A table of learned positions ends somewhere; rotary ones and ALiBi do not."""
    limit = core.model.decoder.max_positions if core.model is not None else None
    if limit is not None and longest_prompt + max_new_tokens > limit:
        raise ValueError(
            f"prompt ({longest_prompt}) + max_new_tokens ({max_new_tokens}) = {longest_prompt + max_new_tokens} tokens "
            f"exceed the {limit} positions that this {core.config.model_type} model has"
        )


def _is_plain_causal(module: nn.Module, sources: Sources) -> bool:
    """Whether the module has a language-model head where its family's table expects one."""
    decoder = describe(module.config)
    if decoder is None:
        return False
    names = decoder.names
    return sources.has(f"{names.embedding}.weight") and sources.has(f"{names.layers}.0.{names.attention_out}.weight")
