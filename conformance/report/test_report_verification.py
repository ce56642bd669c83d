"""The verification report: the schema of the JSON, and the page that is rendered from it alone."""

from __future__ import annotations

import copy
import json
import math
import re
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conformance.support.sentences import sentence
from harness.core.case import Case
from harness.core.errors import HarnessError
from harness.core.expectations import Expectation
from harness.core.files import make_folder
from harness.core.machine import describe_machine, versions
from harness.core.outcome import CaseError, Device, Kernel, Outcome, Stage, Status, Verdict, VerdictKind
from harness.verify.report import ADVICE, Result, read_report, render_report, repro_command, write_report
from harness.verify.report.verification.document import KERNEL_COLUMNS
from harness.verify.report.verification.schema import jsonable, number
from harness.verify.report.verification.wording import cell, count, digits, seconds, size

CREATED = datetime(2025, 3, 4, 5, 6, 7, tzinfo=UTC)
STRICT = Verdict(
    "backbone_fpn_0", (1, 256, 288, 288), "float32", 21233664, 0, 3.14159e-6, 1.2e-7, 0.0123, 2.9e-6, 121.4, 0.98, 1.04,
    VerdictKind.STRICT,
)  # fmt: skip
PAGES = ["VERIFICATION_REPORT.md", "verification_report.html", "verification_report.json"]
NAN = math.nan
MASK = Verdict("mask", (32,), "bool", 32, 0, 0.0, 0.0, NAN, NAN, NAN, NAN, NAN, VerdictKind.STRICT)
EXACT = replace(STRICT, name="position", sqnr_db=math.inf, max_abs=0.0, r_rms=0.0)
WRONG = replace(
    STRICT, name="pred_masks", outside=17, kind=VerdictKind.FAILED, max_abs=4.2, r_rms=math.inf,
    reason="17 of 21233664 elements outside 1e-5 + 1e-5·|torch|",
)  # fmt: skip
NOISY = replace(STRICT, name="features", outside=5, kind=VerdictKind.ORACLE, reason="5 of 21233664 elements outside")
UNSTABLE = replace(STRICT, name="shaky", kind=VerdictKind.NOT_JUDGEABLE, reason="the reference differs from itself")

TIMES = {"build": 1.25, "export": 0.031, "compile": 75.4, "run": 12.0, "judge": 3.0}


def entry(component: str, strategy: str, why: str, **options: Any) -> Expectation:
    return Expectation((component,), (strategy,), ("*",), ("*",), why=why, where="expectations.toml, line 4", **options)


PREDICTED = {"status": Status.FAILED, "stage": Stage.IMPORT, "error": "NotImplementedError"}
CONTROL = entry("vit", "none", "complex | not handled", **PREDICTED)
LARGE = entry("vit", "real", "PyTorch itself is outside the gate")


def every_status() -> list[Result]:
    """One result for every status and every verdict."""
    unavailable = CaseError("Unavailable", "this machine has no Metal device")
    return [
        Result.from_outcome(
            Case("neck", "real", "llvm"),
            Outcome(Stage.JUDGE, Status.PASSED, None, TIMES, {"library": 5 << 20}, 3 << 30, (STRICT, MASK, EXACT)),
            None,
        ),
        Result.from_outcome(Case("vit", "real", "llvm"), Outcome(Stage.JUDGE, Status.PASSED, verdicts=(NOISY,)), LARGE),
        Result.from_outcome(
            Case("vit", "none", "llvm"),
            Outcome(Stage.IMPORT, Status.FAILED, CaseError("NotImplementedError", "no complex64")),
            CONTROL,
        ),
        Result.from_outcome(
            Case("vit", "none", "metal"), Outcome(Stage.JUDGE, Status.PASSED, verdicts=(STRICT,)), CONTROL
        ),
        Result.from_outcome(
            Case("masks", "real", "llvm"),
            Outcome(Stage.JUDGE, Status.FAILED, CaseError("ParityError", "pred_masks"), verdicts=(WRONG, UNSTABLE)),
            None,
        ),
        Result.from_outcome(
            Case("boxes", "real", "llvm"),
            Outcome(Stage.COMPILE, Status.CRASHED, CaseError("SIGSEGV", "died", "Fatal error:\n```\n  frame 0 <a|b>")),
            None,
        ),
        Result.from_outcome(
            Case("score", "real", "llvm"), Outcome(Stage.RUN, Status.TIMED_OUT, CaseError("Late", "60 s")), None
        ),
        Result.from_outcome(Case("text", "real", "llvm"), Outcome(Stage.RUN, Status.OUT_OF_MEMORY), None),
        Result.from_outcome(Case("neck", "real", "metal"), Outcome(Stage.RUN, Status.UNAVAILABLE, unavailable), None),
    ]


def written(tmp_path: Path, results: list[Result], **options: Any) -> tuple[dict[str, Any], str]:
    machine, installed = {"cpu": "A|B"}, {"torch": "2.15", "tvm": None}
    path = write_report(results, machine, installed, tmp_path, created=CREATED, **options)
    assert sorted(file.name for file in tmp_path.iterdir()) == PAGES
    return read_report(path), (tmp_path / "VERIFICATION_REPORT.md").read_text(encoding="utf-8")


# --- kernels ---


def test_the_kernels_of_a_gpu_target_are_kept_and_told_in_a_line(tmp_path):
    product = Kernel("product", "sm_80", 256, 6912, registers=64, constant_bytes=380, stack_bytes=8, spill_bytes=16)
    copy = Kernel("copy", "sm_80", 1024, 0, registers=8, constant_bytes=368, stack_bytes=0, spill_bytes=0)
    kernels = (product, copy, copy, replace(copy, architecture="sm_90", registers=10))
    outcome = Outcome(Stage.RUN, Status.UNAVAILABLE, CaseError("CannotRun", "no GPU"), kernels=kernels)
    metal = replace(outcome, kernels=(Kernel("copy", "metal", 512, 1024, 3),))
    report, page = written(
        tmp_path,
        [
            Result.from_outcome(Case("vit", "real", name), each, None)
            for name, each in (("cuda", outcome), ("metal", metal))
        ],
    )
    kept = report["cases"][0]["kernels"]
    assert {name: len(rows) for name, rows in kept.items()} == {"sm_80": 2, "sm_90": 1}
    assert dict(zip(KERNEL_COLUMNS, kept["sm_80"][1], strict=True)) == {
        "name": "product", "threads": 256, "shared_bytes": 6912, "buffers": None, "registers": 64,
        "constant_bytes": 380, "stack_bytes": 8, "spill_bytes": 16,
    }  # fmt: skip
    assert "sm_80: 2 kernels, at most 64 registers, 6.75 KiB shared memory, 1024 threads, 1 spill · sm_90: " in page
    assert "metal: 1 kernel, 1 KiB shared memory, 512 threads, 3 buffers" in page


def test_an_emulated_case_is_never_told_as_one_that_a_device_ran(tmp_path):
    ran = Outcome(Stage.JUDGE, Status.PASSED, verdicts=(STRICT,))
    results = [Result.from_outcome(Case("vit", "real", "cuda"), replace(ran, emulated=True), None)]
    results.append(Result.from_outcome(Case("vit", "real", "llvm"), ran, None))
    report, page = written(tmp_path, results)
    assert [case.get("emulated", False) for case in report["cases"]] == [True, False]
    assert report["summary"]["emulated"] == 1
    assert "2 passed, 1 emulated on the CPU, 2 of 2 outputs strict" in page
    assert "| [vit](#vit) | ✅ strict, emulated | ✅ strict |" in page
    assert page.count("Emulated on the CPU: the GPU's kernels were run and judged here, and no GPU ran them.") == 1


@pytest.mark.parametrize(("sent_bytes", "sent"), [(5 << 20, "5 MiB"), (0, "nothing")])
def test_another_machine_that_ran_a_case_is_told(sent_bytes: int, sent: str, tmp_path):
    device = Device("bench", "Zen", "Zen", "llvm", "Linux", "x86_64", 2, "10.0.0.7:9090", sent_bytes)
    outcome = Outcome(Stage.JUDGE, Status.PASSED, verdicts=(STRICT,), device=device)
    _, page = written(tmp_path, [Result.from_outcome(Case("vit", "real", "llvm"), outcome, None)])
    assert f"Ran on {device}; {sent} had to be sent." in page


# --- JSON ---


def test_the_schema_is_the_one_that_is_promised(tmp_path):
    report, _ = written(tmp_path, every_status())
    assert report["schema"] == 1
    assert report["created"] == "2025-03-04T05:06:07+00:00"
    assert {"machine", "versions", "cases", "summary"} <= set(report)
    promised = {
        "component", "strategy", "target", "scale", "seed", "status", "stage", "expected", "error", "seconds",
        "peak_rss_bytes", "repro", "outputs",
    }  # fmt: skip
    measured = {
        "name", "shape", "dtype", "elements", "outside", "max_abs", "mean_abs", "max_rel", "required_tolerance",
        "sqnr_db", "r_rms", "r_inf", "verdict",
    }  # fmt: skip
    for case in report["cases"]:
        assert promised <= set(case)
        for output in case["outputs"]:
            assert measured <= set(output)
    assert {"passed", "expected_failures", "unexpected"} <= set(report["summary"])


def test_what_goes_in_comes_out(tmp_path):
    results = every_status()
    report, _ = written(tmp_path, results)
    assert len(report["cases"]) == len(results)
    for result, case in zip(results, report["cases"], strict=True):
        assert (case["component"], case["strategy"], case["target"]) == (
            result.case.component, result.case.strategy, result.case.target,
        )  # fmt: skip
        assert (case["status"], case["stage"]) == (result.outcome.status, result.outcome.stage)
        assert case["expected"] is result.expected
        assert case["seconds"] == result.outcome.seconds
        for verdict, output in zip(result.outcome.verdicts, case["outputs"], strict=True):
            assert output["verdict"] == verdict.kind
            assert tuple(output["shape"]) == verdict.shape
            for metric in ("max_abs", "mean_abs", "max_rel", "required_tolerance", "sqnr_db", "r_rms", "r_inf"):
                found, wanted = number(output[metric]), getattr(verdict, metric)
                assert found == wanted or (math.isnan(found) and math.isnan(wanted))


def test_every_case_is_counted_once(tmp_path):
    report, _ = written(tmp_path, every_status())
    summary = report["summary"]
    assert (summary["cases"], summary["passed"], summary["expected_failures"]) == (9, 2, 1)
    assert (summary["unexpected"], summary["unavailable"]) == (5, 1)
    assert (summary["outputs"], summary["strict_outputs"], summary["oracle_outputs"]) == (7, 4, 1)
    assert summary["elements_outside"] == 22
    assert summary["worst_r_rms"] == "inf"


def test_the_json_has_neither_nan_nor_infinity(tmp_path):
    written(tmp_path, every_status())

    def refuse(name: str) -> None:
        raise AssertionError(name)

    text = (tmp_path / "verification_report.json").read_text(encoding="utf-8")
    json.loads(text, parse_constant=refuse)


@given(st.floats())
def test_every_float_survives_json(value):
    found = number(json.loads(json.dumps(jsonable(value), allow_nan=False)))
    assert found == value or (math.isnan(found) and math.isnan(value))


def test_the_command_that_reproduces_a_case_can_be_pasted():
    case = Case("vit", "none", "llvm", "full", 3)
    expected = "sam3-tvm verify --component vit --strategy none --target llvm --scale full --seed 3"
    assert repro_command(case) == expected
    assert repro_command(case, ["--checkpoint", "a b.pt"]) == f"{expected} --checkpoint 'a b.pt'"
    drawn = replace(case, weights="outliers")
    assert repro_command(drawn) == expected.replace("--seed", "--weights outliers --seed")


def test_flags_reach_every_command(tmp_path):
    report, page = written(tmp_path, every_status(), flags=["--checkpoint", "sam3.pt"])
    assert all(case["repro"].endswith("--checkpoint sam3.pt") for case in report["cases"])
    assert "--seed 0 --checkpoint sam3.pt\n" in page


def damaged(change: Any) -> Any:
    def apply(report: dict[str, Any]) -> Any:
        result = change(report)
        return report if result is None else result

    return apply


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda r: [r], "Expected `object`, got `array`"),
        (lambda r: r.update(schema=2), "`schema`: Invalid enum value 2"),
        (lambda r: r.pop("schema") and None, "missing required field `schema`"),
        (lambda r: r.pop("machine") and None, "missing required field `machine`"),
        (lambda r: r.update(cases={}), "`cases`: Expected `array`, got `object`"),
        (lambda r: r["cases"].append("case"), "`cases[9]`: Expected `object`, got `str`"),
        (lambda r: r["cases"][1].update(status="fine"), "`cases[1].status`: Invalid enum value 'fine'"),
        (lambda r: r["cases"][1].update(stage="lunch"), "`cases[1].stage`: Invalid enum value 'lunch'"),
        (lambda r: r["cases"][0].update(expected="yes"), "`cases[0].expected`: Expected `bool | null`, got `str`"),
        (lambda r: r["cases"][0].update(seed=True), "`cases[0].seed`: Expected `int`, got `bool`"),
        (lambda r: r["cases"][2].pop("repro") and None, "`cases[2]`: Object missing required field `repro`"),
        (
            lambda r: r["cases"][0]["outputs"][0].update(verdict="maybe"),
            "outputs[0].verdict`: Invalid enum value 'maybe'",
        ),
        (
            lambda r: r["cases"][0]["outputs"][0].update(r_rms="tiny"),
            "`cases[0].outputs[0].r_rms`: Invalid enum",
        ),
        (
            lambda r: r["cases"][0]["outputs"][0].update(max_abs=[]),
            "`cases[0].outputs[0].max_abs`: Expected `float",
        ),
        (lambda r: r["cases"].pop() and None, "does not add up"),
        (lambda r: r["summary"].update(passed=3), "does not add up"),
        (lambda r: r["summary"].pop("unexpected") and None, "`summary`: Object missing required field `unexpected`"),
    ],
)
def test_what_is_not_a_report_is_refused_in_one_sentence(tmp_path, change, words):
    report, _ = written(tmp_path, every_status())
    path = tmp_path / "verification_report.json"
    path.write_text(json.dumps(damaged(change)(copy.deepcopy(report))))
    with pytest.raises(HarnessError) as problem:
        read_report(path)
    assert words in str(problem.value)
    assert "\n" not in str(problem.value)


@pytest.mark.parametrize("content", [None, b"", b"# a page", b'{"schema": NaN}', b"\xff\xfe"])
def test_a_report_that_cannot_be_read_ends_in_one_sentence(tmp_path, content):
    path = tmp_path / "report.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(HarnessError):
        read_report(path)


# --- writing ---


def test_a_folder_that_cannot_be_written_ends_in_one_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    for action in (lambda path: write_report([], {}, {}, path), lambda path: make_folder(path, advice=ADVICE)):
        with pytest.raises(HarnessError, match=sentence("cannot-write", advice="--report")):
            action(tmp_path / "file" / "reports")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_page_that_cannot_be_replaced_leaves_nothing_half_written(tmp_path):
    (tmp_path / "VERIFICATION_REPORT.md").mkdir()
    with pytest.raises(HarnessError, match=sentence("cannot-write")):
        write_report(every_status(), {}, {}, tmp_path, created=CREATED)
    assert not list(tmp_path.glob(".*.tmp"))


def test_a_report_removes_what_a_killed_command_left_of_it(tmp_path):
    for name in (".verification_report.json.1.2.tmp", ".mine.json.1.2.tmp"):
        (tmp_path / name).write_text("half")
    write_report(every_status(), {}, {}, tmp_path, created=CREATED)
    assert [path.name for path in tmp_path.glob(".*")] == [".mine.json.1.2.tmp"]


def test_a_new_report_replaces_the_old_one(tmp_path):
    written(tmp_path, every_status())
    report, page = written(tmp_path, every_status()[:1])
    assert len(report["cases"]) == 1
    assert "### masks" not in page


# --- the page ---


def test_the_page_has_its_sections_in_order(tmp_path):
    _, page = written(tmp_path, every_status())
    headings = re.findall(r"^#+ .*$", page, re.M)
    assert headings == [
        "# SAM 3 on TVM: verification report",
        "## At a glance",
        "## Not as expected",
        "## Known discrepancies",
        "## Skipped",
        "## Components",
        "### neck",
        "### vit",
        "### masks",
        "### boxes",
        "### score",
        "### text",
        "## How to read the numbers",
        "## Before you ship",
        "## Time and size",
        "## Machine and versions",
    ]
    assert page.splitlines()[2].startswith("❌ **5 of 9 cases not as expected:** 2 passed, 1 failed as predicted")


def test_the_matrix_shows_every_case_with_its_status(tmp_path):
    _, page = written(tmp_path, every_status())
    table = page.split("## At a glance\n\n")[1].split("\n\n")[0].splitlines()
    columns = ("real · llvm", "none · llvm", "none · metal", "real · metal")
    assert table == [
        f"| component | {' | '.join(f'{column} · shallow' for column in columns)} |",
        "| --- | --- | --- | --- | --- |",
        "| [neck](#neck) | ✅ strict | · | · | ⏭ compiled |",
        "| [vit](#vit) | 🔷 oracle | ⛔ failed (import) | ❌ unexpected pass | · |",
        "| [masks](#masks) | ❌ unexpected failed (judge) | · | · | · |",
        "| [boxes](#boxes) | ❌ unexpected crashed (compile) | · | · | · |",
        "| [score](#score) | ❌ unexpected timed out (run) | · | · | · |",
        "| [text](#text) | ❌ unexpected out of memory (run) | · | · | · |",
    ]


def test_every_table_is_well_formed(tmp_path):
    _, page = written(tmp_path, every_status())
    for block in re.findall(r"(?:^\|.*\n)+", page, re.M):
        widths = {len(re.findall(r"(?<!\\)\|", row)) for row in block.splitlines()}
        assert len(widths) == 1, block
        assert all(row.endswith("|") for row in block.splitlines())


def test_the_error_table_has_every_number_with_few_digits(tmp_path):
    _, page = written(tmp_path, every_status())
    section = page.split("### neck")[1].split("###")[0]
    row = next(line for line in section.splitlines() if line.startswith("| backbone_fpn_0"))
    assert [part.strip() for part in row.strip("|").split("|")] == [
        "backbone_fpn_0", "float32 1\u00d7256\u00d7288\u00d7288", count(21233664), "0",
        "3.1e-6", "1.2e-7", "0.0123", "2.9e-6", "121", "0.98", "1.04", "strict",
    ]  # fmt: skip
    mask = next(line for line in section.splitlines() if line.startswith("| mask"))
    assert mask.count("\u2013") == 5


def test_every_failure_comes_with_its_reason_and_the_command_to_reproduce_it(tmp_path):
    report, page = written(tmp_path, every_status())
    section = page.split("## Not as expected")[1].split("## Known discrepancies")[0]
    for case in report["cases"]:
        assert (case["repro"] in section) == (case["expected"] is False)
    assert section.count("```sh") == 5
    assert "frame 0 <a|b>" in section  # in a code block, as it was
    assert "unexpected pass" in section


def test_known_discrepancies_come_with_their_causes(tmp_path):
    _, page = written(tmp_path, every_status())
    section = page.split("## Known discrepancies")[1].split("\n## ")[0]
    assert "complex \\| not handled" in section
    assert "PyTorch itself is outside the gate" in section


def test_a_run_without_surprises_says_so_and_shows_no_section_of_them(tmp_path):
    results = [result for result in every_status() if result.expected]
    _, page = written(tmp_path, results)
    assert page.splitlines()[2].startswith("✅ **3 cases, all as expected:** 2 passed, 1 failed as predicted")
    assert "## Not as expected" not in page


def test_a_run_that_verified_nothing_does_not_look_like_a_success(tmp_path):
    _, empty = written(tmp_path, [])
    assert "**Nothing was verified:**" in empty.splitlines()[2]
    _, skipped = written(tmp_path, every_status()[-1:])
    assert "**Nothing was verified: 1 case skipped:** 0 passed, 1 compiled and not run." in skipped.splitlines()[2]
    missing = replace(every_status()[-1], outcome=Outcome(Stage.BUILD, Status.UNAVAILABLE, CaseError("No", "no nvcc")))
    _, unable = written(tmp_path, [missing])
    assert "**Nothing was verified: 1 case skipped:** 0 passed, 1 not available here." in unable.splitlines()[2]
    assert "⏭ unavailable |" in unable and "⏭ compiled |" not in unable
    assert "✅ **" not in empty + skipped + unable


def test_several_seeds_are_told_apart(tmp_path):
    first = every_status()[0]
    other = replace(first, case=replace(first.case, seed=1))
    _, page = written(tmp_path, [first, other])
    assert "real · llvm · shallow · seed 0 | real · llvm · shallow · seed 1" in page
    _, alone = written(tmp_path, [other])
    provenance = "2025-03-04T05:06:07+00:00 · A\\|B · PyTorch 2.15"
    assert f"\n{provenance}\n" in page and f"\n{provenance} · seed 1\n" in alone


def test_weights_are_told_apart_and_what_judges_them(tmp_path):
    even = every_status()[0]
    uneven = Outcome(Stage.JUDGE, Status.PASSED, verdicts=(NOISY,))
    outliers = Result.from_outcome(replace(even.case, weights="outliers"), uneven, None)
    report, page = written(tmp_path, [even, outliers])
    assert [case.get("weights") for case in report["cases"]] == [None, "outliers"]
    assert [case["expected"] for case in report["cases"]] == [True, True]
    assert "real · llvm · shallow | real · llvm · shallow · outliers" in page
    assert page.count("Weights with the outliers of trained ones") == 1


def test_the_page_is_rendered_from_the_json_alone(tmp_path):
    report, page = written(tmp_path, every_status())
    assert render_report(read_report(tmp_path / "verification_report.json")) == page
    assert render_report(report) == page


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"), (None, "\u2013"), ("inf", "∞"), ("-inf", "-∞"), (1.23456e-5, "1.2e-5"), (0.0123456, "0.0123"),
        (1.5, "1.5"), (121.44, "121"), (12345.6, "1.2e4"), (-0.5, "-0.5"), (999.4, "999"), (999.96, "1.0e3"),
    ],
)  # fmt: skip
def test_numbers_have_two_or_three_digits(value, text):
    assert digits(value) == text


def test_durations_sizes_and_counts_are_readable():
    assert [seconds(x) for x in (0.0314, 1.25, 75.4, 3600)] == ["31 ms", "1.2 s", "1 min 15 s", "60 min 0 s"]
    assert seconds(None) == "\u2013"
    assert [size(x) for x in (0, None, 500, 5 << 20, 3 << 30)] == ["\u2013", "\u2013", "500 B", "5 MiB", "3 GiB"]
    assert count(1327104) == "1\u202f327\u202f104"
    assert cell("a|b\n<c>") == "a\\|b &lt;c&gt;"


# --- the machine ---


def test_the_machine_is_described_with_what_numbers_depend_on():
    machine = describe_machine()
    assert json.loads(json.dumps(machine)) == machine
    assert {"cpu", "features", "cpus", "affinity", "cgroup_cpus", "memory_bytes", "system", "python"} <= set(machine)
    assert 1 <= machine["usable_cpus"] <= machine["cpus"] or 0 < machine["usable_cpus"] < 1
    assert machine["usable_memory_bytes"] > 1 << 28
    assert machine["python"].startswith("3.")


def test_the_gpus_are_those_that_their_driver_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert describe_machine()["gpus"] == []
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho NVIDIA H200\necho NVIDIA L4\n", encoding="utf-8")
    tool.chmod(0o755)
    assert describe_machine()["gpus"] == ["NVIDIA H200", "NVIDIA L4"]


def test_the_versions_name_what_is_installed_and_what_is_not():
    found = versions()
    assert found["numpy"] == __import__("numpy").__version__
    assert "apache-tvm" in found and "sam3" in found
    assert all(version is None or version[0].isdigit() for version in found.values())
