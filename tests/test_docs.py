"""README and docs/: links lead somewhere, indexes are complete, figures agree, README is short."""

import re
from pathlib import Path

import pytest
from small_corpus import ROOT

import harness
import train

PAGES = [ROOT / "README.md", ROOT / "program.md", *sorted((ROOT / "docs").rglob("*.md"))]
README = PAGES[0].read_text("utf-8")


def slugs(path: Path) -> set[str]:
    """The anchors that GitHub gives the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", path.read_text("utf-8"), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files_and_headings_that_exist(page):
    for link in re.findall(r'\]\(([^)]+)\)|(?:src|srcset)="([^"]+)"', page.read_text("utf-8")):
        name, _, anchor = "".join(link).partition("#")
        if not name.startswith("http"):
            target = page.parent / name if name else page
            assert target.exists() and (not anchor or anchor in slugs(target)), link


@pytest.mark.parametrize("folder", ["docs", "docs/experiments"])
def test_each_page_is_in_its_index_or_named_in_the_code_that_it_is_about(folder):
    index = (ROOT / folder / "README.md").read_text("utf-8")
    code = "".join(path.read_text("utf-8") for path in ROOT.rglob("*.py"))
    for page in (ROOT / folder).glob("*.md"):
        assert page.name == "README.md" or f"({page.name})" in index or f"docs/{page.name}" in code, page


def test_readme_fits_in_a_minute_and_its_row_is_one():
    assert len(README.splitlines()) <= 120 and len(README.split()) <= 1300
    (line,) = re.findall(r"^.*\tkeep\t.*$", README, re.M)
    row = harness.columns.parse_row(line)
    assert row and f"val_bpb:          {row['val_bpb']}" in README


def test_gpus_and_figures_of_readme_are_those_of_gpus_md():
    page = (ROOT / "docs/gpus.md").read_text("utf-8")
    table = README.partition("| GPU |")[2].partition("\n\n")[0]
    rows = [line.split(" | ") for line in table.splitlines()[2:]]
    assert len(rows) == len(train.SIZES) and set(re.findall(r"--gpu (\w+)", README)) <= set(harness.GPUS)
    for row in rows:
        figures = re.findall(r"\d\.\d{3}|\d+(?:\.\d)?(?= (?:M|GiB)\b)", " ".join(row[3:]))
        assert figures and all(re.search(rf"(?<![\d.]){figure}(?![\d.]\d)", page) for figure in figures), row
        assert all(name in page for name in re.findall(r"(?:RTX )?[A-Z]?\d+", row[0])), row


def test_the_page_about_the_log_has_each_column_in_order_and_each_status():
    _, table, statuses = (ROOT / "docs/log.md").read_text("utf-8").split("| --- | --- |")[:3]
    assert re.findall(r"^\| `(\w+)` \|", table, re.M) == [*harness.columns.COLUMNS]
    assert re.findall(r"^\| `(\w+)` \|", statuses, re.M) == ["keep", "discard", "crash", "report"]
