"""The morning's attribution: verdicts on simulated nights whose truth is known; a played one with real git."""

import math
import os
import re
import subprocess
import sys
from collections import Counter

import numpy as np
import pytest
from scratch import Scratch
from test_report import LABEL, Morning

import harness
import prepare
from night import git
from night.attribute import PAIRS, Change, design, estimate, lineage, possible, prune, try_changes, units
from night.git import revisions

pytest.importorskip("scipy", reason="it is in the extra [night]")

TRAIN = """\
import random

REAL = 0

# between two changes there are lines that stay

LUCK = 0
def idle():
    return LUCK

# and here, too

HARM = 0

# and here

TWICE = 0

TRUE = 1.3 - 0.02 * REAL + 0.02 * HARM - 0.02 * TWICE
VERSION = REAL, LUCK, HARM, TWICE
draw = lambda *what: random.Random(str(what)).gauss(0, 0.001)
noise = lambda split: draw(split, seed, VERSION) + 3 * draw(split, seed)
result(TRUE + noise("val"), TRUE + noise("test"))
"""


@pytest.fixture
def shell(tmp_path, monkeypatch):
    """A function that runs a script in a new repository, on its branch `night`; night works in that, too."""
    return Scratch(tmp_path / "clone", monkeypatch, {}).shell


def judged(truth: list, luck: float, rng, needed: int | None = None, both: float = 0.0) -> list[Change]:
    """The changes of a simulated morning. truth: what their removal costs, or (on val, on test). Without the change
    `needed` every run crashes; without the first two together it costs `both` more."""
    truth = np.array([np.broadcast_to(cost, 2) for cost in truth])

    def measure(plan: np.ndarray, seeds: np.ndarray) -> tuple:
        scores = 1.2 + plan @ truth + rng.normal(0, luck, (len(plan), 2))
        scores += rng.normal(0, 10 * luck, (32, 2))[seeds]  # what a seed does to all
        if both:
            scores += both * (plan[:, 0] & plan[:, 1])[:, None]
        if needed is not None:
            scores[plan[:, needed]] = math.nan
        return plan, seeds, scores

    changes = [Change(str(i)) for i in range(len(truth))]
    try_changes(changes, measure)
    return changes


def test_verdicts_hold_at_their_level_and_find_gains_of_three_standard_deviations():
    """Of 200 nights with 16 kept changes: six real, eight null, two harmful."""
    luck, rng, verdicts, errors = 0.003, np.random.default_rng(1), Counter(), []
    truth = np.array([3.0] * 6 + [0.0] * 8 + [-3.0] * 2) * luck
    for _ in range(200):
        for effect, change in zip(truth, judged(truth, luck, rng), strict=True):
            verdicts[effect > 0, change.verdict] += 1
            errors.append((change.val - effect) / change.error)
    assert verdicts[False, "real"] <= 0.03 * 200 * 10  # without Benjamini and Hochberg's correction 0.036
    assert verdicts[True, "real"] >= 0.98 * 200 * 6 and verdicts[True, "harmful"] == 0
    assert verdicts[False, "harmful"] >= 0.98 * 200 * 2
    sd = (16 / 14) ** 0.5  # Student's t with 64 - 16 - 32 degrees of freedom
    assert np.std(errors) == pytest.approx(sd, abs=0.1), "standard errors are what effects vary by"


def test_a_change_without_which_every_run_crashes_is_needed_and_the_others_are_judged_all_the_same():
    changes = judged([0.0, 0.01, -0.01, 0.01], 0.001, np.random.default_rng(2), needed=0)
    assert [change.verdict for change in changes] == ["needed", "real", "harmful", "real"]
    with pytest.raises(prepare.PrepareError, match="0 of 16 runs succeeded"):
        try_changes([Change("a")], lambda plan, seeds: (plan, seeds, np.full((len(plan), 2), math.nan)))
    changes = judged([0.0], 0.001, np.random.default_rng(2), needed=0)
    assert changes[0].verdict == "needed", "that all are needed is an answer"


def test_effects_that_the_runs_cannot_tell_apart_get_no_verdict():
    changes, (left_out, seeds), noise = [Change(name) for name in "abc"], design(3), np.random.default_rng(0)
    left_out[:, 1] = left_out[:, 0]
    scores = left_out @ np.array([[0.01, 0.01]] * 3) + noise.normal(0, 1e-4, (len(seeds), 2))
    estimate(changes, left_out, seeds, scores)
    assert [change.verdict for change in changes] == ["no evidence", "no evidence", "real"]


def test_what_helps_on_val_alone_is_not_real():
    changes = judged([(0.01, -0.01), 0.01], 1e-4, np.random.default_rng(0))
    assert [change.verdict for change in changes] == ["no evidence", "real"]


def test_each_run_leaves_out_half_of_the_changes_and_any_two_together_a_quarter_of_them():
    for count in (1, 5, 16, 27):
        plan, seeds = design(count)
        assert len(plan) >= 2 * count + 8 and plan.shape[1] == count and (plan.mean(0) == 0.5).all()
        assert (np.bincount(seeds) == 2).all() and (plan[seeds == 3].sum(0) == 1).all()
        together = plan.T.astype(int) @ plan / len(plan)
        assert (together[~np.eye(count, dtype=bool)] == 0.25).all()


def test_changes_that_replace_each_other_do_not_blur_the_effects_of_others():
    changes = judged([0.01] * 11, 1e-6, np.random.default_rng(0), both=0.02)
    assert [change.val for change in changes] == pytest.approx([0.02] * 2 + [0.01] * 9, abs=1e-5)


def test_a_line_of_changes_leads_from_the_first_kept_commit_to_the_reference(shell):
    commit = "git commit -q --allow-empty -m x; git rev-parse --short=7 HEAD; "
    a, b, c, d = shell(4 * commit).split()
    aside = f"git checkout -q -b side {b}; {commit.replace('-m x', '-m y')} git checkout -q night"
    side, merge = shell(f"{aside}; git merge -q side; git rev-parse --short=7 HEAD").split()

    def line(*commits: str) -> list[str]:
        return [row["commit"] for row in lineage([dict(commit=name, by="run", status="keep") for name in commits])]

    assert line(a, b, c, d) == line(b, a, c, d) == line(a, b, a, c, d, d) == [a, b, c, d]
    assert line(a, c, side) == [a, side] and line(a, side, c) == [a, c], "of two the last row's"
    assert line(a, c, side, merge) == [a, c, merge], "which has the other"
    assert line() == [] and line(b) == [b]


def test_changes_on_the_same_lines_go_together_and_what_leaves_no_python_goes_with_what_needs_it():
    def file(a: int, b: int, end: str) -> bytes:
        return f"a = {a}\n\nb = {b}\n\n{end}\n".encode()

    files = [file(1, 1, "c = 1"), file(2, 1, "c = 1"), file(2, 2, "c = 1"), file(3, 2, "c = 1")]
    files += [file(3, 2, "if c:\n    c = 1"), file(3, 2, "if c:\n    c = 4")]
    assert [git.group(files, i) for i in range(1, 6)] == [{1, 3}, {2}, {3}, {4, 5}, {5}]
    assert git.without(files, {1, 3}) == file(1, 2, "if c:\n    c = 4")
    assert git.without(files, {2, 5}) == file(3, 1, "if c:\n    c = 1")
    assert git.without(files, {1}) is None
    tuned = [file(a, 1, f"c = {c}") for a, c in [(1, 0), (2, 0), (2, 1), (3, 1), (4, 1), (4, 2)]]
    assert [git.group(tuned, i) for i in range(1, 6)] == [{1, 3, 4}, {2, 5}, {3, 4}, {4}, {5}]
    assert units(files) == [{1, 3}, {2}, {4, 5}] and units(tuned) == [{1, 3, 4}, {2, 5}]
    assert possible(files, [{1, 3}, {2}]) == {1, 2, 3} and possible(files, [{1}, {2}]) == {2}
    lines = [b"def f():\n    n = 1\n    a = 1\n    b = 1\n", b"def f():\n    a = 1\n    b = 1\n"]
    assert git.group([*lines, lines[1] + b"    global n\n"], 1) == {1, 2}, "n would be assigned before"


def test_refs_are_made_where_there_is_none_and_taken_from_nobody(shell):
    """A second commit at a place is refused, and a branch does not move over a commit that came meanwhile."""
    head = shell("echo a > train.py; git add .; git commit -q -m a; git rev-parse HEAD")
    first = git.commit_train(head, b"b", "b", "night-loop/1")
    assert first == git.commit_train(head, b"b", "b", "night-loop/1")
    with pytest.raises(subprocess.CalledProcessError):
        git.commit_train(head, b"c", "c", "night-loop/1")
    assert shell("git rev-parse refs/night/night-loop/1").startswith(first)
    kept = git.commit_train(head, b"c", "c", "without/")
    assert shell(f"git rev-parse --short=7 refs/night/without/{shell(f'git rev-parse {kept}')}") == kept
    assert shell("git branch --format='%(refname:short)'") == "night", "hundreds of branches"
    meanwhile = shell("git commit -q --allow-empty -m meanwhile; git rev-parse HEAD")
    with pytest.raises(subprocess.CalledProcessError):
        git.move_branch("night", git.new_commit(head, b"", "keep", first), head)
    assert shell("git rev-parse night") == meanwhile


def test_commits_are_the_same_whatever_git_is_told(shell, tmp_path, monkeypatch):
    """By the environment of a hook or an alias, by the user's configuration and attributes; on a signed parent, too."""
    gpg, other, config = (tmp_path / name for name in ("gpg", "other", "config"))
    gpg.write_text("#!/bin/sh\necho '[GNUPG:] SIG_CREATED ' >&2\ncat > /dev/null\necho -----BEGIN PGP SIGNATURE-----\n")
    gpg.chmod(0o755)
    shell(f"printf 'a\n\n\n\nb\n' > train.py; git add .; git -c gpg.program={gpg} commit -q -S -m a")
    head = shell(f"git init -q {other}; git rev-parse HEAD")
    plain = git.new_commit(head, b"x\n\n\n\nb\n", "é"), git.archive(head)
    (tmp_path / "attributes").write_text("* text=auto eol=crlf export-ignore\n")  # of all the user's clones
    (tmp_path / "reference-transaction").symlink_to("/bin/false")
    config.write_text(
        f"[core]\nautocrlf = true\nattributesFile = {tmp_path}/attributes\nhooksPath = {tmp_path}\n"
        f"[commit]\ngpgSign = true\n[gpg]\nprogram = {gpg}\n[log]\nshowSignature = true\n"
        "[i18n]\ncommitEncoding = latin1\nlogOutputEncoding = latin1\n[merge]\nconflictStyle = diff3\n"
    )
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(config))
    for name in ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_OBJECT_DIRECTORY", "GIT_COMMON_DIR"):
        monkeypatch.setenv(name, str(other))
    assert (git.new_commit(head, b"x\n\n\n\nb\n", "é"), git.archive(head)) == plain
    assert revisions([git.commit_train(head, b"y\n", "é", "night-loop/1")])[0][1] == "é"
    assert git.revert(b"x\n\n\n\nb\n", b"a\n\n\n\nc\n", b"a\n\n\n\nb\n") == b"x\n\n\n\nc\n"
    assert not [*other.glob("objects/??")]


def test_tests_commit_in_their_own_repository_whatever_git_is_told(tmp_path):
    """By a hook that runs pytest, and by the user's configuration, which may sign commits: gpg would ask who it is."""
    (tmp_path / ".gitconfig").write_text("[commit]\ngpgSign = true\n[gpg]\nprogram = false\n")
    (tmp_path / "torch.py").write_text("class cuda: is_available = bool\ndevice = None")  # the real one takes 2 s
    commands = "git init -q own && cd own && git commit -q --allow-empty -m own && git log --format=%s"
    code = f"import conftest, os; os.chdir({str(tmp_path)!r}); os.system({commands!r})"
    env = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    env |= {"GIT_DIR": str(tmp_path / "other"), "GIT_INDEX_FILE": "index", "HOME": str(tmp_path)}
    env["PYTHONPATH"] = os.pathsep.join([str(tmp_path), *sys.path])
    assert subprocess.check_output([sys.executable, "-c", code], env=env, text=True) == "own\n"
    assert not (tmp_path / "other").exists()


def pruned(costs: list[float], gain: float) -> tuple[str, bool]:
    """What `prune` says of a file with these costs, and whether it is taken."""
    return prune(np.array([[1.2, 1.2 + cost] for cost in costs]), gain)


def test_a_file_is_pruned_only_if_what_it_surely_costs_at_most_is_below_a_tenth_of_the_gain():
    """Student's t for one side of 5% and 4 degrees of freedom: 2.132."""
    costs = [0.0, 0.0001, 0.0002, 0.0003, 0.0004]  # standard error: 0.0000707
    text, fine = pruned(costs, gain=0.0057)
    assert fine and text.startswith("With 5 seeds it costs +0.0002, at most +0.0004 (95% confidence).")
    assert text.endswith("It may cost 0.0006, 10% of the gain.")
    text, fine = pruned([cost + 0.0003 for cost in costs], gain=0.0057)
    assert not fine and "at most +0.0007 (" in text and text.endswith("of the gain: nothing is pruned.")
    assert pruned(costs, gain=0.0037)[1] and not pruned(costs, gain=0.0034)[1], "0.00035"
    assert not pruned(costs, gain=-0.01)[1], "no gain, of which nothing may be lost"


def test_a_pruned_file_that_crashes_is_not_taken():
    for crashes in (0, 1, 5):
        text, fine = pruned([math.nan] * crashes + [0.0] * (5 - crashes), gain=0.02)
        assert fine == (not crashes) == ("It crashes: nothing is pruned." not in text)


def test_of_nights_whose_pruned_files_lose_more_than_a_tenth_of_the_gain_one_in_twenty_prunes():
    """They lose 0.0021 of 0.02; the sd between versions with one seed is 0.001."""
    rng = np.random.default_rng(0)
    lost = [prune(rng.normal([0, 0.0021], 0.001, (PAIRS, 2)), 0.02)[1] for _ in range(400)]
    assert 0 < np.mean(lost) <= 0.05 + 2 * math.sqrt(0.05 * 0.95 / 400)


def test_the_report_names_luck_and_harm_and_prunes_them(tmp_path, monkeypatch, capsys):
    """Of five kept changes one is pure luck, one does harm, two are on one line. The next report trains nothing."""
    clone, text, score = Morning(tmp_path / "clone", monkeypatch), TRAIN, 1.3
    edits = [("REAL = 0", "REAL = 1"), ("LUCK = 0", "LUCK = 1\n\n"), ("HARM = 0", "HARM = 1")]
    edits += [("TWICE = 0", "TWICE = 1"), ("TWICE = 1", "TWICE = 2")]
    names = ["baseline", "real", "luck", "harm", "once", "twice"]
    for name, (old, new) in zip(names, [("", ""), *edits], strict=True):
        text, score = text.replace(old, new) if old else text, score - 0.001
        (clone.folder / "train.py").write_text(text)
        clone.shell(f"git commit -q --allow-empty -am {name}")
        row = dict(memory_gb=2.0, **LABEL, dataset="d", tokens_M=1.5)
        harness.log_result(val_bpb=score, commit=clone.head(), description=name, **row)
    clone.report("--attribute")
    output = capsys.readouterr().out
    number = r"([+-]\d[.\d]*)"
    line = rf"^\| ([\w ;]+) \| {number} \| 0\.\d+ \| {number} \| ([\w ]+) \|$"
    found = re.findall(line, output, re.M)
    verdicts = {"real": "real", "luck": "no evidence", "harm": "harmful", "once; twice": "real"}
    assert {name: verdict for name, *_, verdict in found} == verdicts
    for costs in zip(*((float(val), float(test)) for _, val, test, _ in found), strict=True):
        assert costs == pytest.approx([0.02, 0, -0.02, 0.04], abs=0.003)
    assert "The pruned file lacks 2 commits' changes. With 8 seeds it costs" in output
    (pruned,) = re.findall(r"It is branch (night-pruned-\w{7})\.", output)
    report = clone.written()
    assert "the gain's 97% confidence interval" in report and "\n## Which of the kept changes are real?\n" in report
    text = text.replace("LUCK = 1\n\n", "LUCK = 0").replace("HARM = 1", "HARM = 0")
    assert clone.shell(f"git show {pruned}:train.py") == text.strip()
    assert clone.shell("git status --porcelain") == "" and clone.shell("git branch --show-current") == "night"
    log = harness.RESULTS.read_bytes()
    seeds = {row["seed"] for row in clone.rows() if "without changes" in row["description"]}
    assert seeds == {*range(1001, 1009), *range(2001, 2009)}
    clone.report("--attribute")
    assert capsys.readouterr().out.count("\n0 runs, ") >= 2 and harness.RESULTS.read_bytes() == log
