"""The engine's config: DeepSpeed's JSON keys with DeepSpeed's defaults, checked by a schema.

    config = EngineConfig.load({"train_micro_batch_size_per_gpu": 4, "bf16": {"enabled": True}}, world_size=2)

Every field below is one the engine reads. Keys that DeepSpeed knows and this engine has no use for are
accepted (`engine.config_tables` lists them) and named in one notice; every other key is an error.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    ValidationError,
    field_validator,
)

from engine import optimizers, schedules
from engine.config_checks import cross_check, one_line, solve_batch
from engine.config_read import normalise, read_source


def _no_bool(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError("a number is needed here, not true or false")
    return value


Whole = Annotated[int, BeforeValidator(_no_bool)]
Real = Annotated[float, BeforeValidator(_no_bool), Field(allow_inf_nan=False)]
Count = Annotated[Whole, Field(ge=1)]
Size = Annotated[Whole, Field(ge=0)]


class Section(BaseModel):
    # Frozen: one config is shared by engines, and a value changed later would be half applied.
    model_config = ConfigDict(extra="forbid", frozen=True)


class OptimizerConfig(Section):
    """`type` is a name that `engine.optimizers.build_optimizer` takes; null means no optimizer."""

    type: str | None = None
    params: dict[str, Any] = {}

    def model_post_init(self, context: Any) -> None:
        if self.type is not None:
            optimizers.check_params(self.type, self.params)
        elif self.params:
            raise ValueError("optimizer.params stands without optimizer.type: name the optimizer, such as 'AdamW'")


class SchedulerConfig(Section):
    """`type` is a name that `engine.schedules.build_scheduler` takes; null means a constant rate."""

    type: str | None = None
    params: dict[str, Any] = {}

    def model_post_init(self, context: Any) -> None:
        if self.type is not None:
            schedules.check_params(self.type, self.params)
        elif self.params:
            raise ValueError("scheduler.params stands without scheduler.type: name the schedule, such as 'WarmupLR'")


class FP16Config(Section):
    """`loss_scale` 0 is the dynamic algorithm of `engine.scaler`; another value is a fixed scale."""

    enabled: bool = False
    loss_scale: Annotated[Real, Field(ge=0)] = 0.0
    initial_scale_power: Annotated[Whole, Field(ge=0, le=126)] = 16
    loss_scale_window: Count = 1000
    hysteresis: Count = 2
    consecutive_hysteresis: bool = False
    min_loss_scale: Annotated[Real, Field(gt=0)] = 1.0


class BF16Config(Section):
    enabled: bool = False


class OffloadConfig(Section):
    device: Literal["none", "cpu"] = "none"
    pin_memory: bool = True

    @field_validator("device", mode="before")
    @classmethod
    def _device(cls, value: Any) -> Any:
        if value == "nvme":
            raise ValueError("offload to 'nvme' does not exist here: use 'cpu' or 'none'")
        return value


class ZeroConfig(Section):
    stage: Literal[0, 1, 2, 3] = 0
    offload_param: OffloadConfig = OffloadConfig()
    offload_optimizer: OffloadConfig = OffloadConfig()
    zero_hpz_partition_size: Size = 1

    @field_validator("stage", mode="before")
    @classmethod
    def _stage(cls, value: Any) -> Any:
        return int(value) if isinstance(value, float) and value.is_integer() else _no_bool(value)

    @property
    def offloads_parameters(self) -> bool:
        """Parameters rest on the CPU: stage 3 with `offload_param.device` cpu (as in DeepSpeed, no other)."""
        return self.stage == 3 and self.offload_param.device == "cpu"

    @property
    def offloads_optimizer(self) -> bool:
        """Optimizer states rest on the CPU: stages 1 to 3 with `offload_optimizer.device` cpu."""
        return self.stage >= 1 and self.offload_optimizer.device == "cpu"


class HybridEngineConfig(Section):
    """`max_out_tokens` is prompt + answer of one sequence, in tokens."""

    enabled: bool = False
    max_out_tokens: Count = 512
    inference_tp_size: Count = 1
    release_inference_cache: bool = False
    pin_parameters: bool = True
    tp_gather_partition_size: Count = 8


class MonitorConfig(Section):
    enabled: bool = False
    output_path: str = ""
    job_name: str = "DeepSpeedJobName"


class CheckpointConfig(Section):
    """`async_save` and `keep_last` are this engine's own: save in the background; keep only the last k."""

    async_save: bool = False
    keep_last: Count | None = None


class EngineConfig(Section):
    """All of it. Build one with `EngineConfig.load`, which solves the batch sizes and checks across keys."""

    train_batch_size: Count | None = None
    train_micro_batch_size_per_gpu: Count | None = None
    gradient_accumulation_steps: Count | None = None
    optimizer: OptimizerConfig | None = None
    scheduler: SchedulerConfig | None = None
    # 0 turns clipping off
    gradient_clipping: Annotated[Real, Field(ge=0)] = 1.0
    prescale_gradients: bool = False
    gradient_predivide_factor: Annotated[Real, Field(gt=0)] = 1.0
    steps_per_print: Count | None = None
    wall_clock_breakdown: bool = False
    fp16: FP16Config = FP16Config()
    bf16: BF16Config = BF16Config()
    zero_optimization: ZeroConfig = ZeroConfig()
    hybrid_engine: HybridEngineConfig = HybridEngineConfig()
    tensorboard: MonitorConfig = MonitorConfig()
    csv_monitor: MonitorConfig = MonitorConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()

    _world_size: int = PrivateAttr(1)
    _ignored: tuple[str, ...] = PrivateAttr(())
    _ignored_by_name: tuple[str, ...] = PrivateAttr(())
    _source: dict[str, Any] | None = PrivateAttr(None)

    @property
    def world_size(self) -> int:
        """The rank count that the batch sizes were solved for."""
        return self._world_size

    @property
    def ignored_keys(self) -> tuple[str, ...]:
        """Full dotted keys of the config that DeepSpeed knows and that have no effect here."""
        return self._ignored

    def notice(self) -> str | None:
        """One line that names `ignored_keys`, to log once; None when there are none."""
        if not self._ignored:
            return None
        return f"config keys that DeepSpeed knows and that have no effect here: {', '.join(self._ignored)}"

    @classmethod
    def load(
        cls, config: dict | str | Path | EngineConfig, world_size: int, auto: dict[str, Any] | None = None
    ) -> EngineConfig:
        """Read and check a config.

        Args:
            config: a dict of DeepSpeed's JSON keys, the path of a .json file, that JSON in url-safe base64,
                or an `EngineConfig` (its batch sizes are solved anew for `world_size`).
            world_size: number of data-parallel ranks.
            auto: values for keys that say "auto", by full dotted key (`{"optimizer.params.lr": 1e-5}`). An
                "auto" without a value here takes the key's default.

        Raises:
            ValueError: one line with the key, its value and what to write instead.
            FileNotFoundError: the path does not exist.
        """
        if isinstance(config, EngineConfig):
            source = config._source if config._source is not None else config.model_dump(exclude_unset=True)
            where, ignored = "", list(config._ignored_by_name)
        else:
            raw, where = read_source(config)
        try:
            if not isinstance(config, EngineConfig):
                source, ignored = normalise(raw, cls, auto or {})
            result = cls.model_validate(source)
            result = result.model_copy(update=solve_batch(result, world_size))
            unused_here = cross_check(result, world_size)
        except ValidationError as error:
            raise ValueError(where + one_line(error)) from None
        except ValueError as error:
            raise ValueError(f"{where}{error}") from None
        result._world_size = world_size
        result._source = source
        result._ignored_by_name = tuple(ignored)
        result._ignored = (*ignored, *unused_here)
        return result
