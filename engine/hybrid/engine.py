"""The hybrid engine: a ZeRO engine that swaps its weights into the inference layout, generates, and trains on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from engine import distributed
from engine.engine import Engine
from engine.hybrid.core import Core
from engine.hybrid.requests import Call, GenerateOutput, assemble, no_answers, read_call
from engine.hybrid.scheduler import Answers
from engine.peers import collective


class HybridEngine(Engine):
    """An `Engine` with `generate`. Every rank calls it, with as many prompts as it has, none included.

    The inference weights are laid out by the first call after the parameters changed, and kept until the next
    change unless the config says `pin_parameters: false` or `release_inference_cache: true`.
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        settings = self.config.hybrid_engine
        self._core = Core(
            self.module,
            self.compute_dtype,
            self.device,
            settings.inference_tp_size,
            settings.tp_gather_partition_size,
        )

    @property
    def swap_bytes_received(self) -> int:
        """Bytes that this rank took from others in the last swap."""
        return self._core.swap.bytes_received if self._core.model is not None else 0

    @collective
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
    ) -> torch.Tensor | GenerateOutput:
        """Answer prompts with the current weights. Collective over all ranks.

        Args:
            input_ids: `[B, P]` token ids, usually padded left.
            attention_mask: `[B, P]`, 1 or True on real tokens; all real without it.
            max_new_tokens: the longest answer, in tokens; one number, or one for each prompt.
            do_sample: sample at `temperature`; else take the most likely token.
            top_k, top_p: cut the distribution to the k most likely tokens, then to the smallest set that holds
                `top_p` of what is left; 0 and 1 cut nothing.
            min_new_tokens: no end token before that many tokens.
            num_return_sequences: answers a prompt, next to one another in the output.
            eos_token_id: end token or tokens; the model's by default, none for an empty list.
            pad_token_id: fills rows after their answer; the model's by default.
            seed: one number for the call (rows and replicas then differ), or one for each prompt (an answer
                then depends on nothing but its prompt, its seed and the weights). Without it: torch's generator.

        Returns:
            `[B * num_return_sequences, P + N]` with `N` the longest answer of this rank, or a `GenerateOutput`.

        Raises:
            ValueError: prompt + answer of some rank do not fit `max_out_tokens`, or a setting makes no sense.
        """
        core, settings = self._core, self.config.hybrid_engine
        call, refusal = None, None
        try:
            call = read_call(
                core.module,
                core.config,
                distributed.rank(),
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
        except ValueError as error:
            refusal = str(error)
        is_current = self._agree(call, refusal)
        # whatever mode the caller is in: parameters that FSDP touches in inference mode could not train afterwards
        with torch.inference_mode(False), torch.no_grad():
            if not is_current:
                core.sync(self.weights_version)
            answers = self._pooled(call)
            if settings.release_inference_cache:
                self.release_inference_cache()
            elif not settings.pin_parameters:
                core.release_weights()
            output = assemble(input_ids.to(self.device), answers, call.samples, call.sampling.stop, call.pad)
        return output if return_dict_in_generate else output.sequences

    def _agree(self, call: Call | None, refusal: str | None) -> bool:
        """Whether all ranks have the current weights laid out.

        Raises on all ranks where one has to, before any work: none may wait for one that has left.
        """
        core, limit = self._core, self.config.hybrid_engine.max_out_tokens
        is_current = core.is_current(self.weights_version)
        mine = refusal, call and call.longest, call and (call.sampling, call.samples), is_current
        reports = distributed.gather_objects(mine)
        for rank, (line, *_) in enumerate(reports):
            if line is not None:
                raise ValueError(line if rank == distributed.rank() else f"rank {rank}: {line}")
        prompt, answer = max((pair for _, pair, _, _ in reports), key=sum)
        if prompt + answer > limit:
            raise ValueError(
                f"prompt ({prompt} tokens) + max_new_tokens ({answer}) = {prompt + answer} exceed "
                f"hybrid_engine.max_out_tokens={limit}: raise it, or shorten one of them"
            )
        core.check_positions(prompt, answer)
        for first in range(0, len(reports), core.tp.size):
            group = [settings for _, _, settings, _ in reports[first : first + core.tp.size]]
            for rank, settings in enumerate(group[1:], first + 1):
                if settings != group[0]:
                    raise ValueError(
                        f"ranks {first} and {rank} generate together, and their settings differ: {group[0]}, {settings}"
                    )
        return all(current for *_, current in reports)

    def release_inference_cache(self) -> None:
        """Give the workspace and the inference weights back; the next `generate` makes them again."""
        self._core.release()

    def _pooled(self, call: Call) -> Answers:
        """Answer the prompts of the whole tensor-parallel group together, and keep this rank's own."""
        tp = self._core.tp
        prompts, keys, limits = call.prompts, call.keys, call.limits
        pool = tp.gather_objects(([prompt.tolist() for prompt in prompts], keys, limits)) if tp.size > 1 else None
        if pool is not None:
            prompts = [torch.tensor(ids, device=self.device) for part, _, _ in pool for ids in part]
            keys = [key for _, part, _ in pool for key in part]
            limits = [limit for _, _, part in pool for limit in part]
        else:
            prompts = [prompt.to(self.device) for prompt in prompts]
        if not prompts:
            return no_answers(self.device)
        whole = replace(call, prompts=prompts, keys=keys, limits=limits)
        reserve = self.config.hybrid_engine.max_out_tokens
        each = [limits[i] for i in whole.prompt_of]
        answers = self._core.run(prompts, whole.prompt_of, keys, each, call.sampling, reserve=reserve)
        if pool is None:
            return answers
        start = sum(len(part) for _, part, _ in pool[: tp.rank])
        mine = slice(start, start + len(call.keys))
        return Answers(answers.tokens[mine], answers.logprobs[mine], answers.lengths[mine])
