"""What the kernel counts of memory that was freed: pages handed out anew, and pages that stay."""

from __future__ import annotations

import ctypes
import resource

import pytest
import torch
from torch import nn

import engine
from engine import host_memory
from tests.helpers import run_ranks

NUMBERS = 2**24  # 64 MiB: glibc keeps smaller blocks by itself now and then
PAGES = NUMBERS * 4 // resource.getpagesize()


def faults_of_a_second_tensor() -> int:
    """Page faults of a tensor as large as those that were freed just before."""
    for _ in range(4):  # the heap finds its place first
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        torch.zeros(NUMBERS).add_(1)
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    return faults


def resident_pages() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1])


def around_an_engine(rank: int, world_size: int) -> tuple[int, int, int]:
    before = faults_of_a_second_tensor()
    engine.initialize(nn.Linear(2, 2), {"train_micro_batch_size_per_gpu": 1})
    after = faults_of_a_second_tensor()
    kept = resident_pages()
    host_memory.trim()
    return before, after, kept - resident_pages()


def with_the_users_threshold(rank: int, world_size: int) -> tuple[bool, int]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MALLOC_TRIM_THRESHOLD_", "131072")
        engine.initialize(nn.Linear(2, 2), {"train_micro_batch_size_per_gpu": 1})
        is_keeping = host_memory.keep_freed_memory()
    return is_keeping, faults_of_a_second_tensor()


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="not glibc")
def test_an_engine_keeps_freed_memory_until_it_is_trimmed():
    ((before, after, given_back),) = run_ranks(around_an_engine, 1)
    assert before > 0.9 * PAGES
    assert after < PAGES // 20
    assert given_back > 0.9 * PAGES


def test_thresholds_in_the_environment_are_left_alone():
    ((is_keeping, faults),) = run_ranks(with_the_users_threshold, 1)
    assert not is_keeping
    assert faults > 0.9 * PAGES
