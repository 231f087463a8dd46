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
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from engine import checkpoint, distributed, export, setup
from engine.accumulation import Accumulation
from engine.config import EngineConfig
from engine.monitor import Monitor, warn_once
from engine.peers import collective
from engine.precision import compute_dtype
from engine.scaler import LossScaler
from engine.sharding import local, whole

logger = logging.getLogger(__name__)


class Engine:
    """Trains (or only runs) one module under a DeepSpeed-style config.

    Attributes: `module`, `optimizer`, `lr_scheduler`, `config`, `device`, `compute_dtype`, `zero_stage`;
    `micro_steps` counts `step` calls, `global_steps` optimizer steps (skipped ones included, as DeepSpeed
    counts them), `skipped_steps` those that a non-finite gradient prevented, `weights_version` rises
    whenever parameters may have changed. `global_samples` counts samples by the config's batch size.
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
        if config.notice():
            warn_once(config.notice())
        self.device = distributed.device()
        self.compute_dtype = compute_dtype(config)
        self.zero_stage = config.zero_optimization.stage
        self.micro_steps = self.global_steps = self.skipped_steps = self.global_samples = 0
        self.weights_version = 0
        self._grad_norm = 0.0
        self._was_applied = False
        self._boundary: bool | None = None  # None: micro-batches are counted
        self._is_waiting = False  # whether a micro-batch waits for its update, where the caller sets boundaries
        self._awaits_step = False  # whether `backward` was called since the last `step`
        self._reduced: tuple[float, float, float] | None = None
        self.ema: dict[str, torch.Tensor] = {}
        self._ema_beta = 0.0

        groups = setup.named_groups(model, optimizer, model_parameters, config)
        if groups is None:
            model.requires_grad_(False)  # forward-only: no masters, no graph
        self.parameters = setup.place_parameters(model, config, self.compute_dtype, self.device)
        self.module = model
        self.optimizer = setup.take_optimizer(groups, optimizer, self.parameters, config)
        self.lr_scheduler = setup.take_scheduler(lr_scheduler, self.optimizer, config)
        self.scaler = LossScaler(config.fp16)
        is_trained = self.optimizer is not None
        self.monitor = Monitor(config, self.device, is_trained, self.parameters.reduces_in_backward)
        self.accumulation = Accumulation(config.gradient_accumulation_steps or 1, self.monitor.wants_loss)
        self.background = checkpoint.Background() if config.checkpoint.async_save else None

    # -- running ---------------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.forward(*args, **kwargs)

    @collective
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own forward pass, with its parameters gathered as the stage says."""
        with self._back_to_rest_if_broken_off():
            if not torch.is_grad_enabled():
                # what is gathered here is gathered into again to train, which inference tensors do not allow
                with torch.inference_mode(False), torch.no_grad():
                    output = self.module(*args, **kwargs)
                self.parameters.to_rest()
                return output
            with self.monitor.clock("forward"):
                return self.module(*args, **kwargs)

    @contextmanager
    def _back_to_rest_if_broken_off(self) -> Iterator[None]:
        """A caller who catches the error and goes on must not compute with what a broken pass left gathered."""
        is_done = False
        try:
            yield
            is_done = True
        finally:
            if not is_done:
                self.parameters.to_rest()

    @collective
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
            ValueError: the loss is not a scalar, `weight` is no count, weighted and plain calls are mixed, or `step`
                was not called after the last `backward`.
        """
        if self.optimizer is None:
            raise ValueError("backward on a forward-only engine: give the config an optimizer")
        if loss.numel() != 1:
            raise ValueError(f"backward needs a scalar loss, not one of shape {list(loss.shape)}")
        if self._awaits_step:
            raise ValueError("backward twice without step: call step after every backward, also within a window")
        factor = self.accumulation.add(loss, weight, self.is_gradient_accumulation_start())
        self.parameters.before_backward(self.is_gradient_accumulation_boundary())
        with self._back_to_rest_if_broken_off(), self.monitor.clock("backward"):
            (loss.float() * (factor * self.scaler.scale)).backward()
        self._awaits_step = True
        return loss.detach()

    def is_gradient_accumulation_boundary(self) -> bool:
        """True while the current micro-batch is the last before an optimizer step."""
        if self._boundary is not None:
            return self._boundary
        return (self.micro_steps + 1) % self.accumulation.window == 0

    def is_gradient_accumulation_start(self) -> bool:
        """True between optimizer steps: no micro-batch is waiting for its update."""
        if self._boundary is not None:
            return not self._is_waiting
        return self.micro_steps % self.accumulation.window == 0

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Say whether the next micro-batch closes an optimizer step; micro-batches are no longer counted.

        For updates of a varying number of micro-batches. All ranks say the same, before each `backward`; `micro_steps`
        then counts a closed step as one window.

        Raises:
            ValueError: `backward` ran already, and reduced gradients or not as it was told before.
        """
        if self._awaits_step and is_boundary != self.is_gradient_accumulation_boundary():
            raise ValueError("the boundary was moved between backward and step: say it before backward")
        self._boundary = is_boundary

    @collective
    def has_overflow(self) -> bool:
        """Whether the gradient of the step about to be taken is not finite on some rank, so that `step` will skip it.

        To be asked between the last `backward` and its `step`, on all ranks.
        """
        return not math.isfinite(self._reduce()[0])

    @collective
    def step(self, skip: bool = False) -> None:
        """At the accumulation boundary: reduce, clip, update, tick the schedule, clear the gradients.

        A non-finite gradient on any rank skips the update on all of them, and so do weights that are all 0:
        parameters, moments and schedule stay, and `skipped_steps` counts it. With `skip` (the same on all
        ranks) a finite one is dropped too; the loss scale does not change then.

        Raises:
            ValueError: no `backward` since the last `step`; where a rank has nothing to add, its weight is 0.
        """
        if self.optimizer is None:
            raise ValueError("step on a forward-only engine: give the config an optimizer")
        if not self._awaits_step:
            raise ValueError("step without backward: call both once a micro-batch, with weight 0 where it is empty")
        self._awaits_step = False
        boundary = self.is_gradient_accumulation_boundary()
        self._is_waiting = not boundary
        if self._boundary is None:
            self.micro_steps += 1
        elif boundary:
            self.micro_steps += self.accumulation.window
        if not boundary:
            return
        self._reduce()
        rate, scale = self.get_lr()[0], self.scaler.scale
        with self.monitor.clock("step"):
            loss = self._update(skip)
            self.parameters.zero_grad()
        self.monitor.after_step(self.global_steps, self.global_samples, loss, rate, self._grad_norm, scale)

    def _reduce(self) -> tuple[float, float, float]:
        """Sum the gradients over ranks, once a step; what `Accumulation.finish` says of them."""
        if self._reduced is None:
            with self.monitor.clock("reduce"):
                self.parameters.reduce_gradients()
            gradients = self.parameters.gradients()
            self._reduced = self.accumulation.finish(_square_sum(gradients), self.parameters.gradients_are_partial)
        return self._reduced

    def _update(self, skip: bool) -> float:
        """One optimizer step with the reduced gradients; returns the global batch's mean loss, if it is tracked."""
        gradients = self.parameters.gradients()
        # Gradients are those of (loss * factor * scale); bring them to the gradient of the global mean and clip,
        # in one multiplication.
        square_sum, multiplier, loss = self._reduced
        self._reduced = None
        # a global batch of weight 0 has no mean; moments alone would move the parameters
        is_empty = multiplier == 0.0
        multiplier *= self.parameters.gradient_scale / self.scaler.scale
        finite = math.isfinite(square_sum)
        self._grad_norm = math.sqrt(square_sum) * multiplier if finite else math.inf
        self._was_applied = finite and not (skip or is_empty)
        self.global_steps += 1
        self.global_samples += self.train_batch_size()
        if not (finite and skip):
            self.scaler.update(not finite)
        if not self._was_applied:
            self.skipped_steps += 1
            why = "as asked" if skip else "no micro-batch has a weight" if finite else "a gradient is not finite"
            logger.info("step %d skipped: %s", self.global_steps, why)
            return loss
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
        return loss

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

    def was_step_applied(self) -> bool:
        """Whether the last optimizer step changed the parameters; false after one that was skipped."""
        return self._was_applied

    def train_batch_size(self) -> int:
        """Samples an optimizer step, over all micro-batches and ranks."""
        return self.config.train_batch_size

    def train_micro_batch_size_per_gpu(self) -> int:
        """Samples a micro-batch of one rank."""
        return self.config.train_micro_batch_size_per_gpu

    def gradient_accumulation_steps(self) -> int:
        """Micro-batches an optimizer step."""
        return self.accumulation.window

    def train(self, mode: bool = True) -> Engine:
        self.module.train(mode)
        return self

    def eval(self) -> Engine:
        return self.train(False)

    # -- files -----------------------------------------------------------------------------------------

    @collective
    def save_checkpoint(self, folder: str | Path, tag: str | None = None, client_state: dict | None = None) -> Path:
        """Save all that a resumed run needs under `folder/tag` and move `latest` to it. Collective.

        The default tag is `global_step{N}`. Between micro-batches of a step, what they added up is saved too. A
        kill at any moment leaves the last complete one found. With the config's `checkpoint.async_save` it is
        written in the background: `wait_for_checkpoint` before the process group is left. `client_state` is the
        main rank's.

        Raises:
            ValueError: `backward` was called and its `step` not yet, or `tag` cannot name a folder.
        """
        if self._awaits_step:
            raise ValueError("save_checkpoint between backward and step: save before the one or after the other")
        return checkpoint.save(self, Path(folder), tag, client_state)

    @collective
    def wait_for_checkpoint(self) -> None:
        """Until a checkpoint that is being written in the background is complete; raises what went wrong with it."""
        if self.background is not None:
            self.background.wait()

    @collective
    def load_checkpoint(self, folder: str | Path, tag: str | None = None) -> tuple[Path, dict]:
        """Load what `save_checkpoint` wrote, on any number of ranks. Collective.

        Returns:
            The checkpoint's path and the client state.

        Raises:
            FileNotFoundError: no such checkpoint; the line names the last good one there.
            ValueError: it is damaged (likewise), of another model or optimizer, or stands within an accumulation window
                that this run's `gradient_accumulation_steps` cannot go on with.
        """
        result = checkpoint.load(self, Path(folder), tag)
        self._reduced, self._awaits_step = None, False
        self.monitor.resume(self.global_samples)
        self.parameters.after_update()
        self.weights_version += 1
        return result

    @collective
    def save_pretrained(self, folder: str | Path, dtype: torch.dtype | None = None, *, ema: bool = False) -> None:
        """Write the module as a Hugging Face folder, whole tensors in the compute type. Collective.

        LoRA adapters are merged; where they are all that was trained, `folder/adapter` holds them alone as well.
        With `ema` the moving averages of `enable_ema` stand in for the trained parameters.
        """
        if ema and not self.ema:
            raise ValueError("save_pretrained(ema=True) needs enable_ema before training")
        parameters = self.gather_full_parameters()
        if ema:
            parameters = ((name, whole(self.ema[name]) if name in self.ema else p) for name, p in parameters)
        trained = [name for name, _ in self.parameters.trainable]
        export.save_pretrained(self.module, parameters, Path(folder), dtype or self.compute_dtype, trained)

    def gather_full_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, whole parameter) on every rank, one at a time. Collective: exhaust it on all ranks."""
        return self.parameters.full_parameters()


def _square_sum(gradients: list[torch.Tensor]) -> float:
    """Sum of the squares of all numbers in them, in float64 from tensor to tensor."""
    if not gradients:
        return 0.0
    norms = torch.stack([norm.float() for norm in torch._foreach_norm(gradients)])
    return float(norms.double().square().sum())
