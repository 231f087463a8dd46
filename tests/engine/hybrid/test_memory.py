"""What generating costs in memory: no more with every round, one bucket in the swap, the workspace to its end."""

from __future__ import annotations

import ctypes
import gc
import time
import weakref
from itertools import pairwise
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import engine
from engine import distributed
from tests.engine.hybrid import tiny
from tests.engine.hybrid.test_hybrid_engine import config, rank_batch, train
from tests.helpers import run_ranks

WARM_UP, ROUNDS = 4, 20
# What twenty rounds may add, seen to be 0.2 MiB: less than a rank's slices of WIDE or the workspace for its prompts,
# which are 0.8 MiB each.
GROWTH_BYTES = 2**19
WIDE = tiny.llama(hidden_size=128, intermediate_size=384, num_hidden_layers=2)


def resident_bytes() -> int:
    """This process's own pages, those that the allocator could give back left out."""
    time.sleep(distributed.SETTLE_SECONDS)  # gloo's threads hold the last tensors a moment longer
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    with open("/proc/self/status") as status:
        (line,) = [line for line in status if line.startswith("RssAnon")]
    return int(line.split()[1]) * 1024


class Live(TorchDispatchMode):
    """Within, `peak` is the most bytes that tensors made since the beginning held at once."""

    def __init__(self):
        super().__init__()
        self.peak = 0
        self._held: dict = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        given = {key for key, *_ in self._memory((args, kwargs))}
        out = function(*args, **(kwargs or {}))
        self._held |= {key: held for key, *held in self._memory(out) if key not in given}
        self.peak = max(self.peak, self.now())
        return out

    @staticmethod
    def _memory(values):
        """(identity, weak reference, bytes) of what the tensors in `values` lie in."""
        for leaf in tree_leaves(values):
            if not isinstance(leaf, torch.Tensor) or isinstance(leaf, DTensor):
                continue
            if leaf.layout == torch._mkldnn:  # packed weights have no storage to ask
                yield id(leaf), weakref.ref(leaf), leaf.numel() * leaf.element_size()
            else:
                storage = StorageWeakRef(leaf.untyped_storage())
                yield storage.cdata, storage, leaf.untyped_storage().nbytes()

    def now(self) -> int:
        def alive(ref) -> bool:
            return not ref.expired() if isinstance(ref, StorageWeakRef) else ref() is not None

        self._held = {key: (ref, size) for key, (ref, size) in self._held.items() if alive(ref)}
        return sum(size for _, size in self._held.values())


def rounds(rank: int, generates: bool):
    """The weights after all rounds, by how much resident memory grew since warming up, and the engine."""
    eng = engine.initialize(tiny.build(WIDE), config(3, 2, max_out_tokens=256))
    for count in range(WARM_UP + ROUNDS):
        if count == WARM_UP:
            before = resident_bytes()
        if generates:
            eng.generate(*rank_batch(0), max_new_tokens=4, do_sample=True, eos_token_id=[])
        train(eng, rank, steps=1)
    grown = resident_bytes() - before
    return [p.to_local().clone() for p in eng.module.parameters()], grown, eng


def growth(rank: int):
    """Whether generating left the weights alone, the growth of twenty rounds, and that of two leaks."""
    weights, _, _ = rounds(rank, generates=False)
    with_generation, grown, eng = rounds(rank, generates=True)
    same = all(torch.equal(a, b) for a, b in zip(weights, with_generation, strict=True))
    marks = [resident_bytes()]
    slices = [tensor for bucket in eng._core.swap.run() for tensor in bucket.values()]
    marks.append(resident_bytes())
    workspace = eng._core.model.workspace._storage
    eng.release_inference_cache()
    eng.generate(*rank_batch(0), max_new_tokens=4, eos_token_id=[])
    marks.append(resident_bytes())
    assert slices and workspace.numel()  # held until here
    return same, grown, [after - before for before, after in pairwise(marks)]


def exchange_and_settle(output, input, *sizes, exchange=dist.all_to_all_single):
    """Until gloo's threads have let go of the tensors too, which they do a moment later."""
    storages = [tensor.untyped_storage()._cdata for tensor in (output, input)]
    counts = [*map(torch._C._storage_Use_Count, storages)]
    exchange(output.view(-1), input.view(-1), *sizes)
    while [*map(torch._C._storage_Use_Count, storages)] != counts:
        time.sleep(0.001)


def swap_peak(tp: int):
    """Bytes: the most that the swap held at once, the weights it left, and the largest bucket of them."""
    model = tiny.build(tiny.llama(hidden_size=64, num_hidden_layers=6))
    eng = engine.initialize(model, {**config(3, tp, tp_gather_partition_size=2), "bf16": {"enabled": True}})
    with mock.patch("torch.distributed.all_to_all_single", exchange_and_settle), Live() as live:
        eng._core.sync()
        gc.collect()
        kept = live.now()
    swap, each = eng._core.swap, eng._core.model.dtype.itemsize  # fp32's on a CPU without bf16
    return live.peak, kept, max(each * sum(swap.targets[i].numel for i in bucket) for bucket in swap._buckets)


def full_workspace(rank: int, tp: int, bf16: bool):
    """Prompt and answer fill the workspace of a sequence to its end, on rank 0; one token more is refused on both."""
    ids = torch.full((2, 40 if rank == 0 else 3), 5)
    answers = []
    for room in (48, 96):
        eng = engine.initialize(
            tiny.build(tiny.llama()), {**config(3, tp, max_out_tokens=room), "bf16": {"enabled": bf16}}
        )
        answers.append(eng.generate(ids, max_new_tokens=8, eos_token_id=[]))
        if room == 48:
            with pytest.raises(ValueError) as refusal:
                eng.generate(ids, max_new_tokens=9, eos_token_id=[])
    return torch.equal(*answers), list(answers[0].shape), str(refusal.value)


def two_ranks(rank, world):
    layouts = [(1, True), (2, False), (2, True)]
    full = [full_workspace(rank, *layout) for layout in layouts]
    return growth(rank), [swap_peak(tp) for tp in (1, 2)], full


@pytest.fixture(scope="module")
def two():
    return run_ranks(two_ranks, 2)


def test_rounds_of_generating_and_training_leave_nothing_behind(two):
    for (same, grown, leaks), *_ in two:
        assert same
        assert grown < GROWTH_BYTES < min(leaks)


def test_the_swap_needs_one_bucket_beside_the_weights(two):
    for _, peaks, _ in two:
        for peak, kept, bucket in peaks:
            assert kept < peak <= kept + bucket
            assert bucket < kept / 3


def test_a_workspace_may_be_full_to_the_last_token(two):
    for rank, (*_, full) in enumerate(two):
        for same, shape, refusal in full:
            assert same and shape == [2, (48, 11)[rank]]
            assert "prompt (40 tokens) + max_new_tokens (9) = 49 exceed" in refusal and "max_out_tokens=48" in refusal
