"""The config: DeepSpeed's keys, defaults and rules; each mistake is one line with the key and the way out."""

from __future__ import annotations

import base64
import json

import pytest

from engine.config import EngineConfig
from engine.config_read import known_keys
from engine.config_tables import ALIASES, REFUSED, UNUSED

MICRO = {"train_micro_batch_size_per_gpu": 1}
ADAMW = {"optimizer": {"type": "AdamW"}}


def load(config=None, world_size=1, auto=None, **keys):
    return EngineConfig.load({**MICRO, **keys} if config is None else config, world_size, auto)


def deepspeed_chat_train(stage, offload=False, dtype="fp16"):
    """What DeepSpeed-Chat's get_train_ds_config writes, its main script's batch sizes not yet put in."""
    device = "cpu" if offload else "none"
    precision = (
        {"fp16": {"enabled": True, "loss_scale_window": 100}} if dtype == "fp16" else {"bfloat16": {"enabled": True}}
    )
    return {
        "train_batch_size": 32,
        "train_micro_batch_size_per_gpu": 4,
        "steps_per_print": 10,
        "zero_optimization": {
            "stage": stage,
            "overlap_comm": True,
            "offload_param": {"device": device},
            "offload_optimizer": {"device": device},
            "stage3_param_persistence_threshold": 1e4,
            "stage3_max_live_parameters": 3e7,
            "stage3_prefetch_bucket_size": 3e7,
            "memory_efficient_linear": False,
            "zero_quantized_nontrainable_weights": False,
            "zero_hpz_partition_size": 1,
        },
        **precision,
        "gradient_clipping": 1.0,
        "prescale_gradients": False,
        "wall_clock_breakdown": False,
        "hybrid_engine": {
            "enabled": True,
            "max_out_tokens": 512,
            "inference_tp_size": 1,
            "release_inference_cache": False,
            "pin_parameters": True,
            "tp_gather_partition_size": 8,
        },
        "tensorboard": {
            "enabled": False,
            "output_path": "out/ds_tensorboard_logs/",
            "job_name": "step1_tensorboard",
        },
    }


def deepspeed_chat_eval(stage, offload=False):
    return {
        "train_batch_size": 32,
        "train_micro_batch_size_per_gpu": 4,
        "steps_per_print": 10,
        "zero_optimization": {
            "stage": stage,
            "stage3_param_persistence_threshold": 1e4,
            "offload_param": {"device": "cpu" if offload else "none"},
            "memory_efficient_linear": False,
        },
        "bfloat16": {"enabled": True},
        "gradient_clipping": 1.0,
        "prescale_gradients": False,
        "wall_clock_breakdown": False,
    }


# -- what users have --------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_deepspeed_chats_configs_are_accepted(stage, offload, dtype):
    config = load(deepspeed_chat_train(stage, offload, dtype), world_size=4)
    assert config.zero_optimization.stage == stage
    assert config.zero_optimization.offloads_parameters == (offload and stage == 3)
    assert config.zero_optimization.offloads_optimizer == (offload and stage >= 1)
    assert (config.fp16.enabled, config.bf16.enabled) == (dtype == "fp16", dtype == "bf16")
    assert config.fp16.loss_scale_window == (100 if dtype == "fp16" else 1000)
    assert config.gradient_accumulation_steps == 2 and config.steps_per_print == 10
    assert config.hybrid_engine.enabled and config.tensorboard.job_name == "step1_tensorboard"
    frozen = load(deepspeed_chat_eval(stage, offload), world_size=2)
    assert frozen.optimizer is None and frozen.bf16.enabled and frozen.zero_optimization.stage == stage


def test_defaults_are_deepspeeds():
    config = load()
    assert config.optimizer is None and config.scheduler is None
    assert config.gradient_clipping == 1.0
    assert (config.prescale_gradients, config.gradient_predivide_factor) == (False, 1.0)
    assert (config.steps_per_print, config.wall_clock_breakdown) == (None, False)
    fp16 = config.fp16
    assert (fp16.enabled, fp16.loss_scale, fp16.initial_scale_power) == (False, 0, 16)
    assert (fp16.loss_scale_window, fp16.hysteresis, fp16.consecutive_hysteresis) == (1000, 2, False)
    assert (fp16.min_loss_scale, config.bf16.enabled) == (1, False)
    zero = config.zero_optimization
    assert (zero.stage, zero.zero_hpz_partition_size) == (0, 1)
    assert zero.offload_param.device == zero.offload_optimizer.device == "none"
    hybrid = config.hybrid_engine
    assert (hybrid.enabled, hybrid.max_out_tokens, hybrid.inference_tp_size) == (False, 512, 1)
    assert (hybrid.release_inference_cache, hybrid.pin_parameters, hybrid.tp_gather_partition_size) == (
        False,
        True,
        8,
    )
    for monitor in (config.tensorboard, config.csv_monitor):
        assert (monitor.enabled, monitor.output_path, monitor.job_name) == (False, "", "DeepSpeedJobName")
    assert config.ignored_keys == () and config.notice() is None


def test_null_is_the_default():
    config = load(gradient_clipping=None, fp16=None, optimizer=None, zero_optimization={"stage": None})
    assert config.model_dump() == load().model_dump()
    assert load(scheduler={"type": None, "params": None}).scheduler.params == {}


def test_old_names_mean_the_new_ones():
    assert load(bfloat16={"enabled": True}).bf16.enabled
    assert load(zero_optimization=True).zero_optimization.stage == 1
    assert load(zero_optimization=False).zero_optimization.stage == 0
    old = {"stage": 2, "cpu_offload": True, "cpu_offload_use_pin_memory": False}
    offload = load(zero_optimization=old).zero_optimization.offload_optimizer
    assert (offload.device, offload.pin_memory) == ("cpu", False)
    old = {"stage": 3, "cpu_offload": False, "cpu_offload_param": True, "param_persistence_threshold": 7}
    config = load(zero_optimization=old)
    assert config.zero_optimization.offloads_parameters and not config.zero_optimization.offloads_optimizer
    assert config.ignored_keys == ("zero_optimization.stage3_param_persistence_threshold",)
    config = load(zero_optimization={"stage3_gather_fp16_weights_on_model_save": True})
    assert config.ignored_keys == ("zero_optimization.stage3_gather_16bit_weights_on_model_save",)


def test_aliases_lead_to_known_keys():
    assert set(ALIASES.values()) <= set(known_keys(EngineConfig))


def test_the_callers_dict_is_left_as_it_is():
    raw = {
        **MICRO,
        "bfloat16": {"enabled": True},
        "zero_optimization": {"cpu_offload": True, "stage": "auto"},
    }
    before = json.dumps(raw)
    load(raw)
    assert json.dumps(raw) == before


# -- where it comes from ----------------------------------------------------------------------------------


def test_dict_path_base64_and_config_are_one(tmp_path):
    raw = {**MICRO, **ADAMW, "aio": {"block_size": 1}}
    text = json.dumps(raw)
    path = tmp_path / "ds.json"
    path.write_text(text)
    config = load(raw, 2)
    assert load(path, 2) == load(str(path), 2) == config
    assert load(base64.urlsafe_b64encode(text.encode()).decode(), 2) == config
    assert load(config, 2) == config
    assert load(config, 2).notice() == config.notice()


def test_a_config_is_solved_anew_for_another_rank_count():
    config = load({"train_batch_size": 32, "train_micro_batch_size_per_gpu": 4}, 2)
    assert (config.gradient_accumulation_steps, config.world_size) == (4, 2)
    again = load(config, 8)
    assert (again.gradient_accumulation_steps, again.world_size) == (1, 8)
    assert load(again, 2) == config
    by_hand = EngineConfig(train_micro_batch_size_per_gpu=3, bf16={"enabled": True})
    assert load(by_hand, 2).train_batch_size == 6 and load(by_hand, 2).bf16.enabled


def test_bad_files_are_named(tmp_path):
    path = tmp_path / "ds.json"
    for text, message in [
        ("{", "not JSON at line 1, column 2"),
        ("[1]", "holds a list: it must be one JSON object"),
        ('{"bf16": {"enabled": true}, "bf16": {}}', "key bf16 is given twice: keep one"),
        ('{"fp16": {"enabled": true, "enabled": false}}', "key fp16.enabled is given twice"),
        ('{"zero_optimization": {"stage": 7}}', "config key zero_optimization.stage is 7"),
    ]:
        path.write_text(text)
        with pytest.raises(ValueError) as caught:
            load(path)
        assert str(path) in str(caught.value) and message in str(caught.value)
        assert "\n" not in str(caught.value)
    duplicate = base64.urlsafe_b64encode(b'{"stage": 1, "stage": 2}').decode()
    with pytest.raises(ValueError, match="key stage is given twice"):
        load(duplicate)
    with pytest.raises(FileNotFoundError, match="missing.json: no such file"):
        load(tmp_path / "missing.json")
    with pytest.raises(FileNotFoundError, match="no such file"):
        load("x" * 5000)
    with pytest.raises(ValueError, match="config is a list"):
        load([1])


# -- "auto" -----------------------------------------------------------------------------------------------


AUTO = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": "auto", "betas": "auto", "eps": 1e-6, "weight_decay": "auto"},
    },
    "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": "auto", "warmup_num_steps": "auto"}},
    "fp16": {"enabled": "auto", "loss_scale": 0},
    "bf16": {"enabled": "auto"},
    "zero_optimization": {
        "stage": 3,
        "reduce_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
    },
}


def test_auto_takes_the_callers_value_or_the_default():
    given = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 3,
        "optimizer.params.lr": 1e-5,
        "optimizer.params.betas": [0.9, 0.95],
        "scheduler.params.warmup_num_steps": 20,
        "bf16.enabled": True,
    }
    config = load(AUTO, 4, given)
    assert config.train_batch_size == 24
    assert config.optimizer.params == {"lr": 1e-5, "betas": [0.9, 0.95], "eps": 1e-6}
    assert config.scheduler.params == {"warmup_num_steps": 20}
    assert config.bf16.enabled and not config.fp16.enabled
    assert config.gradient_clipping == 1.0
    assert config.ignored_keys == (
        "zero_optimization.reduce_bucket_size",
        "zero_optimization.stage3_param_persistence_threshold",
    )


def test_auto_never_replaces_a_value_that_is_there():
    assert load(gradient_clipping=0.5, auto={"gradient_clipping": 2.0}).gradient_clipping == 0.5


def test_values_for_auto_must_be_of_known_keys():
    with pytest.raises(ValueError, match="unknown config key gradient_cliping: did you mean gradient_clipping?"):
        load(auto={"gradient_cliping": 1.0})


# -- batch sizes ------------------------------------------------------------------------------------------


def deepspeed_rule(train, micro, accumulation, world):
    """The rule as its text says; None where it refuses."""
    if train is None and micro is None:
        return None
    if train is not None and micro is not None and accumulation is not None:
        pass
    elif train is not None and micro is not None:
        accumulation = (train // micro) // world
    elif train is not None and accumulation is not None:
        micro = (train // world) // accumulation
    elif micro is not None and accumulation is not None:
        train = micro * accumulation * world
    elif train is not None:
        accumulation, micro = 1, train // world
    else:
        accumulation, train = 1, micro * world
    if min(train, micro, accumulation) <= 0 or train != micro * accumulation * world:
        return None
    return train, micro, accumulation


def test_batch_sizes_follow_the_rule():
    keys = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    for train in (None, 1, 4, 7, 12, 48):
        for micro in (None, 1, 3, 4):
            for accumulation in (None, 1, 2, 4):
                for world in (1, 2, 3, 4):
                    given = dict(zip(keys, (train, micro, accumulation), strict=True))
                    case = {**{k: v for k, v in given.items() if v is not None}, **ADAMW}
                    expected = deepspeed_rule(train, micro, accumulation, world)
                    try:
                        config = load(case, world)
                        found = tuple(getattr(config, key) for key in keys)
                    except ValueError as error:
                        found = None
                        assert "\n" not in str(error)
                        if train is not None:
                            assert f"{world} ranks = " in str(error) and str(train) in str(error)
                    assert found == expected, (case, world)


def test_a_contradiction_shows_the_product_and_the_ranks():
    with pytest.raises(ValueError) as caught:
        load({"train_batch_size": 32, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 3}, 2)
    assert str(caught.value) == (
        "train_batch_size 32 is not train_micro_batch_size_per_gpu 4 x gradient_accumulation_steps 3 x 2 ranks "
        "= 24: change one of them or leave one out"
    )


def test_a_forward_only_config_needs_no_batch_size():
    config = load({"zero_optimization": {"stage": 3}}, 2)
    assert (config.train_batch_size, config.train_micro_batch_size_per_gpu) == (2, 1)
    with pytest.raises(ValueError, match="neither train_batch_size nor train_micro_batch_size_per_gpu"):
        load(ADAMW, 2)


# -- keys -------------------------------------------------------------------------------------------------


def test_known_but_unused_keys_are_named_once():
    config = load(
        aio={"block_size": 1048576},
        zero_optimization={
            "stage": 2,
            "overlap_comm": True,
            "offload_param": {"device": "cpu", "buffer_count": 5},
        },
        comms_logger={"enabled": True, "prof_ops": ["all_reduce"]},
        flops_profiler={"enabled": False},
        zero_allow_untested_optimizer=True,
        autotuning={"anything": {"goes": 1}},
    )
    assert config.ignored_keys == (
        "aio",
        "zero_optimization.overlap_comm",
        "zero_optimization.offload_param.buffer_count",
        "comms_logger",
        "flops_profiler",
        "zero_allow_untested_optimizer",
        "autotuning",
        "zero_optimization.offload_param (at stage 2)",
    )
    notice = config.notice()
    assert "\n" not in notice and all(key in notice for key in config.ignored_keys)


def test_the_order_of_division_is_named_where_fsdp2_has_its_own():
    keys = {"prescale_gradients": True, "gradient_predivide_factor": 2.0}
    assert load(**keys).ignored_keys == ()
    ignored = load(**keys, zero_optimization={"stage": 2}).ignored_keys
    assert ignored == ("prescale_gradients (at stage 2)", "gradient_predivide_factor (at stage 2)")


def test_every_known_key_is_accepted():
    """One config with every key the tables hold, each with a harmless value."""

    def fill(tree):
        return {key: {} if child is None else fill(child) for key, child in tree.items()}

    refused = {path.split(".")[0] for path in REFUSED}
    raw = {key: value for key, value in fill(UNUSED).items() if key not in refused}
    raw["checkpoint"]["keep_last"] = 3
    config = load({**MICRO, **raw})
    assert len(config.ignored_keys) > 60 and config.checkpoint.keep_last == 3


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"gradient_cliping": 1}, "unknown config key gradient_cliping: did you mean gradient_clipping?"),
        ({"zero_optimisation": {}}, "unknown config key zero_optimisation: did you mean zero_optimization?"),
        ({"stage": 2}, "unknown config key stage: did you mean zero_optimization.stage?"),
        ({"cpu_offload": True}, "did you mean zero_optimization.offload_optimizer?"),
        ({"zero_optimization": {"stag": 1}}, "zero_optimization.stag: did you mean zero_optimization.stage?"),
        (
            {"zero_optimization": {"offload_param": {"devise": "cpu"}}},
            "did you mean zero_optimization.offload_param.device?",
        ),
        ({"bf16": {"enable": True}}, "unknown config key bf16.enable: did you mean bf16.enabled?"),
        ({"bfloat16": {"enable": True}}, "unknown config key bf16.enable: did you mean bf16.enabled?"),
        ({"aio": {"blok_size": 1}}, "unknown config key aio.blok_size: did you mean aio.block_size?"),
        ({"optimizer": {"typ": "Adam"}}, "unknown config key optimizer.typ: did you mean optimizer.type?"),
        ({"hybrid_engine": {"max_tokens": 9}}, "did you mean hybrid_engine.max_out_tokens?"),
        ({"": 1}, "unknown config key "),
        ({"bf16": {}, "bfloat16": {}}, "config keys bfloat16 and bf16 are one setting"),
        ({"zero_optimization": {"cpu_offload": True, "offload_optimizer": {}}}, "keep offload_optimizer"),
        ({"zero_optimization": {"cpu_offload": "cpu"}}, "config key zero_optimization.cpu_offload is 'cpu'"),
        ({"zero_optimization": {"stage": 4}}, "config key zero_optimization.stage is 4: use 0, 1, 2 or 3"),
        ({"zero_optimization": {"stage": True}}, "config key zero_optimization.stage is True"),
        ({"zero_optimization": {"stage": "three"}}, "config key zero_optimization.stage is 'three'"),
        ({"zero_optimization": 3}, "config key zero_optimization is 3: use a JSON object"),
        (
            {"zero_optimization": {"offload_param": {"device": "nvme"}}},
            "'nvme': offload to 'nvme' does not exist here",
        ),
        ({"zero_optimization": {"offload_param": {"device": "gpu"}}}, "use 'none' or 'cpu'"),
        ({"zero_optimization": {"zero_hpz_partition_size": -1}}, "use a number of 0 or more"),
        ({"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 2}}, "does not divide the 3 ranks"),
        (
            {"hybrid_engine": {"enabled": True, "inference_tp_size": 2}},
            "inference_tp_size 2 does not divide the 3 ranks",
        ),
        (
            {"hybrid_engine": {"max_out_tokens": 0}},
            "config key hybrid_engine.max_out_tokens is 0: use a number of 1",
        ),
        (
            {"fp16": {"enabled": True}, "bf16": {"enabled": True}},
            "fp16.enabled and bf16.enabled are both true",
        ),
        ({"fp16": {"enabled": "maybe"}}, "config key fp16.enabled is 'maybe': use true or false"),
        ({"fp16": {"loss_scale": -1}}, "config key fp16.loss_scale is -1: use a number of 0 or more"),
        ({"fp16": {"loss_scale": True}}, "config key fp16.loss_scale is True"),
        ({"fp16": {"loss_scale": float("nan")}}, "config key fp16.loss_scale is nan"),
        ({"fp16": {"loss_scale": float("inf")}}, "config key fp16.loss_scale is inf"),
        (
            {"fp16": {"loss_scale_window": 0}},
            "config key fp16.loss_scale_window is 0: use a number of 1 or more",
        ),
        ({"fp16": {"hysteresis": 0}}, "config key fp16.hysteresis is 0"),
        ({"fp16": {"min_loss_scale": 0}}, "config key fp16.min_loss_scale is 0: use a number above 0"),
        ({"fp16": {"min_loss_scale": 1e6}}, "fp16.min_loss_scale 1000000.0 is above the first scale"),
        ({"gradient_clipping": -1}, "config key gradient_clipping is -1: use a number of 0 or more"),
        ({"gradient_clipping": "much"}, "config key gradient_clipping is 'much': use a number"),
        ({"steps_per_print": 2.5}, "config key steps_per_print is 2.5: use a whole number"),
        ({"steps_per_print": 0, "gradient_clipping": -1}, "(and 1 more)"),
        ({"train_batch_size": "x"}, "config key train_batch_size is 'x': use a whole number"),
        (
            {"tensorboard": {"enabled": True, "output_path": 3}},
            "config key tensorboard.output_path is 3: use a text",
        ),
        ({"optimizer": {"type": "AdmW"}}, "optimizer.type 'AdmW' is unknown: did you mean AdamW?"),
        ({"optimizer": {"type": "AdamW", "params": {"lr": "x"}}}, "optimizer.params.lr is 'x'"),
        (
            {"optimizer": {"type": "AdamW", "params": [1]}},
            "config key optimizer.params is [1]: use a JSON object",
        ),
        ({"scheduler": {"type": "cosin"}}, "scheduler.type 'cosin' is unknown: did you mean cosine?"),
        (
            {"scheduler": {"type": "WarmupLR", "params": {"warmup": 1}}},
            "scheduler.params.warmup is not a parameter",
        ),
        ({"scheduler": {"params": {"warmup_num_steps": 5}}}, "scheduler.params stands without scheduler.type: name"),
        ({"optimizer": {"params": {"lr": 1e-3}}}, "optimizer.params stands without optimizer.type: name"),
        (
            {"gradient_allreduce_op": "sum"},
            'config key gradient_allreduce_op is "sum", which this engine does not do',
        ),
        ({"amp": {"enabled": True}}, "amp.enabled is true, which this engine does not do: use bf16.enabled"),
        ({"tensor_parallel": {"autotp_size": 4}}, "tensor_parallel.autotp_size is 4"),
        ({"managed_gradient_accumulation": False}, "use gradient_accumulation_steps 1"),
        ({"checkpoint": {"keep_last": 0}}, "config key checkpoint.keep_last is 0: use a number of 1 or more"),
    ],
)
def test_every_mistake_is_one_line(keys, message):
    with pytest.raises(ValueError) as caught:
        load(world_size=3, **keys)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_numbers_as_deepspeeds_files_write_them():
    config = load(zero_optimization={"stage": 3.0, "zero_hpz_partition_size": 1.0}, train_batch_size=4.0)
    assert config.zero_optimization.stage == 3 and config.train_batch_size == 4
    assert isinstance(config.zero_optimization.stage, int)


def test_harmless_settings_of_refused_keys_are_accepted():
    config = load(gradient_allreduce_op="mean", amp={"enabled": False, "opt_level": "O1"}, sequence_parallel_size=1)
    assert config.ignored_keys == ("gradient_allreduce_op", "amp", "sequence_parallel_size")


def test_a_config_cannot_be_changed_afterwards():
    with pytest.raises(ValueError, match="frozen"):
        load().gradient_clipping = 2.0
