"""Defines the only route from a PyTorch module to a Relax module: a frontend, a RoPE strategy and a precision.

All code that compiles, explains, tunes or measures takes this route; no other code calls a frontend.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from harness.compiler.lowering.frontends import EXPORTING_PROGRAMS, FRONTENDS
from harness.compiler.lowering.rope import STRATEGIES
from harness.compiler.lowering.strategy import Strategy
from harness.core.budget import NO_GROUPS, Groups
from harness.core.case import DEFAULT_FRONTEND, DEFAULT_STRATEGY, Case
from harness.core.errors import HarnessError
from harness.core.precision import DEFAULT_PRECISION, PRECISIONS

if TYPE_CHECKING:
    import numpy as np
    import torch
    import tvm

    from harness.compiler.lowering.frontends.frontend import Frontend
    from harness.compiler.lowering.frontends.torch_export.lifting import Graph
    from harness.core.program import Axis


@dataclass(frozen=True)
class Lowered:
    """A Relax module with the values of its parameters.

    Attributes:
        module: Its function `main` takes the inputs in order (their number is the attribute `num_input`), then every
            weight, buffer and constant; it returns a tuple of the outputs.
        values: Imported values of the parameters by name, in the order of `main`.
        float32: The module's groups that stayed float32: the route's, and those noted by `keep_float32`.
    """

    module: tvm.IRModule
    values: dict[str, np.ndarray]
    float32: Groups = NO_GROUPS

    def parameters(self) -> dict[str, np.ndarray]:
        """Returns the values in the dtypes of `main`, rounded to nearest even.

        Raises:
            HarnessError: A weight is beyond the range of the precision's dtype.
        """
        from harness.compiler.lowering.precision import parameters_for

        rounded = parameters_for(self.module, list(self.values.values()))
        return dict(zip(self.values, rounded, strict=True))


@dataclass(frozen=True)
class Route:
    """A frontend, a strategy and a precision by registry names, as in a case.

    Attributes:
        frontend: Key of `harness.compiler.lowering.frontends.FRONTENDS`.
        strategy: Key of `harness.compiler.lowering.rope.STRATEGIES`, or an unregistered strategy.
        precision: Key of `harness.core.precision.PRECISIONS`.
        float32: Groups of products that stay float32 in half precision, in addition to those noted by
            `harness.compiler.lowering.groups.keep_float32`.
    """

    frontend: str = DEFAULT_FRONTEND
    strategy: str | Strategy = DEFAULT_STRATEGY
    precision: str = DEFAULT_PRECISION
    float32: Groups = NO_GROUPS

    @classmethod
    def from_case(cls, case: Case, float32: Groups = NO_GROUPS) -> Route:
        """Returns the route of a case, with groups of products that stay float32."""
        return cls(case.frontend, case.strategy, case.precision, float32)

    def apply_strategy(self, module: torch.nn.Module) -> AbstractContextManager[None]:
        """Applies the strategy to the module, which `export` sees in this form, for the duration of the context."""
        return self._strategy.apply(module)

    @property
    def symbolic(self) -> bool:
        """Returns whether frontend and strategy take symbolic axes."""
        return self._frontend.symbolic and self._strategy.symbolic

    def export(
        self, module: torch.nn.Module, args: tuple[torch.Tensor, ...], axes: Sequence[Mapping[int, Axis]] = ()
    ) -> Any:
        """Exports the module to the frontend's exchange format, for the shapes and dtypes of `args`.

        Args:
            module: Takes tensors and returns a tensor or a tuple of tensors; in evaluation mode.
            args: Its positional inputs.
            axes: Symbolic axes of each input, by number (`Program.axes`); none by default.

        Raises:
            HarnessError: There are symbolic axes, and the frontend or the strategy takes none.
        """
        if any(axes) and not self.symbolic:
            kind, entry = ("strategy", self._strategy) if self._frontend.symbolic else ("frontend", self._frontend)
            raise HarnessError(f"the {kind} {entry.name} takes no symbolic axes: use another {kind}, or a static shape")
        with self.apply_strategy(module):
            return self._frontend.export(module, args, axes)

    def lower(self, exported: Any, exported_module: torch.nn.Module) -> Lowered:
        """Returns the Relax module of an exported module, in the precision.

        Groups noted by `keep_float32` stay float32 if the frontend keeps modules.

        Args:
            exported: The result of `export`.
            exported_module: The exported module.

        Raises:
            HarnessError: The route has groups that stay float32, and the frontend cannot identify them.
            Exception: Any error of the frontend's import, unchanged.
        """
        from harness.compiler.lowering.groups import always_float32
        from harness.compiler.lowering.precision import lower_precision

        module, values = self._frontend.import_exported(exported, self._strategy)
        precision = PRECISIONS[self.precision]
        always = always_float32(exported_module) if self.frontend in EXPORTING_PROGRAMS else NO_GROUPS
        float32 = self.float32 | always
        if not float32 or not precision.is_half:
            return Lowered(lower_precision(module, precision), values)
        group_names = self.groups(exported, module, exported_module)
        products = [product for product, group in group_names.items() if group in float32]
        return Lowered(lower_precision(module, precision, products), values, float32.intersection(group_names.values()))

    def groups(self, exported: Any, module: tvm.IRModule, exported_module: torch.nn.Module) -> dict[str, str]:
        """Returns the group of each product, by the name of its variable in the imported fp32 module.

        Args:
            exported: The result of `export`.
            module: The imported module.
            exported_module: The module that was exported.

        Raises:
            HarnessError: The frontend keeps no modules.
        """
        from harness.compiler.lowering.groups import groups_of

        if self.frontend not in EXPORTING_PROGRAMS:
            frontends = " or ".join(EXPORTING_PROGRAMS)
            raise HarnessError(
                f"the frontend {self.frontend} keeps no modules to name products by: choose --frontend {frontends}"
            )
        return groups_of(module, self.graph(exported), exported_module)

    def graph(self, exported: Any) -> Graph:
        """Returns the graph from which an exported program is imported; for `EXPORTING_PROGRAMS` alone."""
        from harness.compiler.lowering.frontends.torch_export.lifting import graph_of

        return graph_of(self._strategy.transform(exported))

    @property
    def _strategy(self) -> Strategy:
        return STRATEGIES[self.strategy] if isinstance(self.strategy, str) else self.strategy

    @property
    def _frontend(self) -> Frontend:
        return FRONTENDS[self.frontend]


def lower(module: torch.nn.Module, args: tuple[torch.Tensor, ...], route: Route | None = None) -> Lowered:
    """Exports and imports a module in one step.

    Args:
        module: See `Route.export`.
        args: Its positional inputs.
        route: The route; the default route if None.
    """
    route = route or Route()
    return route.lower(route.export(module, args), module)
