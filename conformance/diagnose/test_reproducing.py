"""Reproductions: a folder that shows the fault of one kernel with TVM alone, and its script where the fault is gone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import tvm
from safetensors.numpy import load_file
from torch import nn
from tvm import relax
from tvm.relax.frontend.torch.base_fx_graph_translator import BaseFXGraphImporter

from conformance.calibration.mutation import mutated
from conformance.support.commands import run_command
from conformance.support.diagnosed import CASE, WIDTH, after_softmax, block, by_chance, cause_of
from conformance.support.sentences import sentence
from harness.compiler.lowering.frontends.torch_export import defects
from harness.compiler.schedules.cpu import epilogue
from harness.compiler.schedules.cpu.pipeline import LEGALIZE
from harness.core.errors import HarnessError
from harness.core.program import Program
from harness.core.settings import SEEDED
from harness.verify.diagnose import runner
from harness.verify.diagnose.deviation import Fault, Kind
from harness.verify.diagnose.diagnosis import Cause, Diagnosis
from harness.verify.diagnose.report import check_folder, write_folder
from harness.verify.diagnose.runner import diagnose_program
from harness.verify.report import read_report

FAULTY = "conformance.support.faulty_block"


def run(folder: Path) -> subprocess.CompletedProcess[str]:
    """Runs the script of a reproduction, from another folder."""
    command = [sys.executable, "-I", str((folder / "reproduce.py").resolve())]
    return subprocess.run(command, capture_output=True, text=True, cwd="/", timeout=600, check=False)


def written(found: Diagnosis, folder: Path) -> dict[str, str]:
    """Writes the folder of a reproduction, and returns its texts by the names of the files."""
    assert found.reproduction is not None
    assert write_folder(found, folder).startswith(f"Reproduction: {folder}: cut down to ")
    assert "harness" not in (folder / "reproduce.py").read_text()
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]
    return {path.name: path.read_text() for path in folder.iterdir() if path.suffix != ".safetensors"}


@pytest.mark.wide
def test_a_wrong_import_is_shown_by_tvm_alone_until_it_is_repaired(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def softmax(self: Any, node: torch.fx.Node) -> relax.Var:
        return self.block_builder.emit(relax.op.nn.softmax(self.env[node.args[0]], 0))

    monkeypatch.setattr(BaseFXGraphImporter, "_softmax", softmax)
    found = block(reproduce=True)
    assert cause_of(found) is Cause.IMPORTER
    assert found.ablation is not None
    assert found.ablation.responsible == "TVM's importer"
    texts = written(found, tmp_path / "softmax")
    assert "torch.ops.aten._softmax.default" in texts["reproduce.py"]
    assert "R.nn.softmax" in texts["module.py"]
    assert "diagnosed.py" in texts["README.md"]
    tensors = load_file(tmp_path / "softmax" / "tensors.safetensors")
    assert np.allclose(tensors["pytorch"].sum(-1), 1)
    done = run(tmp_path / "softmax")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "The fault is there" in done.stdout
    (tmp_path / "softmax" / "module.py").write_text(texts["module.py"].replace("axis=0", "axis=-1"))
    done = run(tmp_path / "softmax")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "The fault is gone" in done.stdout
    (tmp_path / "softmax" / "module.py").write_text("nothing")
    assert run(tmp_path / "softmax").returncode == 2


def test_a_workaround_that_is_wrong_is_told_from_tvms_importer(monkeypatch: pytest.MonkeyPatch) -> None:
    def mirrored(node: torch.fx.Node, importer: Any) -> relax.Var:
        return importer.block_builder.emit(relax.op.sigmoid(relax.op.negative(importer.env[node.args[0]])))

    wrong = replace(defects.DEFECTS[0], converters={"sigmoid.default": mirrored}, passes=())
    monkeypatch.setattr(defects, "DEFECTS", (*defects.DEFECTS, wrong))
    found = block(reproduce=True)
    assert cause_of(found) is Cause.IMPORTER
    assert found.ablation is not None and found.reproduction is not None
    assert "extents halved" in found.reproduction.description
    assert found.ablation.responsible == "this project's workarounds"
    assert found.ablation.reason.endswith("the fault is in this project's workarounds")


def test_the_pass_that_loses_an_activation_is_named_and_its_loops_are_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(epilogue.UNARY, "relax.nn.relu", lambda x: x)
    found = block(reproduce=True)
    assert cause_of(found) is Cause.FUSION
    assert found.ablation is not None
    assert found.ablation.passes == ("CallKernels",)
    texts = written(found, tmp_path / "relu")
    assert "T.prim_func" in texts["module.py"]
    assert "relu" in texts["reproduce.py"]
    assert run(tmp_path / "relu").returncode == 1


class Chain(nn.Module):
    """Operators that one kernel computes, on rows that do not know of each other."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(torch.relu(x * 1.5) - 0.5).reshape(48, WIDTH // 2, 2)


@pytest.mark.wide
def test_operators_and_rows_that_the_fault_does_not_need_are_left_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    right = LEGALIZE["relax.sigmoid"]

    def mirrored(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
        return right(builder, relax.op.sigmoid(builder.emit(relax.op.negative(call.args[0]))))

    monkeypatch.setitem(LEGALIZE, "relax.sigmoid", mirrored)
    program = Program("chain", Chain(), {"x": torch.linspace(-3, 3, 48 * WIDTH).reshape(48, WIDTH)}, ("y",))
    found = diagnose_program(program, CASE, SEEDED, reproduce=True)
    assert cause_of(found) is Cause.LEGALIZATION
    written(found, tmp_path / "sigmoid")
    tensors = load_file(tmp_path / "sigmoid" / "tensors.safetensors")
    (argument,) = (value for name, value in tensors.items() if name not in ("pytorch", "float64"))
    assert argument.shape == (3, 4)
    right_value = 1 / (1 + np.exp(-argument.astype(np.float64)))
    assert np.abs(right_value.reshape(3, 2, 2) - tensors["float64"]).max() < 1e-12


def test_a_fault_of_the_program_alone_is_shown_by_its_own_functions(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    right, calls = LEGALIZE["relax.nn.softmax"], []

    def wrong_once(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
        calls.append(call)
        return right(builder, call if len(calls) > 1 else relax.op.nn.softmax(call.args[0], 0))

    monkeypatch.setitem(LEGALIZE, "relax.nn.softmax", wrong_once)
    found = block(reproduce=True)
    assert found.ablation is not None
    assert found.ablation.cause is Cause.RUNTIME
    texts = written(found, tmp_path / "softmax")
    assert "R.call_tir" in texts["module.py"]
    assert "the compiled functions of the program itself" in texts["README.md"]
    assert run(tmp_path / "softmax").returncode == 1


@pytest.mark.wide
def test_packed_weights_are_made_again_by_the_functions_of_a_reproduction(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def wrong(module: tvm.IRModule) -> tvm.IRModule:
        (name,) = (variable for variable in module.get_global_vars() if variable.name_hint == "matmul_add_relu")
        module = module.clone()
        # The first read is of the operand; some of the last ones only say what is fetched into a cache.
        module[name] = mutated(module[name], "wrong element read", 0.0)
        return module

    right = runner.lower_module
    monkeypatch.setattr(runner, "lower_module", lambda *arguments: wrong(right(*arguments)))
    found = block(reproduce=True)
    assert found.ablation is not None
    assert found.ablation.cause is Cause.RUNTIME
    texts = written(found, tmp_path / "product")
    assert "pack" in texts["module.py"]
    assert run(tmp_path / "product").returncode == 1


def test_what_is_wrong_otherwise_each_time_is_not_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    after_softmax(monkeypatch, by_chance())
    told = write_folder(block(reproduce=True), tmp_path / "none")
    assert told.startswith("No reproduction was written: ")
    assert "other elements are wrong" in told
    assert list(tmp_path.iterdir()) == []


def test_a_fault_is_the_same_only_if_the_same_elements_are_wrong_in_the_same_way() -> None:
    wrong = np.arange(24).reshape(4, 6) % 5 == 0
    fault = Fault(Kind.VALUE, wrong.shape, np.packbits(wrong).tobytes())
    assert np.array_equal(fault.wrong, wrong)
    assert np.array_equal(fault.part((slice(0, 2), slice(0, 6))).wrong, wrong[:2])
    assert fault.same(fault)
    assert not fault.same(None)
    assert not fault.same(replace(fault, kind=Kind.SPECIAL))
    assert not fault.same(replace(fault, packed=np.packbits(~wrong).tobytes()))
    assert not fault.same(fault.part((slice(0, 2), slice(0, 6))))


def test_a_folder_that_exists_and_several_cases_are_refused(tmp_path: Path) -> None:
    with pytest.raises(HarnessError, match=sentence("folder-exists", folder=tmp_path, advice="--reproduce")):
        check_folder(tmp_path, 1)
    with pytest.raises(HarnessError, match=sentence("several-cases", cases=2)):
        check_folder(tmp_path / "new", 2)


def test_where_nothing_diverges_nothing_is_written(tmp_path: Path) -> None:
    folder = tmp_path / "new"
    done = run_command("diagnose", "--component", "box_head", "--reproduce", str(folder))
    assert done.returncode == 0, done.stderr
    assert "Nothing to reproduce" in done.stdout
    assert not folder.exists()


def sam3_tvm(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs the command with a model whose kernels lose an activation."""
    environment = {**os.environ, "SAM3_TVM_MODELS": FAULTY, "COLUMNS": "200"}
    return run_command(*arguments, environment=environment)


def test_the_command_writes_the_folder(tmp_path: Path) -> None:
    folder = tmp_path / "relu"
    done = sam3_tvm("diagnose", "--component", "faulty_block", "--reproduce", str(folder))
    assert done.returncode == 1, done.stdout + done.stderr
    assert f"Reproduction: {folder}: cut down to" in done.stdout
    assert run(folder).returncode == 1


def test_verify_diagnoses_what_is_wrong_and_says_why_other_cases_are_not(tmp_path: Path) -> None:
    done = sam3_tvm(
        *("verify", "--diagnose", "--component", "faulty_block", "--report", str(tmp_path)),
        *("--frontend", "torch", "--frontend", "onnx"),
    )
    assert done.returncode == 1, done.stdout + done.stderr
    torch_case, onnx_case = read_report(tmp_path / "verification_report.json")["cases"]
    assert torch_case["diagnosis"]["ablation"]["cause"] == "fusion or folding"
    assert torch_case["diagnosis"]["boundaries"]
    assert json.dumps(torch_case["diagnosis"], allow_nan=False)
    assert "choose --frontend torch" in onnx_case["not_diagnosed"]
    for text in (done.stdout, (tmp_path / "VERIFICATION_REPORT.md").read_text()):
        assert "First divergent kernel (certain)" in text
        assert "choose --frontend torch" in text
