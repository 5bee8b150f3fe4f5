"""The score by length of document: a gain on average may be a loss in long ones."""

from __future__ import annotations


class Score(float):
    """Bits per byte of a split. `quarters`: the same by length of document, shortest first; NaN if one is empty."""

    quarters: tuple[float, ...] = ()


def quarters_by_length(inputs, sizes, bos: int):
    """For each target, the quarter (0: shortest, 3: longest) that its document is in by its length in bytes.

    A document begins with its BOS among the inputs; what comes before the first one belongs to the first.
    """
    document = (inputs.flatten() == bos).cumsum(0).clamp(min=1) - 1
    lengths = document.bincount(sizes.flatten())
    ranks = lengths.argsort(stable=True).argsort()
    return (4 * ranks // len(ranks))[document].view(sizes.shape)
