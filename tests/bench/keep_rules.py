"""
By which rule should a night keep changes, and how should the morning check them? Simulated nights with known truth.

    export OMP_NUM_THREADS=1  # threads only slow it down
    python tests/bench/keep_rules.py                         # the tables of docs/keep_rules.md, always the same
    python tests/bench/keep_rules.py --plot keep_rules.png   # and its picture

An idea helps (12%: exponential, mean 0.0025 bpb), does nothing (28%) or harms (60%: exponential, mean 0.004). Effects
of kept changes add up. A run scores the truth plus a seed's normal noise. A night begins with three seeds of the
baseline. Runs of the morning count, too. A change in the final file is false if that is no worse without it.
"""

import argparse
import functools
import itertools
import math
from typing import NamedTuple

import numpy as np
from scipy import linalg, special, stats

BASELINE = 3  # seeds, from which the rules know the noise


class Case(NamedTuple):
    sd: float = 0.001  # of a seed
    runs: int = 100  # of a night
    wave: int = 1  # ideas tried at once, from one reference
    helps: float = 0.12  # share of the ideas
    rare: float = 0.0  # share of ideas that gain 0.01
    overlap: bool = False  # helpful ideas come in pairs: together they gain only what the better one does


class Rule(NamedTuple):
    k: float = 0.0  # discard unless the first run beats the reference by k sd
    seeds: int = 1  # if it does, idea and reference get this many seeds in all
    z: float = 0.0  # keep if their means then differ by z standard errors
    race: bool = False  # decide after every seed: drop if behind, keep at z
    night: float = 1.0  # its runs, in case.runs
    design: str = ""  # of the morning: leave "one" out, or "half"; none: no morning
    budget: float = 0.3  # the morning's runs, in case.runs; its first design and its check are made in any case
    method: str = "BH"  # correction for many tests: Benjamini-Hochberg, or else Bonferroni
    level: float = 0.1
    check: int = 3  # new seeds for the full and for the pruned file
    margin: float = 2.0  # the pruned file fails if its mean is worse by this many sd


class Kept(NamedTuple):
    ideas: np.ndarray  # (n,) true effects, positive is better
    pairs: np.ndarray  # (pairs, 2) ideas that overlap
    which: list[int]  # m of them
    sd: float  # noise, estimated from the baseline
    runs: int

    def truth(self, present: np.ndarray) -> np.ndarray:
        """(..., m) bool: which changes are in the file. Returns its true gain, (...)."""
        file = np.zeros((*present.shape[:-1], len(self.ideas)), bool)
        file[..., self.which] = present
        lost = self.ideas[self.pairs].min(1)
        return file @ self.ideas - file[..., self.pairs].all(-1) @ lost


def draw(case: Case, number: int, rng: np.random.Generator) -> np.ndarray:
    """(number,) effects of ideas, positive is better."""
    u, size = rng.random(number), rng.exponential(size=number)
    ideas = np.where(u < case.helps, 0.0025 * size, np.where(u < case.helps + 0.28, 0, -0.004 * size))
    ideas[u > 1 - case.rare] = 0.01
    return ideas


def night(case: Case, rule: Rule, rng: np.random.Generator) -> Kept:
    budget = round(rule.night * case.runs)
    ideas = draw(case, budget, rng)
    helpful = np.flatnonzero(ideas > 0)
    pairs = helpful[: len(helpful) // 2 * 2 * case.overlap].reshape(-1, 2)
    noise = iter(rng.normal(0, case.sd, budget + 100 * case.wave))  # the last wave may exceed the budget
    kept, runs, tried = (), 0, 0

    def run(changes: tuple[int, ...]) -> float:
        nonlocal runs
        runs += 1
        file = Kept(ideas, pairs, list(changes), 0, 0)
        return float(file.truth(np.ones(len(changes), bool)) + next(noise))

    def contest(changes: tuple[int, ...]) -> list[float]:
        """The scores of kept + changes if they win, else nothing."""
        scores = []
        for n in range(1, rule.seeds + 1):
            scores.append(run(kept + changes))
            if len(reference) < n:
                reference.append(run(kept))
            lead = sum(scores) / n - sum(reference) / len(reference)
            error = sd * math.sqrt(1 / n + 1 / len(reference))
            bar = rule.k * sd if n == 1 else rule.z * error
            if (n == 1 and lead <= bar) or (rule.race and lead <= 0):
                return []
            if lead > bar and (n == rule.seeds or (rule.race and n > 1)):
                return scores
        return []

    reference = [run(kept) for _ in range(BASELINE)]
    sd = float(np.std(reference, ddof=1))
    while runs < budget:
        wave = range(tried, min(tried + case.wave, tried + budget - runs))
        tried = wave.stop
        won = {(i,): scores for i in wave if (scores := contest((i,)))}
        best = max(won, key=lambda changes: sum(won[changes]) / len(won[changes]), default=())
        if len(won) > 1 and (scores := contest(everyone := sum(won, ()))):  # the winners together
            best, won[everyone] = everyone, scores
        if best:
            kept, reference = kept + best, won[best]
    return Kept(ideas, pairs, list(kept), sd, runs)


@functools.cache
def balanced(m: int) -> np.ndarray:
    """(n, n - 1) bool, n > m: the full file; all other rows lack half of the changes, each two of them a quarter.
    The design is Plackett and Burman's (1946), the construction Paley's."""
    q = next(q for q in itertools.count(max(m, 3)) if q % 4 == 3 and all(q % d for d in range(2, math.isqrt(q) + 1)))
    squares = {i * i % q for i in range(1, q)}
    return np.vstack([np.zeros((1, q), bool), linalg.circulant([i not in squares for i in range(q)])])


def leave_out(design: str, m: int, rng: np.random.Generator) -> np.ndarray:
    """(runs, m) bool, in random order: the changes that each run goes without. "one": each alone, and sqrt(m) runs of
    the full file. "half": see `balanced`; every run tells about every change."""
    if design == "one":
        return rng.permutation(np.vstack([np.eye(m, dtype=bool), np.zeros((math.isqrt(m), m), bool)]))
    return rng.permutation(rng.permutation(balanced(m), axis=1)[:, :m])


def attribute(
    kept: Kept, case: Case, rule: Rule, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray, int, float]:
    """(m,) bool: which changes are real; which are refuted, as the file seems no worse without; runs; noise found.

    Least squares over all runs, and a one-sided t test for each change. While the budget lasts, more runs leave out
    the changes that are neither, and all of the refuted ones."""
    m = len(kept.which)
    new, removed, scores = leave_out(rule.design, m, rng), np.zeros((0, m), bool), np.zeros(0)
    while True:
        removed = np.vstack([removed, new])
        scores = np.append(scores, kept.truth(~new) + rng.normal(0, case.sd, len(new)))
        x = np.hstack([np.ones((len(scores), 1)), ~removed])
        inverse = np.linalg.inv(x.T @ x)
        fit = inverse @ (x.T @ scores)
        df = len(scores) - m - 1 + BASELINE - 1
        sd = math.sqrt((((scores - x @ fit) ** 2).sum() + (BASELINE - 1) * kept.sd**2) / df)
        t = fit[1:] / (sd * np.sqrt(np.diag(inverse)[1:]))
        p = special.stdtr(df, -t)
        real = (stats.false_discovery_control(p) if rule.method == "BH" else p * m) < rule.level
        refuted = ~real & (t <= 0)
        undecided = ~real & ~refuted
        left = round(rule.budget * case.runs) - len(scores) - 2 * rule.check
        if left <= 0 or not undecided.any():
            return real, refuted, len(scores), sd
        design = leave_out(rule.design, undecided.sum(), rng)[:left]
        new = np.tile(refuted, (len(design), 1))
        new[:, undecided] = design


def morning(kept: Kept, case: Case, rule: Rule, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, int]:
    """(m,) bool: which changes stay, and which are real; runs. The real ones stay; if the file with these alone fails
    its check, all that are not refuted; if that fails, too, all. Without a morning, all."""
    everything = np.ones(len(kept.which), bool)
    if not rule.design or not len(everything):
        return everything, everything, 0
    real, refuted, runs, sd = attribute(kept, case, rule, rng)
    if real.all():
        return real, real, runs
    full, *pruned = (kept.truth(f) + rng.normal(0, case.sd, rule.check).mean() for f in (everything, real, ~refuted))
    for number, stays in enumerate((real, ~refuted)):
        if pruned[number] >= full - rule.margin * sd:
            return stays, real, runs + (2 + number) * rule.check
    return everything, real, runs + 3 * rule.check


@functools.cache
def simulate(case: Case, rule: Rule) -> np.ndarray:
    """(nights, 8): true gain at the end; runs over case.runs; changes in the file, false ones among them; of what the
    night kept: null or harmful changes, those called real; gains of 3 sd and more, those called real."""
    results = []
    for seed in range(min(400, 90_000 // case.runs)):
        rng = np.random.default_rng(seed)
        kept = night(case, rule, rng)
        stays, real, runs = morning(kept, case, rule, rng)
        gain, without = kept.truth(stays), stays & ~np.eye(len(stays), dtype=bool)[stays]  # one change each
        none, large = kept.ideas[kept.which] <= 0, kept.ideas[kept.which] >= 3 * case.sd
        groups = stays, kept.truth(without) > gain - 1e-12, none, real & none, large, real & large
        results.append((gain, (kept.runs + runs) / case.runs, *(group.sum() for group in groups)))
    return np.array(results)


RULES = {
    "lowest": Rule(),
    "lowest, a longer night": Rule(night=1.3),
    "lowest by 1 sd": Rule(k=1, night=1.3),
    "lowest by 2 sd": Rule(k=2, night=1.3),
    "lowest, and still ahead with a second seed": Rule(seeds=2, night=1.3),
    "lowest, and 1 s.e. ahead with a second seed": Rule(seeds=2, z=1, night=1.3),
    "within 0.5 sd, and 1 s.e. ahead with three seeds": Rule(k=-0.5, seeds=3, z=1, night=1.3),
    "race: up to 6 seeds, until behind or 1.5 s.e. ahead": Rule(seeds=6, z=1.5, race=True, night=1.3),
    "lowest; one out": Rule(design="one"),
    "lowest by 1 sd; one out": Rule(k=1, night=1.05, design="one", budget=0.25),
    "lowest; one out, level 0.05, twice the runs": Rule(design="one", level=0.05, budget=0.6),
    "lowest; half out": Rule(design="half"),
    "lowest; half out, level 0.2": Rule(design="half", level=0.2),
    "lowest; half out, Bonferroni": Rule(design="half", method="Bonferroni"),
}
SDS = tuple(Case(sd) for sd in (0.0005, 0.001, 0.002, 0.003))
CASES = *(Case(runs=n) for n in (30, 300, 900)), Case(rare=0.02), Case(helps=0.04), Case(overlap=True), Case(wave=8)


def table(names: list[str], cases: tuple[Case, ...]) -> None:
    """Prints Markdown: in each case the mean gain, its standard error, its median, and the share of false changes."""
    titles = [", ".join(f"{k} {v}" for k, v in c._asdict().items() if v != Case._field_defaults[k]) for c in cases]
    heads = ["rule", *(title or "sd 0.001" for title in titles), "runs", "false called real", "3 sd called real"]
    print(f"\n| {' | '.join(heads)} |\n|{' --- |' * len(heads)}")
    for name in names:
        cells, groups = [], [simulate(case, RULES[name]) for case in cases]
        for gain, _, kept, false, *_ in (group.T for group in groups):
            error = gain.std() / len(gain) ** 0.5
            cells.append(f"{gain.mean():.4f} ± {error:.4f} ({np.median(gain):.4f}), {false.sum() / kept.sum():.0%}")
        *_, none, none_real, large, large_real = sum(group.sum(0) for group in groups)
        called = [f"{none_real / none:.1%}", f"{large_real / large:.1%}"] if RULES[name].design else ["", ""]
        runs = [group[:, 1].mean() for group in groups]
        print("|", " | ".join([name, *cells, f"{min(runs):.2f} to {max(runs):.2f}", *called]), "|")


def plot(path: str) -> None:
    from matplotlib.figure import Figure

    figure = Figure((11, 4.6), layout="constrained")
    for ax, case in zip(figure.subplots(1, 4, sharey=True), SDS, strict=True):
        lowest = simulate(case, RULES["lowest"]).mean(0)[0]
        ax.fill_between([0, 10], 1, 1.7, color="#1a7f37", alpha=0.12, label="the target")
        for (name, rule), marker in zip(RULES.items(), "ov^<>sPXd*DhpH", strict=True):
            mean = simulate(case, rule).mean(0)
            ax.scatter(100 * mean[3] / mean[2], mean[0] / lowest, s=45, marker=marker, label=name)
        ax.set(title=f"a seed's sd {case.sd}", xlim=(0, 60), ylim=(0.6, 1.7), xlabel="false changes in the file, %")
    figure.axes[0].set_ylabel('true gain / that of "lowest"')
    figure.legend(*ax.get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=8)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plot", metavar="FILE", help="draw the first table, too")
    path = parser.parse_args().plot
    table(list(RULES), SDS)
    table(["lowest", "lowest; one out", "lowest by 1 sd; one out", "lowest; half out"], CASES)
    if path:
        plot(path)


if __name__ == "__main__":
    main()
