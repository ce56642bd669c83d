"""The performance report, through its command: what the page says of real benchmark files, and of what is none."""

from __future__ import annotations

import copy
import csv
import gzip
import json
import math
import re
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from conformance.support.benchmarked import run_benchmarks
from conformance.support.sentences import sentence
from harness.cli.main import main
from harness.core.settings import REPOSITORY
from perf.tables import component_tables

DOCS = REPOSITORY / "docs" / "evidence"
STORED = sorted((DOCS / "performance").glob("zen5-*.json.gz"))
"""The files of the machine that is first on the page."""
OTHERS = sorted((DOCS / "performance").glob("zen4-*.json.gz"))

Data = dict[str, Any]
Row = dict[str, str]


def stored(name: str) -> Data:
    """A file of docs/evidence/performance."""
    data: Data = json.loads(gzip.decompress((DOCS / "performance" / f"{name}.json.gz").read_bytes()))
    return data


def info(data: Data) -> Data:
    """What the first benchmark of a file keeps."""
    found: Data = data["benchmarks"][0]["extra_info"]
    return found


@pytest.fixture
def backbone() -> Data:
    """A run of one component on all sides, and one of OpenVINO's."""
    return stored("xeon-vision_backbone")


@pytest.fixture
def command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str]]:
    """Runs `sam3-tvm report`; returns the exit code, and the page or what was said instead of it."""

    def run(*results: Path | Data) -> tuple[int, str]:
        paths = [write(tmp_path / f"{n}.json", one) if isinstance(one, dict) else one for n, one in enumerate(results)]
        words = ["sam3-tvm", "report", *map(str, paths), "--out", str(tmp_path / "docs")]
        monkeypatch.setattr(sys, "argv", words)
        with pytest.raises(SystemExit) as ended:
            main()
        code, page = int(ended.value.code or 0), tmp_path / "docs" / "performance.md"
        return code, page.read_text(encoding="utf-8") if code == 0 else capsys.readouterr().err

    return run


def write(path: Path, data: object) -> Path:
    path.write_text(json.dumps(data), encoding="utf-8")
    return path


def tables(page: str, *titles: str) -> list[Row]:
    """The rows of all tables of a page that have these titles."""
    found: list[Row] = []
    for table in re.findall(r"(?:^\|.*\n?)+", page, re.MULTILINE):
        header, _, *rows = (re.split(r" (?<!\\)\| ?", line[1:-1] + " ") for line in table.splitlines())
        names = [name.strip() for name in header]
        if set(titles) <= set(names):
            found += [dict(zip(names, (cell.strip() for cell in row), strict=False)) for row in rows]
    return found


def table_of(name: str, folder: Path = DOCS) -> list[Row]:
    """The rows of a table beside the page."""
    with (folder / "performance" / f"{name}-1.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def seconds(text: str) -> float:
    number, unit = text.split()
    return float(number) * {"s": 1.0, "ms": 1e-3}[unit]


def near(expected: float) -> Any:
    """Three digits of a number."""
    return pytest.approx(expected, rel=0.006)


# The page of docs/evidence: every figure follows from the rounds in its files


@pytest.fixture(scope="module")
def page() -> str:
    return (DOCS / "performance.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def measured() -> dict[str, Data]:
    """What the benchmarks of that machine kept, by the names that they have on the page."""
    files = [stored(path.name.removesuffix(".json.gz")) for path in STORED]
    every = [benchmark["extra_info"] for file in files for benchmark in file["benchmarks"]]
    return {name(found): found for found in every}


def name(found: Data) -> str:
    if "kernel" in found:
        return f"{found['kernel']} {found['shape']}"
    sample = f" ({found['sample']})" if found.get("sample") else ""
    return str(found.get("what") or found["case"]["component"] + sample)


def test_the_page_in_docs_is_that_of_its_files(
    page: str, command: Callable[..., tuple[int, str]], tmp_path: Path
) -> None:
    assert command(*STORED, *OTHERS) == (0, page)
    shown = set(re.findall(r"\]\((performance/[^)]+)\)", page))
    written = [path for path in (DOCS / "performance").iterdir() if path.suffix != ".gz"]
    assert {path.relative_to(DOCS).as_posix() for path in written} == shown
    for file in shown:
        content = (tmp_path / "docs" / file).read_bytes()
        assert content.startswith(b"\x89PNG") if file.endswith(".png") else content == (DOCS / file).read_bytes()


def test_the_roof_is_what_was_measured(
    command: Callable[..., tuple[int, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    figures: list[Any] = []
    monkeypatch.setattr("harness.verify.report.performance.plots.png", lambda figure: figures.append(figure) or b"")
    assert command(*STORED)[0] == 0
    lines = [line for figure in figures for axes in figure.axes for line in axes.lines]
    roofs = [line for line in lines if "GFLOP/s" in str(line.get_label())]
    assert roofs
    for roof in roofs:
        compute, memory = map(float, re.findall(r"(\d+) G", str(roof.get_label())))
        expected = [min(compute, memory * intensity) for intensity in roof.get_xdata()]
        assert list(roof.get_ydata()) == pytest.approx(expected, rel=0.05)


def test_latencies_and_costs_are_those_of_the_rounds(measured: dict[str, Data]) -> None:
    keys = {"PyTorch": "torch", "TVM untuned": "untuned", "TVM tuned": "tuned"}
    rows = table_of("latency")
    expected = [
        (entry, key) for entry, found in measured.items() for key in found.get("sides", ()) if key in keys.values()
    ]
    assert sorted((row["name"], keys[row["side"]]) for row in rows) == sorted(expected)
    for row in rows:
        side = measured[row["name"]]["sides"][keys[row["side"]]]
        ordered = sorted(side["seconds"])
        assert int(row["rounds"]) == len(ordered)
        assert seconds(row["median"]) == near(statistics.median(ordered))
        assert seconds(row["mean"]) == near(statistics.fmean(ordered))
        assert float(row["calls/s"]) == near(1 / statistics.fmean(ordered))
        first, _, third = statistics.quantiles(ordered, n=4, method="inclusive")
        for title, ends in (("middle half", (first, third)), ("min–max", (ordered[0], ordered[-1]))):
            assert [seconds(end) for end in row[title].split(" – ")] == [near(end) for end in ends]
        for title, share, enough in (("p95", 0.95, 20), ("p99", 0.99, 100)):
            assert (row[title] == "n/a") == (len(ordered) < enough)
            assert row[title] == "n/a" or seconds(row[title]) == near(ordered[math.ceil(share * len(ordered)) - 1])
        assert row["verdict"] == side.get("verdict", "n/a")
        assert seconds(row["first call"]) == near(side["first_call"])


def test_ratios_are_of_medians_and_their_intervals_of_the_rounds(page: str, measured: dict[str, Data]) -> None:
    labels = {"torch.compile": "torch.compile", "OpenVINO": "openvino", "OpenVINO f32": "openvino f32"}
    compared = 0
    for row in tables(page, "PyTorch / untuned", "worst r_rms") + table_of("peers"):
        sides = measured[row["component"]]["sides"]
        over, under = sides["torch"], sides["untuned"]
        if "side" in row:
            if row["side"] not in labels:
                continue
            over, under = sides[labels[row["side"]]], sides.get("tuned", under)
        text = row.get("its time / ours", row.get("PyTorch / untuned", ""))
        value, low, high = map(float, re.findall(r"[\d.]+", text))
        ratio = statistics.median(over["seconds"]) / statistics.median(under["seconds"])
        assert value == pytest.approx(ratio, abs=0.0051)
        # The tightest order statistics that the median lies between with 95 % confidence, whatever the distribution.
        ordered = sorted(a / b for a, b in zip(over["seconds"], under["seconds"], strict=True))
        missed = [
            2 * sum(math.comb(len(ordered), k) for k in range(rank + 1)) / 2 ** len(ordered) for rank in range(50)
        ]
        rank = max(rank for rank, chance in enumerate(missed[: len(ordered) // 2]) if chance <= 0.05)
        assert low == pytest.approx(min(ratio, ordered[rank]), abs=0.0051)
        assert high == pytest.approx(max(ratio, ordered[-1 - rank]), abs=0.0051)
        compared += 1
    assert compared > 60


def test_groups_of_kernels_are_weighted_by_time(page: str, measured: dict[str, Data]) -> None:
    alone = {entry: found for entry, found in measured.items() if "kernel" in found}
    for row in tables(page, "group", "PyTorch's, of peak"):
        members = [found for found in alone.values() if found["group"] == row["group"]]
        ours, theirs = (sum(found[key] for found in members) for key in ("tvm_median", "torch_median"))
        at_peak = sum(found["work"] / statistics.median(found["peaks"]) for found in members)
        assert int(row["kernels"]) == len(members)
        assert float(row["rate"].split()[0]) == near(sum(found["work"] for found in members) / ours / 1e9)
        assert float(row["of peak"].split()[0]) == pytest.approx(100 * at_peak / ours, abs=0.51)
        assert float(row["PyTorch / TVM"]) == pytest.approx(theirs / ours, abs=0.0051)
    rows = table_of("kernels_alone")
    slower = sum(found["torch_median"] < found["tvm_median"] for found in alone.values())
    assert f"PyTorch is faster in {slower} of {len(alone)} kernels." in page
    assert {row["kernel"] for row in rows} == alone.keys()
    assert all((float(row["PyTorch / TVM"]) <= 1) >= (seconds(row["PyTorch"]) < seconds(row["TVM"])) for row in rows)


def test_kernels_of_a_component_have_their_share_of_its_time(measured: dict[str, Data]) -> None:
    found = measured["vit"]
    rows = [row for row in table_of("kernels") if row["component"] == "vit"]
    total = sum(kernel["seconds"] for kernel in found["kernels"])
    assert [seconds(row["time"]) for row in rows] == sorted((seconds(row["time"]) for row in rows), reverse=True)
    for kernel in found["kernels"]:
        (row,) = (row for row in rows if row["kernel"] == kernel["name"])
        assert row["calls"] == str(kernel["calls"]) and seconds(row["time"]) == near(kernel["seconds"])
        assert float(row["share"].split()[0]) == pytest.approx(100 * kernel["seconds"] / total, abs=0.51)
        rate = kernel["flop"] / kernel["seconds"] if kernel["flop"] else None
        assert (
            (row["GFLOP/s"], row["of peak"]) == ("n/a", "n/a")
            if rate is None
            else float(row["GFLOP/s"]) == near(rate / 1e9)
        )


def test_the_page_says_where_its_figures_come_from(page: str) -> None:
    for path in (*STORED, *OTHERS):
        data = stored(path.name.removesuffix(".json.gz"))
        assert re.search(rf"\| {path.name} \| [^|]+ UTC \| {data['commit_info']['id'][:12]} \|", page)
    sources = {(row["file"], row["benchmark"]) for name in ("latency", "kernels_alone") for row in table_of(name)}
    for path in STORED:
        benchmarks = stored(path.name.removesuffix(".json.gz"))["benchmarks"]
        assert {(path.name, benchmark["name"]) for benchmark in benchmarks} <= sources


# Other files, each made of a real one


def test_goals_are_reached_missed_or_within_the_noise(command: Callable[..., tuple[int, str]], backbone: Data) -> None:
    untuned, tuned, openvino, gain = tables(command(backbone)[1], "goal")
    assert untuned["result"] == "reached" and untuned["the least"].startswith("vision_backbone 1.34")
    assert tuned["result"] == openvino["result"] == "within the noise" and tuned["within the noise"].startswith(
        "vision_backbone"
    )
    assert gain["result"] == "not measured"
    sides = info(backbone)["sides"]
    sides["tuned"]["seconds"] = [2 * value for value in sides["torch"]["seconds"]]
    tuned = tables(command(backbone)[1], "goal")[1]
    assert tuned["result"] == "not reached" and tuned["below"] == "vision_backbone 0.50 (0.50–0.50)"


def test_without_tuning_there_is_no_tuned_time(command: Callable[..., tuple[int, str]], backbone: Data) -> None:
    del info(backbone)["sides"]["tuned"]
    page = command(backbone)[1]
    (row,) = tables(page, "TVM tuned")
    assert (row["TVM tuned"], row["PyTorch / tuned"], row["gain of tuning"]) == ("n/a", "n/a", "n/a")
    assert tables(page, "goal")[1]["not measured"] == "1"
    info(backbone)["note"] = "9 trials of 1 of its 5 kernels found nothing over the defaults"
    (row,) = tables(command(backbone)[1], "TVM tuned")
    assert row["TVM tuned"] == row["TVM untuned"] and row["gain of tuning"] == "nothing found"


def test_peers_that_fail_are_told(command: Callable[..., tuple[int, str]], backbone: Data, tmp_path: Path) -> None:
    page = command(backbone)[1]
    (row,) = tables(page, "OpenVINO f32")
    assert row["OpenVINO f32"].endswith(" ×") and "1 of 1 do." in page
    (peer,) = table_of("peers", tmp_path / "docs")
    assert "3 of 5308416 elements" in peer["reason"]
    assert (peer["side"], peer["verdict"]) == ("OpenVINO f32", "failed")
    sides = info(backbone)["sides"]
    sides["openvino"] = {**sides["openvino f32"], "setting": "no hints", "computes_in": "bf16"}
    sides["openvino f32"] = {"error": "no such operator | 3\nin two lines"}
    page = command(backbone)[1]
    (peer,) = table_of("peers", tmp_path / "docs")
    assert (peer["side"], peer["setting"]) == ("OpenVINO", "no hints; it computed in bf16")
    assert "- vision_backbone, OpenVINO f32 was not measured: no such operator \\| 3 in two lines" in page
    del sides["openvino"]
    assert "- vision_backbone, OpenVINO f32 was not measured: no such operator" in command(backbone)[1]


def test_a_case_is_named_by_all_that_is_not_usual(command: Callable[..., tuple[int, str]], backbone: Data) -> None:
    other = copy.deepcopy(backbone)
    info(other)["case"] |= {"target": "cuda", "precision": "bf16", "scale": "shallow", "seed": 3, "weights": "outliers"}
    info(other)["sample"] = "second"
    for key in ("peak_flops", "peak_bandwidth"):
        del info(other)[key]
    info(other)["machine"]["gpus"] = ["NVIDIA H200"]
    page = command(backbone, other)[1]
    names = [row["component"] for row in tables(page, "GFLOP/s (of peak)")]
    assert names == ["vision_backbone", "vision_backbone (cuda · shallow · bf16 · outliers · seed 3 · second)"]
    assert tables(page, "goal")[0]["aim reached"] == "0 of 1"  # at full scale and in fp32
    alone = command(other)[1]
    assert "2 threads, NVIDIA H200" in alone and "shallow scale" in alone and "- In **half precision**" in alone
    assert "no peak" in alone and "![GFLOP/s" not in alone
    summary = component_tables([info(other)])
    assert (
        "2 threads of Intel(R) Xeon(R) Processor, NVIDIA H200\n" in summary and "peaks in the same run" not in summary
    )


def test_machines_are_sections_and_newer_runs_are_shown(
    command: Callable[..., tuple[int, str]], backbone: Data, tmp_path: Path
) -> None:
    there, older = copy.deepcopy(backbone), copy.deepcopy(backbone)
    info(there)["machine"]["cpu"] = "Another | CPU"
    older["datetime"] = "2025-03-01T00:00:00+00:00"
    for side in ("torch", "openvino f32"):
        info(older)["sides"][side]["seconds"] = [1.0] * 6
    for files in ((older, backbone), (backbone, older)):
        command(*files)
        (peer,) = table_of("peers", tmp_path / "docs")
        assert seconds(peer["median"]) > 10
    page = command(older, backbone, there)[1]
    assert [line for line in page.splitlines() if line.startswith("## ")][:2] == [
        "## Intel(R) Xeon(R) Processor, 2 threads",
        "## Another \\| CPU, 2 threads",
    ]
    assert "Newer runs replace these: test_component[vision_backbone-real-llvm-full] in 0.json." in page
    assert [row["PyTorch"] for row in tables(page, "GFLOP/s (of peak)")] == ["25.9 s", "25.9 s"]


def test_a_peer_of_an_older_run_is_beside_ours_of_its_run(
    command: Callable[..., tuple[int, str]], backbone: Data, tmp_path: Path
) -> None:
    newer = copy.deepcopy(backbone)
    newer["datetime"] = "2100-01-01T00:00:00+00:00"
    sides = info(newer)["sides"]
    sides["torch.compile"] = sides.pop("openvino f32")
    for side in sides.values():
        side["seconds"] = [2 * seconds for seconds in side["seconds"]]
    (alone,) = tables(command(backbone)[1], "OpenVINO f32")
    page = command(backbone, newer)[1]
    (row,) = tables(page, "OpenVINO f32", "torch.compile")
    assert row["OpenVINO f32"] == row["torch.compile"] == alone["OpenVINO f32"]
    assert "Newer runs replace" not in page and "0.json" in page and "1.json" in page
    older, new = table_of("peers", tmp_path / "docs")
    assert (older["file"], new["file"]) == ("0.json", "1.json") and older["ours"] != new["ours"]
    (ours,) = tables(page, "GFLOP/s (of peak)")
    assert ours["PyTorch"] == "51.7 s"


def test_compressed_or_not_gives_the_same_bytes(
    command: Callable[..., tuple[int, str]], tmp_path: Path, backbone: Data
) -> None:
    import matplotlib

    backbone["benchmarks"].append({"name": "test_the_sides_take_turns", "extra_info": {}})
    path = write(tmp_path / "perf.json", backbone)
    page = command(path)[1]
    pictures = {file.name: file.read_bytes() for file in (tmp_path / "docs" / "performance").iterdir()}
    packed = tmp_path / "packed" / "perf.json"
    packed.parent.mkdir()
    packed.write_bytes(gzip.compress(path.read_bytes()))
    with matplotlib.rc_context({"font.size": 30}):  # whatever the user's settings are
        assert command(packed) == (0, page)
    assert {file.name: file.read_bytes() for file in (tmp_path / "docs" / "performance").iterdir()} == pictures
    assert "measure nothing of the model: test_the_sides_take_turns in perf.json" in page


@pytest.mark.model
def test_what_the_suite_writes_is_read(command: Callable[..., tuple[int, str]], tmp_path: Path) -> None:
    results = tmp_path / "kernels.json"
    benchmarks = run_benchmarks(results, "perf/test_kernels.py", "-q", "-k", "linear-4x4-4x256")
    assert command(results)[0] == 0
    rows = table_of("kernels_alone", tmp_path / "docs")
    assert [row["benchmark"] for row in rows] == [benchmark["name"] for benchmark in benchmarks]


# Bad input


def changed(change: Callable[[Data], object]) -> Callable[[Data], Data]:
    """A file whose first benchmark is changed."""

    def apply(data: Data) -> Data:
        change(info(data))
        return data

    return apply


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda _: [], sentence("not-results")),
        (lambda _: {"tests": 3}, sentence("not-results")),
        (lambda data: data | {"benchmarks": []}, sentence("no-benchmarks", kinds="perf/test_components.py")),
        (lambda data: data | {"benchmarks": [3]}, sentence("bad-benchmark", location="benchmark 1")),
        (lambda data: data | {"benchmarks": [{"name": "test", "stats": {}}]}, sentence("no-benchmarks", kinds="perf")),
        (lambda data: data | {"datetime": "yesterday"}, sentence("undated")),
        (
            lambda data: data | {"benchmarks": data["benchmarks"] + stored("zen5-end_to_end")["benchmarks"]},
            sentence("mixed-machines"),
        ),
        (
            changed(lambda kept: kept.update(case="vision_backbone-real-llvm-full")),
            sentence("bad-benchmark", reason="`case`"),
        ),
        (changed(lambda kept: kept.pop("threads")), sentence("bad-benchmark", reason="threads")),
        (changed(lambda kept: kept["sides"].pop("torch")), sentence("bad-benchmark", reason="`torch`")),
        (
            changed(lambda kept: kept["sides"]["untuned"].update(seconds=[])),
            sentence("bad-benchmark", reason="`seconds`"),
        ),
        (
            changed(lambda kept: kept["sides"]["untuned"].update(seconds=[1.0, math.nan])),
            sentence("bad-benchmark", reason="`seconds`"),
        ),
        (changed(lambda kept: kept["sides"]["untuned"].update(memory=3)), sentence("bad-benchmark")),
        (changed(lambda kept: kept.update(kernels=[{"name": "a"}])), sentence("bad-benchmark")),
    ],
)
def test_what_is_no_result_is_a_sentence(
    spoil: Callable[[Data], object], words: str, command: Callable[..., tuple[int, str]], backbone: Data, tmp_path: Path
) -> None:
    code, said = command(write(tmp_path / "perf.json", spoil(backbone)))
    assert code == 2 and said.startswith("error: ") and said.count("\n") == 1
    assert re.search(words, said) and str(tmp_path / "perf.json") in said
    assert not (tmp_path / "docs").exists()


@pytest.mark.parametrize("length", [0, 1, 1000, -1])
def test_what_was_cut_off_is_a_sentence(length: int, command: Callable[..., tuple[int, str]], tmp_path: Path) -> None:
    packed = (DOCS / "performance" / "xeon-vision_backbone.json.gz").read_bytes()
    for content in (packed, gzip.decompress(packed)):
        path = tmp_path / "perf.json"
        path.write_bytes(content[:length])
        code, said = command(path)
        assert code == 2 and re.search(sentence("not-json", path=path), said) and said.count("\n") == 1


def test_paths_that_cannot_be_used_are_a_sentence(
    command: Callable[..., tuple[int, str]], tmp_path: Path, backbone: Data
) -> None:
    path, twin = write(tmp_path / "perf.json", backbone), tmp_path / "twin" / "perf.json"
    for results, words in (
        ((tmp_path / "no.json",), sentence("unreadable-results", path=tmp_path / "no.json")),
        ((path, twin), sentence("two-of-one-name", duplicates="perf.json")),
    ):
        code, said = command(*results)
        assert code == 2 and re.match(f"error: {words}", said) and said.count("\n") == 1
        assert not (tmp_path / "docs").exists()
    (tmp_path / "docs").touch()
    code, said = command(path)
    assert code == 2 and re.match("error: " + sentence("out-is-a-file", directory=tmp_path / "docs"), said)
    (tmp_path / "docs").unlink()
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "performance").touch()
    code, said = command(path)
    assert code == 2 and re.search(sentence("cannot-write", advice="--out"), said)
    assert [file.name for file in (tmp_path / "docs").iterdir()] == ["performance"]


@pytest.mark.parametrize("package", ["pandas", "matplotlib"])
def test_a_package_that_is_absent_is_named(
    package: str, command: Callable[..., tuple[int, str]], monkeypatch: pytest.MonkeyPatch, backbone: Data
) -> None:
    for module in [module for module in sys.modules if module.startswith("harness.verify.report.performance")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, package, None)  # what an import of something absent finds
    code, said = command(backbone)
    assert code == 2 and re.match("error: " + sentence("not-installed", name=package), said)
