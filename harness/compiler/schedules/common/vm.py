"""The passes after scheduling, for every target: from Relax calls to code for TVM's virtual machine."""

from __future__ import annotations

import tvm
from tvm import relax


def lower_to_vm(plan: tvm.transform.Pass | None = None) -> tvm.transform.Pass:
    """Plans memory and lowers Relax to what `tvm.relax.build` with `relax_pipeline=None` generates code from.

    Args:
        plan: Plans memory; TVM's own `StaticPlanBlockMemory` by default.
    """
    return tvm.transform.Sequential(
        [
            relax.transform.RewriteDataflowReshape(),
            relax.transform.ToNonDataflow(),
            relax.transform.RemovePurityChecking(),
            relax.transform.CallTIRRewrite(),
            plan or relax.transform.StaticPlanBlockMemory(),
            relax.transform.LowerAllocTensor(),
            relax.transform.KillAfterLastUse(),
            relax.transform.LowerRuntimeBuiltin(),
            relax.transform.ComputePrimValue(),
            relax.transform.VMShapeLower(),
            relax.transform.AttachGlobalSymbol(),
        ]
    )
