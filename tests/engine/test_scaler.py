"""The loss scale against the algorithm's text, written out again as plainly as it is stated."""

from __future__ import annotations

import itertools
import random

import pytest

from engine.config import FP16Config
from engine.scaler import LossScaler


class AtMinimum(Exception):
    pass


def reference(overflows, *, power, window, hysteresis, consecutive, minimum, raises=True):
    """Scales after each update; ends early where the algorithm raises."""
    cur_scale = 2.0**power
    cur_iter = 0
    last_overflow_iter = -1
    cur_hysteresis = hysteresis
    scales = []
    for overflow in overflows:
        if overflow:
            if hysteresis == 1 or cur_hysteresis == 1:
                if cur_scale == minimum and raises:
                    return scales, True
                cur_scale = max(cur_scale / 2, minimum)
            else:
                cur_hysteresis -= 1
            last_overflow_iter = cur_iter
        else:
            if consecutive:
                cur_hysteresis = hysteresis
            stable = cur_iter - last_overflow_iter - 1
            if stable > 0 and stable % window == 0:
                if not consecutive:
                    cur_hysteresis = hysteresis
                cur_scale *= 2
        cur_iter += 1
        scales.append(cur_scale)
    return scales, False


def build(*, power, window, hysteresis, consecutive, minimum, raises=True):
    section = FP16Config(
        enabled=True,
        initial_scale_power=power,
        loss_scale_window=window,
        hysteresis=hysteresis,
        consecutive_hysteresis=consecutive,
        min_loss_scale=minimum,
    )
    return LossScaler(section, raise_at_minimum=raises)


def run(scaler, overflows):
    scales = []
    for overflow in overflows:
        try:
            scaler.update(overflow)
        except ValueError:
            return scales, True
        scales.append(scaler.scale)
    return scales, False


SETTINGS = [
    dict(
        power=power,
        window=window,
        hysteresis=hysteresis,
        consecutive=consecutive,
        minimum=minimum,
        raises=raises,
    )
    for power, window, hysteresis, consecutive, minimum, raises in itertools.product(
        (0, 3, 16), (1, 2, 3, 4), (1, 2, 3), (False, True), (1.0, 0.25), (True, False)
    )
]


@pytest.mark.parametrize("pattern", ["none", "some", "only"])
def test_sequences_equal_the_algorithm(pattern):
    generator = random.Random(0)
    for settings in SETTINGS:
        for _ in range(6):
            overflows = {
                "none": [False] * 40,
                "some": [generator.random() < generator.choice((0.1, 0.3, 0.7)) for _ in range(60)],
                "only": [True] * 40,
            }[pattern]
            assert run(build(**settings), overflows) == reference(overflows, **settings), (
                settings,
                overflows,
            )


def test_every_short_sequence():
    settings = dict(power=2, window=2, hysteresis=2, consecutive=False, minimum=1.0)
    for overflows in itertools.product((False, True), repeat=10):
        assert run(build(**settings), overflows) == reference(overflows, **settings), overflows


def test_literal_numbers():
    scaler = build(power=8, window=2, hysteresis=1, consecutive=False, minimum=1.0)
    assert run(scaler, [True, True])[0] == [128.0, 64.0]
    # the first doubling is at clean step window + 1, then every window steps
    assert run(scaler, [False] * 6)[0] == [64.0, 64.0, 128.0, 128.0, 256.0, 256.0]
    patient = build(power=4, window=100, hysteresis=3, consecutive=False, minimum=1.0)
    assert run(patient, [True] * 5)[0] == [16.0, 16.0, 8.0, 4.0, 2.0]
    refilled = build(power=4, window=100, hysteresis=2, consecutive=True, minimum=1.0)
    assert run(refilled, [True, False, True, False, True, True])[0] == [16.0] * 5 + [8.0]


def test_an_overflow_at_the_minimum_names_the_way_out():
    scaler = build(power=1, window=2, hysteresis=1, consecutive=False, minimum=1.0)
    scaler.update(True)
    with pytest.raises(ValueError, match="minimum loss scale 1: .*fp16.min_loss_scale") as caught:
        scaler.update(True)
    assert "\n" not in str(caught.value)
    assert scaler.scale == 1.0


@pytest.mark.parametrize(
    ("section", "scale"),
    [
        (None, 1.0),
        (FP16Config(), 1.0),
        (FP16Config(loss_scale=64), 1.0),
        (FP16Config(enabled=True, loss_scale=64), 64.0),
    ],
)
def test_a_fixed_scale_never_moves(section, scale):
    scaler = LossScaler(section)
    assert run(scaler, [True] * 30 + [False] * 30) == ([scale] * 60, False)


def test_the_default_starts_at_two_to_the_sixteen():
    assert LossScaler(FP16Config(enabled=True)).scale == 65536.0


def test_a_restored_scaler_continues_at_every_step():
    settings = dict(power=6, window=2, hysteresis=2, consecutive=False, minimum=1.0)
    overflows = [False, False, False, True, False, True, True, False, False, False, False, True]
    whole, _ = run(build(**settings), overflows)
    for cut in range(len(overflows) + 1):
        first, second = build(**settings), build(**settings)
        run(first, overflows[:cut])
        second.load_state_dict(first.state_dict())
        assert run(second, overflows[cut:])[0] == whole[cut:]


def test_state_of_another_kind_of_run_keeps_the_configs_scale():
    dynamic = build(power=6, window=2, hysteresis=2, consecutive=False, minimum=1.0)
    dynamic.load_state_dict(LossScaler().state_dict())
    assert dynamic.scale == 64.0
    fixed = LossScaler(FP16Config(enabled=True, loss_scale=8))
    fixed.load_state_dict(dynamic.state_dict())
    assert fixed.scale == 8.0
