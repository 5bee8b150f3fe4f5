"""The morning's attribution: verdicts on simulated nights whose truth is known; a played one with real git and Ray."""

import random
import re
from collections import Counter, defaultdict

import pytest
from test_report import LABEL, Clone

import harness
import prepare
from night import commits
from night.attribute import FIRST_SEEDS, MOST_SEEDS, Change, decide

TRAIN = """\
import random, sys, time
import harness
import prepare

REAL = 0

# between two changes there are lines that stay

LUCK = 0
def idle():
    return LUCK

# and here, too

HARM = 0

# and here

TWICE = 0

options = dict(option.removeprefix("--").split("=") for option in sys.argv[1:])
TRUE = 1.3 - 0.02 * REAL + 0.02 * HARM - 0.02 * TWICE
noise = lambda split: random.Random(f"{split} {options['seed']} {TRUE} {LUCK}").gauss(0, 0.001)
harness.log_result(
    val_bpb=TRUE + noise("val"), memory_gb=2.0, gpu="cpu, 1.5 M tokens", dataset=prepare.dataset_id(), tokens_M=1.5,
    test_bpb=TRUE + noise("test") if harness.night_record()["score_test"] else None,
)
"""


@pytest.mark.parametrize("luck", [0.0005, 0.001, 0.003])
def test_verdicts_hold_at_their_level_and_find_gains_of_three_standard_deviations(luck):
    """Of 200 nights with 16 kept changes: six real, eight null, two harmful."""
    pytest.importorskip("scipy")
    truth, rng = [3 * luck] * 6 + [0.0] * 8 + [-3 * luck] * 2, random.Random(1)
    false, verdicts, runs = 0, Counter(), 0
    for _ in range(200):
        noise = defaultdict(lambda: rng.gauss(0, luck))

        def measure(chosen: list[Change], seeds: int, noise=noise) -> None:
            for change in chosen:
                own = truth[int(change.name)]
                change.effects = {"val": [own + noise[change.name, s] - noise["full", s] for s in range(seeds)]}

        changes = [Change({i}, str(i), 1, "") for i in range(len(truth))]
        decide(changes, measure)
        found = {int(change.name): change.verdict for change in changes}
        false += any(found[i] == "real" for i in range(6, 16))
        verdicts.update((truth[i] > 0, verdict) for i, verdict in found.items())
        runs += len(noise)
    assert false <= 0.05 * 200
    assert verdicts[True, "real"] >= 0.9 * 200 * 6 and verdicts[True, "harmful"] == 0
    assert runs < 65 * 200


def test_a_file_that_crashes_without_a_change_needs_it_and_no_run_is_wasted_on_a_verdict():
    pytest.importorskip("scipy")
    seen = []

    def measure(chosen: list[Change], seeds: int) -> None:
        seen.append((seeds, [change.name for change in chosen]))
        for change in chosen:
            change.effects = {
                "val": {"crash": [], "null": [0.001, -0.001] * seeds, "real": [0.1, 0.1001] * seeds}[change.name]
            }

    changes = [Change({i}, name, 1, "") for i, name in enumerate(["crash", "null", "real"])]
    decide(changes, measure)
    assert [change.verdict for change in changes] == ["needed", "no evidence", "real"]
    assert seen[0] == (FIRST_SEEDS, ["crash", "null", "real"]) and seen[1:] in ([], [(FIRST_SEEDS + 1, ["real"])])
    assert MOST_SEEDS > FIRST_SEEDS


def test_changes_on_the_same_lines_go_together_and_what_leaves_no_python_goes_with_what_needs_it():
    files = [b"a = 1\n\nb = 1\n\nc = 1\n", b"a = 2\n\nb = 1\n\nc = 1\n", b"a = 2\n\nb = 2\n\nc = 1\n"]
    files += [
        b"a = 3\n\nb = 2\n\nc = 1\n",
        b"a = 3\n\nb = 2\n\nif c:\n    c = 1\n",
        b"a = 3\n\nb = 2\n\nif c:\n    c = 4\n",
    ]
    assert [commits.group(files, i) for i in range(1, 6)] == [{1, 3}, {2}, {3}, {4, 5}, {5}]
    assert commits.without(files, {1, 3}) == b"a = 1\n\nb = 2\n\nif c:\n    c = 4\n"
    assert commits.without(files, {2, 5}) == b"a = 3\n\nb = 1\n\nif c:\n    c = 1\n"
    assert commits.without(files, {1}) is None


def test_the_report_names_luck_and_harm_and_prunes_them(prepared, tmp_path):
    """Of five kept changes one is pure luck, one does harm, two are on one line. The next report trains nothing."""
    pytest.importorskip("ray")
    clone, text, score = Clone(tmp_path / "clone", prepared), TRAIN, 1.3
    dataset = prepare.dataset_id(clone.cache / clone.dataset)
    edits = [("REAL = 0", "REAL = 1"), ("LUCK = 0", "LUCK = 1\n\n"), ("HARM = 0", "HARM = 1")]
    edits += [("TWICE = 0", "TWICE = 1"), ("TWICE = 1", "TWICE = 2")]
    for name, (old, new) in zip(["baseline", "real", "luck", "harm", "once", "twice"], [("", ""), *edits], strict=True):
        text, score = text.replace(old, new) if old else text, score - 0.001
        (clone.folder / "train.py").write_text(text)
        clone.run(f"git commit -q --allow-empty -am {name}")
        head = clone.run("git rev-parse --short=7 HEAD").strip()
        row = dict(memory_gb=2.0, gpu=LABEL, dataset=dataset, tokens_M=1.5, path=clone.results)
        harness.log_result(val_bpb=score, commit=head, description=name, **row)
    output = clone.finish(clone.report("--attribute"))
    found = re.findall(
        r"^\| ([\w :]+) \| ([+-]\d+) \| ([+-]0\.\d+) \| ([+-]0\.\d+) \| 0\.\d+ \| (\d) \| ([\w ]+) \|$", output, re.M
    )
    assert [(name, lines, verdict) for name, lines, _, _, _, verdict in found] == [
        ("real", "+0", "real"),
        ("luck", "+2", "no evidence"),
        ("harm", "+0", "harmful"),
        ("once with: twice", "+0", "real"),
        ("twice", "+0", "real"),
    ]
    costs = [float(val) for _, _, val, *_ in found]
    assert costs == pytest.approx([0.02, 0, -0.02, 0.04, 0.02], abs=0.003)
    assert (
        "Of 5 kept changes 3 are real, 1 show nothing, 1 do harm; without 2 of them the file is 2 lines shorter"
        in output
    )
    branch = clone.run("git branch --show-current").strip()
    pruned = clone.run(f"git show {branch}-pruned:train.py")
    assert pruned == text.replace("LUCK = 1\n\n", "LUCK = 0").replace("HARM = 1", "HARM = 0")
    assert clone.run("git status --porcelain") == "" and clone.run("git branch --show-current").strip() == branch
    log = clone.results.read_bytes()
    assert clone.finish(clone.report("--attribute")).count("\n0 runs, ") >= 3 and clone.results.read_bytes() == log
