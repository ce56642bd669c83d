"""The layers of this project, and how each is made wrong at one place, from the import to the reference."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import tvm
from tvm import ir, relax, tirx
from tvm.relax.frontend.torch.base_fx_graph_translator import BaseFXGraphImporter
from tvm.relax.frontend.torch.exported_program_translator import ExportedProgramImporter
from tvm_ffi import StructuralKey

from conformance.calibration.faults import Fault, picked
from conformance.calibration.mutation import FACTORS, MUTATIONS, mutated
from conformance.calibration.preparing import Prepared
from conformance.calibration.reaching import built_by, content, functions_of, key_of, new_functions
from conformance.calibration.sources import KINDS, PARTS, rewritten
from harness.compiler.lowering.frontends.torch_export import defects
from harness.compiler.lowering.route import Lowered
from harness.compiler.schedules import cpu
from harness.compiler.schedules.common import folding
from harness.compiler.schedules.common.graph import default
from harness.compiler.schedules.common.kernel_info import Kind, info_of
from harness.compiler.schedules.cpu import elementwise, epilogue, memory, pipeline, rewrite
from harness.compiler.schedules.cpu.arena import Layout, Result, Value
from harness.compiler.schedules.cpu.lowering import Lowering
from harness.core.program import Arrays
from harness.runtime.executable import TRANSFORM_PARAMETERS
from harness.verify.diagnose.diagnosis import Cause


class NoPlaceError(Exception):
    """A component has no place where such a fault can be."""


@dataclass
class Injected:
    """Where a fault went; some of it is known only when the program is compiled.

    Attributes:
        where: In words.
        nodes: Nodes of the exported program of which a right diagnosis names one.
        functions: Compiled functions of which a right diagnosis names one.
        again: What becomes of PyTorch's second run.
        folder: The compiled model to load instead of what is compiled from the component.
        absent: Whether there turned out to be no place for it.
        file: The source file that it is in, below `harness/`, if it is in one.
    """

    where: str = ""
    nodes: set[str] = field(default_factory=set)
    functions: set[str] = field(default_factory=set)
    again: Callable[[Arrays], Arrays] = lambda arrays: arrays
    folder: Path | None = None
    absent: bool = False
    file: str = ""


Inject = Callable[[Fault, Prepared, Injected, ExitStack], None]
"""Puts a fault in until the stack is left, and says where it went.

Raises NoPlaceError if there is no place for it.
"""


@dataclass(frozen=True)
class Layer:
    """A part of this project.

    Attributes:
        weight: How likely a fault is in it.
        kinds: What can be wrong in it.
        causes: What a right diagnosis says; nothing where it can only say that values changed or outputs are wrong.
        inject: Makes it wrong.
    """

    weight: int
    kinds: Sequence[str]
    causes: frozenset[Cause]
    inject: Inject


@contextmanager
def injected(fault: Fault, prepared: Prepared) -> Iterator[Injected]:
    """Makes the project wrong in the context.

    Raises:
        NoPlaceError: The component has no place for the fault.
    """
    made = Injected()
    with ExitStack() as stack:
        LAYERS[fault.layer].inject(fault, prepared, made, stack)
        yield made


def _some(choices: Sequence[Any], part: float, what: str) -> Any:
    if not choices:
        raise NoPlaceError(f"no {what}")
    return picked(choices, part)


def _nothing(_fault: Fault, _prepared: Prepared, _injected: Injected, _stack: ExitStack) -> None:
    """The null fault."""


# The import


def _converter(fault: Fault, prepared: Prepared, injected: Injected, stack: ExitStack) -> None:
    """Converters of TVM and of this project's workarounds get wrong arguments, for nodes alike."""
    nodes = [node for node in prepared.graph.nodes.values() if node.op == "call_function"]
    keys = list(dict.fromkeys(_node_key(node) for node in nodes if _arguments(node, fault.kind) is not None))
    key = _some(keys, fault.place, "operator with such arguments")
    injected.nodes |= {node.name for node in nodes if _node_key(node) == key}
    injected.where = key
    name = key.partition("(")[0]

    def wrong(right: Callable[..., Any]) -> Callable[..., Any]:
        def convert(node: torch.fx.Node, *importer: Any) -> Any:
            changed = _arguments(node, fault.kind) if _node_key(node) == key else None
            if changed is None:
                return right(node, *importer)
            kept, node.args = node.args, changed
            try:
                return right(node, *importer)
            finally:
                node.args = kept

        return convert

    def wrapped(converters: dict[str, Any]) -> dict[str, Any]:
        return converters | ({name: wrong(converters[name])} if name in converters else {})

    create, update = ExportedProgramImporter.create_convert_map, BaseFXGraphImporter.update_convert_map
    stack.enter_context(
        mock.patch.object(ExportedProgramImporter, "create_convert_map", lambda self: wrapped(create(self)))
    )
    stack.enter_context(
        mock.patch.object(BaseFXGraphImporter, "update_convert_map", lambda self, own: update(self, wrapped(own)))
    )


def _node_key(node: torch.fx.Node) -> str:
    shapes = (str(list(other.meta["val"].shape)) for other in node.all_input_nodes if _is_tensor(other))
    return f"{getattr(node.target, '__name__', node.target)}({', '.join(shapes)})"


def _is_tensor(node: Any) -> bool:
    return isinstance(node, torch.fx.Node) and isinstance(node.meta.get("val"), torch.Tensor)


_COMMUTATIVE = ("add", "mul", "eq", "ne", "logical_and", "logical_or", "maximum", "minimum")
_AXES = ("dim", "dims", "dim0", "dim1", "axis")


def _arguments(node: torch.fx.Node, kind: str) -> tuple[Any, ...] | None:
    """Returns the changed arguments of a node; None where there are none to change so."""
    schema = getattr(node.target, "_schema", None)
    if schema is None or not node.args:
        return None
    arguments = list(node.args)
    known = schema.arguments[: len(arguments)]
    if kind == "swapped arguments":
        tensors = [n for n, value in enumerate(arguments) if _is_tensor(value)]
        name = str(schema.name).partition("::")[2]
        if len(tensors) < 2 or name in _COMMUTATIVE:
            return None
        first, second = tensors[:2]
        arguments[first], arguments[second] = arguments[second], arguments[first]
        return tuple(arguments)
    if kind == "dropped argument":
        return tuple(arguments[:-1]) if known[-1].has_default_value() else None
    rank = arguments[0].meta["val"].dim() if _is_tensor(arguments[0]) else 0
    for n, argument in enumerate(known):
        value = arguments[n]
        is_axis = argument.name in _AXES
        if kind == "wrong axis" and is_axis and rank > 1 and isinstance(value, int):
            arguments[n] = (value + 1) % rank
            return tuple(arguments)
        if kind == "wrong axis" and is_axis and rank > 1 and isinstance(value, list | tuple) and value:
            permuted = len(value) == rank
            arguments[n] = [value[1], value[0], *value[2:]] if permuted else [(int(dim) + 1) % rank for dim in value]
            return tuple(arguments)
        if kind == "wrong number" and not is_axis and type(value) in (int, float):
            arguments[n] = value * 1.5 if isinstance(value, float) else value + 1
            return tuple(arguments)
    return None


def _workaround(fault: Fault, prepared: Prepared, injected: Injected, stack: ExitStack) -> None:
    """A workaround of a defect of TVM's importer is left out."""
    defect = picked(defects.DEFECTS, fault.place)
    injected.where = defect.name
    injected.nodes |= {
        node.name for node in prepared.graph.nodes.values() if getattr(node.target, "__name__", "") in defect.converters
    }
    rest = tuple(other for other in defects.DEFECTS if other is not defect)
    stack.enter_context(mock.patch.object(defects, "DEFECTS", rest))


# Legalizations, kernels, schedules


def _mutate_new(builder: relax.BlockBuilder, before: set[str], fault: Fault) -> None:
    """Changes one of the functions that a builder has got since."""
    module = builder.get()
    changed = {v: mutated(module[v], fault.kind, fault.site) for v in new_functions(builder, before)}
    able = [variable for variable, function in changed.items() if function is not None]
    if able:
        variable = picked(able, fault.function)
        builder.update_func(variable, changed[variable])


def _key_of(places: Mapping[str, Sequence[tirx.PrimFunc]], fault: Fault) -> str:
    """Picks one of the operators with a function that can be wrong in the way of a fault."""
    able = [key for key, functions in places.items() if any(mutated(f, fault.kind, 0) is not None for f in functions)]
    key: str = _some(able, fault.place, "function that can be wrong so")
    return key


def _legalization(fault: Fault, prepared: Prepared, injected: Injected, stack: ExitStack) -> None:
    """A function is wrong that an operator becomes, by this project's legalization or by TVM's."""
    key = _key_of(prepared.reached.legalized, fault)
    name = key.partition("(")[0]
    right = pipeline.LEGALIZE.get(name, default)
    injected.where = key
    injected.nodes |= prepared.nodes(key)

    def wrong(builder: relax.BlockBuilder, call: ir.Call) -> relax.Expr:
        before = set(functions_of(builder.get()))
        result = right(builder, call)
        if key_of(call) == key:
            _mutate_new(builder, before, fault)
        return result

    stack.enter_context(mock.patch.dict(pipeline.LEGALIZE, {name: wrong}))


def _kernel(fault: Fault, prepared: Prepared, injected: Injected, stack: ExitStack) -> None:
    """A function is wrong that this project emits for a product, a convolution or an attention, or for its operands."""
    key = _key_of(prepared.reached.kernels, fault)
    name = key.partition("(")[0]
    right = rewrite.KERNELS[name]
    injected.where = key
    injected.nodes |= prepared.nodes(key)

    def wrong(context: Any, call: ir.Call) -> Any:
        lowering = right(context, call)
        return lowering if lowering is None or key_of(call) != key else _with_wrong_function(lowering, fault)

    stack.enter_context(mock.patch.dict(rewrite.KERNELS, {name: wrong}))


def _with_wrong_function(lowering: Lowering, fault: Fault) -> Lowering:
    def build(builder: relax.BlockBuilder, inputs: Any, after: epilogue.Epilogue) -> relax.Expr:
        before = set(functions_of(builder.get()))
        result = lowering.build(builder, inputs, after)
        _mutate_new(builder, before, fault)
        return result

    return built_by(lowering, build, lambda other: _with_wrong_function(other, fault))


def _is_loops(function: tirx.PrimFunc) -> bool:
    info = info_of(function)
    return info is None or info.kind is Kind.LOOPS


def _mutable(module: tvm.IRModule, names: Sequence[str], fault: Fault, injected: Injected) -> str:
    """Picks one of the functions that can be wrong in the way of a fault."""
    able = [name for name in sorted(names) if mutated(module[name], fault.kind, fault.site) is not None]
    if not able:
        injected.absent = True  # TVM makes an exception of its own of those that its passes raise
    name: str = _some(able, fault.place, "function that can be wrong so")
    injected.where = name
    injected.functions.add(name)
    return name


def _schedule(fault: Fault, _prepared: Prepared, injected: Injected, stack: ExitStack) -> None:
    """Loops of TVM's, fused or not, are wrong after this project has scheduled them, wherever the same loops are."""
    right = elementwise.schedule_remaining
    chosen: list[StructuralKey] = []

    @tvm.transform.module_pass(opt_level=0, name="ScheduleRemaining")
    def wrong(module: tvm.IRModule, _context: Any) -> tvm.IRModule:
        module = right(module).clone()
        loops = {name: v for name, v in functions_of(module).items() if _is_loops(module[v])}
        if not chosen:  # the program
            name = _mutable(module, list(loops), fault, injected)
            chosen.append(content(module[loops[name]]))
        for variable in loops.values():
            if content(module[variable]) == chosen[0]:
                module[variable] = mutated(module[variable], fault.kind, fault.site)
        return module

    stack.enter_context(mock.patch.object(elementwise, "schedule_remaining", wrong))


# Folding and epilogues


def _folded(fault: Fault, prepared: Prepared, injected: Injected, stack: ExitStack) -> None:
    """A kernel reads an operand through an operator at wrong places."""
    rules = folding._RULES
    key = _some(list(prepared.reached.folded), fault.place, "operator that kernels can read through")
    name = key.partition("(")[0]
    right = rules[name]
    injected.where = key
    injected.nodes |= prepared.nodes(key)

    def wrong(scope: Any, call: ir.Call, shape: tuple[Any, ...]) -> Any:
        folded = right(scope, call, shape)
        axes = [axis for axis, extent in enumerate(shape) if isinstance(extent, int) and extent > 1]
        if folded is None or key_of(call) != key or not axes:
            return folded

        def element(reader: Any, at: Sequence[Any]) -> Any:
            wrongly = list(at)
            if fault.kind == "read at the next index" or len(axes) < 2:
                axis = picked(axes, fault.site)
                wrongly[axis] = tirx.min(at[axis] + 1, shape[axis] - 1)
            else:
                n = int(fault.site * (len(axes) - 1))
                for one, other in ((axes[n], axes[n + 1]), (axes[n + 1], axes[n])):
                    wrongly[one] = tirx.min(at[other], shape[one] - 1)
            return folded.element(reader, wrongly)

        return replace(folded, element=element)

    stack.enter_context(mock.patch.dict(rules, {name: wrong}))


_BINARY_FAULTS: dict[str, Callable[[Callable[[Any, Any], Any]], Callable[[Any, Any], Any]]] = {
    "dropped step": lambda right: lambda a, b: a,
    "swapped step": lambda right: lambda a, b: right(b, a),
    "step 1 % off": lambda right: lambda a, b: right(a, b) * tirx.const(1.01, "float32"),
}


def _epilogue(fault: Fault, prepared: Prepared, injected: Injected, stack: ExitStack) -> None:
    """A step that a kernel does before it stores a value is dropped or wrong, in every kernel that does it."""
    steps = prepared.reached.steps
    if fault.kind == "swapped step":
        steps = [step for step in steps if step in ("relax.subtract", "relax.divide")]
    name = _some(list(steps), fault.place, "such operator that kernels do before they store")
    injected.where = name
    injected.nodes |= {operator.node for operator in prepared.operators if operator.name == name}
    if name in epilogue.UNARY:
        unary = epilogue.UNARY[name]
        wrong = (lambda x: unary(x) * tirx.const(1.01, "float32")) if fault.kind == "step 1 % off" else (lambda x: x)
        stack.enter_context(mock.patch.dict(epilogue.UNARY, {name: wrong}))
    else:
        binary = _BINARY_FAULTS[fault.kind](epilogue.BINARY[name])
        stack.enter_context(mock.patch.object(epilogue, "BINARY", {**epilogue.BINARY, name: binary}))


# The program as a whole


@dataclass
class _Program:
    """Tells the pipeline of the program, which runs first, from those of its pieces."""

    compiling: bool = False
    compiled: bool = False


def _whole(stack: ExitStack, change: Callable[[tvm.IRModule], tvm.IRModule] = lambda module: module) -> _Program:
    """Changes what the pipeline makes of the program, and of nothing else."""
    right, state = cpu.cpu_pipeline, _Program()

    def wrong(*arguments: Any) -> tvm.transform.Pass:
        made = right(*arguments)

        @tvm.transform.module_pass(opt_level=0, name="CpuPipeline")
        def run(module: tvm.IRModule, _context: Any) -> tvm.IRModule:
            state.compiling = not state.compiled
            module = made(module)
            if state.compiling:
                module = change(module)
            state.compiling, state.compiled = False, True
            return module

        return run

    stack.enter_context(mock.patch.object(cpu, "cpu_pipeline", wrong))
    return state


def _code(fault: Fault, _prepared: Prepared, injected: Injected, stack: ExitStack) -> None:
    """Any compiled function of the program is wrong, and right wherever else it is compiled."""

    def change(module: tvm.IRModule) -> tvm.IRModule:
        module = module.clone()
        functions = functions_of(module)
        name = _mutable(module, list(functions), fault, injected)
        module[functions[name]] = mutated(module[name], fault.kind, fault.site)
        return module

    _whole(stack, change)


def _memory(fault: Fault, _prepared: Prepared, injected: Injected, stack: ExitStack) -> None:
    """The memory of a value is given away before its last use."""
    right, program = memory.lay_out, _whole(stack)

    def wrong(values: Sequence[Value], results: Sequence[Result]) -> Layout:
        lasting = [n for n, value in enumerate(values) if value.last > value.first + 1]
        if program.compiling and lasting:
            n = picked(lasting, fault.place)
            values = [replace(value, last=value.first) if m == n else value for m, value in enumerate(values)]
            injected.where = f"value {n} of {len(values)}"
        return right(values, results)

    stack.enter_context(mock.patch.object(memory, "lay_out", wrong))


class _Repacked:
    """A loaded library whose packed weights are changed."""

    def __init__(self, machine: Any, fault: Fault, injected: Injected) -> None:
        self.machine, self.fault, self.injected = machine, fault, injected

    def __contains__(self, name: str) -> bool:
        return name in self.machine

    def __getitem__(self, name: str) -> Any:
        return self._packed if name == TRANSFORM_PARAMETERS else self.machine[name]

    def call(self, *arguments: Any) -> Any:
        return self.machine.call(*arguments)

    def _packed(self, weights: Any) -> list[Any]:
        tensors = list(self.machine[TRANSFORM_PARAMETERS](weights))
        large = [n for n, tensor in enumerate(tensors) if tensor.shape and tensor.shape[0] > 1]
        n = _some(large, self.fault.place, "packed weight")
        self.injected.where = f"weight {n} of {len(tensors)}, {list(tensors[n].shape)}"
        array = tensors[n].numpy()
        if self.fault.kind == "swapped blocks of a weight":
            changed = np.roll(array, len(array) // 2, axis=0)
        else:
            changed = np.ascontiguousarray(np.swapaxes(array, 0, -1)).reshape(array.shape)
        tensors[n] = tvm.runtime.tensor(changed)
        return tensors


def _packing(fault: Fault, _prepared: Prepared, injected: Injected, stack: ExitStack) -> None:
    """A weight lies wrongly in memory after it was packed, in the program alone."""
    from harness.runtime import executable
    from harness.verify.diagnose import comparison

    for module in (comparison, executable):
        right = module.load_library

        def wrong(library: Any, device: Any, right: Callable[..., Any] = right) -> Any:
            machine = right(library, device)
            whole = library.stem == "program" and TRANSFORM_PARAMETERS in machine
            return _Repacked(machine, fault, injected) if whole else machine

        stack.enter_context(mock.patch.object(module, "load_library", wrong))


def _weights(fault: Fault, prepared: Prepared, injected: Injected, stack: ExitStack) -> None:
    """A weight of the compiled program is another one of the same shape, as with a wrong key of a checkpoint."""
    values = prepared.lowered.parameters()
    pairs = [
        (one, other)
        for one in values
        for other in values
        if one < other and values[one].shape == values[other].shape and not np.array_equal(values[one], values[other])
    ]
    one, other = _some(pairs, fault.place, "two weights of one shape")
    injected.where = f"{other} as {one}"
    right = Lowered.parameters

    def wrong(lowered: Lowered) -> dict[str, np.ndarray]:
        found = right(lowered)
        return found | {one: found[other]}

    stack.enter_context(mock.patch.object(Lowered, "parameters", wrong))


def _reference(fault: Fault, prepared: Prepared, injected: Injected, _stack: ExitStack) -> None:
    """PyTorch's second run differs from its first in one bit of one element."""
    name = picked([n for n, array in prepared.reference.again.items() if array.dtype == np.float32], fault.place)
    injected.where = name

    def again(arrays: Arrays) -> Arrays:
        changed = arrays[name].copy()
        flat = changed.reshape(-1)
        n = int(fault.site * flat.size)
        flat[n] = np.nextafter(flat[n], np.float32(np.inf))
        return arrays | {name: changed}

    injected.again = again


def _folder(fault: Fault, prepared: Prepared, injected: Injected, stack: ExitStack) -> None:
    """Some files of a compiled model's folder are those of another compile."""
    from conformance.calibration.folders import mixed

    if prepared.case.component != "clip":
        raise NoPlaceError("no model with a folder of its own")
    injected.folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    injected.where = ", ".join(mixed(fault.place, injected.folder))


# Source files


def _source(fault: Fault, prepared: Prepared, injected: Injected, stack: ExitStack) -> None:
    """An expression or a statement of a function of this project is another one."""
    able = [place for place in prepared.places if place.part == fault.layer and place.kind == fault.kind]
    injected.file = _some(sorted({place.file for place in able}), fault.place, "line that can be wrong so")
    place = picked([place for place in able if place.file == injected.file], fault.site)
    injected.where = str(place)
    stack.enter_context(rewritten(place))


_MUTATIONS = tuple(MUTATIONS)
_CODE = (*(kind for kind in _MUTATIONS if kind not in FACTORS), *FACTORS)

LAYERS: dict[str, Layer] = {
    "nothing": Layer(0, ("nothing",), frozenset(), _nothing),
    "converter": Layer(
        5,
        ("swapped arguments", "wrong axis", "dropped argument", "wrong number"),
        frozenset((Cause.IMPORTER,)),
        _converter,
    ),
    "workaround": Layer(2, ("left out",), frozenset((Cause.IMPORTER,)), _workaround),
    "legalization": Layer(7, _CODE, frozenset((Cause.LEGALIZATION,)), _legalization),
    "kernel": Layer(7, _CODE, frozenset((Cause.SCHEDULE, Cause.FUSION)), _kernel),
    "schedule": Layer(5, _CODE, frozenset((Cause.SCHEDULE, Cause.FUSION)), _schedule),
    "folding": Layer(3, ("read at the next index", "read with axes swapped"), frozenset((Cause.FUSION,)), _folded),
    "epilogue": Layer(3, tuple(_BINARY_FAULTS), frozenset((Cause.FUSION,)), _epilogue),
    "program": Layer(7, _CODE, frozenset((Cause.RUNTIME,)), _code),
    "memory": Layer(2, ("given away too early",), frozenset(), _memory),
    "packing": Layer(2, ("swapped blocks of a weight", "transposed weight"), frozenset((Cause.RUNTIME,)), _packing),
    "weights": Layer(1, ("weights of another layer",), frozenset(), _weights),
    "reference": Layer(1, ("differs from itself",), frozenset(), _reference),
    "folder": Layer(0, ("files of another compile",), frozenset(), _folder),
    **{name: Layer(4, KINDS, part.causes, _source) for name, part in PARTS.items()},
}
"""Every layer by name, from the import on; one of weight 0 is drawn only if it is asked for."""
