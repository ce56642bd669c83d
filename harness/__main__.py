"""Runs the command `sam3-tvm` as `python -m harness`."""

from harness.cli.main import main

if __name__ == "__main__":
    main()
