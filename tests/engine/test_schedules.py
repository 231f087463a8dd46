"""Every schedule against its formula, written out here step by step; Hugging Face's against transformers."""

from __future__ import annotations

import itertools
import logging
import math
from fractions import Fraction

import pytest
import torch
import transformers
from transformers.optimization import TYPE_TO_SCHEDULER_FUNCTION

from engine.schedules import build_scheduler

BASE = 0.02


def optimizer(rates=(BASE,), kind=torch.optim.AdamW):
    return kind([{"params": [torch.zeros(1)], "lr": rate} for rate in rates])


def trace(type_name, params, steps, rates=(BASE,), total_steps=None):
    """Rates of updates 0, 1, ... as an engine would use them: one list of rates an update."""
    opt = optimizer(rates)
    schedule = build_scheduler(opt, type_name, params, total_steps)
    used = []
    for _ in range(steps):
        used.append([group["lr"] for group in opt.param_groups])
        assert schedule.get_last_lr() == used[-1]
        schedule.step()
    return used


def first(rows):
    return [row[0] for row in rows]


def close(found, expected):
    assert found == pytest.approx(expected, rel=1e-12, abs=1e-18)


# -- the formulas, by i ---------------------------------------------------------------------------------


def gamma(i, warmup, kind):
    n = max(2, warmup)
    if kind == "log":
        return math.log(i + 1) / math.log(n)
    return i / n


def warmup_lr(i, low, high, warmup, kind):
    if i < 0:
        return low
    return low + (high - low) * (gamma(i, warmup, kind) if i < max(2, warmup) else 1.0)


def warmup_decay_lr(i, low, high, warmup, kind, total):
    n = max(2, warmup)
    if i < n:
        return warmup_lr(i, low, high, warmup, kind)
    return low + (high - low) * max(0.0, (total - i) / max(1, total - n))


def warmup_cosine_lr(i, base, min_ratio, warmup, cos_min, kind, total):
    n = max(2, warmup)
    if i < 0:
        return 0.0
    if i < n:
        return base * (min_ratio + (1 - min_ratio) * gamma(i, warmup, kind))
    progress = min(1.0, (i - n + 1) / max(1, total - n))
    return base * max(0.0, cos_min + (1 - cos_min) * (1 + math.cos(math.pi * progress)) / 2)


def one_cycle(i, low, high, first_size, second_size, first_stairs=0, second_stairs=0):
    """The fraction of the way up, exactly, and whether the cycle still runs."""
    b, total = i + 1, first_size + second_size
    if i >= total:
        return None
    a = Fraction(first_size, total)
    x = Fraction(b, total) - math.floor(Fraction(b, total))
    rising = x <= a
    scale = x / a if rising else (x - 1) / (a - 1)
    stairs = first_stairs if rising else second_stairs
    if stairs:
        within = b % total
        place = Fraction(within * stairs, first_size) if rising else Fraction((total - within) * stairs, second_size)
        scale = Fraction(math.floor(place), stairs)
    return float(scale)


# -- DeepSpeed's five -----------------------------------------------------------------------------------

KINDS = ("log", "linear")


@pytest.mark.parametrize(("kind", "warmup"), list(itertools.product(KINDS, (1, 2, 3, 7, 40))))
def test_warmup(kind, warmup):
    params = {"warmup_min_lr": 1e-4, "warmup_max_lr": 3e-3, "warmup_num_steps": warmup, "warmup_type": kind}
    used = first(trace("WarmupLR", params, 60))
    close(used, [warmup_lr(k - 1, 1e-4, 3e-3, warmup, kind) for k in range(60)])
    assert used[0] == used[1] == 1e-4  # i = -1, and gamma(0) = 0
    assert used[-1] == 3e-3


def test_warmup_defaults_and_each_groups_own_maximum():
    used = trace("WarmupLR", {}, 1100, rates=(0.1, 0.3))
    for column, high in enumerate((0.1, 0.3)):
        close([row[column] for row in used], [warmup_lr(k - 1, 0.0, high, 1000, "log") for k in range(1100)])


def test_bounds_by_group():
    params = {
        "warmup_min_lr": [0.0, 1.0],
        "warmup_max_lr": [2.0, 5.0],
        "warmup_num_steps": 4,
        "warmup_type": "linear",
    }
    assert trace("WarmupLR", params, 6, rates=(1, 1)) == [[0, 1], [0, 1], [0.5, 2], [1, 3], [1.5, 4], [2, 5]]
    with pytest.raises(ValueError, match="warmup_min_lr has 2 values for 1 parameter groups"):
        trace("WarmupLR", params, 1)


@pytest.mark.parametrize(("kind", "warmup", "total"), list(itertools.product(KINDS, (1, 5, 20), (1, 5, 6, 30, 50))))
def test_warmup_decay(kind, warmup, total):
    params = {
        "warmup_min_lr": 1e-4,
        "warmup_max_lr": 3e-3,
        "warmup_num_steps": warmup,
        "warmup_type": kind,
        "total_num_steps": total,
    }
    used = first(trace("WarmupDecayLR", params, 70))
    close(used, [warmup_decay_lr(k - 1, 1e-4, 3e-3, warmup, kind, total) for k in range(70)])
    assert used[-1] == 1e-4  # down to the minimum, and it stays there


def test_warmup_decay_defaults():
    used = first(trace("WarmupDecayLR", {"total_num_steps": 1500}, 1600))
    close(used, [warmup_decay_lr(k - 1, 0.0, 0.001, 1000, "log", 1500) for k in range(1600)])


@pytest.mark.parametrize(("kind", "warmup", "total"), list(itertools.product(KINDS, (1, 5, 20), (1, 5, 6, 30, 50))))
def test_warmup_cosine(kind, warmup, total):
    params = {
        "total_num_steps": total,
        "warmup_num_steps": warmup,
        "warmup_type": kind,
        "warmup_min_ratio": 0.1,
        "cos_min_ratio": 0.05,
    }
    used = first(trace("WarmupCosineLR", params, 70))
    close(used, [warmup_cosine_lr(k - 1, BASE, 0.1, warmup, 0.05, kind, total) for k in range(70)])
    assert used[0] == 0.0
    assert used[-1] == pytest.approx(0.05 * BASE)  # the end holds; it does not swing back up


def test_warmup_cosine_defaults_scale_each_groups_own_rate():
    used = trace("WarmupCosineLR", {"total_num_steps": 1200}, 1300, rates=(1.0, 0.5))
    expected = [warmup_cosine_lr(k - 1, 1.0, 0.0, 1000, 1e-4, "log", 1200) for k in range(1300)]
    close(first(used), expected)
    close([row[1] for row in used], [0.5 * value for value in expected])


@pytest.mark.parametrize(
    ("first_size", "second_size", "first_stairs", "second_stairs"),
    [
        (10, None, 0, None),
        (7, 13, 0, None),
        (3, 1, 0, None),
        (5, 0, 0, None),
        (1, 1, 0, None),
        (10, 10, 5, None),
    ]
    + [(12, 9, 4, 3), (7, 13, 3, 0), (7, 11, 0, 5), (9, 6, 9, 6), (6, 6, 1, 1), (49, 21, 7, 7)],
)
def test_one_cycle(first_size, second_size, first_stairs, second_stairs):
    low, high = 1e-4, 1e-2
    params = {
        "cycle_min_lr": low,
        "cycle_max_lr": high,
        "cycle_first_step_size": first_size,
        "cycle_second_step_size": second_size,
        "cycle_first_stair_count": first_stairs,
        "cycle_second_stair_count": second_stairs,
        "decay_step_size": 4,
        "decay_lr_rate": 0.5,
        "decay_mom_rate": 0.01,
    }
    opt = optimizer()
    schedule = build_scheduler(opt, "OneCycle", params)
    down = first_size if second_size is None else second_size
    total = first_size + down
    for i in range(-1, total + 20):
        scale = one_cycle(
            i,
            low,
            high,
            first_size,
            down,
            first_stairs,
            first_stairs if second_stairs is None else second_stairs,
        )
        past = i - total + 1
        rate = low / (1 + 0.5 * past / 4) if scale is None else low + (high - low) * scale
        momentum = 0.9 * (1 + 0.01 * past / 4) if scale is None else 0.9 - (0.9 - 0.8) * scale
        group = opt.param_groups[0]
        close([group["lr"], *group["betas"]], [rate, momentum, 0.99])
        schedule.step()


def test_one_cycle_without_decay_holds_the_ends():
    params = {"cycle_min_lr": 1e-4, "cycle_max_lr": 1e-2, "cycle_first_step_size": 3, "decay_lr_rate": 0.5}
    opt = optimizer()
    schedule = build_scheduler(opt, "OneCycle", params)
    for _ in range(20):
        schedule.step()
    assert opt.param_groups[0]["lr"] == 1e-4
    assert opt.param_groups[0]["betas"] == (0.9, 0.99)


def test_one_cycle_leaves_momentum_alone_when_asked_or_without_betas(caplog):
    params = {"cycle_min_lr": 1e-4, "cycle_max_lr": 1e-2, "cycle_momentum": False}
    opt = optimizer()
    build_scheduler(opt, "OneCycle", params).step()
    assert opt.param_groups[0]["betas"] == (0.9, 0.999)
    with caplog.at_level(logging.WARNING):
        build_scheduler(optimizer(kind=torch.optim.SGD), "OneCycle", {**params, "cycle_momentum": True}).step()
    assert "cycle_momentum is off: SGD has no betas" in caplog.text


@pytest.mark.parametrize("staircase", [False, True])
def test_range_test(staircase):
    params = {
        "lr_range_test_min_lr": 1e-4,
        "lr_range_test_step_size": 7,
        "lr_range_test_step_rate": 2.5,
        "lr_range_test_staircase": staircase,
    }
    used = first(trace("LRRangeTest", params, 40))
    interval = [k // 7 if staircase else k / 7 for k in range(40)]
    close(used, [1e-4 * (1 + 2.5 * t) for t in interval])


def test_unknown_warmup_type_warns_and_is_log(caplog):
    with caplog.at_level(logging.WARNING):
        used = first(trace("WarmupLR", {"warmup_type": "cubic", "warmup_num_steps": 9}, 12))
    assert "'cubic'" in caplog.text
    close(used, [warmup_lr(k - 1, 0.0, BASE, 9, "log") for k in range(12)])


def test_total_below_warmup_only_warns(caplog):
    with caplog.at_level(logging.WARNING):
        trace("WarmupDecayLR", {"total_num_steps": 3, "warmup_num_steps": 5}, 1)
    assert "total_num_steps 3 is less than warmup_num_steps 5" in caplog.text


# -- Hugging Face's -------------------------------------------------------------------------------------

HUGGING_FACE = {
    "linear": {},
    "cosine": {"num_cycles": 1.5},
    "cosine_with_restarts": {"num_cycles": 3},
    "polynomial": {"power": 2.0, "lr_end": 1e-6},
    "constant": {},
    "constant_with_warmup": {},
    "inverse_sqrt": {"timescale": 5},
    "cosine_with_min_lr": {"min_lr_rate": 0.1},
    "cosine_warmup_with_min_lr": {"min_lr": 1e-3},
    "warmup_stable_decay": {"num_decay_steps": 6},
}


@pytest.mark.parametrize("name", HUGGING_FACE)
def test_hugging_face(name):
    params = {"num_warmup_steps": 4, "num_training_steps": 25, **HUGGING_FACE[name]}
    opt = optimizer((BASE, 0.3))
    theirs = transformers.get_scheduler(
        name, opt, num_warmup_steps=4, num_training_steps=25, scheduler_specific_kwargs=HUGGING_FACE[name]
    )
    expected = []
    for _ in range(30):
        expected.append(theirs.get_last_lr())
        opt.step()
        theirs.step()
    assert trace(name, params, 30, rates=(BASE, 0.3)) == expected


def test_every_hugging_face_name_is_covered():
    names = {kind.value for kind in TYPE_TO_SCHEDULER_FUNCTION} - {"reduce_lr_on_plateau", "greedy"}
    assert names == set(HUGGING_FACE)
    for name in ("reduce_lr_on_plateau", "greedy"):
        with pytest.raises(ValueError, match="follows a metric"):
            build_scheduler(optimizer(), name, {})


def test_total_steps_of_the_run_fill_in():
    given = trace("cosine", {"num_training_steps": 10}, 10)
    assert trace("cosine", {}, 10, total_steps=10) == given
    assert trace("cosine", {"num_training_steps": 10}, 10, total_steps=99) == given
    assert trace("WarmupDecayLR", {}, 12, total_steps=10) == trace("WarmupDecayLR", {"total_num_steps": 10}, 12)
    assert trace("WarmupLR", {}, 5, total_steps=10) == trace("WarmupLR", {}, 5)
    assert trace("constant", {}, 5, total_steps=10) == [[BASE]] * 5


def test_warmup_stable_decay_by_its_stable_steps():
    params = {"num_warmup_steps": 2, "num_decay_steps": 4}
    by_total = trace("warmup_stable_decay", {**params, "num_training_steps": 16}, 20)
    assert trace("warmup_stable_decay", {**params, "num_stable_steps": 10}, 20) == by_total


def test_the_optimizers_step_is_left_alone():
    opt = optimizer()
    build_scheduler(opt, "cosine", {"num_training_steps": 10})
    assert "step" not in vars(opt)


# -- resuming -------------------------------------------------------------------------------------------

RESUMED = {
    "WarmupLR": {"warmup_num_steps": 5},
    "WarmupDecayLR": {"warmup_num_steps": 5, "total_num_steps": 20},
    "WarmupCosineLR": {"warmup_num_steps": 5, "total_num_steps": 20},
    "OneCycle": {
        "cycle_min_lr": 1e-4,
        "cycle_max_lr": 1e-2,
        "cycle_first_step_size": 6,
        "cycle_first_stair_count": 3,
    },
    "LRRangeTest": {"lr_range_test_step_size": 3, "lr_range_test_staircase": True},
    "linear": {"num_warmup_steps": 3, "num_training_steps": 20},
    "cosine": {"num_warmup_steps": 3, "num_training_steps": 20},
}


def state(opt):
    return [(group["lr"], group["betas"]) for group in opt.param_groups]


@pytest.mark.parametrize("name", RESUMED)
@pytest.mark.parametrize("order", ["optimizer first", "schedule first", "schedule alone"])
def test_a_resumed_schedule_continues(name, order):
    def build():
        opt = optimizer((BASE, 0.3))
        return opt, build_scheduler(opt, name, RESUMED[name])

    opt, schedule = build()
    whole = []
    for _ in range(25):
        whole.append(state(opt))
        schedule.step()
    for cut in (0, 1, 4, 5, 13, 24):
        opt, schedule = build()
        for _ in range(cut):
            schedule.step()
        saved, saved_optimizer = schedule.state_dict(), opt.state_dict()
        assert saved == {"last_batch_iteration": cut - 1}
        opt, schedule = build()
        if order == "optimizer first":
            opt.load_state_dict(saved_optimizer)
        schedule.load_state_dict(saved)
        if order == "schedule first":
            opt.load_state_dict(saved_optimizer)
        for expected in whole[cut:]:
            assert state(opt) == expected
            schedule.step()


def test_a_schedule_built_on_a_resumed_optimizer_starts_from_the_first_rate():
    opt = optimizer()
    schedule = build_scheduler(opt, "WarmupCosineLR", RESUMED["WarmupCosineLR"])
    for _ in range(12):
        schedule.step()
    resumed = optimizer()
    resumed.load_state_dict(opt.state_dict())
    again = build_scheduler(resumed, "WarmupCosineLR", RESUMED["WarmupCosineLR"])
    again.load_state_dict(schedule.state_dict())
    assert again.get_last_lr() == schedule.get_last_lr()


# -- bad settings ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "params", "message"),
    [
        ("WarmupLr", {}, "scheduler.type 'WarmupLr' is unknown: did you mean WarmupLR?"),
        ("cosinee", {}, "scheduler.type 'cosinee' is unknown: did you mean cosine?"),
        ("WarmupLR", {"warmup_steps": 3}, "scheduler.params.warmup_steps is not a parameter of WarmupLR"),
        ("cosine", {"warmup_steps": 3}, "did you mean num_warmup_steps?"),
        (
            "WarmupLR",
            {"warmup_num_steps": 0},
            "scheduler.params.warmup_num_steps is 0: use a whole number of 1",
        ),
        ("WarmupLR", {"warmup_num_steps": 2.5}, "scheduler.params.warmup_num_steps is 2.5"),
        ("WarmupCosineLR", {"total_num_steps": 9, "warmup_num_steps": -1}, "warmup_num_steps is -1"),
        ("WarmupDecayLR", {}, "scheduler.params.total_num_steps is missing: WarmupDecayLR needs it"),
        ("WarmupDecayLR", {"total_num_steps": 0}, "scheduler.params.total_num_steps is 0"),
        ("OneCycle", {"cycle_min_lr": 0.1}, "scheduler.params.cycle_max_lr is missing"),
        (
            "OneCycle",
            {"cycle_min_lr": 0, "cycle_max_lr": 1, "cycle_first_step_size": 0},
            "cycle_first_step_size is 0",
        ),
        (
            "OneCycle",
            {"cycle_min_lr": 0, "cycle_max_lr": 1, "cycle_second_step_size": -1},
            "second_step_size is -1",
        ),
        ("LRRangeTest", {"lr_range_test_step_size": 0}, "scheduler.params.lr_range_test_step_size is 0"),
        ("linear", {}, "scheduler.params.num_training_steps is missing: linear needs it"),
        ("warmup_stable_decay", {"num_training_steps": 9}, "scheduler.params.num_decay_steps is missing"),
        ("warmup_stable_decay", {"num_decay_steps": 9}, "scheduler.params.num_training_steps is missing"),
        ("WarmupLR", {"warmup_max_lr": "1e-3"}, "scheduler.params.warmup_max_lr is '1e-3': use a number"),
        ("WarmupLR", {"warmup_min_lr": [0.1, "x"]}, "use numbers, one a parameter group"),
        ("WarmupLR", {"warmup_type": 3}, "scheduler.params.warmup_type is 3: use a text"),
        ("LRRangeTest", {"lr_range_test_staircase": "yes"}, "staircase is 'yes': use true or false"),
        ("polynomial", {"num_training_steps": 9, "power": float("nan")}, "scheduler.params.power is nan"),
    ],
)
def test_bad_settings_give_one_line(name, params, message):
    with pytest.raises(ValueError) as caught:
        build_scheduler(optimizer(), name, params)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
