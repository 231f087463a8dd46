"""Answers of a model to prompts, for comparing models: greedy, sampled, by beams, by contrastive search.

Greedy and sampled answers come from the decoder that PPO generates with; beams from transformers' `generate`.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from data.chat import Dialogue, decode_response, encode_prompt, stop_token_ids
from engine.hybrid import Generator
from rlhf.metrics import compute_type
from rlhf.models import load_actor, load_tokenizer

TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def default_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def inference_type(name: str) -> torch.dtype:
    """What `--dtype NAME` comes to for a model that is not trained."""
    return TYPES[compute_type(name)]


class Answerer:
    """A model with its tokenizer. `args`: the flags of `rlhf eval prompts`."""

    def __init__(self, path: str | Path, args: Namespace):
        self.tokenizer = load_tokenizer(path)
        self.model = load_actor(path, inference_type(args.dtype)).to(default_device()).eval()
        self._args = args
        self._stops = stop_token_ids(self.tokenizer)
        self._generator = Generator(self.model)

    def answers(self, prompts: Sequence[Dialogue], decoding: str) -> list[list[str]]:
        """For each prompt its answers: one, or `num_return_sequences` where several are possible.

        A prompt is a row, turns, or text in marker form. The dice of a sampled answer hang on the seed and the
        prompt's number alone.
        """
        ids = [encode_prompt(self.tokenizer, prompt) for prompt in prompts]
        return [self._answer(prompt, number, decoding) for number, prompt in enumerate(ids)]

    def _answer(self, prompt: list[int], number: int, decoding: str) -> list[str]:
        args = self._args
        row = torch.tensor([prompt], device=self.model.device)
        common: dict[str, Any] = {
            "max_new_tokens": args.max_new_tokens,
            "eos_token_id": self._stops,
            "pad_token_id": self.tokenizer.pad_token_id,
        }
        if decoding == "contrastive":
            found = contrastive_search(
                self.model, row, args.max_new_tokens, args.top_k, args.penalty_alpha, self._stops
            )
        elif decoding == "greedy" and args.num_beams > 1:
            with torch.no_grad():
                found = self.model.generate(
                    row,
                    attention_mask=torch.ones_like(row),
                    num_beams=args.num_beams,
                    num_return_sequences=args.num_return_sequences,
                    do_sample=False,
                    **common,
                )
        elif decoding == "greedy":
            found = self._generator.generate(row, **common)
        else:
            found = self._generator.generate(
                row,
                do_sample=True,
                temperature=args.temperature,
                top_p=args.top_p,
                num_return_sequences=args.num_return_sequences,
                seed=[args.seed + 7_919 * (number + 1)],
                **common,
            )
        return [decode_response(self.tokenizer, ids) for ids in found[:, len(prompt) :]]


@torch.no_grad()
def contrastive_search(
    model: Any, input_ids: torch.Tensor, max_new_tokens: int, top_k: int, penalty_alpha: float, stops: Sequence[int]
) -> torch.Tensor:
    """Contrastive search (Su et al. 2022) for one prompt: `[1, P] -> [1, P + N]`.

    Of the `top_k` likeliest tokens v the one with the largest (1 - a) p(v) - a max_j cos(h_v, h_j), h_v its last
    hidden state and h_j those of all tokens before it. Every step runs the candidates whole, without a cache: meant
    for the few prompts of a comparison.
    """
    ids = input_ids
    probabilities = model(input_ids=ids).logits[0, -1].float().softmax(-1)
    for _ in range(max_new_tokens):
        likely, tokens = probabilities.topk(min(top_k, len(probabilities)))
        rows = torch.cat([ids.expand(len(tokens), -1), tokens[:, None]], dim=1)
        output = model(input_ids=rows, output_hidden_states=True)
        hidden = torch.nn.functional.normalize(output.hidden_states[-1].float(), dim=-1)
        similarity = (hidden[:, :-1] @ hidden[:, -1:].transpose(1, 2)).squeeze(-1).max(dim=1).values
        best = int(((1 - penalty_alpha) * likely - penalty_alpha * similarity).argmax())
        ids, probabilities = rows[best : best + 1], output.logits[best, -1].float().softmax(-1)
        if int(tokens[best]) in stops:
            break
    return ids
