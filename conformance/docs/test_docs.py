"""Holds the pages of docs/ to the code: what is generated, what is claimed, and which figures are marked."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

import pytest
import yaml

from conformance.support import reference
from docs.generate import figures
from docs.generate.figures import DOCS
from docs.generate.pages import PAGES
from docs.generate.reference import CLAIMS, SETTINGS
from harness import __version__
from harness.core.settings import REPOSITORY

HARNESS = REPOSITORY / "harness"

EXPORTING = {"reference/operators.md", "reference/entry-points.md"}
"""Pages that need the reproductions of defects as exported programs, or the model's modules."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.kernel) if name in EXPORTING else name for name in PAGES]
)
def test_a_generated_page_is_up_to_date(name: str) -> None:
    assert (DOCS / name).read_text(encoding="utf-8") == PAGES[name](), "run `python -m docs.generate`"


def test_every_variable_is_on_the_page_of_settings() -> None:
    page = (DOCS / "reference" / "settings.md").read_text(encoding="utf-8")
    sources = [path.read_text(encoding="utf-8") for path in HARNESS.rglob("*.py")]
    named = {name for source in sources for name in re.findall(r'= "(SAM3_TVM_[A-Z_]+)"', source)}
    assert named and all(f"`{name}`" in page for name in named)
    assert len(named) == len(SETTINGS["Environment variables"])


OUTSIDE = [*sorted(REPOSITORY.glob("*.md")), *sorted(REPOSITORY.glob("examples/**/*.md"))]
"""The pages that `mkdocs build --strict` does not read."""


def named(page: Path) -> str:
    """The path of a page in the repository."""
    return page.relative_to(REPOSITORY).as_posix()


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and MkDocs make them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", OUTSIDE, ids=named)
def test_links_of_a_page_outside_the_site_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\((?!https?:)([^)\s]+)\)", figures.CODE.sub("", page.read_text(encoding="utf-8"))):
        file, _, anchor = link.partition("#")
        linked = page.parent / file if file else page
        assert linked.exists(), link
        assert not anchor or anchor in anchors(linked), link


COMMAND = re.compile(r"(?:^|[`/ ])sam3-tvm ([a-z][a-z-]*)((?: +[^\s`#|&>]+)*)", re.MULTILINE)


@pytest.mark.parametrize("page", [*OUTSIDE, *figures.guides()[1:], DOCS / "evidence" / "todo.md"], ids=named)
def test_the_commands_of_a_page_exist(page: Path) -> None:
    known = reference.options()
    for code in figures.CODE.finditer(page.read_text(encoding="utf-8")):
        for name, arguments in COMMAND.findall(code[0]):
            assert set(re.findall(r"--[a-z][a-z0-9-]*", arguments)) <= known[name], f"{name}{arguments}"


@pytest.mark.parametrize("name", ["architecture.md", "language.md"])
def test_the_files_of_a_table_exist(name: str) -> None:
    lines = (DOCS / "design" / name).read_text(encoding="utf-8").splitlines()
    rows = [re.findall(r"`([\w/]+(?:\.py|/))`", line) for line in lines if line.startswith("|")]
    assert sum(map(len, rows)) > 30
    for row in rows:
        # A later name of a row may be in the folder of an earlier one.
        folders = [HARNESS, *(HARNESS / path.rpartition("/")[0] for path in row)]
        assert not [path for path in row if not any((folder / path).exists() for folder in folders)]


def test_the_version_and_its_date_are_the_same_everywhere() -> None:
    changes = (REPOSITORY / "CHANGELOG.md").read_text(encoding="utf-8")
    (version, date), *_ = re.findall(r"^## (\S+) \((.*)\)$", changes, re.MULTILINE)
    citation = yaml.safe_load((REPOSITORY / "CITATION.cff").read_text(encoding="utf-8"))
    assert version == citation["version"] == __version__
    assert date == citation["date-released"]


def test_every_claim_names_a_test_that_exists() -> None:
    for claim in tomllib.loads(CLAIMS.read_text(encoding="utf-8"))["claims"]:
        file, _, name = claim["test"].partition("::")
        tree = ast.parse((REPOSITORY / file).read_text(encoding="utf-8"))
        assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, claim["test"]


@pytest.mark.parametrize("page", figures.guides(), ids=named)
def test_figures_of_a_guide_are_marked_and_current(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert figures.filled(text) == text, "a figure is stale: run `python -m docs.generate`"
    found = [*figures.unmarked(text)]
    assert not found, f"mark these figures, or say `measured on DATE on MACHINE`: {', '.join(found)}"


MARKED = "It takes <!-- figure: latency-1; photo and text; TVM untuned; median -->{}<!-- end -->."


@pytest.mark.parametrize("file", ["Makefile", "README.md"])
def test_code_says_how_many_cases_are_verified(file: str) -> None:
    count = figures.filled("<!-- figure: cases; make verify; value --><!-- end -->").split(">")[1].split("<")[0]
    assert f" {count} shallow cases" in (REPOSITORY / file).read_text(encoding="utf-8")


def test_a_stale_figure_is_filled() -> None:
    assert figures.filled(MARKED.format("1 s")) == figures.filled(MARKED.format(""))
    assert figures.filled(MARKED.format("1 s")) != MARKED.format("1 s")
    assert not [*figures.unmarked(MARKED.format("1 s"))]


@pytest.mark.parametrize("key", ["latency; photo and text", "latency; photo; TVM untuned; median", "no table; a; b"])
def test_a_mark_that_names_nothing_is_an_error(key: str) -> None:
    with pytest.raises(LookupError):
        figures.filled(f"<!-- figure: {key} -->1 s<!-- end -->")


@pytest.mark.parametrize("figure", ["12.8 s", "0.9 GB", "545 GFLOP/s", "2.5x", "2.5× ", "10 ms", "1.2 GiB"])
def test_a_figure_without_a_mark_is_found(figure: str) -> None:
    assert [*figures.unmarked(f"## Speed\n\nIt is {figure} here.")] == [figure.strip()]
    for allowed in (
        f"## Speed\n\nMeasured on 2026-11-26 on an AMD EPYC. It is {figure}.",
        f"`{figure}`",
        f"It is {figure}. <!-- no measurement -->",
    ):
        assert not [*figures.unmarked(allowed)]


def test_sizes_of_tensors_are_no_figures() -> None:
    assert not [*figures.unmarked("An image of 1008×1008 pixels, 3×3 filters, 3 x 3, and 32 KiB.")]
