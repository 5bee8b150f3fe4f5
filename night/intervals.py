"""What scores show, and how surely: intervals of gains and bounds of costs. Pure functions; scores are normal."""

import numpy as np
from numpy.typing import ArrayLike

SHARE = 0.1  # of a night's gain: what a pruned file may lose
MISS = 0.05  # chance that a statement is wrong: a pruned file that loses more, a gain outside its interval


def miss_of_look(look: int) -> float:
    """The chance that the interval of the first, second, ... look at more seeds misses the true gain: 3%, 1%, 0.5%, ...

    However many looks there are, all their intervals hold with a chance of 1 - MISS (Bonferroni), as long as what one
    look says does not choose the number of seeds of the next: it is twice as many."""
    return 0.6 * MISS if look == 1 else 0.4 * MISS / 2 ** (look - 1)


def interval(differences: ArrayLike, miss: float = MISS) -> tuple:
    """The mean of paired differences (..., n), its standard error, and the ends of its interval, by Student's t."""
    from scipy import stats

    n = np.shape(differences)[-1]
    mean, error = np.mean(differences, -1), np.std(differences, -1, ddof=1) / np.sqrt(n)
    margin = stats.t.isf(miss / 2, n - 1) * error
    return mean, error, mean - margin, mean + margin


def shrink(gains: ArrayLike, sd: ArrayLike) -> np.ndarray:
    """What each of a night's gains is on average, given its measured value: the best of many is partly luck.

    An empirical Bayes mean: if each true gain is one of the measured ones or nothing, EM finds which shares of these
    make the measured ones likeliest, with two more that are nothing. sd: of each measurement."""
    true = np.append(gains, 0.0)
    likely = np.exp(-0.5 * ((np.reshape(gains, (-1, 1)) - true) / np.reshape(sd, (-1, 1))) ** 2)
    share = np.full(len(true), 1 / len(true))
    for _ in range(50):
        chance = likely * share / (likely @ share)[:, None]
        share = chance.sum(0) + 2 * (true == 0)
        share /= share.sum()
    return likely * share @ true / (likely @ share)
