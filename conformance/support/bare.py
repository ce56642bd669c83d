"""Runs the command as after a base install."""

BARE = (
    "import sys\n"
    "sys.modules['torch'] = sys.modules['torchvision'] = sys.modules['sam3'] = None\n"
    "from harness.cli.main import main\n"
    "try:\n"
    "    main()\n"
    "finally:\n"
    "    assert 'tvm' not in sys.modules\n"
)
"""What a base install lacks cannot be imported; nor does the command load TVM's compiler."""
