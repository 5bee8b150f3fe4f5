"""The report on the morning after: how much of the night's gain was luck?"""

import statistics
from argparse import Namespace

import harness
from harness import crashed
from night.attribute import attribute, lineage
from night.git import create_ref, git, in_history
from night.noise import MISS, interval, miss_of_look
from night.plot import plot
from night.pool import Run
from night.rows import Kind, experiments, good, pairs, scores
from night.wave import Trainer, start_pool
from prepare import PrepareError


def report(args: Namespace, pool=None, kind: Kind | None = None) -> None:
    """Trains the first and the last kept revision with new seeds, scores val and test, and says what was luck."""
    import matplotlib  # noqa: F401
    import scipy  # noqa: F401  better missed now than after all runs

    seeds = range(101, 101 + args.seeds)  # unlikely to have been used by experiments
    if len(seeds) < 2:
        raise PrepareError(f"--seeds must be at least 2, not {args.seeds}: one run has no standard error")
    if not pool:
        pool, kind = start_pool(args)
    rows = [row for row in experiments() if kind.holds(row)]
    if not rows:
        raise PrepareError(f"results.tsv has no experiment on {kind}")
    kept = lineage(in_history([row for row in rows if row["status"] == "keep"]))
    parts = [f"{kind}: {len(rows)} experiments, {len(kept)} kept on this branch, {sum(map(crashed, rows))} crashed."]
    print(parts[0])

    def write(text: str) -> None:
        """Appends to the report: each part is safe before the next one begins."""
        print(f"\n{text}")
        parts.append(text)
        harness.RESULTS.with_name("report.md").write_text("\n\n".join([*parts, "![](progress.png)"]) + "\n", "utf-8")

    if len(kept) < 2:
        write("Fewer than two revisions were kept on this branch: there is no gain to report.")
    else:
        trainer = Trainer(args, pool, kind._replace(report=True))
        ends = kept[0], kept[-1]
        trained = trainer.train([Run(row["commit"], row["description"], seed) for seed in seeds for row in ends])
        commits = [row["commit"] for row in ends]
        write(gains(*ends, rows, trained, *remember_look(*commits, trained, kind.dataset)))
        if args.attribute:
            gain = statistics.mean(before - after for before, after in pairs(trained, *commits))
            write(f"## Which of the kept changes are real?\n\n{attribute(kept, trainer, gain)}")
    plot()


def gains(first: dict, last: dict, night: list[dict], rows: list[dict], look: int = 1, earlier=()) -> str:
    """Markdown: the gain of the last kept commit over the first, as logged in the night and by the report's rows.

    look, earlier: see `remember_look`."""
    lines = [
        f"First kept: {first['commit']}, {first['description']}. Last kept: {last['commit']}, {last['description']}.\n",
        "| bits per byte | first kept | last kept | gain | standard error |\n| --- | --- | --- | --- | --- |",
    ]

    def add_line(name: str, both: list[tuple[float, float]], error: str = "") -> None:
        before, after = map(statistics.mean, zip(*both, strict=True))
        lines.append(f"| {name} | {before:.4f} | {after:.4f} | {before - after:.4f} | {error} |")

    ends, where = (first["commit"], last["commit"]), ""
    if both := pairs(night, *ends):  # else no seed has trained both
        add_line("val, as logged", both)
    for split in ("val", "test"):
        if len(both := pairs(rows, *ends, split)) >= 2:
            _, error, low, high = interval([a - b for a, b in both], miss_of_look(look))
            add_line(f"{split}, mean of {len(both)} new seeds", both, f"{error:.4f}")
            where, seeds = split, len(both)
    if not where:
        raise PrepareError("fewer than two seeds succeeded with both revisions: see their rows, and repeat this")
    if where == "test":
        reports = f"the report on {' and '.join(earlier)} has scored, too" if earlier else "no other report has scored"
        where = f"test, which {reports},"
    verdict = "it holds up" if low > 0 else "it is a loss" if high < 0 else "it may be chance"
    level, then = (f"{100 * (1 - miss_of_look(n)):g}%" for n in (look, look + 1))
    lines += [
        f"\nOn {where} the gain's {level} confidence interval is {low:.4f} to {high:.4f}: {verdict}.",
        f"This is look {look} at it. The next one, with --seeds {2 * seeds}, has a {then} interval, so that all "
        f"looks together are wrong in at most {MISS:.0%} of nights.",
        "The errors cover seeds, not texts, and val is the text by which the night has chosen.",
    ]
    for commit in ends:
        if lost := {row["seed"] for row in rows if row["commit"] == commit} - scores(good(rows, commit)).keys():
            lines.append(f"{commit} crashed with {len(lost)} of the seeds: the numbers are those of the others.")
    return "\n".join(lines)


def remember_look(first: str, last: str, rows: list[dict], dataset: str) -> tuple[int, list[str]]:
    """Which look at this gain it is, counted by numbers of seeds; and the pairs of commits in its history whose reports
    have scored test, too. Refs below refs/night/reports/ remember both."""
    name, seeds, folder = f"{first}-{last}", len(pairs(rows, first, last)), f"refs/night/reports/{dataset}/"
    refs = git("for-each-ref", f"--merged={last}", "--format=%(refname)", folder).split()
    found = [ref.removeprefix(folder).split("/") for ref in refs]
    looks = {int(seeds): int(look) for other, look, seeds in found if other == name}
    look = looks.get(seeds, len(looks) + 1)
    if seeds > 1:
        create_ref(f"{folder}{name}/{look}/{seeds}", last)
    return look, sorted({other for other, *_ in found if other != name})
