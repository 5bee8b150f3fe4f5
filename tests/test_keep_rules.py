"""Claims about tests/bench/keep_rules.py: nights with known truth, the morning's designs and verdicts."""

import numpy as np
import pytest

pytest.importorskip("scipy")
from keep_rules import Case, Kept, Rule, attribute, balanced, leave_out, morning, night

LOWEST, ONE_OUT, HALF_OUT = Rule(), Rule(design="one"), Rule(design="half")


def kept_of(gains: list[float], sd: float, pairs=()) -> Kept:
    return Kept(np.array(gains), np.array(pairs, int).reshape(-1, 2), list(range(len(gains))), sd, 100)


@pytest.mark.parametrize("wave", [1, 8])
def test_without_noise_the_lowest_keeps_every_gain_once_and_no_harm(wave):
    kept = night(Case(sd=1e-12, wave=wave), LOWEST, np.random.default_rng(0))
    harm, gains = np.flatnonzero(kept.ideas < 0), np.flatnonzero(kept.ideas > 0)
    assert not {*harm} & {*kept.which} and len({*kept.which}) == len(kept.which)
    assert wave > 1 or {*gains[gains < 97]} <= {*kept.which}  # 100 runs, three for the baseline


def test_of_two_changes_that_overlap_the_better_counts():
    kept = kept_of([0.002, 0.003, 0.001], 0.001, pairs=[(0, 1)])
    present = np.array([[1, 1, 1], [1, 0, 1], [0, 1, 0], [0, 0, 0]], bool)
    assert kept.truth(present) == pytest.approx([0.004, 0.003, 0.003, 0])


@pytest.mark.parametrize("m", [1, 4, 7, 12, 30])
def test_each_change_is_left_out_of_half_of_the_runs_and_any_two_of_a_quarter(m):
    runs = balanced(m)
    n, columns = runs.shape
    assert columns == n - 1 >= m
    together = runs.T.astype(int) @ runs
    assert (together == np.where(np.eye(columns), n // 2, n // 4)).all()
    assert leave_out("half", m, np.random.default_rng(0)).shape == (n, m)


@pytest.mark.parametrize("rule", [ONE_OUT, HALF_OUT], ids=["one", "half"])
def test_gains_without_noise_are_real_and_harm_is_refuted(rule):
    kept = kept_of([0.001, -0.001, 0.002, -0.003, 0.004], 1e-9)
    real, refuted, *_ = attribute(kept, Case(sd=1e-9), rule, np.random.default_rng(0))
    assert real.tolist() == [True, False, True, False, True]
    assert refuted.tolist() == (~real).tolist()


def test_a_pruned_file_that_is_worse_is_not_taken():
    kept = kept_of([0.003, 0.0009, 0.0009, 0.0009], 0.001)  # three gains too small to find, together large
    rule = HALF_OUT._replace(level=1e-9, check=50, margin=1)
    stays, real, _ = morning(kept, Case(), rule, np.random.default_rng(0))
    assert not real.any() and kept.truth(stays) > 0.0045
