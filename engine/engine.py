"""The ZeRO engine: one object that owns a module's parameters, their gradients and their updates.

    engine.init_distributed()
    eng = engine.initialize(model, config)
    loss = eng(**batch)
    eng.backward(loss)      # every micro-batch
    eng.step()              # every micro-batch; updates at the accumulation boundary

A config without an optimizer gives a forward-only engine with the same placement of parameters.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from engine import checkpoint, distributed, export
from engine.config import EngineConfig
from engine.optimizers import build_optimizer, parameter_groups
from engine.precision import compute_dtype
from engine.replicated import ReplicatedParameters
from engine.scaler import LossScaler
from engine.schedules import build_scheduler
from engine.sharding import ShardedParameters, local, whole

logger = logging.getLogger(__name__)


class Engine:
    """Trains (or only runs) one module under a DeepSpeed-style config.

    Attributes: `module`, `optimizer`, `lr_scheduler`, `config`, `device`, `compute_dtype`, `zero_stage`;
    `micro_steps` counts `step` calls, `global_steps` optimizer steps (skipped ones included, as DeepSpeed
    counts them), `skipped_steps` those that a non-finite gradient prevented, `weights_version` rises
    whenever parameters may have changed.
    """

    def __init__(
        self,
        model: nn.Module,
        config: EngineConfig,
        optimizer: torch.optim.Optimizer | None = None,
        lr_scheduler: Any = None,
        model_parameters: Any = None,
    ):
        self.config = config
        self.device = distributed.device()
        self.compute_dtype = compute_dtype(config)
        self.zero_stage = config.zero_optimization.stage
        self.micro_steps = self.global_steps = self.skipped_steps = 0
        self.weights_version = 0
        self._accumulation = config.gradient_accumulation_steps or 1
        self._grad_norm = 0.0
        self._weight_sum = 0.0
        self._weighted: bool | None = None
        self._unit = 1.0
        self.ema: dict[str, torch.Tensor] = {}
        self._ema_beta = 0.0

        groups = _named_groups(model, optimizer, model_parameters, config)
        if groups is None:
            model.requires_grad_(False)  # forward-only: no masters, no graph
        _broadcast_from_main(model, self.device)
        zero = config.zero_optimization
        offload = zero.offloads_parameters or zero.offloads_optimizer
        if self.zero_stage == 0 or (distributed.world_size() == 1 and not offload):
            # Over one rank a shard is the whole, so every stage is the replicated layout there.
            self.parameters = ReplicatedParameters(model, self.compute_dtype, self.device)
        else:
            distributed.require_process_group()
            self.parameters = ShardedParameters(model, self.compute_dtype, self.device, zero)
        self.module = model
        self.optimizer = self._take_optimizer(groups, optimizer)
        self.lr_scheduler = self._take_scheduler(lr_scheduler)
        self.scaler = LossScaler(config.fp16)

    # -- running ---------------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.forward(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own forward pass, with its parameters gathered as the stage says."""
        output = self.module(*args, **kwargs)
        if not torch.is_grad_enabled():
            self.parameters.after_forward()
        return output

    def backward(self, loss: torch.Tensor, weight: float | torch.Tensor | None = None) -> torch.Tensor:
        """Accumulate the gradients of one micro-batch.

        Args:
            loss: scalar, the mean over the micro-batch.
            weight: how many units (supervised tokens, pairs) `loss` is the mean over on this rank. The
                update is then the gradient of the mean over all units of the global batch, however they
                fall over micro-batches and ranks. Without it every micro-batch of every rank counts the
                same, as in DeepSpeed. All calls of one optimizer step must agree on giving one.

        Returns:
            `loss`, detached.

        Raises:
            ValueError: the loss is not a scalar, or weighted and plain calls are mixed.
        """
        if self.optimizer is None:
            raise ValueError("backward on a forward-only engine: give the config an optimizer")
        if loss.numel() != 1:
            raise ValueError(f"backward needs a scalar loss, not one of shape {list(loss.shape)}")
        first = self.is_gradient_accumulation_start()
        weighted = weight is not None
        if first:
            self._weighted, self._weight_sum = weighted, 0.0
        elif weighted != self._weighted:
            raise ValueError("backward was called with `weight` in one micro-batch and without in another of one step")
        if weighted:
            weight = float(weight)
            if first and self.global_steps == 0:
                self._set_unit(sum(distributed.all_reduce_sums([weight])) * self._accumulation)
            self._weight_sum += weight
            factor = weight / self._unit
        else:
            factor = 1.0 / self._accumulation
        self.parameters.before_backward(self.is_gradient_accumulation_boundary())
        (loss.float() * (factor * self.scaler.scale)).backward()
        return loss.detach()

    def is_gradient_accumulation_boundary(self) -> bool:
        """True while the current micro-batch is the last before an optimizer step."""
        return (self.micro_steps + 1) % self._accumulation == 0

    def is_gradient_accumulation_start(self) -> bool:
        """True between optimizer steps: no micro-batch is waiting for its update."""
        return self.micro_steps % self._accumulation == 0

    def step(self) -> None:
        """At the accumulation boundary: reduce, clip, update, tick the schedule, clear the gradients.

        A non-finite gradient on any rank skips the update on all of them: parameters, moments and
        schedule stay, and `skipped_steps` counts it.
        """
        boundary = self.is_gradient_accumulation_boundary()
        self.micro_steps += 1
        if not boundary:
            return
        self.parameters.reduce_gradients()
        gradients = self.parameters.gradients()
        square_sum, weight_sum = self._global_sums(gradients)
        # Gradients hold the mean over ranks of (loss * factor * scale); bring them to the gradient of the
        # global mean and clip, in one multiplication.
        multiplier = 1.0 / self.scaler.scale
        if self._weighted:
            multiplier *= distributed.world_size() * self._unit / weight_sum if weight_sum else 0.0
            self._set_unit(weight_sum)
        finite = math.isfinite(square_sum)
        self._grad_norm = math.sqrt(square_sum) * multiplier if finite else math.inf
        self.global_steps += 1
        self.scaler.update(not finite)
        if finite:
            clip = self.config.gradient_clipping
            if clip and self._grad_norm > clip:
                multiplier *= clip / (self._grad_norm + 1e-6)
            if multiplier != 1.0 and gradients:
                torch._foreach_mul_(gradients, multiplier)
            self.optimizer.step()
            self.parameters.after_update()
            self.weights_version += 1
            self._update_ema()
            if self.lr_scheduler is not None:
                self.lr_scheduler.step()
        else:
            self.skipped_steps += 1
            logger.info("step %d skipped: a gradient is not finite", self.global_steps)
        self.parameters.zero_grad()

    def enable_ema(self, beta: float) -> None:
        """Keep `ema <- beta * ema + (1 - beta) * parameters` after every update, in fp32, sharded as they are.

        It starts at the present parameters, is saved in checkpoints, and stays as it is in a skipped step.
        """
        self._ema_beta = beta
        self.ema = {name: parameter.detach().float().clone() for name, parameter in self.parameters.trainable}

    @torch.no_grad()
    def _update_ema(self) -> None:
        if self.ema:
            averages = [local(self.ema[name]) for name, _ in self.parameters.trainable]
            current = [local(parameter.detach()) for _, parameter in self.parameters.trainable]
            torch._foreach_lerp_(averages, current, 1.0 - self._ema_beta)

    def get_lr(self) -> list[float]:
        """The learning rate of each parameter group: what the next update will use."""
        return [] if self.optimizer is None else [group["lr"] for group in self.optimizer.param_groups]

    def get_global_grad_norm(self) -> float:
        """2-norm of the last step's gradient over all parameters and ranks, before clipping.

        The same figure in every stage and rank count; infinite when the step was skipped.
        """
        return self._grad_norm

    def train(self, mode: bool = True) -> Engine:
        self.module.train(mode)
        return self

    def eval(self) -> Engine:
        return self.train(False)

    # -- files -----------------------------------------------------------------------------------------

    def save_checkpoint(self, folder: str | Path, tag: str | None = None, client_state: dict | None = None) -> Path:
        """Save all that a resumed run needs under `folder/tag` and move `latest` to it. Collective.

        The default tag is `global_step{N}`. A kill at any moment leaves the last complete one found.
        """
        return checkpoint.save(self, Path(folder), tag, client_state)

    def load_checkpoint(self, folder: str | Path, tag: str | None = None) -> tuple[Path, dict]:
        """Load what `save_checkpoint` wrote, on any number of ranks. Collective.

        Returns:
            The checkpoint's path and the client state.

        Raises:
            FileNotFoundError: no complete checkpoint there.
        """
        result = checkpoint.load(self, Path(folder), tag)
        self.parameters.after_update()
        self.weights_version += 1
        return result

    def save_pretrained(self, folder: str | Path, dtype: torch.dtype | None = None, *, ema: bool = False) -> None:
        """Write the module as a Hugging Face folder, whole tensors in the compute type. Collective.

        With `ema` the moving averages of `enable_ema` stand in for the trained parameters.
        """
        if ema and not self.ema:
            raise ValueError("save_pretrained(ema=True) needs enable_ema before training")
        parameters = self.gather_full_parameters()
        if ema:
            parameters = ((name, whole(self.ema[name]) if name in self.ema else p) for name, p in parameters)
        export.save_pretrained(self.module, parameters, Path(folder), dtype or self.compute_dtype)

    def gather_full_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, whole parameter) on every rank, one at a time. Collective: exhaust it on all ranks."""
        return self.parameters.full_parameters()

    # -- construction ----------------------------------------------------------------------------------

    def _take_optimizer(self, groups, optimizer):
        if groups is None:
            return None
        by_name = dict(self.module.named_parameters())
        owned = []
        for group in groups:
            names = group.pop("names")
            owned.append({**group, "params": [self.parameters.optimizer_parameter(n, by_name[n]) for n in names]})
        if optimizer is None:
            spec = self.config.optimizer
            return build_optimizer(owned, spec.type, spec.params)
        for group, replacement in zip(optimizer.param_groups, owned, strict=True):
            group["params"] = replacement["params"]
        return optimizer

    def _take_scheduler(self, lr_scheduler):
        if self.optimizer is None:
            return None
        if lr_scheduler is not None:
            return lr_scheduler(self.optimizer) if callable(lr_scheduler) else lr_scheduler
        spec = self.config.scheduler
        if spec is None or spec.type is None:
            return None
        return build_scheduler(self.optimizer, spec.type, spec.params)

    # -- details ---------------------------------------------------------------------------------------

    def _global_sums(self, gradients: list[torch.Tensor]) -> tuple[float, float]:
        """Sum of squares of all gradients and of the micro-batch weights, over all ranks."""
        square_sum = 0.0
        if gradients:
            norms = torch.stack([norm.float() for norm in torch._foreach_norm(gradients)])
            square_sum = float(norms.double().square().sum())
        partial = self.parameters.gradients_are_partial
        if not partial and not self._weighted:
            return square_sum, 0.0
        sums = distributed.all_reduce_sums([square_sum, self._weight_sum])
        return (sums[0] if partial else square_sum), sums[1]

    def _set_unit(self, weight_sum: float) -> None:
        # A power of two near the expected sum of weights on a rank: it keeps the scaled loss near the plain
        # mean's size (fp16 would overflow on a sum) and, being a power of two, changes no rounding.
        expected = weight_sum / distributed.world_size()
        self._unit = 2.0 ** round(math.log2(expected)) if expected > 0 else 1.0


def _named_groups(model, optimizer, model_parameters, config) -> list[dict] | None:
    """Parameter groups by name, taken before sharding replaces the tensors; None for no optimizer."""
    if optimizer is not None:
        if optimizer.state:
            raise ValueError("the optimizer given to initialize has already stepped: give a fresh one")
        groups = optimizer.param_groups
    elif config.optimizer is None or config.optimizer.type is None:
        return None
    elif model_parameters is not None:
        groups = list(model_parameters)
        if groups and not isinstance(groups[0], dict):
            groups = [{"params": groups}]
    else:
        groups = parameter_groups(model, (config.optimizer.params or {}).get("weight_decay", 0.0))
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    named = []
    for group in groups:
        parameters = [p for p in group["params"] if p.requires_grad]
        foreign = [list(p.shape) for p in parameters if id(p) not in names]
        if foreign:
            raise ValueError(f"the optimizer holds parameters that are not the model's, of shapes {foreign[:3]}")
        named.append({**{k: v for k, v in group.items() if k != "params"}, "names": [names[id(p)] for p in parameters]})
    return [group for group in named if group["names"]] if optimizer is None else named


def _broadcast_from_main(model: nn.Module, device: torch.device) -> None:
    """Start every rank from rank 0's values: ranks that built a random head each would train another model."""
    if distributed.world_size() == 1:
        return
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            moved = tensor.detach().to(device).contiguous()
            torch.distributed.broadcast(moved, src=0)
            tensor.copy_(moved)
