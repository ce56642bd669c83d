"""Reads the assembly that LLVM wrote for a module, and finds its loops that multiply and add.

Reads what LLVM prints for x86-64 (AT&T syntax) and for AArch64 (Linux and macOS); there is no general parser in it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

import tvm
from tvm import relax

_FUSED = re.compile(r"vdpbf16ps|bf(dot|mmla)(\.4s)?|vfn?m(add|sub)\d+[ps]s|fml[as](\.4s)?|fn?m(add|sub)")
"""Mnemonics of fused multiply-adds, vector or scalar, that add into one of their operands."""
_BRANCH = re.compile(r"(?:j\w+|b(?:\.\w+)?|cbn?z|tbn?z)\s(?:.*,)?\s*(\.?L\w+)$")
_FULL_VECTOR = {"x86-64-v4": r"%zmm\d+$", "x86-64-v3": r"%ymm\d+$"}
_NEON = r"v\d+(\.4s)?$"


@dataclass(frozen=True)
class Instruction:
    """One instruction: its mnemonic and its operands as written."""

    mnemonic: str
    operands: tuple[str, ...]

    @property
    def operation(self) -> str:
        """The mnemonic without the arrangement of vectors, which macOS writes behind it."""
        return self.mnemonic.partition(".")[0]

    @property
    def text(self) -> str:
        """The instruction on one line."""
        return f"{self.mnemonic} {', '.join(self.operands)}"

    @property
    def written(self) -> tuple[str, ...]:
        """The operands that it may write: the last one in AT&T syntax, the first ones of AArch64."""
        if any("%" in operand for operand in self.operands):
            return self.operands[-1:]
        return self.operands[: 2 if self.mnemonic == "ldp" else 0 if self.mnemonic.startswith("st") else 1]

    @property
    def spills(self) -> bool:
        """Whether it moves a vector between a register and the stack frame."""
        vector = any(re.match(r"%[xyz]mm|[qv]\d", operand) for operand in self.operands)
        return vector and any(re.match(r"-?\d*\(%rsp\)$|\[(sp|x29)\b", operand) for operand in self.operands)


@dataclass(frozen=True)
class ProductLoop:
    """An innermost loop that adds products into registers that it never loads or overwrites.

    Attributes:
        instructions: All of it.
        fused: Its fused multiply-adds.
        accumulators: The registers that they add into.
    """

    instructions: tuple[Instruction, ...]
    fused: tuple[Instruction, ...]
    accumulators: frozenset[str]

    @property
    def spills(self) -> list[str]:
        """Vectors that it moves to or from the stack, whose frame x29 points to unless the loop writes it."""
        pointer = any("x29" in instruction.written for instruction in self.instructions)
        spills = [instruction.text for instruction in self.instructions if instruction.spills]
        return [text for text in spills if not (pointer and "[x29" in text)]


def assembly(module: tvm.IRModule, target: tvm.target.Target) -> str:
    """Returns LLVM's assembly of a lowered module."""
    return str(relax.build(module, target, relax_pipeline=None).mod.imports[0].inspect_source("asm"))


def product_loops(text: str) -> list[ProductLoop]:
    """Returns every innermost loop with an accumulator, in all functions."""
    loops = []
    for body in innermost_loops(text):
        fused = tuple(i for i in body if _FUSED.fullmatch(i.mnemonic))
        others = {_register(operand) for i in body if i not in fused for operand in i.written}
        accumulators = frozenset(_register(i.written[0]) for i in fused) - others
        if accumulators:
            loops.append(ProductLoop(body, fused, accumulators))
    return loops


def full_vector(cpu: str) -> re.Pattern[str]:
    """Matches the accumulator of a multiply-add on a whole vector register of that CPU."""
    return re.compile(_FULL_VECTOR.get(cpu, _NEON))


def innermost_loops(text: str) -> Iterator[tuple[Instruction, ...]]:
    """Yields the code between a label and a jump back to it, with no such loop inside."""
    lines = text.splitlines()
    labels = {line[:-1] if line.endswith(":") else line.split(":")[0]: n for n, line in enumerate(lines) if ":" in line}
    backward = set()
    for n, line in enumerate(lines):
        branch = _BRANCH.match(line.strip())
        if branch and labels.get(branch[1], n + 1) <= n:
            backward.add((labels[branch[1]], n))
    for first, last in sorted(backward):
        if not any(first <= a and b <= last and (a, b) != (first, last) for a, b in backward):
            yield tuple(_instruction(line) for line in lines[first:last] if re.match(r"\s+[a-z]", line))


def _register(operand: str) -> str:
    """Returns one name for the parts of a vector register: zmm1 for xmm1 and ymm1, v1 for s1, d1, q1 and v1.4s."""
    x86 = re.match(r"%[xyz]mm(\d+)", operand)
    arm = re.match(r"[bhsdqv](\d+)", operand)
    return f"zmm{x86[1]}" if x86 else f"v{arm[1]}" if arm else operand


def _instruction(line: str) -> Instruction:
    mnemonic, _, rest = re.sub(r"\s+(# |//|; ).*", "", line).strip().partition("\t")
    # Commas inside an address do not separate operands.
    operands = re.findall(r"(?:\([^)]*\)|\[[^\]]*\]|[^,()\[\]])+", rest)
    return Instruction(mnemonic, tuple(operand.strip() for operand in operands))
