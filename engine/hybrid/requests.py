"""What a call of `generate` asks for and gets back: arguments to requests, answers to the output's shapes."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch

from engine.hybrid.sampling import Sampling, mix
from engine.hybrid.scheduler import Answers


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


@dataclass
class Call:
    """One rank's call of `generate`, read and checked: `keys` and answers are prompt by prompt, sample by sample."""

    prompts: list[torch.Tensor]
    limits: list[int]
    keys: list[int]
    samples: int
    sampling: Sampling
    pad: int

    @property
    def longest(self) -> tuple[int, int]:
        """(prompt, answer) lengths of the request that needs the most room; zeros when there is none."""
        pairs = [(len(prompt), limit) for prompt, limit in zip(self.prompts, self.limits, strict=True)]
        return max(pairs, key=sum, default=(0, 0))

    @property
    def prompt_of(self) -> list[int]:
        """The prompt of each request."""
        return [i for i in range(len(self.prompts)) for _ in range(self.samples)]


def read_call(
    module: torch.nn.Module,
    config: Any,
    replica: int,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    max_new_tokens: int | Sequence[int],
    do_sample: bool,
    temperature: float | None,
    top_k: int | None,
    top_p: float | None,
    min_new_tokens: int | None,
    num_return_sequences: int,
    eos_token_id: int | Sequence[int] | None,
    pad_token_id: int | None,
    seed: int | Sequence[int] | None,
) -> Call:
    """`generate`'s arguments for `module`, which `config` describes; of transformers' settings None is no cut.

    Raises:
        ValueError: one line on what cannot be.
    """
    own = getattr(module, "generation_config", None)
    stop = stop_ids(config, own, eos_token_id)
    temperature, top_p = (
        1.0 if value is None else real(name, value) for name, value in (("temperature", temperature), ("top_p", top_p))
    )
    top_k, least = whole("top_k", top_k or 0), whole("min_new_tokens", min_new_tokens or 0)
    sampling = Sampling(do_sample, temperature, top_k, top_p, least, stop)
    sampling.check()
    samples = whole("num_return_sequences", num_return_sequences)
    if samples < 1:
        raise ValueError(f"num_return_sequences={samples} must be at least 1")
    prompts = unpad(input_ids, attention_mask, config.get_text_config().vocab_size)
    limits = answer_limits(max_new_tokens, len(prompts))
    keys = request_keys(seed, len(prompts), samples, replica, sampling)
    return Call(prompts, limits, keys, samples, sampling, padding_id(config, own, pad_token_id, stop))


def stop_ids(config, generation_config, eos_token_id) -> tuple[int, ...]:
    """The end tokens: the caller's, else the model's. An empty list means none."""
    if eos_token_id is None:
        eos_token_id = getattr(generation_config, "eos_token_id", None)
    if eos_token_id is None:
        eos_token_id = getattr(config, "eos_token_id", None)
    if eos_token_id is None:
        return ()
    numbers = whole_or_several("eos_token_id", eos_token_id)
    return (numbers,) if isinstance(numbers, int) else tuple(numbers)


def whole(name: str, number: Any) -> int:
    """Python's own whole number, of whatever kind of integer.

    Raises:
        ValueError: it is not one.
    """
    try:
        return operator.index(number)
    except TypeError:
        raise ValueError(f"{name}={number!r} must be a whole number") from None


def real(name: str, number: Any) -> float:
    """Python's own number, of whatever kind of number.

    Raises:
        ValueError: it is not one.
    """
    number = number.item() if hasattr(number, "item") else number
    if not isinstance(number, Real):
        raise ValueError(f"{name}={number!r} must be a number")
    return float(number)


def whole_or_several(name: str, numbers: Any) -> int | list[int]:
    """A whole number or a list of them, whether they came in a tensor, in an array or as such."""
    numbers = numbers.tolist() if hasattr(numbers, "tolist") else numbers
    return [whole(name, number) for number in numbers] if isinstance(numbers, Iterable) else whole(name, numbers)


def padding_id(config, generation_config, pad_token_id: int | None, stop: tuple[int, ...]) -> int:
    """What fills rows after their answer: the caller's, else the model's, else the end token."""
    own = [getattr(source, "pad_token_id", None) for source in (generation_config, config)]
    for candidate in (pad_token_id, *own):
        if candidate is not None:
            return whole("pad_token_id", candidate)
    return stop[0] if stop else 0


def request_keys(
    seed: int | Sequence[int] | None, prompts: int, samples: int, replica: int, sampling: Sampling
) -> list[int]:
    """A sampling key for each of `prompts * samples` requests.

    One seed for the call is mixed with the rank and the row, so that rows and replicas differ; a seed for
    each prompt is used as it is, so that a prompt's answer depends on nothing else.
    """
    if seed is None:  # greedy answers leave torch's generator as it is
        seed = int(torch.randint(1 << 62, (1,))) if sampling.do_sample else 0
    seed = whole_or_several("seed", seed)
    if isinstance(seed, int):
        return [mix(seed, replica, row, sample) for row in range(prompts) for sample in range(samples)]
    if len(seed) != prompts:
        raise ValueError(f"seed has {len(seed)} entries for {prompts} prompts: give one number, or one a prompt")
    return [mix(s, sample) for s in seed for sample in range(samples)]


def unpad(input_ids: torch.Tensor, attention_mask: torch.Tensor | None, vocabulary: int) -> list[torch.Tensor]:
    """The real tokens of each row.

    Raises:
        ValueError: ids are not integers, the mask has another shape, a row has no token, or a token is not of the
            vocabulary.
    """
    if input_ids.dim() != 2 or input_ids.is_floating_point():
        raise ValueError(f"input_ids must be integers [batch, length], not {input_ids.dtype} {list(input_ids.shape)}")
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
    tokens = input_ids[mask].long()
    unknown = tokens[(tokens < 0) | (tokens >= vocabulary)]
    if len(unknown):
        raise ValueError(f"input_ids has token {int(unknown[0])}, and the model's vocabulary ends at {vocabulary - 1}")
    return list(tokens.split(lengths))


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
    sequences = torch.cat((prompts, tokens.to(prompts.dtype)), dim=1)
    # the answers were made in inference mode, which autograd would hold against the caller
    return GenerateOutput(sequences, logprobs, answers.lengths.clone(), finished)


def no_answers(device: torch.device) -> Answers:
    return Answers(
        torch.zeros(0, 0, dtype=torch.int64, device=device),
        torch.zeros(0, 0, dtype=torch.float32, device=device),
        torch.zeros(0, dtype=torch.int64, device=device),
    )


def answer_limits(max_new_tokens: int | Sequence[int], prompts: int) -> list[int]:
    """The longest answer to each prompt.

    Raises:
        ValueError: one is below 1, or there are not as many as prompts.
    """
    limits = whole_or_several("max_new_tokens", max_new_tokens)
    if isinstance(limits, int):
        limits, least = [limits] * prompts, limits
    else:
        least = min(limits, default=1)
    if least < 1:
        raise ValueError(f"max_new_tokens={least} must be at least 1")
    if len(limits) != prompts:
        raise ValueError(
            f"max_new_tokens has {len(limits)} entries for {prompts} prompts: give one number, or one a prompt"
        )
    return limits
