"""The inference side of one module: keeps the layout in step with the training weights, and runs requests."""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager

import torch
from torch import nn

from engine import host_memory
from engine.adapters import check_adapters
from engine.hybrid import passthrough, scheduler
from engine.hybrid.decoder import Model
from engine.hybrid.families import describe
from engine.hybrid.groups import TensorParallel
from engine.hybrid.layout import check_sizes, plan_layout
from engine.hybrid.reshard import Swap
from engine.hybrid.sampling import Sampling
from engine.hybrid.scheduler import Answers, OnToken
from engine.hybrid.sources import Sources

logger = logging.getLogger(__name__)


class Core:
    """The inference side of one module: its layout, its workspace and the runs over them."""

    def __init__(
        self, module: nn.Module, dtype: torch.dtype, device: torch.device, tp_size: int = 1, layers_per_bucket: int = 8
    ):
        self.module, self.dtype, self.device = module, dtype, device
        check_adapters(module)
        self.tp = TensorParallel(tp_size)
        self.sources = Sources(module)
        self.sources.refresh()
        self.version: object = None
        self.replica: nn.Module | None = None
        self.plain = module.get_base_model() if hasattr(module, "get_base_model") else module
        self.config = self.plain.config
        decoder = describe(self.config) if _is_plain_causal(self.plain, self.sources) else None
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
        tied = tied and not self.sources.is_adapted(head)
        self.swap = Swap(
            self.sources,
            lambda rank: plan_layout(decoder, self.sources.has, tied, rank % tp_size, tp_size),
            dtype,
            layers_per_bucket,
        )

    def is_current(self, version: object = None) -> bool:
        """Whether the weights laid out are those of the module: nothing was written to it, adapters are as they were,
        and the caller's `version` is the one given to `sync`."""
        has_weights = self.replica is not None or (self.model is not None and self.model.has_weights)
        return has_weights and self.version == (version, self.sources.state())

    def sync(self, version: object = None) -> None:
        """Lay the weights out. Collective."""
        self.release_weights()
        with torch.no_grad(), self._as_laid_out():
            if self.model is not None:
                self.model.load(self.swap.run())
            else:
                self.sources.refresh()
                whole = self.sources.is_sharded()
                # peft's wrapper has a generation config of its own beside the model's, where adapters are already
                self.replica = passthrough.gathered_copy(self.module, self.sources, self.dtype) if whole else self.plain
        self.version = version, self.sources.state()

    def release_weights(self) -> None:
        self.version = self.replica = None
        if self.model is not None:
            self.model.release_weights()

    def release(self) -> None:
        """Give back the inference weights and the workspace, to the system too."""
        self.release_weights()
        if self.model is not None:
            self.model.workspace.release()
        host_memory.trim()

    def run(
        self,
        prompts: list[torch.Tensor],
        prompt_of: list[int],
        keys: list[int],
        limits: list[int],
        sampling: Sampling,
        *,
        reserve: int = 0,
        on_token: OnToken | None = None,
    ) -> Answers:
        """Answer requests that every rank of the tensor-parallel group knows: see `scheduler.generate`."""
        with self._as_laid_out():
            if self.model is None:
                return passthrough.generate(self.replica, prompts, prompt_of, keys, limits, sampling, on_token=on_token)
            return scheduler.generate(
                self.model, prompts, prompt_of, keys, limits, sampling, reserve=reserve, on_token=on_token
            )

    def _as_laid_out(self) -> AbstractContextManager:
        """Types are those of the layout, whatever autocast the caller is in."""
        return torch.autocast(self.device.type, enabled=False)

    def check_positions(self, prompt: int, answer: int) -> None:
        """A table of learned positions ends somewhere; rotary ones and ALiBi do not.

        Raises:
            ValueError: prompt + answer go beyond it.
        """
        limit = self.model.decoder.max_positions if self.model is not None else None
        if limit is not None and prompt + answer > limit:
            raise ValueError(
                f"prompt ({prompt}) + max_new_tokens ({answer}) = {prompt + answer} tokens exceed the {limit} "
                f"positions that this {self.config.model_type} model has"
            )


def _is_plain_causal(module: nn.Module, sources: Sources) -> bool:
    """Whether the module has a language-model head where its family's table expects one."""
    decoder = describe(module.config)
    if decoder is None:
        return False
    names = decoder.names
    return sources.has(f"{names.embedding}.weight") and sources.has(f"{names.layers}.0.{names.attention_out}.weight")
