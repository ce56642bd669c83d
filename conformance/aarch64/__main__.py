"""`python -m conformance.aarch64`: sets the emulated machine up, for `pytest --aarch64`."""

from __future__ import annotations

import sys

from conformance.aarch64.environment import set_up
from harness.core.errors import HarnessError


def main() -> int:
    try:
        machine = set_up(lambda step: print(f"Setting up an emulated AArch64 machine: {step}", flush=True))
    except HarnessError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"AArch64 code runs {'emulated' if machine.emulated else 'on this machine'}, in {machine.python}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
