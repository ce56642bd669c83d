"""Runs the command as after a base install."""

IMPORTS = (
    "import sys\n"
    "sys.modules['torch'] = sys.modules['torchvision'] = sys.modules['sam3'] = None\n"
    "from harness.cli.main import main\n"
)
"""What a base install lacks cannot be imported."""
BARE = f"{IMPORTS}try:\n    main()\nfinally:\n    assert 'tvm' not in sys.modules\n"
"""Nor does the command load TVM's compiler."""
