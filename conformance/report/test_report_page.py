"""The page of a verification: what it shows is what the JSON says, as text, in a browser, for keyboards and readers."""

from __future__ import annotations

import base64
import copy
import html
import io
import json
import math
import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from conformance.report.test_report_verification import CREATED, every_status
from conformance.support import small_segmenter
from conformance.support.markup import Element, cells, parsed
from conformance.support.pages import chromium
from conformance.support.sentences import sentence
from harness.cli.main import app
from harness.compiler.schedules.cpu import epilogue
from harness.core.case import Case
from harness.core.errors import HarnessError
from harness.core.outcome import EDGES, WITHIN, CaseError, Outcome, Stage, Status
from harness.core.settings import SEEDED
from harness.models.registry import MODELS_VARIABLE, models, subjects
from harness.parity.verdict import MAX_R_RMS, ORACLE_R_RMS
from harness.verify.diagnose.report import document
from harness.verify.diagnose.runner import diagnose_program
from harness.verify.report import Result, read_report, write_report
from harness.verify.report.verification.charts import timeline
from harness.verify.report.verification.comparison import compare, summary_sentence
from harness.verify.report.verification.pages import render_page
from harness.verify.report.verification.schema import number
from harness.verify.report.verification.wording import WorstRatio, count, digits, mark, seconds, worst_ratio
from harness.verify.stages import run_case

CASE = Case("photograph", "real", "llvm")
BROKEN = replace(CASE, seed=1)
PAGE, JSON = "verification_report.html", "verification_report.json"


@pytest.fixture(scope="module")
def verified(tmp_path_factory: pytest.TempPathFactory) -> list[Result]:
    """A case that passes, one with a kernel that is wrong, with its diagnosis, and what ended in any other way."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(MODELS_VARIABLE, small_segmenter.__name__)
        patch.setenv("SAM3_TVM_CACHE", str(tmp_path_factory.mktemp("cache")))
        models.cache_clear()
        subjects.cache_clear()
        try:
            right = Result.from_outcome(CASE, run_case(CASE, SEEDED), None)
            patch.setitem(epilogue.UNARY, "relax.nn.relu", lambda x: x)
            wrong = Result.from_outcome(BROKEN, run_case(BROKEN, SEEDED), None)
            diagnosis = diagnose_program(small_segmenter.program(BROKEN.seed), BROKEN, SEEDED)
        finally:
            models.cache_clear()
            subjects.cache_clear()
    assert (right.expected, wrong.expected) == (True, False)
    return [right, replace(wrong, diagnosis=document(diagnosis)), *every_status()]


@pytest.fixture(scope="module")
def folder(verified: list[Result], tmp_path_factory: pytest.TempPathFactory) -> Path:
    written = tmp_path_factory.mktemp("report")
    write_report(verified, {"cpu": "A<B>", "memory_bytes": 2**34}, {"torch": "2.15"}, written, created=CREATED)
    return written


@pytest.fixture(scope="module")
def report(folder: Path) -> dict[str, Any]:
    return read_report(folder / JSON)


@pytest.fixture(scope="module")
def page(folder: Path) -> Element:
    return parsed((folder / PAGE).read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def old(report: dict[str, Any]) -> dict[str, Any]:
    """The report as it was written before anything was drawn."""
    old = copy.deepcopy(report)
    for case in old["cases"]:
        case.pop("diagnosis", None)
        for output in case["outputs"]:
            output.pop("distribution", None)
    return old


@pytest.fixture(scope="module")
def comparison(folder: Path, report: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Element:
    """The page about the report and the same after a change."""
    out = tmp_path_factory.mktemp("comparison")
    (out / "after.json").write_text(json.dumps(changed(report)))
    sam3_tvm("--compare", folder / JSON, out / "after.json")
    return parsed((out / "verification_comparison.html").read_text(encoding="utf-8"))


def cases_of(page: Element) -> list[Element]:
    """Every case, in the order of the JSON."""
    return sorted(page.all("details", "case"), key=lambda place: int(place["id"].removeprefix("case-")))


def outputs_of(case: Element) -> list[Element]:
    return case.all("details", "output")


def decoded(address: str) -> Any:
    kind, _, data = address.partition(",")
    assert kind == "data:image/png;base64"
    with Image.open(io.BytesIO(base64.b64decode(data, validate=True))) as image:
        return np.asarray(image.convert("RGBA"))


# --- what it shows ---


def word(case: dict[str, Any]) -> str:
    """What a case's mark says beside its sign."""
    return mark(case).partition(" ")[2]


def test_signs_are_drawn_whatever_fonts_there_are(page: Element, comparison: Element, report: dict[str, Any]) -> None:
    signs = {mark(case).partition(" ")[0] for case in report["cases"]}
    assert len(signs) == 5
    for each in (page, comparison):
        assert not [text for text in each.text.split() if signs & set(text) or "✗" in text]
    drawn = [link.one("svg", "sign").all("path") for link in page.one("table", "matrix").all("a")]
    assert len({"".join(path["d"] for path in paths) for paths in drawn}) == len(signs)
    table = next(each for each in page.all("table") if each.one("caption").text.startswith("Calls that were"))
    for row in table.all("tr")[1:]:
        assert bool(row.all("svg", "sign")) == ("diverges" in row.text)


def test_words_say_what_signs_say(report: dict[str, Any]) -> None:
    """Where a page in Markdown is read without a font for its signs, no two outcomes look the same."""
    by_word = {word(case): mark(case) for case in report["cases"]}
    assert len(by_word) == len({mark(case) for case in report["cases"]})
    assert all(("unexpected" in word(case)) == (case["expected"] is False) for case in report["cases"])


def test_the_matrix_has_every_case_and_leads_to_it(page: Element, report: dict[str, Any]) -> None:
    links = page.one("table", "matrix").all("a")
    assert len(links) == len(report["cases"])
    for link in links:
        place = page.at(link["href"].removeprefix("#"))
        case = report["cases"][int(place["id"].removeprefix("case-")) - 1]
        assert link.text.startswith(f"{word(case)}: ")
        assert link.one("svg", "sign")["aria-hidden"] == "true"
        assert case["component"] in place.one("h4").text
        assert ("open" in place.attributes) == (case["expected"] is False)


def test_the_matrix_has_the_worst_ratio_of_each_case_and_a_bar(page: Element, report: dict[str, Any]) -> None:
    for cell in page.one("table", "matrix").all("td", "mark"):
        if not cell.all("a"):
            continue
        case = report["cases"][int(cell.one("a")["href"].removeprefix("#case-")) - 1]
        ratios = [number(output["r_rms"]) for output in case["outputs"]]
        worst = max((ratio for ratio in ratios if not math.isnan(ratio)), default=None)
        shown = cell.all("div", "ratio")
        assert len(shown) == (worst is not None)
        for ratio in shown:
            assert worst is not None and digits(worst) in ratio.text
            (bar,) = (each for each in ratio.all("span") if each["style"])
            width = float(bar["style"].removeprefix("width:").removesuffix("%"))
            assert 0 <= width <= 100 and (width == 100 or width >= 100 * worst / 2 - 0.1)


@pytest.mark.parametrize("verdicts", [("strict", "oracle"), ("oracle", "strict")])
def test_outputs_with_the_same_ratio_have_the_limits_of_their_verdicts(verdicts: tuple[str, str]) -> None:
    worst = worst_ratio({"outputs": [{"r_rms": 1.2, "verdict": verdict} for verdict in verdicts]})
    assert worst == WorstRatio(1.2, 1.2 / min(MAX_R_RMS, ORACLE_R_RMS))


def test_the_numbers_are_those_of_the_json(page: Element, report: dict[str, Any]) -> None:
    metrics = ("max_abs", "mean_abs", "max_rel", "required_tolerance", "sqnr_db", "r_rms", "r_inf")
    shown = 0
    for place, case in zip(cases_of(page), report["cases"], strict=True):
        wanted = [
            [
                *(o["name"], f"{o['dtype']} {'×'.join(map(str, o['shape']))}", count(o["elements"])),
                *(count(o["outside"]), *(digits(o[metric]) for metric in metrics), o["verdict"].replace("_", " ")),
            ]
            for o in case["outputs"]
        ]
        table = next((each for each in place.all("table") if each.one("caption").text.startswith("Outputs of")), None)
        # What is one blank to a reader of HTML is several to Unicode.
        assert [[" ".join(text.split()) for text in row] for row in wanted] == (cells(table) if table else [])
        for each, o in zip(outputs_of(place), case["outputs"], strict=True):
            figures = [figure.text for figure in each.one("dl").all("dd")]
            assert (figures[0], figures[1], figures[3]) == tuple(digits(o[m]) for m in ("r_rms", "r_inf", "max_abs"))
            assert o["reason"] in each.text
            shown += 1
        assert case["repro"] in place.raw
    assert shown == report["summary"]["outputs"] > 10


def test_a_histogram_has_a_bar_for_each_count_on_its_side_of_the_gate(page: Element, report: dict[str, Any]) -> None:
    drawn = 0
    for place, case in zip(cases_of(page), report["cases"], strict=True):
        for each, output in zip(outputs_of(place), case["outputs"], strict=True):
            counts = output.get("distribution", {}).get("histogram")
            figures = each.all("svg", "histogram")
            assert bool(figures) == bool(counts)
            if not counts:
                continue
            within, outside = (
                [(float(x), float(height)) for x, height in re.findall(r"M([\d.]+) \d+v-([\d.]+)h", path["d"])]
                for path in figures[0].all("path")
            )
            assert len(within) == sum(map(bool, counts[:WITHIN]))
            assert len(outside) == sum(map(bool, counts[WITHIN:]))
            heights = [height for _, height in within + outside]
            tall = [n for n in counts if n]
            assert [height for _, height in sorted(zip(tall, heights, strict=True))] == sorted(heights)
            told = figures[0].one("desc").text
            assert [int(n.replace(" ", "")) for n in re.findall(r"(\d[\d ]*) (?:above|at most|more)", told)] == tall
            assert sum(counts) == output["elements"] and sum(counts[WITHIN:]) == output["outside"]
            drawn += 1
    assert drawn == 6, "three floating outputs of two cases"


def test_the_map_and_the_masks_are_those_of_the_json(page: Element, report: dict[str, Any]) -> None:
    right, wrong = ({o["name"]: o for o in case["outputs"]} for case in report["cases"][:2])
    named = {o.one("h5").text: o for o in outputs_of(cases_of(page)[1])}
    rows = np.array([[float(value) for value in row.split()] for row in wrong["features"]["distribution"]["largest"]])
    (picture,) = named["features"].all("img")
    shades = decoded(picture["src"])[..., 0].astype(int)
    assert shades.shape == rows.shape == (24, 24)
    lightest, darkest = shades[rows == rows.min()], shades[rows == rows.max()]
    assert (lightest >= shades.max()).all() and (darkest == shades.min()).all()
    row, column = (place[0] + 1 for place in np.nonzero(rows == rows.max()))
    assert f"{digits(float(rows.max()))}, in row {row} and column {column}" in picture["alt"]
    assert math.isclose(rows.max(), wrong["features"]["max_abs"], rel_tol=1e-2)

    for masks, name in ((wrong["pred_masks"], "pred_masks"), (wrong["mask"], "mask")):
        kept = masks["distribution"]["masks"]
        figures = [figure for figure in named[name].all("figure") if figure.all("div", "pair")]
        assert len(figures) == len(kept)
        for figure, mask in zip(figures, kept, strict=True):
            torch, tvm, marks = (decoded(image["src"]) for image in figure.all("img"))
            assert torch.shape[:2] == tvm.shape[:2] == marks.shape[:2] == (32, 96)
            assert marks[..., 3].any()
            inside = [side[..., 0] > 127 for side in (torch, tvm)]
            assert not ((inside[0] != inside[1]) & (marks[..., 3] == 0)).any(), "what is seen to differ is marked"
            assert f"of which {count(mask['differing'])} differ".replace("\u202f", " ") in figure.text
    assert right["pred_masks"]["distribution"]["masks"][0]["marks"] is None
    same = next(o for o in outputs_of(cases_of(page)[0]) if o.one("h5").text == "pred_masks")
    assert "of which none differ" in same.text and not same.all("img", "marks")


def test_a_diagnosis_is_drawn_call_by_call(page: Element, report: dict[str, Any]) -> None:
    place, found = cases_of(page)[1], report["cases"][1]["diagnosis"]
    for line in found["told"].splitlines():
        assert " ".join(line.split()) in place.text
    table = next(each for each in place.all("table") if each.one("caption").text.startswith("Calls that were"))
    diverging = [found["first"]["boundary"]["position"], *found["first"]["others"]]
    assert len(cells(table)) == len(found["boundaries"]) > 3
    for row, boundary in zip(cells(table), found["boundaries"], strict=True):
        assert row[0].split()[0] == str(boundary["position"])
        assert ("diverges" in row[1]) == (boundary["position"] in diverging)
        errors = [boundary[side][ratio] for side in ("local", "accumulated") for ratio in ("r_rms", "r_inf")]
        assert row[3:7] == [digits(error) for error in errors]
        line = re.search(r"[\w.]+\.py:\d+", boundary["source"])
        assert line is None or line[0] in row[8]
    first = place.one("svg", "curves").one("a")
    assert first["href"] == f"#case-2-call-{diverging[0]}"
    assert page.at(first["href"][1:]).tag == "tr"
    assert f"first divergence: call {diverging[0]}" in first.text
    points = place.one("polyline")["points"].split()
    dots = place.one("svg", "curves").all("circle") + place.one("svg", "curves").all("path", "wrongdot")
    assert len(points) == len(dots) <= len(found["boundaries"])
    shares = next(each for each in place.all("table") if each.one("caption").text.startswith("Which kinds"))
    assert [row[:2] for row in cells(shares)] == [
        [kind, f"{100 * share:.1f} %"] for kind, share in found["budget"].items()
    ]


def test_stages_follow_each_other(page: Element, report: dict[str, Any]) -> None:
    for place, case in zip(cases_of(page), report["cases"], strict=True):
        tables = [each for each in place.all("table") if each.one("caption").text.startswith("Stages")]
        assert bool(tables) == bool(case["seconds"])
        for table in tables:
            assert [row[:2] for row in cells(table)] == [[k, seconds(v)] for k, v in case["seconds"].items()]
        steps = timeline(case["seconds"])
        assert not steps or math.isclose(steps[-1].start + steps[-1].length, 100)
        for before, after in pairwise(steps):
            assert math.isclose(before.start + before.length, after.start)


def test_of_an_old_report_the_page_says_what_is_missing(old: dict[str, Any], report: dict[str, Any]) -> None:
    page = parsed(render_page(old))
    assert not page.all("svg", "histogram") and not page.all("img") and not page.all("svg", "curves")
    told = page.text.count("This report does not have how errors are distributed: verify again to see it.")
    floating = [o for case in report["cases"] for o in case["outputs"] if o["dtype"] == "float32"]
    assert told == len([o for o in floating if not math.isnan(number(o["max_abs"]))]) > 5
    assert [each.text for each in page.one("table", "matrix").all("a")] == [
        each.text for each in parsed(render_page(report)).one("table", "matrix").all("a")
    ]


def test_a_report_of_nothing_is_a_page() -> None:
    empty: dict[str, Any] = {"created": "now", "machine": {}, "versions": {}, "cases": []}
    page = parsed(render_page(empty | {"summary": {"cases": 0}}))
    assert "Nothing was verified: no case was run." in page.text


# --- what is no report ---


DISTRIBUTION, DIAGNOSIS = "cases[0].outputs[0].distribution", "cases[1].diagnosis"


@pytest.mark.parametrize(
    ("where", "part", "change"),
    [
        (DISTRIBUTION, "`: `histogram`", {"histogram": [1, 2]}),
        (DISTRIBUTION, ".histogram[0]`", {"histogram": [0.5] * (len(EDGES) + 1)}),
        (DISTRIBUTION, "`: `largest`", {"largest": ["1 2", "3"]}),
        (DISTRIBUTION, "`: `largest`", {"largest": ["1 two"]}),
        (DISTRIBUTION, ".largest`", {"largest": ["1"] * 25}),
        (DISTRIBUTION, ".masks[0]`", {"masks": [{"index": [0]}]}),
        (
            DISTRIBUTION,
            ".masks[0].torch`",
            {"masks": [{"index": [0], "size": [1, 1], "differing": 0, "torch": '">', "tvm": None}]},
        ),
        (DIAGNOSIS, ".told`", {"told": 3}),
        (DIAGNOSIS, ".boundaries[0].position`", {"boundaries": [{"position": "x"}]}),
        (DIAGNOSIS, ".first`", {"first": {}}),
        (DIAGNOSIS, ".budget[...]`", {"budget": {"conv": "much"}}),
    ],
)
def test_what_has_another_form_is_refused(
    tmp_path: Path, report: dict[str, Any], where: str, part: str, change: dict[str, Any]
) -> None:
    damaged = copy.deepcopy(report)
    first, second = damaged["cases"][:2]
    (second["diagnosis"] if where == DIAGNOSIS else first["outputs"][0]["distribution"]).update(change)
    (tmp_path / JSON).write_text(json.dumps(damaged))
    with pytest.raises(HarnessError, match=sentence("not-a-report", error=f"{where}{part}")):
        read_report(tmp_path / JSON)


def test_a_negative_error_is_refused(tmp_path: Path, report: dict[str, Any]) -> None:
    damaged = copy.deepcopy(report)
    damaged["cases"][1]["diagnosis"]["boundaries"][0]["local"]["r_rms"] = -1.0
    (tmp_path / JSON).write_text(json.dumps(damaged))
    with pytest.raises(HarnessError, match=sentence("not-a-report", error="boundaries[0].local.r_rms")):
        read_report(tmp_path / JSON)


def test_an_error_may_have_no_details(tmp_path: Path, report: dict[str, Any]) -> None:
    changed = copy.deepcopy(report)
    error = next(case["error"] for case in changed["cases"] if case["error"])
    error.pop("details")
    (tmp_path / JSON).write_text(json.dumps(changed))
    assert error["message"] in render_page(read_report(tmp_path / JSON))


# --- how it is made ---


def test_it_needs_nothing_beside_it(folder: Path, page: Element) -> None:
    assert page.all("meta")[0]["charset"] == "utf-8"
    assert not page.all("link") and not page.all("iframe")
    assert all(image["src"].startswith("data:image/png;base64,") for image in page.all("img"))
    assert all(link["href"].startswith("#") for link in page.all("a") + page.all("use"))
    text = (folder / PAGE).read_text(encoding="utf-8")
    assert not re.search(r"https?://|@import|url\(", text)
    assert sorted(path.name for path in folder.iterdir()) == ["VERIFICATION_REPORT.md", PAGE, JSON]


@pytest.mark.parametrize("which", ["page", "comparison"])
def test_links_lead_somewhere_and_places_are_one(which: str, request: pytest.FixtureRequest) -> None:
    page = request.getfixturevalue(which)
    places = [each["id"] for each in page if each["id"]]
    assert len(places) == len(set(places))
    assert {link["href"][1:] for link in page.all("a") + page.all("use")} <= set(places)


@pytest.mark.parametrize("which", ["page", "comparison"])
def test_readers_of_the_screen_are_told_everything(which: str, request: pytest.FixtureRequest) -> None:
    page = request.getfixturevalue(which)
    assert page.one("html")["lang"] == "en" and page.one("head").one("title").text and page.one("h1").text
    levels = [int(each.tag[1]) for each in page if re.fullmatch(r"h[1-6]", each.tag)]
    assert all(after <= before + 1 for before, after in pairwise(levels))
    for table in page.all("table"):
        assert table.one("caption").text
        assert all(cell["scope"] in ("row", "col") for cell in table.all("th"))
    for image in page.all("img"):
        assert image["alt"]
    for drawing in page.all("svg"):
        named = [drawing.at(name).text for name in drawing["aria-labelledby"].split()]
        assert drawing["aria-hidden"] == "true" or (drawing["role"] and all(named) and len(named) == 2)
    for box in page.all("div", "box"):
        assert (box["role"], box["tabindex"]) == ("region", "0") and box["aria-label"]


NASTY = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\"'&{{7*7}}"


def test_whatever_is_said_stays_text(report: dict[str, Any], verified: list[Result], tmp_path: Path) -> None:
    told = CaseError(NASTY, NASTY, NASTY)
    outcome = Outcome(Stage.JUDGE, Status.FAILED, told, {"run": 1.0}, {NASTY: 3}, lost_schedules=(NASTY,))
    verdicts = tuple(replace(verdict, name=NASTY, reason=NASTY) for verdict in verified[1].outcome.verdicts)
    result = Result(Case(NASTY, NASTY, NASTY, NASTY), replace(outcome, verdicts=verdicts), False, NASTY, NASTY)
    diagnosis = copy.deepcopy(report["cases"][1]["diagnosis"])
    diagnosis |= {"told": NASTY, "program": NASTY, "budget": {NASTY: 0.5}}
    for boundary in (*diagnosis["boundaries"], diagnosis["first"]["boundary"]):
        boundary |= {"function": NASTY, "node": NASTY, "source": NASTY, "operators": [NASTY], "between": [NASTY]}
    write_report([replace(result, diagnosis=diagnosis)], {NASTY: NASTY}, {NASTY: NASTY}, tmp_path, created=CREATED)
    text = (tmp_path / PAGE).read_text(encoding="utf-8")
    page = parsed(text)
    assert len(page.all("script")) == 1
    assert not [name for each in page for name in each.attributes if name.startswith("on")]
    assert all(image["src"].startswith("data:") for image in page.all("img"))
    assert html.unescape(text).count(NASTY) > 30 and "49" not in page.one("head").one("title").text


# --- the command ---


def sam3_tvm(*arguments: Any) -> str:
    done = CliRunner().invoke(app, ["report", *map(str, arguments)])
    if isinstance(done.exception, HarnessError):
        raise done.exception
    assert done.exit_code == 0, done.output
    return done.output


def test_a_page_is_rendered_again_from_the_json(folder: Path, tmp_path: Path) -> None:
    sam3_tvm(folder / JSON, "--out", tmp_path / "again")
    for name in (PAGE, "VERIFICATION_REPORT.md"):
        assert (tmp_path / "again" / name).read_bytes() == (folder / name).read_bytes()


def test_a_summary_has_the_matrix_and_which_kernel_is_wrong(
    folder: Path, report: dict[str, Any], tmp_path: Path
) -> None:
    summary = tmp_path / "summary.md"
    summary.write_text("before\n")
    sam3_tvm(folder / JSON, "--out", tmp_path, "--summary", summary)
    text = summary.read_text(encoding="utf-8")
    assert text.startswith("before\n# SAM 3 on TVM\n")
    assert f"| photograph | {mark(report['cases'][0])} | {mark(report['cases'][1])} |" in text
    assert "First divergent kernel (certain): call " in text
    assert text.count("\n```sh\n") == report["summary"]["unexpected"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), sentence("no-files")),
        (("--compare", "a.json", "b.json", "--summary", "s.md"), sentence("compare-alone")),
        (("--compare", "a.json", "b.json"), sentence("unreadable-report", path="a.json")),
        (("{json}", "{json}"), sentence("several-reports")),
        (("{folder}/verification_report.html",), sentence("no-out")),
        (("{json}", "--out", "{json}/x"), sentence("cannot-write", advice="--out")),
        (("--compare", "{json}", "{json}", "--out", "{json}/x"), sentence("cannot-write", advice="--out")),
        (("{json}", "--out", "{folder}", "--summary", "{folder}"), sentence("cannot-write", advice="--summary")),
    ],
)
def test_mistakes_end_in_one_sentence(folder: Path, arguments: tuple[str, ...], words: str) -> None:
    with pytest.raises(HarnessError, match=words) as problem:
        sam3_tvm(*(each.format(json=folder / JSON, folder=folder) for each in arguments))
    assert "\n" not in str(problem.value)


# --- two reports ---


def changed(report: dict[str, Any]) -> dict[str, Any]:
    """The report after a change: the wrong case passes, an output is twice as accurate, a case takes half as long."""
    after = copy.deepcopy(report)
    after["cases"][1] |= {"status": "passed", "expected": True, "outputs": copy.deepcopy(after["cases"][0]["outputs"])}
    after["summary"]["unexpected"] -= 1
    after["summary"]["passed"] += 1
    after["cases"][0]["outputs"][0]["r_rms"] /= 2
    after["cases"][0]["seconds"]["compile"] /= 2
    after["versions"]["torch"] = "2.16"
    return after


def test_a_report_is_as_itself(report: dict[str, Any]) -> None:
    found = compare(report, report)
    assert (found.outcomes, found.accuracies, found.environment) == ((), (), ())
    assert (found.cases, found.outputs) == (len(report["cases"]), report["summary"]["outputs"])
    assert all(took.before == took.after or math.isnan(took.before) for took in found.durations)


def test_what_changed_is_on_the_page(folder: Path, report: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "after.json").write_text(json.dumps(changed(report)))
    printed = sam3_tvm("--compare", folder / JSON, tmp_path / "after.json")
    assert f"photograph · real · llvm · shallow · seed 1: {mark(report['cases'][1])} → ✅ strict" in printed
    page = parsed((tmp_path / "verification_comparison.html").read_text(encoding="utf-8"))
    (ended,) = cells(page.at("ended-table"))
    assert ended[:3] == ["photograph · real · llvm · shallow · seed 1", word(report["cases"][1]), "strict"]
    before, after = (number(each["cases"][0]["outputs"][0]["r_rms"]) for each in (report, changed(report)))
    halved = ["photograph · real · llvm · shallow · seed 0", "features", f"{digits(before)} strict"]
    rows = cells(page.at("accuracy-table"))
    assert [row[:4] for row in rows if row[0].endswith("seed 0")] == [[*halved, f"{digits(after)} strict"]]
    assert {row[1] for row in rows if row[0].endswith("seed 1")} == set(small_segmenter.OUTPUTS)
    took = next(row for row in cells(page.at("took-table")) if row[0].startswith("photograph") and row[0][-1] == "0")
    halves = [report["cases"][0]["seconds"]["compile"] * factor for factor in (1, 0.5)]
    assert f"{seconds(halves[0])} → {seconds(halves[1])}" in took
    assert cells(page.at("setting-table")) == [["torch", "2.15", "2.16"]]


def test_a_case_of_one_report_alone_is_told(report: dict[str, Any]) -> None:
    less = copy.deepcopy(report)
    gone = less["cases"].pop(0)
    comparison = compare(report, less)
    (ended,) = comparison.outcomes
    assert (ended.before, ended.after) == (mark(gone), "")
    assert re.match(
        rf"Of {len(less['cases'])} cases?\b.* 0 ended .*; 1 case of one report", summary_sentence(comparison)
    )
    (come,) = compare(less, report).outcomes
    assert (come.before, come.after) == ("", mark(gone))


# --- in a browser ---


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as started:
        yield started


class Window:
    """A page in the browser, which has not complained when it is closed."""

    def __init__(self, browser: Any, path: Path, **options: Any) -> None:
        self.context = browser.new_context(**options)
        self.page = self.context.new_page()
        self.faults: list[str] = []
        self.asked: list[str] = []
        self.page.on("pageerror", lambda error: self.faults.append(str(error)))
        self.page.on("console", lambda message: self.faults.append(message.text))
        self.page.on("request", lambda request: self.asked.append(request.url.partition(":")[0]))
        self.page.goto(path.as_uri())

    def __enter__(self) -> Any:
        return self.page

    def __exit__(self, *_: object) -> None:
        self.context.close()
        assert self.faults == []
        assert set(self.asked) <= {"file", "data"}


def test_a_browser_shows_what_the_json_says(browser: Any, folder: Path, report: dict[str, Any]) -> None:
    with Window(browser, folder / PAGE) as page:
        words = page.locator(".matrix a").all_inner_texts()
        assert [text.partition(":")[0].strip() for text in words] == [
            word(case) for case in sorted(report["cases"], key=lambda case: names_of(report).index(case["component"]))
        ]
        page.get_by_role("button", name="Unfold everything").click()
        shown = page.locator(".output").first.locator("dd").all_inner_texts()
        output = report["cases"][0]["outputs"][0]
        assert (shown[0], shown[3]) == (digits(output["r_rms"]), digits(output["max_abs"]))
        assert page.locator("img").evaluate_all("all => all.every(each => each.complete && each.naturalWidth > 0)")
        bars = page.locator(".histogram .within").first.evaluate("path => path.getBBox().height")
        assert bars == 80
        page.get_by_role("button", name="Fold everything", exact=True).click()
        assert page.locator("details[open]").count() == 0


def names_of(report: dict[str, Any]) -> list[str]:
    return list(dict.fromkeys(case["component"] for case in report["cases"]))


def test_the_keyboard_leads_from_the_matrix_to_a_case_and_on(browser: Any, folder: Path) -> None:
    with Window(browser, folder / PAGE) as page:
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.className") == "skip"
        page.locator(".matrix a").first.focus()
        assert page.locator(":focus").evaluate("each => getComputedStyle(each).outlineStyle") == "solid"
        page.keyboard.press("ArrowRight")
        assert page.evaluate("document.activeElement.getAttribute('href')") == "#case-2"
        page.keyboard.press("ArrowLeft")
        assert not page.locator("#case-1").evaluate("each => each.open")
        page.keyboard.press("Enter")
        page.locator("#case-1[open]").wait_for(state="attached")
        assert page.evaluate("document.activeElement.parentElement.id") == "case-1"
        page.keyboard.press("Enter")
        assert not page.locator("#case-1").evaluate("each => each.open"), "Enter folds it again"
        page.locator(".curves a").focus()
        page.keyboard.press("Enter")
        assert "diverges" in page.locator("tr:focus").inner_text()


def test_it_does_not_scroll_sideways_on_a_phone(browser: Any, folder: Path, tmp_path: Path) -> None:
    sam3_tvm("--compare", folder / JSON, folder / JSON, "--out", tmp_path)
    for path in (folder / PAGE, tmp_path / "verification_comparison.html"):
        with Window(browser, path, viewport={"width": 390, "height": 780}) as page:
            page.evaluate("document.querySelectorAll('details').forEach(each => { each.open = true })")
            assert page.evaluate("document.documentElement.scrollWidth") <= 390
            assert page.locator(".box").evaluate_all("all => all.some(each => each.scrollWidth > each.clientWidth)")


def test_dark_is_dark(browser: Any, folder: Path) -> None:
    colours = {}
    for scheme in ("light", "dark"):
        with Window(browser, folder / PAGE, color_scheme=scheme) as page:
            colours[scheme] = [
                sum(map(int, re.findall(r"\d+", page.evaluate(f"getComputedStyle(document.body).{name}"))[:3]))
                for name in ("backgroundColor", "color")
            ]
    assert colours["light"][0] > 600 > 200 > colours["light"][1]
    assert colours["dark"][0] < 200 < 600 < colours["dark"][1]


def test_without_its_script_it_still_shows_everything(browser: Any, folder: Path) -> None:
    with Window(browser, folder / PAGE, java_script_enabled=False) as page:
        assert page.get_by_role("button").count() == 0
        page.locator("#case-1 > summary").click()
        assert page.locator("#case-1 table").first.is_visible()
