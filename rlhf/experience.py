"""What PPO learns from: sampled answers and everything the models said about them.

`B` responses of at most `T` tokens after left-padded prompts of at most `P`. The index rule, kept here and
nowhere else: the token at position i was scored by the logits at i - 1, and its value is read at i - 1 too.
Masks say what is real; token ids never do, since a padding token may be the end token.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from rlhf.logprobs import token_logprobs, token_logprobs_and_entropy


def positions(attention_mask: torch.Tensor) -> torch.Tensor:
    """Position ids `[B, L]`: 0 at the first real token of a row, on whichever side it is padded."""
    return (attention_mask.long().cumsum(-1) - 1).clamp(min=0)


def response_mask_from(lengths: torch.Tensor, max_length: int) -> torch.Tensor:
    """`[B] -> [B, max_length]` bool: the first `lengths[b]` slots, which hold the answer with its end token."""
    return torch.arange(max_length, device=lengths.device) < lengths.unsqueeze(1)


def response_logprobs(
    model: Any,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    response_length: int,
    temperature: float = 1.0,
) -> torch.Tensor:
    """Log-probabilities of the last `response_length` tokens, at the sampling temperature.

    Args:
        model: a transformers causal model, or an engine around one.
        input_ids, attention_mask: `[B, P + T]`, the mask True on real tokens.
        response_length: T; logits are computed for these positions only.

    Returns:
        `[B, T]` fp32, 0 where the attention mask is False.

    Raises:
        ValueError: no prompt token stands before the response, so its first token has no distribution.
    """
    logits, tokens, mask = _response_logits(model, input_ids, attention_mask, response_length)
    return token_logprobs(logits, tokens, mask, temperature)[:, :-1]


def response_logprobs_and_entropy(
    model: Any,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    response_length: int,
    temperature: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`response_logprobs`, and the entropy in nats of the distribution each token was drawn from. `[B, T]` both."""
    logits, tokens, mask = _response_logits(model, input_ids, attention_mask, response_length)
    logprobs, entropy = token_logprobs_and_entropy(logits, tokens, mask, temperature)
    return logprobs[:, :-1], entropy[:, :-1]


def answer_logprobs(
    model: Any, input_ids: torch.Tensor, attention_mask: torch.Tensor, answer_mask: torch.Tensor
) -> torch.Tensor:
    """The log-probability of each row's answer: the sum over the tokens of `answer_mask`.

    Args:
        model: a transformers causal model, or an engine around one.
        input_ids, attention_mask, answer_mask: `[B, L]`, padded on either side; the answers may begin at different
            places, each behind at least one token.

    Returns:
        `[B]` fp32. Logits are computed from the earliest answer's first token on.
    """
    length = input_ids.shape[1] - int(answer_mask.any(0).int().argmax())
    logprobs = response_logprobs(model, input_ids, attention_mask, length)
    return (logprobs * answer_mask[:, -length:]).sum(1)


def _response_logits(model, input_ids, attention_mask, response_length):
    """Logits `[B, T + 1, V]` from the last prompt token on, with the token each predicts and which of them count."""
    total = input_ids.shape[1]
    if not 0 < response_length < total:
        raise ValueError(
            f"response_length {response_length} must lie between 1 and {total - 1}: the batch has {total} "
            "positions and at least one of them must be prompt"
        )
    logits = model(
        input_ids=input_ids,
        # bool masks are what we carry; families that build positional biases from the mask do arithmetic on it
        attention_mask=attention_mask.long(),
        position_ids=positions(attention_mask),
        use_cache=False,
        logits_to_keep=response_length + 1,
    ).logits[:, -response_length - 1 :]
    # The last position predicts a token that was not sampled. It is masked, not cut off: a cut would copy the logits.
    pad = torch.nn.functional.pad
    tokens = pad(input_ids[:, -response_length:], (0, 1))
    mask = pad(attention_mask[:, -response_length:].bool(), (0, 1), value=False)
    return logits, tokens, mask


PER_ANSWER = ("scores", "greedy_scores")
OF_CRITIC = ("critic_ids", "critic_mask")


@dataclass
class Experience:
    """Sampled responses, what the models said about them, and what follows from that.

    Group by group: the text (input_ids, attention_mask `[B, P + T]`, response_mask `[B, T]`); the models'
    words (logprobs of the training engine before any update, ref_logprobs, gen_logprobs of the sampler,
    values, entropy `[B, T]`, scores `[B]` as the reward sources gave them, greedy_scores `[B]` of the greedy
    answer to the same prompt); and what is computed from these (rewards, raw_advantages before whitening,
    advantages, returns, loss_mask of the tokens that train `[B, T]`). None: not known (yet), or not needed.

    A critic with a tokenizer of its own reads critic_ids, critic_mask `[B, C]`, padded on the right, and its value of
    the state before response token t stands at position critic_places[:, t] of them.
    """

    input_ids: torch.Tensor
    attention_mask: torch.Tensor
    response_mask: torch.Tensor
    logprobs: torch.Tensor | None = None
    ref_logprobs: torch.Tensor | None = None
    gen_logprobs: torch.Tensor | None = None
    values: torch.Tensor | None = None
    entropy: torch.Tensor | None = None
    scores: torch.Tensor | None = None
    greedy_scores: torch.Tensor | None = None
    rewards: torch.Tensor | None = None
    raw_advantages: torch.Tensor | None = None
    advantages: torch.Tensor | None = None
    returns: torch.Tensor | None = None
    loss_mask: torch.Tensor | None = None
    critic_ids: torch.Tensor | None = None
    critic_mask: torch.Tensor | None = None
    critic_places: torch.Tensor | None = None

    def __post_init__(self) -> None:
        whole, response, rows = self.input_ids.shape, self.response_mask.shape, self.input_ids.shape[:1]
        expected = {"input_ids": whole, "attention_mask": whole} | dict.fromkeys(PER_ANSWER, rows)
        expected |= {name: tensor.shape for name, tensor in self.tensors().items() if name in OF_CRITIC}
        for name, tensor in self.tensors().items():
            if tensor.shape != expected.get(name, response) or tensor.shape[0] != rows[0]:
                raise ValueError(
                    f"experience {name} has shape {list(tensor.shape)}, not {list(expected.get(name, response))}, "
                    f"beside input_ids {list(whole)}"
                )
        if self.response_mask.dtype != torch.bool or self.attention_mask.dtype != torch.bool:
            raise ValueError(
                f"experience masks are bool, not {self.attention_mask.dtype} and {self.response_mask.dtype}"
            )

    def __len__(self) -> int:
        return self.input_ids.shape[0]

    @property
    def response_length(self) -> int:
        """T."""
        return self.response_mask.shape[1]

    def tensors(self) -> dict[str, torch.Tensor]:
        """The fields that are known."""
        return {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) is not None}

    def select(self, rows: torch.Tensor | slice | list[int]) -> Experience:
        """These responses only, all fields alike."""
        return Experience(**{name: tensor[rows] for name, tensor in self.tensors().items()})

    @property
    def lengths(self) -> torch.Tensor:
        """Real tokens of each row, prompt and response, `[B]`."""
        return self.attention_mask.sum(1)

    def trimmed(self) -> Experience:
        """Without the columns that are padding in every row: left of the prompts, right of the responses.

        At least one position of each part stays. Log-probabilities and values are the same (masks and
        positions do not change), for less work.
        """
        prompt_length = self.input_ids.shape[1] - self.response_length
        prompts, responses = self.attention_mask[:, :prompt_length].any(0), self.response_mask.any(0)
        start = min(int(prompts.int().argmax()), prompt_length - 1) if prompts.any() else prompt_length - 1
        kept = max(1, int(responses.nonzero().max()) + 1) if responses.any() else 1
        cut = {}
        for name, tensor in self.tensors().items():
            if name in ("input_ids", "attention_mask"):
                cut[name] = tensor[:, start : prompt_length + kept]
            elif name in OF_CRITIC:
                cut[name] = tensor[:, : max(1, int(self.critic_mask.sum(1).max()))]
            elif name not in PER_ANSWER:
                cut[name] = tensor[:, :kept]
        return replace(self, **cut)
