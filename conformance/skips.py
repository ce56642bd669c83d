"""Lists the reasons for which tests may be skipped, and where those tests run; a test with another reason fails."""

from __future__ import annotations

import re
from collections.abc import Generator

import pytest

SKIPS = {
    r"an emulated machine takes minutes.*": "make test-arm, arm.yml",
    r"an AArch64 machine is used as it is|of x86 on Linux|.* x86-64\b.*": "llvm.yml",
    r"threads are emulated on x86-64 and on arm64": "llvm.yml, metal.yml",
    # What a processor has: each of these runs on another one, or is run by the emulation of its instructions.
    r"(this machine|a \S+ processor) (does not execute|cannot run|has no|has everything).*": "another processor",
    r"compiled for .*, whose .* this machine's .* lacks": "another processor",
    r"this processor (does not execute|executes|has no|has the unit).*": "another processor",
    r"the system (refuses|allows) the matrix unit.*": "another processor",
    r"this process may use one CPU": "a machine with two",
    # What a system has.
    r"this system does not .*": "Linux",
    r"(macOS|Linux|glibc|only Linux|only glibc) .*": "the other system",
    r"needs the right to mount a small disk": "llvm.yml",
    r"needs (a limit on the size of files|signals|signals and limits|SIGKILL)": "Linux, macOS",
    r"a CPU's name tells no system.*|processes are forked on Linux alone": "Linux",
    # What is installed.
    r"nvcc was not found.*|this build of TVM .*|the LLVM in this build of TVM .*": "cuda.yml, metal.yml",
    r"Chromium is not installed.*": "nightly.yml",
    r"could not import '(aiohttp|onnxruntime|openvino|pyarrow|ray)'.*": "nightly.yml",
    r"could not import '(cvat_sdk|label_studio_)\S+'.*": "a machine with the libraries of examples/07 and 08",
    r"mlx-vlm is not installed.*": "a machine with the extra [mlx]",
    r"ziglang is not installed|torch.compile needs a C\+\+ compiler|.*(links|link) .*": "llvm.yml",
    # A device that is there, or is not.
    r".*\b(CUDA|Metal|GPU|driver|device)\b.*": "cuda.yml, metal.yml",
    r".* runs on this machine(, and nothing needs to be emulated)?|every target runs on this machine": "llvm.yml",
}
"""By a pattern of the reason: the workflow or the machine that runs such tests."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Fails a test of the suite that is skipped for another reason."""
    report = yield
    suite = item.config.rootpath / "conformance"
    if report.skipped and not hasattr(report, "wasxfail") and item.path.is_relative_to(suite):
        assert isinstance(report.longrepr, tuple)
        reason = report.longrepr[2].removeprefix("Skipped: ")
        if not any(re.fullmatch(pattern, reason, re.DOTALL) for pattern in SKIPS):
            report.outcome = "failed"
            report.longrepr = f"conformance/skips.py does not say where a test runs that is skipped here: {reason}"
    return report
