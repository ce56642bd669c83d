"""The one way from a PyTorch module to a Relax module: a frontend, a RoPE strategy, a precision.

Everything that compiles, explains, tunes or measures goes this way; nothing else calls a frontend.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from harness.core.budget import NO_GROUPS, Groups
from harness.core.case import DEFAULT_FRONTEND, DEFAULT_STRATEGY, Case
from harness.core.errors import HarnessError
from harness.core.precision import DEFAULT_PRECISION, PRECISIONS
from harness.lowering.frontends import EXPORTING_PROGRAMS, FRONTENDS
from harness.lowering.rope import STRATEGIES
from harness.lowering.strategy import Strategy

if TYPE_CHECKING:
    import numpy as np
    import torch
    import tvm

    from harness.core.program import Axis
    from harness.lowering.frontends.frontend import Frontend
    from harness.lowering.frontends.torch_export.graph import Graph


@dataclass(frozen=True)
class Lowered:
    """A Relax module with the values of its parameters.

    Attributes:
        module: Its function `main` takes the inputs in order (their number is the attribute `num_input`), then every
            weight, buffer and constant; it returns a tuple of the outputs.
        values: Values of the parameters by name, in the order in which `main` takes them, as they were imported.
        float32: The groups that stayed float32: those of the route's that it has, and those that always do.
    """

    module: tvm.IRModule
    values: dict[str, np.ndarray]
    float32: Groups = NO_GROUPS

    def parameters(self) -> dict[str, np.ndarray]:
        """Returns the values in the dtypes in which `main` takes them, rounded to nearest even.

        Raises:
            HarnessError: A weight is beyond the range of the precision's dtype.
        """
        from harness.lowering.precision import parameters_for

        rounded = parameters_for(self.module, list(self.values.values()))
        return dict(zip(self.values, rounded, strict=True))


@dataclass(frozen=True)
class Route:
    """How modules are lowered: by registry names, as a case has them.

    Attributes:
        frontend: Key of `harness.lowering.frontends.FRONTENDS`.
        strategy: Key of `harness.lowering.rope.STRATEGIES`, or a strategy that is in no registry.
        precision: Key of `harness.core.precision.PRECISIONS`.
        float32: Groups of products that stay float32 in a half precision, besides those that always do
            (`harness.lowering.groups.keep_float32`).
    """

    frontend: str = DEFAULT_FRONTEND
    strategy: str | Strategy = DEFAULT_STRATEGY
    precision: str = DEFAULT_PRECISION
    float32: Groups = NO_GROUPS

    @classmethod
    def of(cls, case: Case, float32: Groups = NO_GROUPS) -> Route:
        """Returns the route that a case names, with groups of products that stay float32."""
        return cls(case.frontend, case.strategy, case.precision, float32)

    def applied(self, module: torch.nn.Module) -> AbstractContextManager[None]:
        """Gives the module the strategy's form, which `export` sees, for the duration of the context."""
        return self._strategy.apply(module)

    @property
    def symbolic(self) -> bool:
        """Whether frontend and strategy take symbolic axes."""
        return self._frontend.symbolic and self._strategy.symbolic

    def export(
        self, module: torch.nn.Module, args: tuple[torch.Tensor, ...], axes: Sequence[Mapping[int, Axis]] = ()
    ) -> Any:
        """Exports the module to the frontend's exchange format, for the shapes and dtypes of `args`.

        Args:
            module: Takes tensors, returns a tensor or a tuple of tensors; in eval mode.
            args: Its positional inputs.
            axes: Axes of each of them whose extents are to be symbolic, by number (`Program.axes`); none by default.

        Raises:
            HarnessError: There are symbolic axes, and the frontend or the strategy takes none.
        """
        if any(axes) and not self.symbolic:
            kind, one = ("strategy", self._strategy) if self._frontend.symbolic else ("frontend", self._frontend)
            raise HarnessError(f"the {kind} {one.name} takes no symbolic axes: use another {kind}, or a static shape")
        with self.applied(module):
            return self._frontend.export(module, args, axes)

    def lower(self, exported: Any, exported_module: torch.nn.Module) -> Lowered:
        """Returns the Relax module of what `export` returned, in the precision.

        Groups that always stay float32 do so if the frontend keeps modules.

        Args:
            exported: What `export` returned.
            exported_module: The module that it was given.

        Raises:
            HarnessError: The route's groups are to stay float32, and the frontend cannot tell them.
            Exception: Whatever the frontend raises on what it cannot import, unchanged.
        """
        from harness.lowering.groups import always_float32
        from harness.lowering.precision import lower_precision

        module, values = self._frontend.import_exported(exported, self._strategy)
        precision = PRECISIONS[self.precision]
        always = always_float32(exported_module) if self.frontend in EXPORTING_PROGRAMS else NO_GROUPS
        float32 = self.float32 | always
        if not float32 or not precision.is_half:
            return Lowered(lower_precision(module, precision), values)
        group_of = self.groups(exported, module, exported_module)
        products = [product for product, group in group_of.items() if group in float32]
        return Lowered(lower_precision(module, precision, products), values, float32.intersection(group_of.values()))

    def groups(self, exported: Any, module: tvm.IRModule, exported_module: torch.nn.Module) -> dict[str, str]:
        """Returns the group of each product, by the name of its variable in the module as imported in fp32.

        Args:
            exported: What `export` returned.
            module: What it was imported as.
            exported_module: The module that was exported.

        Raises:
            HarnessError: The frontend keeps no modules.
        """
        from harness.lowering.groups import groups_of

        if self.frontend not in EXPORTING_PROGRAMS:
            others = " or ".join(EXPORTING_PROGRAMS)
            raise HarnessError(
                f"the frontend {self.frontend} keeps no modules to name products by: choose --frontend {others}"
            )
        return groups_of(module, self.graph(exported), exported_module)

    def graph(self, exported: Any) -> Graph:
        """Returns the graph that the import of what `export` returned begins with; of `EXPORTING_PROGRAMS` alone."""
        from harness.lowering.frontends.torch_export.graph import graph_of

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
        module: As for `Route.export`.
        args: Its positional inputs.
        route: The default one if none is given.
    """
    route = route or Route()
    return route.lower(route.export(module, args), module)
