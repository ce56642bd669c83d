"""Runs traces of PyTorch modules: the same calls in fp32, under autocast or in float64."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from harness.core.program import Arrays, Call, Output, Program, Trace
from harness.parity.references import RunModule

if TYPE_CHECKING:
    import torch


def run_trace(programs: Mapping[str, Program], trace: Trace, run: RunModule) -> Arrays:
    """Runs a trace of PyTorch modules; each call gets the outputs of earlier calls of the same run.

    Args:
        programs: Programs by name.
        trace: The calls.
        run: Runs a module in fp32, under autocast, or in float64.
    """
    import torch

    outputs: Arrays = {}
    results: dict[tuple[str, str], Any] = {}
    for call in trace:
        program = programs[call.program]
        inputs = [
            torch.from_numpy(results[value.call, value.name]) if isinstance(value, Output) else value
            for value in call.arguments
        ]
        for name, array in run(program.module, inputs, program.outputs).items():
            outputs[f"{call.prefix}{name}"] = results[call.name, name] = array
    return outputs


def independent_calls(
    samples: Mapping[str, Mapping[str, torch.Tensor]], programs: Mapping[str, str]
) -> tuple[Call, ...]:
    """Returns one call for each sample; the main sample's outputs have no prefix.

    Args:
        samples: Inputs by sample name; the first sample is the main one.
        programs: The name of the program of each sample.
    """
    main = next(iter(samples))
    return tuple(
        Call(name, programs[name], tuple(args.values()), "" if name == main else f"{name}/")
        for name, args in samples.items()
    )
