"""Estimates against the ZeRO paper's table, against dry runs, and against every byte a real rank holds."""

from __future__ import annotations

import gc
import itertools

import pytest
import torch
import torch.distributed as dist
from transformers import LlamaConfig, OPTConfig

import engine
from engine.memory import dry_run, estimate_memory
from tests.engine.tiny import tiny_llama, token_batch, token_loss
from tests.helpers import run_ranks

VOCAB = 128


def config_for(stage, *, bf16=False, accumulation=1, optimizer="AdamW", **more):
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": accumulation,
        "bf16": {"enabled": bf16},
        "zero_optimization": {"stage": stage},
        **more,
    }
    return config if optimizer is None else {**config, "optimizer": {"type": optimizer}}


def medium_llama(frozen=False):
    model = tiny_llama(
        vocab_size=VOCAB, hidden_size=128, intermediate_size=512, num_hidden_layers=4, num_key_value_heads=4
    )
    if frozen:
        model.model.layers[0].requires_grad_(False)
    return model


# -- the table --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("stage", "ranks"), list(itertools.product((0, 1, 2, 3), (1, 2, 4, 64))))
def test_the_papers_table(stage, ranks):
    """7.5 billion parameters with Adam, as in the paper's figure 1, with this engine's fp32 gradients."""
    numel = 7_500_000_000
    estimate = estimate_memory(numel, config_for(stage, bf16=True), ranks)
    optimizer_share = ranks if stage >= 1 else 1
    if ranks > 1 and stage == 3:  # the paper's 2 + 12 bytes: fp32 shards are masters and parameters in one
        assert estimate.parameters + estimate.optimizer_states == pytest.approx(12 * numel / ranks)
    else:
        assert estimate.parameters == 2 * numel
        assert estimate.optimizer_states == pytest.approx(12 * numel / optimizer_share)
    assert estimate.gradients == pytest.approx(4 * numel / optimizer_share)
    assert estimate.total == sum(
        (estimate.parameters, estimate.masters, estimate.gradients, estimate.moments, estimate.working)
    )


def test_stage_1_keeps_whole_gradients_over_an_accumulation_window():
    one, four = (estimate_memory(1000, config_for(1, accumulation=n), 4) for n in (1, 4))
    assert (one.gradients, four.gradients) == (1000, 4000)


@pytest.mark.parametrize(
    ("name", "params", "states"),
    [
        ("AdamW", {}, 2),
        ("Adam", {"amsgrad": True}, 3),
        ("SGD", {}, 0),
        ("SGD", {"momentum": 0.9}, 1),
        ("Lion", {}, 1),
    ],
)
def test_moments_follow_the_optimizer(name, params, states):
    config = {**config_for(2), "optimizer": {"type": name, "params": params}}
    assert estimate_memory(1000, config, 2).moments == states * 4 * 500


def test_a_forward_only_model_is_only_parameters():
    for stage, expected in ((0, 2000), (3, 2000)):
        estimate = estimate_memory(1000, config_for(stage, bf16=True, optimizer=None), 2)
        assert (estimate.parameters, estimate.masters, estimate.gradients, estimate.moments) == (
            expected,
            0,
            0,
            0,
        )


# -- dry runs ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stage", "ranks", "bf16", "frozen"),
    list(itertools.product((0, 1, 2, 3), (1, 2, 3, 16), (False, True), (False, True))),
)
def test_a_dry_run_counts_what_the_formula_says(stage, ranks, bf16, frozen):
    config = config_for(stage, bf16=bf16, accumulation=2)
    counted = dry_run(lambda: medium_llama(frozen), config, ranks)
    estimate = estimate_memory(medium_llama(frozen), config, ranks)
    for kind, value in counted.as_dict().items():
        # "step" counters are a handful of bytes a tensor
        assert value == pytest.approx(estimate.as_dict()[kind], rel=1e-3, abs=200), kind


def test_offloaded_states_lie_in_the_hosts_memory():
    cpu = {"device": "cpu"}
    for stage, key in (
        (1, "offload_optimizer"),
        (2, "offload_optimizer"),
        (3, "offload_optimizer"),
        (3, "offload_param"),
    ):
        config = config_for(stage, bf16=True, zero_optimization={"stage": stage, key: cpu})
        counted = dry_run(medium_llama, config, 4)
        assert counted.as_dict() == pytest.approx(estimate_memory(medium_llama(), config, 4).as_dict(), abs=200)
        shards = counted.parameters if stage == 3 else counted.masters
        assert counted.host == pytest.approx(shards + counted.gradients + counted.moments, abs=200)
        assert counted.device == counted.total - counted.host
    # stage 0 offloads nothing, as in DeepSpeed
    config = config_for(0, zero_optimization={"stage": 0, "offload_optimizer": cpu})
    assert estimate_memory(1000, config, 4).host == 0
    # whole gradients of an accumulation window stay where backward makes them
    config = config_for(1, accumulation=2, zero_optimization={"stage": 1, "offload_optimizer": cpu})
    assert estimate_memory(1000, config, 4).host == 4 * 250 + 8 * 250


def test_175_billion_parameters_on_64_ranks():
    shape = dict(hidden_size=12288, ffn_dim=49152, word_embed_proj_dim=12288, num_hidden_layers=96)
    counted = dry_run(OPTConfig(**shape, num_attention_heads=96), config_for(3, bf16=True), 64)
    numel = 174_604_468_224
    assert counted.parameters + counted.optimizer_states == pytest.approx(12 * numel / 64, rel=1e-3)
    assert counted.gradients == pytest.approx(4 * numel / 64, rel=1e-3)
    block = 12 * 12288**2 + 13 * 12288
    outside = numel - 96 * block
    # two gathered layers and what is in none in bf16, and one layer's gradient in fp32
    assert counted.working == pytest.approx(2 * (2 * block + outside) + 4 * block, rel=1e-6)
    assert not dist.is_initialized()


def test_a_dry_run_of_a_forward_only_model_and_of_a_transformers_config():
    counted = dry_run(lambda: medium_llama(), config_for(3, bf16=True, optimizer=None), 8)
    assert counted.gradients == counted.moments == counted.masters == 0
    assert counted.parameters == pytest.approx(4 * sum(p.numel() for p in medium_llama().parameters()) / 8)
    by_config = dry_run(LlamaConfig(**medium_llama().config.to_dict()), config_for(2), 8)
    assert by_config == dry_run(lambda: medium_llama(), config_for(2), 8)


def test_a_dry_run_needs_a_process_of_its_own(tmp_path):
    dist.init_process_group("gloo", rank=0, world_size=1, init_method=f"file://{tmp_path}/store")
    try:
        with pytest.raises(ValueError, match="torch.distributed is not set up"):
            dry_run(medium_llama, config_for(3), 8)
    finally:
        dist.destroy_process_group()


# -- a real rank ------------------------------------------------------------------------------------------


def bytes_of(tensors) -> int:
    """Bytes of the distinct storages under `tensors`."""
    storages = {}
    for tensor in tensors:
        if isinstance(tensor, dist.tensor.DTensor):
            tensor = tensor.to_local()
        storage = tensor.untyped_storage()
        if storage.nbytes():
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def everything_held() -> int:
    gc.collect()
    found = [o for o in gc.get_objects() if issubclass(type(o), torch.Tensor) and o.device.type == "cpu"]
    # a gradient is an object of Python only once somebody looked at it
    return bytes_of(found + [o.grad for o in found if o.is_leaf and o.grad is not None])


def measure_one(world, stage, bf16, frozen, group=1):
    """Most bytes held at once in an update with moments and an accumulation window; bytes of moments."""
    zero = {"stage": stage, "zero_hpz_partition_size": group}
    config = config_for(stage, bf16=bf16, accumulation=2, zero_optimization=zero)
    batch = token_batch(1, length=4, vocab=VOCAB)
    before = everything_held()
    eng = engine.initialize(medium_llama(frozen), config)
    held = []

    def look(*_):
        # twice: gloo's own thread may still let go of a finished collective's buffers at the first
        dist.barrier()
        held.append(min(everything_held() for _ in range(2)) - before)

    for micro in range(4):
        if micro == 3:  # a layer's backward pass starts with the gradient of its last output
            for layer in eng.module.model.layers:
                layer.mlp.register_forward_hook(lambda module, args, out: out.register_hook(look) and None)
        logits = eng(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        loss, count = token_loss(logits, batch["labels"])
        if micro == 3:
            look()
        eng.backward(loss, weight=count)
        eng.step()
    moments = bytes_of(v for s in eng.optimizer.state.values() for v in s.values() if v.ndim)
    return max(held), moments, estimate_memory(medium_llama(frozen), config, world, device_type="cpu")


def measure(rank, world, cases):
    gc.collect()
    gc.freeze()  # what the imports made is no part of the count, and the collector need not walk it
    return [measure_one(world, *case) for case in cases]


MEASURED = list(itertools.product((0, 1, 2, 3), (False, True), (False, True)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "cases"),
    [(2, MEASURED), (4, [*(case for case in MEASURED if not case[2]), (3, False, False, 2), (3, True, False, 2)])],
)
def test_a_real_rank_holds_what_was_estimated(world, cases):
    results = run_ranks(measure, world, cases, timeout=300)[0]
    for case, (held, moments, estimate) in zip(cases, results, strict=True):
        assert moments == pytest.approx(estimate.moments, rel=0.05), case
        assert held == pytest.approx(estimate.total, rel=0.05), case


def measure_kinds(rank, world):
    """For each stage, in bf16: bytes of what forward reads, of reduced gradients, and of optimizer states."""
    batch = token_batch(1, length=4, vocab=VOCAB)
    results = []
    for stage in (0, 1, 2, 3):
        eng = engine.initialize(medium_llama(), config_for(stage, bf16=True))
        for _ in range(2):
            loss, _ = token_loss(eng(batch["input_ids"]).logits, batch["labels"])
            # at stage 3 the layers have given their copies back by now
            read = bytes_of(p for layer in eng.module.model.layers for p in layer.parameters())
            eng.backward(loss)
            eng.has_overflow()  # reduces
            gradients = bytes_of(eng.parameters.gradients())
            eng.step()
        owned = [p for group in eng.optimizer.param_groups for p in group["params"]]
        moments = bytes_of(v for state in eng.optimizer.state.values() for v in state.values() if v.ndim)
        results.append((read, gradients, bytes_of(p.detach() for p in owned) + moments))
    return results


@pytest.mark.parametrize("world", [2, 4])
def test_measured_kinds_follow_the_papers_table(world):
    """2 bytes a parameter, 4 a gradient (fp32 here), 12 of optimizer states, by the stage whole or dealt out."""
    numel = sum(p.numel() for p in medium_llama().parameters())
    in_layers = sum(p.numel() for p in medium_llama().model.layers.parameters())
    for ranks in run_ranks(measure_kinds, world):
        for stage, (read, gradients, states) in enumerate(ranks):
            assert gradients == pytest.approx(4 * numel / (world if stage else 1), rel=0.05), stage
            assert states == pytest.approx(12 * numel / (world if stage else 1), rel=0.05), stage
            # stage 3 reads from the fp32 shards that are counted among the states
            expected = 4 * in_layers / world if stage == 3 else 2 * in_layers
            assert read == pytest.approx(expected, rel=0.05), stage
