"""`python -m harness` is the `sam3-tvm` command."""

from harness.cli.main import main

if __name__ == "__main__":
    main()
