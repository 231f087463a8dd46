"""The hybrid engine over ranks: whatever the stage and the tensor-parallel size, it is the same model."""

from __future__ import annotations

import pytest
import torch

import engine
from engine.hybrid import Generator
from tests.engine.hybrid import tiny
from tests.helpers import run_ranks

NEW = 8


def config(stage: int = 0, tp: int = 1, lr: float = 1e-2, **hybrid) -> dict:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": lr}},
        "zero_optimization": {"stage": stage},
        "hybrid_engine": {"enabled": True, "max_out_tokens": 48, "inference_tp_size": tp, **hybrid},
    }


def rank_batch(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """3, 0, 2 and 5 prompts on ranks 0 to 3."""
    rows = (3, 0, 2, 5)[rank]
    ids, mask = tiny.batch(seed=rank)
    return ids[:rows], mask[:rows]


def whole_model(eng, base):
    """A plain model with the engine's present weights, merged where there are adapters."""
    state = {name: p.float().clone() for name, p in eng.gather_full_parameters()}
    fresh = tiny.build(base)
    if any("lora_" in name for name in state):
        fresh = adapted(fresh)
        fresh.load_state_dict(state, strict=False)
        return fresh.merge_and_unload().eval()
    fresh.load_state_dict(state, strict=False)
    fresh.tie_weights()
    return fresh


def adapted(model):
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(model, LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj", "down_proj"]))
    torch.manual_seed(4)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.3)
    return model


def train(eng, rank: int, steps: int = 2) -> None:
    generator = torch.Generator().manual_seed(rank)
    eng.train()
    for _ in range(steps):
        x = torch.randint(3, tiny.VOCABULARY, (2, 7), generator=generator)
        eng.backward(eng(input_ids=x, labels=x).loss)
        eng.step()


def same_tokens(eng, base, rank: int, new: int = NEW) -> bool:
    ids, mask = rank_batch(rank)
    model = whole_model(eng, base)
    got = eng.generate(ids, mask, max_new_tokens=new)
    if not len(ids):
        return got.shape == (0, 9)
    return torch.equal(got, tiny.reference(model, ids, mask, new))


def over_families(rank, world, names, stage, tp):
    wrong = []
    for name in names:
        eng = engine.initialize(tiny.build(tiny.FAMILIES[name]), config(stage, tp))
        if not same_tokens(eng, tiny.FAMILIES[name], rank):
            wrong.append(name)
    return wrong


def over_stages(rank, world, layouts):
    """Llama with grouped heads and one with tied embeddings, before and after training, under LoRA too."""
    results = {}
    for stage, tp in layouts:
        for name in ("llama", "llama tied, biases, one head each"):
            base = tiny.FAMILIES[name]
            eng = engine.initialize(tiny.build(base), config(stage, tp))
            results[stage, tp, name, "before"] = same_tokens(eng, base, rank)
            train(eng, rank)
            results[stage, tp, name, "after"] = same_tokens(eng, base, rank)
        eng = engine.initialize(adapted(tiny.build(tiny.llama())), config(stage, tp))
        results[stage, tp, "lora", "before"] = same_tokens(eng, tiny.llama(), rank)
        train(eng, rank)
        results[stage, tp, "lora", "after"] = same_tokens(eng, tiny.llama(), rank)
    return results


def swap_bytes(rank, world, tp):
    """Weights tagged with their owner: after the swap, what carries another's tag came over the wire."""
    eng = engine.initialize(tiny.build(tiny.llama()), {**config(3, tp), "bf16": {"enabled": True}})
    with torch.no_grad():
        for parameter in eng.module.parameters():
            parameter.to_local().fill_(rank + 1)
    swap = eng._core.swap
    tensors = [tensor for bucket in swap.run() for tensor in bucket.values()]
    foreign = sum(int(((t != 0) & (t != rank + 1)).sum()) for t in tensors)
    kept = sum(t.numel() for t in tensors)
    return swap.bytes_received, 2 * foreign, 2 * kept


def slices_are_bitwise(rank, world, tp):
    """The slices of stage 3 in bf16 are those of the whole tensors, rounded."""
    from tests.engine.hybrid.test_layout import slices

    eng = engine.initialize(tiny.build(tiny.llama()), {**config(3, tp), "bf16": {"enabled": True}})
    got = {name: tensor for bucket in eng._core.swap.run() for name, tensor in bucket.items()}
    expected = slices(tiny.build(tiny.llama()), rank % tp, tp, torch.bfloat16)
    return got.keys() == expected.keys() and all(torch.equal(got[name], expected[name]) for name in got)


def limited(rank, tp):
    eng = engine.initialize(tiny.build(tiny.llama()), config(3, tp))
    limits = [2, 5] if rank == 0 else [6, 1, 3]
    ids = torch.full((len(limits), 4), 5 + rank)
    output = eng.generate(ids, max_new_tokens=limits, eos_token_id=[], return_dict_in_generate=True)
    return output.lengths.tolist()


def two_ranks(rank, world):
    results = {"families": over_families(rank, world, tiny_families(), 3, 2)}
    results["stages"] = over_stages(rank, world, [(0, 2), (1, 1), (2, 2), (3, 1), (3, 2)])
    results["bytes"] = [swap_bytes(rank, world, tp) for tp in (1, 2)]
    results["bitwise"] = [slices_are_bitwise(rank, world, tp) for tp in (1, 2)]
    results["lengths"] = early_end(rank)
    results["seeds"] = sampled(rank)
    results["limits"] = [limited(rank, tp) for tp in (1, 2)]
    results["refused"] = refused_together(rank)
    own = engine.initialize(tiny.build(tiny.NO_ADAPTER), config(3))
    results["own forward"] = same_tokens(own, tiny.NO_ADAPTER, rank)
    return results


def tiny_families():
    return [name for name, c in tiny.FAMILIES.items() if c.model_type != "llama" and "six" not in name]


def early_end(rank):
    """Case: stage 3, end tokens after 2 tokens on one rank and after 5 on the other."""
    end = (2, 5)[rank]
    alone = Generator(tiny.build(tiny.llama()))
    for seed in range(20):  # a prompt whose greedy answer has a token of its own at that place
        ids = tiny.batch(seed)[0][:1]
        free = alone.generate(ids, max_new_tokens=NEW, eos_token_id=[])[0, 9:].tolist()
        if free[end - 1] not in free[: end - 1]:
            break
    eng = engine.initialize(tiny.build(tiny.llama()), config(3))
    output = eng.generate(ids, max_new_tokens=NEW, eos_token_id=free[end - 1], return_dict_in_generate=True)
    return output.lengths.tolist(), output.finished.tolist(), list(output.sequences.shape)


def sampled(rank):
    """The same prompts and seed at tp 1 and 2: the same draws; the two ranks' draws differ."""
    ids, mask = tiny.batch()
    draws = []
    for tp in (1, 2):
        eng = engine.initialize(tiny.build(tiny.llama()), config(3, tp))
        draws.append(eng.generate(ids, mask, max_new_tokens=6, do_sample=True, seed=3, eos_token_id=[]).tolist())
    return draws


def refused_together(rank):
    """Only rank 0's prompt is too long, and both ranks say so before any work."""
    eng = engine.initialize(tiny.build(tiny.llama()), config(3))
    ids = torch.full((1, 40 if rank == 0 else 3), 5)
    assert eng.generate(ids, max_new_tokens=8, eos_token_id=[]).shape[1] == ids.shape[1] + 8  # exactly full
    try:
        eng.generate(ids, max_new_tokens=9)
    except ValueError as error:
        return str(error)


@pytest.fixture(scope="module")
def two():
    return run_ranks(two_ranks, 2, timeout=300)


def test_every_family_at_stage_3_over_two_ranks(two):
    assert [r["families"] for r in two] == [[], []]


def test_every_stage_before_and_after_training(two):
    assert [key for r in two for key, same in r["stages"].items() if not same] == []


def test_bytes_are_what_a_rank_keeps_and_did_not_own(two):
    for result in two:
        for received, foreign, kept in result["bytes"]:
            assert received == foreign
            assert 0 < received < kept


def test_slices_are_bitwise_those_of_whole_tensors(two):
    assert [r["bitwise"] for r in two] == [[True, True]] * 2


def test_a_rank_that_ends_early_keeps_its_own_length(two):
    assert two[0]["lengths"] == ([2], [True], [1, 11])
    assert two[1]["lengths"] == ([5], [True], [1, 14])


def test_seeds_do_not_depend_on_tensor_parallelism(two):
    first, second = two[0]["seeds"], two[1]["seeds"]
    assert first[0] == first[1] and second[0] == second[1]
    assert first[0] != second[0]


def test_limits_stay_with_their_prompts_in_the_pool(two):
    assert [result["limits"] for result in two] == [[[2, 5]] * 2, [[6, 1, 3]] * 2]


def test_a_prompt_too_long_on_one_rank_is_refused_on_all(two):
    for result in two:
        assert "prompt (40 tokens) + max_new_tokens (9) = 49" in result["refused"]
        assert "max_out_tokens=48" in result["refused"]


def test_own_forward_under_sharded_weights(two):
    assert [r["own forward"] for r in two] == [True, True]


def four_ranks(rank, world):
    results = over_stages(rank, world, [(3, 2), (3, 4), (2, 4)])
    data = [swap_bytes(rank, world, tp) for tp in (1, 2, 4)]
    return results, data, [slices_are_bitwise(rank, world, tp) for tp in (2, 4)]


def test_four_ranks():
    for results, data, bitwise in run_ranks(four_ranks, 4, timeout=300):
        assert [key for key, same in results.items() if not same] == []
        assert all(received == foreign for received, foreign, _ in data)
        assert all(bitwise)


def test_weights_are_laid_out_again_only_after_they_changed(monkeypatch):
    eng = engine.initialize(tiny.build(tiny.llama()), config())
    swaps = []
    run = eng._core.swap.run
    monkeypatch.setattr(eng._core.swap, "run", lambda: swaps.append(eng.weights_version) or run())
    ids, mask = tiny.batch()
    for _ in range(2):
        eng.generate(ids, mask, max_new_tokens=3)
    train(eng, 0, steps=1)
    for _ in range(2):
        eng.generate(ids, mask, max_new_tokens=3)
    assert swaps == [0, 1]


def test_a_swap_left_out_would_be_seen(monkeypatch):
    eng = engine.initialize(tiny.build(tiny.llama()), config(lr=0.1))
    ids, mask = tiny.batch()
    eng.generate(ids, mask, max_new_tokens=NEW)
    train(eng, 0)
    expected = tiny.reference(whole_model(eng, tiny.llama()), ids, mask, NEW)
    core = eng._core
    with monkeypatch.context() as patch:
        patch.setattr(core, "sync", lambda version: None)
        assert not torch.equal(eng.generate(ids, mask, max_new_tokens=NEW), expected)
    assert torch.equal(eng.generate(ids, mask, max_new_tokens=NEW), expected)


@pytest.mark.parametrize("hybrid", [{"release_inference_cache": True}, {"pin_parameters": False}, {}])
def test_what_stays_after_a_call(hybrid):
    eng = engine.initialize(tiny.build(tiny.llama()), config(**hybrid))
    ids, mask = tiny.batch()
    expected = tiny.reference(tiny.build(tiny.llama()), ids, mask, 4)
    for _ in range(2):
        assert torch.equal(eng.generate(ids, mask, max_new_tokens=4), expected)
    model = eng._core.model
    assert model.has_weights is (not hybrid)
    assert (model.workspace.nbytes > 0) is ("release_inference_cache" not in hybrid)
    eng.release_inference_cache()
    assert not model.has_weights and model.workspace.nbytes == 0
    assert torch.equal(eng.generate(ids, mask, max_new_tokens=4), expected)


def test_generating_leaves_the_weights_as_they_were():
    eng = engine.initialize(adapted(tiny.build(tiny.llama())), config(lr=0.0))
    before = {name: p.clone() for name, p in eng.gather_full_parameters()}
    ids, mask = tiny.batch()
    for _ in range(5):
        eng.generate(ids, mask, max_new_tokens=3, do_sample=True)
        train(eng, 0, steps=1)
    assert all(torch.equal(p, before[name]) for name, p in eng.gather_full_parameters())


def test_tensor_parallel_sizes_that_cannot_be():
    with pytest.raises(ValueError, match="inference_tp_size.2 does not divide the 1 ranks"):
        engine.initialize(tiny.build(tiny.llama()), config(tp=2))
