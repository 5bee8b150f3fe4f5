"""Claims about tests/bench/keep_rules.py: nights with known truth, the morning's designs and verdicts."""

import numpy as np
import pytest

pytest.importorskip("scipy")
from keep_rules import RULES, Case, Kept, Rule, attribute, balanced, leave_out, morning, night, simulate

LOWEST, ONE_OUT, HALF_OUT = Rule(), Rule(design="one"), Rule(design="half")


def kept_of(gains: list[float], sd: float, pairs=()) -> Kept:
    return Kept(np.array(gains), np.array(pairs, int).reshape(-1, 2), list(range(len(gains))), sd, 100)


def test_without_noise_the_lowest_keeps_every_gain_and_no_harm():
    kept = night(Case(sd=1e-12), LOWEST, np.random.default_rng(0))
    harm, gains = np.flatnonzero(kept.ideas < 0), np.flatnonzero(kept.ideas > 0)
    assert not {*harm} & {*kept.which}
    assert {*gains[gains < 97]} <= {*kept.which}  # 100 runs, three for the baseline


@pytest.mark.parametrize(
    "sd, gain, false",
    [
        pytest.param(0.0005, 0.0285, 0.45, marks=pytest.mark.slow),
        (0.001, 0.0246, 0.48),
        pytest.param(0.002, 0.0169, 0.53, marks=pytest.mark.slow),
    ],
)
def test_keep_the_lowest_repeats_the_known_nights(sd, gain, false):
    nights = simulate(Case(sd), LOWEST)
    assert nights[:, 0].mean() == pytest.approx(gain, abs=3 * nights[:, 0].std() / 20)  # 400 nights
    assert nights[:, 3].sum() / nights[:, 2].sum() == pytest.approx(false, abs=0.03)


def test_of_two_changes_that_overlap_the_better_counts():
    kept = kept_of([0.002, 0.003, 0.001], 0.001, pairs=[(0, 1)])
    present = np.array([[1, 1, 1], [1, 0, 1], [0, 1, 0], [0, 0, 0]], bool)
    assert kept.truth(present) == pytest.approx([0.004, 0.003, 0.003, 0])


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize("wave", [1, 8])
def test_a_night_stays_within_its_runs_but_for_the_last_wave(rule, wave):
    kept = night(Case(wave=wave), rule, np.random.default_rng(1))
    assert 0 <= kept.runs - rule.night * 100 <= 2 * rule.seeds * wave
    assert len(set(kept.which)) == len(kept.which)


@pytest.mark.parametrize("m", [1, 3, 4, 7, 12, 19, 30, 60])
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


def test_half_out_meets_the_target_and_finds_gains_of_three_sd_and_calls_one_false_change_in_twenty_real():
    lowest, pruned = simulate(Case(), LOWEST), simulate(Case(), HALF_OUT)
    assert pruned[:, 0].mean() >= lowest[:, 0].mean()
    assert pruned[:, 3].sum() / pruned[:, 2].sum() <= 0.1
    assert pruned[:, 1].mean() <= 1.31
    *_, none, none_real, large, large_real = pruned.sum(0)
    assert none_real / none <= 0.05
    assert large_real / large >= 0.9


def test_a_pruned_file_that_is_worse_is_not_taken():
    kept = kept_of([0.003, 0.0009, 0.0009, 0.0009], 0.001)  # three gains too small to find, together large
    rule = HALF_OUT._replace(level=1e-9, check=50, margin=1)
    stays, real, _ = morning(kept, Case(), rule, np.random.default_rng(0))
    assert not real.any() and kept.truth(stays) > 0.0045
