"""The fp16 loss scale: fixed, or DeepSpeed's dynamic algorithm.

One algorithm serves every ZeRO stage: the one DeepSpeed runs at stages 1 to 3. (Its stage 0 has another that
ignores `hysteresis`; here all stages give the same numbers, so all follow the same scale.)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine.config import FP16Config

FACTOR = 2.0


class LossScaler:
    """The factor on the loss that keeps small fp16 gradients above zero, and how it adapts.

    `scale` starts at 2 ** initial_scale_power. Call `update(overflow)` once an optimizer step, with the same
    value on every rank; a step that overflowed must not be applied. With `loss_scale` set the scale is that
    number for ever, and without fp16 it is 1.

    On an overflow the scale halves (not below `min_loss_scale`) once the hysteresis is used up; until then
    an overflow only uses up one unit of it. After `loss_scale_window` clean steps in a row the scale doubles
    and the hysteresis is refilled; with `consecutive_hysteresis` every clean step refills it. The clean step
    right after an overflow (or after the start) does not count: the first doubling is at clean step
    window + 1.

    Args:
        fp16: the config's fp16 section; None is the same as one that is not enabled.
        raise_at_minimum: whether an overflow at the minimum scale is an error. False clamps instead.
    """

    def __init__(self, fp16: FP16Config | None = None, raise_at_minimum: bool = True):
        enabled = fp16 is not None and fp16.enabled
        self.dynamic = enabled and fp16.loss_scale == 0
        self._raise_at_minimum = raise_at_minimum
        self._step = 0
        self._last_overflow = -1
        if self.dynamic:
            self.scale = FACTOR**fp16.initial_scale_power
            self._minimum = float(fp16.min_loss_scale)
            self._window = fp16.loss_scale_window
            self._full_hysteresis = fp16.hysteresis
            self._refill_always = fp16.consecutive_hysteresis
            self._hysteresis = fp16.hysteresis
        else:
            self.scale = float(fp16.loss_scale) if enabled else 1.0

    def update(self, overflow: bool) -> None:
        """Adapt the scale after one optimizer step.

        Raises:
            ValueError: an overflow with the scale already at its minimum.
        """
        if not self.dynamic:
            return
        if overflow:
            self._on_overflow()
            self._last_overflow = self._step
        else:
            self._on_clean_step()
        self._step += 1

    def _on_overflow(self) -> None:
        if self._hysteresis > 1:
            self._hysteresis -= 1
            return
        if self.scale == self._minimum and self._raise_at_minimum:
            raise ValueError(
                f"fp16 gradients are not finite at the minimum loss scale {self._minimum:g}: "
                "lower the learning rate, use bf16, or lower fp16.min_loss_scale"
            )
        self.scale = max(self.scale / FACTOR, self._minimum)

    def _on_clean_step(self) -> None:
        clean_steps = self._step - self._last_overflow - 1
        window_full = clean_steps > 0 and clean_steps % self._window == 0
        if window_full or self._refill_always:
            self._hysteresis = self._full_hysteresis
        if window_full:
            self.scale *= FACTOR

    def state_dict(self) -> dict[str, Any]:
        state = {"scale": self.scale, "step": self._step, "last_overflow": self._last_overflow}
        return {**state, "hysteresis": self._hysteresis} if self.dynamic else state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state` stood. A fixed scale stays what the config says."""
        if not self.dynamic:
            return
        self._step = state["step"]
        self._last_overflow = state["last_overflow"]
        # saved by a run with a fixed scale or without fp16: this run's own start stands
        if "hysteresis" in state:
            self.scale = state["scale"]
            self._hysteresis = state["hysteresis"]
