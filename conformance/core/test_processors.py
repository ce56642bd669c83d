"""The processors to compile for: options win over the environment, and both over a device."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conformance.support.sentences import sentence
from harness.cli.main import app
from harness.core.errors import HarnessError
from harness.core.processors import CPU_VARIABLE, CUDA_VARIABLE, THIS_MACHINE, Processors, chosen_processors
from harness.core.settings import Settings
from harness.verify.runner import repro_flags

PROCESSORS = st.builds(
    Processors, st.sampled_from([None, "x86-64-v3", "znver5"]), st.sampled_from([None, "sm_80", "sm_90"])
)


@given(PROCESSORS, PROCESSORS, PROCESSORS)
def test_what_is_named_first_wins(a: Processors, b: Processors, c: Processors) -> None:
    assert a.with_defaults(THIS_MACHINE) == a == THIS_MACHINE.with_defaults(a) == a.with_defaults(a)
    assert a.with_defaults(b).with_defaults(c) == a.with_defaults(b.with_defaults(c))
    assert a.with_defaults(b).cpu in ([a.cpu] if a.cpu else [b.cpu])


def test_the_environment_has_the_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CPU_VARIABLE, "x86-64-v3")
    monkeypatch.setenv(CUDA_VARIABLE, "")  # as good as not set
    assert chosen_processors() == Processors("x86-64-v3") == chosen_processors(None, "")
    assert chosen_processors("znver5", "sm_89") == Processors("znver5", "sm_89")


def test_a_case_is_reproduced_for_the_same_processors() -> None:
    flags = repro_flags(Settings(processors=Processors("x86-64-v3", "sm_89")))
    assert " ".join(flags) == "--untuned --cpu x86-64-v3 --cuda-arch sm_89"


@pytest.mark.part
@pytest.mark.parametrize("command", ["verify", "compile", "explain", "diagnose"])
def test_an_unknown_cpu_is_one_sentence(command: str, tmp_path: Path) -> None:
    where = {
        "verify": ("--component", "box_head", "--report", str(tmp_path)),
        "compile": ("--scale", "shallow", "--out", str(tmp_path / "model")),
    }
    options = where.get(command, ("--component", "box_head"))
    with pytest.raises(HarnessError, match=sentence("unknown-cpu", name="z80")):
        app([command, *options, "--cpu", "z80"], standalone_mode=False)
