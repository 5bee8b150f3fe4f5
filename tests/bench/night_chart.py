"""
The chart of README.md: the night of tests/night/results.tsv, for light pages and for GitHub's dark one.

    python tests/bench/night_chart.py docs    # writes night.png and night-dark.png there
"""

import sys
from pathlib import Path

from matplotlib import style

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import harness
from night.git import ROOT
from night.plot import draw, new_figure
from night.rows import experiments

DARK = ["dark_background", {"figure.facecolor": "#0d1117", "axes.facecolor": "#0d1117"}]


def main(folder: Path) -> None:
    harness.RESULTS = ROOT / "tests" / "night" / "results.tsv"
    for name, theme in (("night.png", []), ("night-dark.png", DARK)):
        with style.context(theme):
            figure, ((ax,),) = new_figure()
            figure.set_figheight(3.2)
            draw(ax, experiments())
            figure.savefig(folder / name, dpi=180)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
