"""The performance report: what is read from pytest-benchmark's JSON, what is made of it, the page and its plots."""

from __future__ import annotations

import json
import math
import random
import re
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from typer.testing import CliRunner

from conformance.support.benchmarked import run_benchmarks
from harness.cli.main import app
from harness.core.case import DEFAULT_STRATEGY, Case, Scale
from harness.core.errors import HarnessError
from harness.core.settings import REPOSITORY
from harness.core.weights import Weights
from harness.models.registry import subjects
from harness.report.performance import findings, write_performance_report
from harness.report.performance.cases import recorded_case, variant_of
from harness.report.performance.document import GOALS, build_sections, judge_goal, median_interval, ratio, shares
from harness.report.performance.formatting import duration
from harness.report.performance.markdown import render_page
from harness.report.performance.plots import shortened
from harness.report.performance.reading import KernelTime, Measurement, read_result, read_results
from perf.tables import component_tables

MACHINE = {
    "cpu": "Test CPU | 1",
    "features": ["avx2", "fma"],
    "usable_cpus": 2,
    "threads": 2,
    "memory_bytes": 16 << 30,
    "system": "Linux 6.1.0",
}
PEAK = 5.0e11


# Files


def side(seconds: Sequence[float], **others: Any) -> dict[str, Any]:
    """A side as the suites write it, of raw rounds; every figure follows from them."""
    ordered = sorted(seconds)

    def percentile(q: float, enough: int) -> float | str:
        return ordered[math.ceil(q * len(ordered)) - 1] if len(ordered) >= enough else "n/a"

    return {
        "seconds": list(seconds),
        "median": statistics.median(seconds),
        "mean": statistics.fmean(seconds),
        "p95": percentile(0.95, 20),
        "p99": percentile(0.99, 100),
        "throughput": len(seconds) / sum(seconds),
        "first_call": 2 * ordered[-1],
        "compile_seconds": 12.5,
        "load_seconds": 0.25,
        "memory": {"weights_bytes": 3 << 20, "run_bytes": 5 << 20, "peak_bytes": 8 << 20},
        "worst_r_rms": 0.75,
        "verdict": "strict",
    } | others


def rounds(center: float, count: int, seed: int) -> list[float]:
    generator = random.Random(seed)
    return [center * (1 + abs(generator.gauss(0, 0.02))) for _ in range(count)]


def three_sides(torch: float, untuned: float, tuned: float | None, count: int = 30) -> dict[str, dict[str, Any]]:
    centers = {"torch": torch, "untuned": untuned} | ({} if tuned is None else {"tuned": tuned})
    return {name: side(rounds(center, count, seed)) for seed, (name, center) in enumerate(centers.items())}


def component(name: str, sides: Mapping[str, Any], **others: Any) -> dict[str, Any]:
    """A benchmark of perf/test_components.py."""
    case = Case(name, DEFAULT_STRATEGY, "llvm", Scale.FULL)
    timed = {key: value["median"] for key, value in sides.items() if "median" in value}
    ours = "tuned" if "tuned" in timed else "untuned"
    extra = {
        "case": case.to_json(),
        "threads": 2,
        "machine": MACHINE,
        "versions": {"apache-tvm": "0.27.0", "torch": "2.13.0"},
        "sides": sides,
        "ratios": {f"torch_over_{key}": timed["torch"] / timed[key] for key in timed if key != "torch"},
        "peak_flops": PEAK,
        "peak_bandwidth": 4.0e10,
        "flop": 0.8 * PEAK * timed.get(ours, 1.0),
        "profiled": ours,
        "kernels": [
            {"name": "product_gelu", "size": "8x4 · 4x2", "calls": 4, "seconds": 0.06, "flop": 2.4e10, "bytes": 9e7},
            {"name": "layer_norm", "calls": 8, "seconds": 0.03, "flop": None, "bytes": 3e8},
            *({"name": f"add{n}", "calls": 1, "seconds": 0.001, "flop": None, "bytes": 1e6} for n in range(10)),
        ],
    }
    return {"name": f"test_component[{case.id}]", "group": None, "extra_info": extra | others, "stats": {}}


def question(what: str, sides: Mapping[str, Any]) -> dict[str, Any]:
    """A benchmark of perf/test_end_to_end.py."""
    case = Case("end_to_end", DEFAULT_STRATEGY, "llvm", Scale.FULL).to_json()
    extra = {"what": what, "case": case, "threads": 2, "machine": MACHINE, "sides": sides, "ratios": {}}
    return {"name": f"test_end_to_end[{what}]", "group": None, "extra_info": extra, "stats": {}}


def kernel(name: str, group: str, bound: str, work: float, ours: float, theirs: float) -> dict[str, Any]:
    """A benchmark of perf/test_kernels.py."""
    extra = {
        "group": group,
        "kernel": name,
        "shape": "4×4 · 4×4",
        "bound": bound,
        "work": work,
        "moved": 1e7,
        "peaks": [PEAK, PEAK] if bound == "compute" else [4e10, 4e10],
        "rate": work / ours,
        "torch_rate": work / theirs,
        "tvm_median": ours,
        "torch_median": theirs,
        "threads": 2,
        "machine": MACHINE,
    }
    return {"name": f"test_kernel[{name}]", "group": group, "extra_info": extra, "stats": {}}


def write(path: Path, *benchmarks: Mapping[str, Any], **others: Any) -> Path:
    data = {
        "machine_info": {},
        "commit_info": {"id": "0123456789abcdef", "dirty": False},
        "benchmarks": list(benchmarks),
        "datetime": "2025-03-04T05:06:07+00:00",
        "version": "5.0",
    }
    path.write_text(json.dumps(data | others), encoding="utf-8")
    return path


def page_of(folder: Path, *results: Path) -> str:
    """The page, which is written into `docs` of a folder."""
    return write_performance_report(results, folder / "docs").read_text(encoding="utf-8")


@pytest.fixture
def perf_json(tmp_path: Path) -> Path:
    peers = {"openvino f32": side(rounds(0.21, 30, 7)), "onnxruntime": {"error": "no such operator | 3"}}
    return write(
        tmp_path / "perf.json",
        component("vision_backbone", three_sides(0.5, 0.25, 0.2) | peers),
        component("box_head", three_sides(0.0011, 0.0012, 0.0008, 120)),
        question("photo and text", three_sides(14.0, 7.0, 6.5, 7)),
        kernel("qkv", "linear layers of the ViT", "compute", 3.2e10, 0.08, 0.18),
        kernel("add", "elementwise", "memory", 1e7, 0.0005, 0.0003),
        {"name": "test_the_sides_take_turns", "extra_info": {}},
    )


@pytest.fixture
def one(tmp_path: Path) -> Callable[[Mapping[str, Any]], Measurement]:
    """Reads a single benchmark."""

    def read(benchmark: Mapping[str, Any]) -> Measurement:
        return read_result(write(tmp_path / "one.json", benchmark)).measurements[0]

    return read


# The page


def test_every_figure_is_traced_to_its_file(perf_json: Path, tmp_path: Path) -> None:
    page = page_of(tmp_path, perf_json)
    origin = page[page.index("## Where the figures come from") :]
    for benchmark in json.loads(perf_json.read_text(encoding="utf-8"))["benchmarks"][:-1]:
        assert f"| `perf.json` | `{benchmark['name']}` |" in origin
    assert "test_the_sides_take_turns in perf.json" in page
    assert "Test CPU \\| 1, 2 threads" in page and "2025-03-04 05:06 UTC" in page and "0123456789ab" in page
    assert "TVM 0.27.0" in page and "PyTorch 2.13.0" in page
    assert "| `product_gelu` | 8x4 · 4x2 | 4 |" in page


def test_every_latency_is_that_of_the_json(perf_json: Path, tmp_path: Path) -> None:
    page = page_of(tmp_path, perf_json)
    rows = [
        line.split(" | ") for line in page.splitlines() if re.search(r"\| (PyTorch|TVM (un)?tuned) \| \d+ \|", line)
    ]
    written = iter(rows)
    for benchmark in json.loads(perf_json.read_text(encoding="utf-8"))["benchmarks"][:3]:
        for name in ("torch", "untuned", "tuned"):
            figures, row = benchmark["extra_info"]["sides"][name], next(written)
            percentiles = [figures[key] if figures[key] == "n/a" else duration(figures[key]) for key in ("p95", "p99")]
            assert row[2] == str(len(figures["seconds"]))
            assert row[3] == duration(figures["median"])
            assert row[5] == f"{duration(min(figures['seconds']))} – {duration(max(figures['seconds']))}"
            assert row[7:9] == percentiles
    assert next(written, None) is None


def test_the_summary_says_what_is_reached(perf_json: Path, tmp_path: Path) -> None:
    page = page_of(tmp_path, perf_json)
    lines = page.splitlines()
    untuned, tuned, openvino, gain = (
        next(line for line in lines if line.startswith(f"| {goal.what} |")) for goal in GOALS
    )
    assert "❌ not reached" in untuned and "1 of 2 below 1: box_head 0.9" in untuned
    assert "✅ reached" in tuned and "all 2 at 1.2 or above, the least is box_head with 1.3" in tuned
    assert "✅ reached" in openvino and "vision_backbone 1.0" in openvino and "aim of 1.1 is not reached" in openvino
    assert "✅ reached" in gain and "photo and text +8.5 %" in gain and "aim of 10 % is not reached" in gain
    assert "❌ **1 of 4 measured goals not reached**" in page


def test_a_gpu_is_named_and_has_no_share_of_the_cpus_peak(tmp_path: Path) -> None:
    sides = three_sides(7.4, 0.2, None) | {"torch cuda": side(rounds(0.15, 30, 3))}
    benchmark = component("vit", sides, machine=MACHINE | {"gpus": ["NVIDIA H200"]})
    found = benchmark["extra_info"]
    found["case"]["target"], found["sample"], found["note"] = "cuda", "", ""
    for figure in found["sides"].values():
        figure |= {"first_call": 1.0, "memory": None, "mean": 1.0, "throughput": 1.0}
    del found["peak_flops"], found["peak_bandwidth"]
    page, table = page_of(tmp_path, write(tmp_path / "gpu.json", benchmark)), component_tables([found])
    assert "Test CPU \\| 1, 2 threads, NVIDIA H200" in page and "PyTorch on the GPU" in page
    assert "product_gelu" in page and "of the measured peak" not in page and "roofline_components" not in page
    assert "on 2 threads of Test CPU | 1, NVIDIA H200\n" in table + "\n" and "peaks in the same run" not in table


def test_plots_are_pictures_that_the_page_shows(perf_json: Path, tmp_path: Path) -> None:
    page = write_performance_report([perf_json], tmp_path / "docs")
    shown = set(re.findall(r"!\[[^]]+\]\(([^)]+)\)", page.read_text(encoding="utf-8")))
    written = {path.relative_to(page.parent).as_posix() for path in page.parent.rglob("*") if path.is_file()}
    assert written == shown | {page.name}
    names = ("speedup", "latency", "end_to_end", "roofline", "roofline_components", "kernels", "peers")
    assert shown == {f"performance/{name}.png" for name in names}
    for name in shown:
        assert (page.parent / name).read_bytes().startswith(b"\x89PNG")


def test_the_same_results_give_the_same_bytes(perf_json: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import matplotlib

    first = write_performance_report([perf_json], tmp_path / "first").parent
    with matplotlib.rc_context({"font.size": 30, "axes.facecolor": "red"}):  # a user's own style
        second = write_performance_report([perf_json], tmp_path / "second").parent
        assert matplotlib.rcParams["font.size"] == 30
    files = sorted(path.relative_to(first) for path in first.rglob("*") if path.is_file())
    assert len(files) == 8
    for file in files:
        assert (first / file).read_bytes() == (second / file).read_bytes(), file


def test_failures_of_peers_are_told_and_what_fails_the_gate_is_flagged(tmp_path: Path) -> None:
    sides = three_sides(0.5, 0.25, 0.2)
    failed = {"verdict": "failed", "reason": "masks: 3 of 4 elements outside", "worst_r_rms": 1234.0}
    sides["openvino"] = side(rounds(0.1, 30, 5), **failed, setting="no hints", computes_in="bf16")
    sides["torch.compile"] = {"error": "a graph break\nin two lines"}
    path = write(tmp_path / "perf.json", component("vit", sides))
    page = page_of(tmp_path, path)
    assert "⚠ vit, OpenVINO does not pass the parity gate" in page and "masks: 3 of 4 elements outside" in page
    assert re.search(r"\| vit \| .* \| OpenVINO \| .* \| failed \| 1234 \|", page)
    assert "- OpenVINO: no hints; it computed in bf16 (vit)" in page
    assert "- vit, torch.compile: a graph break in two lines" in page


def test_openvino_of_files_that_do_not_tell_its_setting_was_set_to_f32(
    one: Callable[[Mapping[str, Any]], Measurement],
) -> None:
    sides, peer = three_sides(0.5, 0.25, 0.2), rounds(0.3, 30, 5)
    assert one(component("vit", sides | {"openvino": side(peer)})).sides.keys() == {*sides, "openvino f32"}
    assert one(component("vit", sides | {"openvino": {"error": "no"}})).absent == {"openvino f32": "no"}
    new = {"openvino": side(peer, setting="no hints"), "openvino f32": side(peer, setting="f32")}
    found = one(component("vit", sides | new))
    assert found.sides.keys() == {*sides, *new} and found.sides["openvino"].setting == "no hints"


def test_without_tuning_the_page_says_so(tmp_path: Path) -> None:
    path = write(tmp_path / "perf.json", component("vit", three_sides(0.5, 0.25, None)))
    page = page_of(tmp_path, path)
    (line,) = (line for line in page.splitlines() if line.startswith(f"| {GOALS[1].what} |"))
    assert "⏭ not measured" in line and "no schedules of its kernels were tried on this machine" in line


@pytest.mark.parametrize("absent", ["tuned", "untuned"])
def test_one_of_ours_is_enough(tmp_path: Path, absent: str) -> None:
    sides = three_sides(0.5, 0.25, 0.2)
    del sides[absent]
    # The whole model has both: what is tuned there says nothing of the component.
    path = write(tmp_path / "perf.json", component("vit", sides), question("second text", three_sides(3.0, 1.6, 1.5)))
    page = page_of(tmp_path, path)
    assert "| second text | 1." in page and "| vit | 50" in page
    assert (tmp_path / "docs" / "performance" / "speedup.png").is_file()


def test_where_tuning_changed_nothing_untuned_is_tuned(
    tmp_path: Path, one: Callable[[Mapping[str, Any]], Measurement]
) -> None:
    benchmark = component("vit", three_sides(0.5, 0.25, None), note="tuning found nothing over the defaults")
    measurement = one(benchmark)
    assert ratio(measurement, "torch", "tuned") == ratio(measurement, "torch", "untuned")
    gain = ratio(measurement, "untuned", "tuned")
    assert gain is not None and gain.value == 1
    page = page_of(tmp_path, write(tmp_path / "a.json", benchmark))
    assert "| nothing found |" in page


def test_two_machines_are_two_sections(tmp_path: Path) -> None:
    here = component("vit", three_sides(0.5, 0.25, 0.2))
    there = component("vit", three_sides(0.9, 0.5, 0.4), machine=MACHINE | {"cpu": "Another CPU"})
    fewer = component("vit", three_sides(0.9, 0.5, 0.4), threads=1)
    files = [write(tmp_path / f"{n}.json", benchmark) for n, benchmark in enumerate((here, there, fewer))]
    page = page_of(tmp_path, *files)
    headings = [line for line in page.splitlines() if line.startswith("## ")]
    assert headings[:3] == [
        "## Test CPU \\| 1, 2 threads (0.json)",
        "## Another CPU, 2 threads (1.json)",
        "## Test CPU \\| 1, 1 thread (2.json)",
    ]
    assert len(list((tmp_path / "docs" / "performance").glob("speedup-*.png"))) == 3


def test_of_two_runs_the_newer_one_is_shown(tmp_path: Path) -> None:
    new = write(tmp_path / "new.json", component("vit", three_sides(0.5, 0.25, 0.2)))
    old = write(
        tmp_path / "old.json",
        component("vit", three_sides(0.5, 0.4, 0.3)),
        component("box_head", three_sides(0.5, 0.4, 0.3)),
        datetime="2025-03-01T00:00:00+00:00",
    )
    (section,) = build_sections(read_results([old, new]))
    assert [(m.name, m.source.file) for m in section.components] == [("vit", "new.json"), ("box_head", "old.json")]
    assert section.components[0].sides["untuned"].median < 0.3
    assert section.superseded == ("test_component[vit-real-llvm-full] in old.json",)


# Cases


def test_a_half_precision_is_no_scale(tmp_path: Path) -> None:
    half = Case("box_head", DEFAULT_STRATEGY, "cuda", precision="fp16")
    plain = component("vit", three_sides(0.5, 0.25, None), case=Case("vit", DEFAULT_STRATEGY, "cuda").to_json())
    path = write(tmp_path / "a.json", component("box_head", three_sides(0.5, 0.25, None), case=half.to_json()), plain)
    (section,) = build_sections(read_results([path]), order=("vit", "box_head"))
    assert [(m.case, m.scale) for m in section.components] == [
        (Case("vit", DEFAULT_STRATEGY, "cuda"), Scale.SHALLOW),
        (half, Scale.SHALLOW),
    ]
    assert list(section.names.values()) == ["vit", "box_head (fp16)"]
    assert section.scales == (Scale.SHALLOW,)
    assert list(section.goals[0].values) == ["vit"]  # the goals are for fp32
    page = page_of(tmp_path, path)
    assert " · shallow scale" in page and "- In **half precision**, r_rms is over" in page


def test_precisions_of_a_component_stand_beside_each_other(tmp_path: Path) -> None:
    cases = [Case("vit", DEFAULT_STRATEGY, "cuda", precision=precision) for precision in ("fp32", "fp16", "bf16")]
    benchmarks = [component("vit", three_sides(0.5, 0.25, None), case=case.to_json()) for case in cases]
    (section,) = build_sections(read_results([write(tmp_path / "a.json", *benchmarks)]))
    variants = ("", " · fp16", " · bf16")
    assert list(section.names.values()) == [f"vit (real · cuda · shallow{variant})" for variant in variants]
    assert section.superseded == ()


def test_a_sample_is_an_entry_of_its_own(tmp_path: Path) -> None:
    main, second = three_sides(6.0, 2.0, None), three_sides(3.0, 1.5, None)
    benchmarks = component("memory_attention", main), component("memory_attention", second, sample="second")
    (section,) = build_sections(read_results([write(tmp_path / "perf.json", *benchmarks)]))
    assert list(section.names.values()) == [
        "memory_attention (real · llvm · full)",
        "memory_attention (real · llvm · full · second)",
    ]
    assert [found.value for found in section.goals[0].values.values()] == pytest.approx([3.0, 2.0], rel=0.1)


def former(benchmark: Mapping[str, Any]) -> dict[str, Any]:
    """The benchmark as it was written when a case was its id, and a question had only a scale."""
    extra = dict(benchmark["extra_info"])
    if "case" in extra:
        case = Case.from_json(extra.pop("case"))
        extra |= {"scale": str(case.scale)} if "what" in extra else {"case": case.id}
    return {**benchmark, "extra_info": extra}


def test_files_with_ids_of_cases_give_the_same_page(perf_json: Path, tmp_path: Path) -> None:
    benchmarks = json.loads(perf_json.read_text(encoding="utf-8"))["benchmarks"]
    half = Case("vit", DEFAULT_STRATEGY, "cuda", Scale.FULL, precision="bf16")
    benchmarks.append(component("vit", three_sides(0.5, 0.25, 0.2), case=half.to_json()))
    (tmp_path / "former").mkdir()
    now, before = tmp_path / "perf.json", tmp_path / "former" / "perf.json"
    write(now, *benchmarks)
    write(before, *map(former, benchmarks))
    assert now.read_text(encoding="utf-8") != before.read_text(encoding="utf-8")
    pages = []
    for path in (now, before):
        files = read_results([path])
        sections = build_sections(files)
        pages.append(render_page(sections, [{}] * len(sections), files))
    assert pages[0] == pages[1] and "vit (bf16)" in pages[0]


def test_the_page_in_docs_is_that_of_its_files() -> None:
    docs, machines = REPOSITORY / "docs", ("zen5", "xeon")
    folder = docs / "performance"
    files = read_results([file for name in machines for file in sorted(folder.glob(f"{name}-*.json"))])
    places: list[dict[str, str]] = [
        {path.stem.removesuffix(f"-{n}"): f"performance/{path.name}" for path in folder.glob(f"*-{n}.png")}
        for n, _ in enumerate(machines, 1)
    ]
    page = (docs / "PERFORMANCE_REPORT.md").read_text(encoding="utf-8")
    assert render_page(build_sections(files, order=list(subjects())), places, files) == page


@given(
    st.builds(
        Case,
        st.sampled_from(["vit", "end_to_end"]),
        st.sampled_from(["real", "tensorir"]),
        st.sampled_from(["llvm", "cuda"]),
        st.sampled_from(list(Scale)),
        precision=st.sampled_from(["fp32", "fp16", "bf16"]),
    ),
    st.integers(0, 3),
    st.sampled_from(list(Weights)),
)
def test_a_case_is_read_from_its_fields_and_from_its_id(case: Case, seed: int, weights: Weights) -> None:
    assert recorded_case({"case": case.id}) == case
    drawn = replace(case, seed=seed, weights=weights)
    written = json.loads(json.dumps(drawn.to_json()))
    assert recorded_case({"case": written}) == drawn
    assert (weights in variant_of(drawn)) is (weights is Weights.OUTLIERS)
    del written["weights"]  # as files had it before there was a choice
    assert recorded_case({"case": written}) == replace(drawn, weights="seeded")


@pytest.mark.parametrize(
    "data", ["vit", "vit-real-llvm-fp16", "vit-real-llvm-full-fp8", {}, {"component": "vit"}, 3, {"component": 3}]
)
def test_what_is_no_case_is_refused(tmp_path: Path, data: object) -> None:
    path = write(tmp_path / "perf.json", component("vit", three_sides(0.5, 0.25, None), case=data))
    with pytest.raises(HarnessError, match="`case` of test_component"):
        read_results([path])


# The figures

times = st.lists(st.floats(1e-6, 1e3), min_size=1, max_size=130)


@given(times, times, st.booleans())
@example([1.0] * 19, [1.0] * 20, False)
@example([1.0] * 99, [1.0] * 100, False)
def test_percentiles_take_rounds_and_ratios_are_of_medians(
    tmp_path_factory: pytest.TempPathFactory, torch: list[float], ours: list[float], paired: bool
) -> None:
    if paired:
        length = min(len(torch), len(ours))
        torch, ours = torch[:length], ours[:length]
    path = tmp_path_factory.getbasetemp() / "hypothesis.json"
    sides = {"torch": side(torch), "untuned": side(ours)}
    measurement = read_result(write(path, component("vit", sides))).measurements[0]
    for read in measurement.sides.values():
        assert (read.p95 is None) == (len(read.seconds) < 20)
        assert (read.p99 is None) == (len(read.seconds) < 100)
        assert min(read.seconds) <= read.quartiles[0] <= read.quartiles[1] <= max(read.seconds)
    found = ratio(measurement, "torch", "untuned")
    assert found is not None
    assert found.value == statistics.median(torch) / statistics.median(ours)
    if found.low is not None and found.high is not None:
        assert len(torch) == len(ours) >= 6
        assert found.low <= found.value <= found.high
    assert ratio(measurement, "torch", "openvino") is None


@given(st.lists(st.floats(0.1, 10), min_size=1, max_size=200))
def test_the_interval_of_a_median_is_the_tightest_that_is_sure_enough(samples: list[float]) -> None:
    interval = median_interval(samples)
    count = len(samples)

    def missed(rank: int) -> float:
        """Probability that the median is outside the order statistics of this rank from both ends."""
        return 2 * sum(math.comb(count, k) for k in range(rank + 1)) / 2**count

    if interval is None:
        assert missed(0) > 0.05
        return
    ordered = sorted(samples)
    rank = max(rank for rank in range(math.ceil(count / 2)) if missed(rank) <= 0.05)
    assert interval == (ordered[rank], ordered[count - 1 - rank])
    assert interval[0] <= statistics.median(samples) <= interval[1]


kernel_times = st.lists(
    st.builds(
        KernelTime,
        st.sampled_from("abcdefghijkl"),
        st.just("2x3 · 3x4"),
        st.integers(1, 9),
        st.floats(0, 1),
        st.none(),
        st.floats(1, 1e9),
    ),
    max_size=40,
)


@given(kernel_times, st.integers(1, 12))
def test_shares_are_of_all_kernels(kernels: list[KernelTime], top: int) -> None:
    found = shares(kernels, top)
    total = sum(entry.seconds for entry in kernels)
    if not total:
        assert found == []
        return
    assert sum(share.share for share in found) == pytest.approx(1)
    assert sum(share.seconds for share in found) == pytest.approx(total)
    told = [share for share in found if share.calls is not None]
    assert [share.seconds for share in told] == sorted((share.seconds for share in told), reverse=True)
    assert len(found) <= top + 1 and len({share.name for share in found}) == len(found)


@given(st.text(min_size=1, max_size=80), st.integers(8, 40))
def test_a_shortened_name_keeps_its_ends(name: str, limit: int) -> None:
    short = shortened(name, limit)
    assert len(short) == min(len(name), limit)
    assert short[0] == name[0] and short[-1] == name[-1]


def test_a_goal_within_the_noise_is_told(one: Callable[[Mapping[str, Any]], Measurement]) -> None:
    base = rounds(1.0, 40, 1)
    shaky = [value * (0.9 if n % 2 else 1.12) for n, value in enumerate(base)]
    measurement = one(component("vit", {"torch": side(shaky), "untuned": side(base)}))
    result = judge_goal(GOALS[0], [measurement], {measurement: "vit"})
    assert "vit" in result.noisy
    assert findings.verdict(result) == "❔ within the noise"


@pytest.mark.parametrize(
    ("slower", "word"), [(1.05, "❌ not reached"), (1.002, "❔ within the noise")], ids=["clearly", "in the noise"]
)
def test_tuning_loses_only_beyond_the_noise(
    one: Callable[[Mapping[str, Any]], Measurement], slower: float, word: str
) -> None:
    base = rounds(1.0, 40, 1)
    tuned = [value * slower * (0.98 if n % 2 else 1.02) for n, value in enumerate(base)]
    measurement = one(question("text", {"torch": side(base), "untuned": side(base), "tuned": side(tuned)}))
    result = judge_goal(GOALS[-1], [measurement], {measurement: "text"})
    assert result.values["text"].value < 1
    assert findings.verdict(result) == word
    assert ("tuning makes text slower" in findings.sentence(result)) is (word == "❌ not reached")


# Bad input


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "is not JSON"),
        ("[]", "no list `benchmarks`"),
        ('{"benchmarks": []}', "has no `datetime`"),
        (
            '{"benchmarks": [], "datetime": "2025-03-04T05:06:07+00:00"}',
            "holds no benchmark of perf/test_components.py",
        ),
        ('{"benchmarks": [3], "datetime": "2025-03-04T05:06:07+00:00"}', "benchmark 1 is not an object"),
        ('{"benchmarks": [], "datetime": "yesterday"}', "`datetime` of the file is 'yesterday'"),
    ],
)
def test_what_is_no_result_is_refused(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "perf.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(HarnessError, match=re.escape(words)) as caught:
        write_performance_report([path], tmp_path / "docs")
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)
    assert not (tmp_path / "docs").exists()


def without(data: dict[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in data.items() if name != key}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda sides: sides["untuned"].update(median=0.1), "`median` of `untuned`"),
        (lambda sides: sides["untuned"].update(seconds=[]), "`seconds` of `untuned`"),
        (lambda sides: sides["untuned"].update(seconds=[1.0, math.nan]), "`seconds` of `untuned`"),
        (lambda sides: sides["untuned"].update(p99=1.0), "has a `p99` of 30 rounds, where it takes 100"),
        (lambda sides: sides["untuned"].update(throughput="fast"), "`throughput` of `untuned`"),
        (lambda sides: sides["untuned"].update(memory={"weights_bytes": 1}), "has no `run_bytes`"),
        (lambda sides: sides.pop("torch"), "lacks the side `torch`"),
        (lambda sides: sides.update(tuned=7), "`tuned` of `sides`"),
    ],
)
def test_a_benchmark_that_is_not_of_the_suites_is_refused(
    tmp_path: Path, change: Callable[[dict[str, Any]], object], words: str
) -> None:
    benchmark = component("vit", three_sides(0.5, 0.25, None))
    change(benchmark["extra_info"]["sides"])
    path = write(tmp_path / "perf.json", benchmark)
    with pytest.raises(HarnessError, match=re.escape(words)):
        write_performance_report([path], tmp_path / "docs")


def test_a_ratio_that_its_medians_do_not_give_is_refused(tmp_path: Path) -> None:
    benchmark = component("vit", three_sides(0.5, 0.25, None), ratios={"torch_over_untuned": 3.0})
    with pytest.raises(HarnessError, match=r"`torch_over_untuned` of `ratios` of .* is 3, its medians give"):
        read_result(write(tmp_path / "perf.json", benchmark))


def test_two_files_of_one_name_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    paths = [
        write(folder / "perf.json", component("vit", three_sides(1, 1, 1))) for folder in (tmp_path, tmp_path / "a")
    ]
    with pytest.raises(HarnessError, match=r"Two results are called perf\.json"):
        read_results(paths)


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "harness", "report", *map(str, arguments)],
        capture_output=True, text=True, cwd=REPOSITORY, timeout=300,
    )  # fmt: skip


def test_the_command_refuses_what_is_not_there(tmp_path: Path) -> None:
    done = run(tmp_path / "no.json", "--out", tmp_path / "docs")
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("error: Cannot read the results") and done.stderr.count("\n") == 1
    assert not (tmp_path / "docs").exists()


def test_the_command_writes_where_it_says(perf_json: Path, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["report", str(perf_json), "--out", str(tmp_path / "docs")])
    assert done.exit_code == 0, done.output
    assert (tmp_path / "docs" / "PERFORMANCE_REPORT.md").is_file()
    assert "PERFORMANCE_REPORT.md" in done.output


def test_a_folder_that_cannot_be_written_is_a_sentence(perf_json: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(HarnessError, match="give --out a folder"):
        write_performance_report([perf_json], tmp_path / "file")
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "performance").touch()
    with pytest.raises(HarnessError, match="choose another folder with --out"):
        write_performance_report([perf_json], tmp_path / "docs")
    assert sorted(path.name for path in (tmp_path / "docs").iterdir()) == ["performance"]


def test_without_matplotlib_one_sentence_says_what_to_install(
    perf_json: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # what an import of something absent finds
    with pytest.raises(HarnessError, match=r"pip install 'sam3-tvm\[perf\]'"):
        write_performance_report([perf_json], tmp_path / "docs")
    assert not (tmp_path / "docs").exists()


# The suite itself


@pytest.mark.model
def test_what_the_suite_writes_is_read(tmp_path: Path) -> None:
    results = tmp_path / "kernels.json"
    benchmarks = run_benchmarks(results, "perf/test_kernels.py", "-q", "-k", "linear-4x4-4x256")
    (section,) = build_sections(read_results([results]))
    assert [entry.source.benchmark for entry in section.kernels] == [benchmark["name"] for benchmark in benchmarks]
    for read, benchmark in zip(section.kernels, benchmarks, strict=True):
        assert read.rate == pytest.approx(read.work / read.seconds)
        assert read.seconds == statistics.median(benchmark["extra_info"]["tvm_seconds"])
    page = page_of(tmp_path, results)
    assert all(f"`{benchmark['name']}`" in page for benchmark in benchmarks)
