"""Defines the `sam3-tvm` command; each command has a file in this folder."""

from __future__ import annotations

import io
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Annotated

import typer

from harness import __version__
from harness.cli.budget import budget_command
from harness.cli.compile import ModelCommand, compile_
from harness.cli.console import console, print_error
from harness.cli.diagnose import diagnose
from harness.cli.doctor import doctor
from harness.cli.explain import explain
from harness.cli.inspect import inspect
from harness.cli.list import list_
from harness.cli.pack import pack
from harness.cli.report import report
from harness.cli.segment import segment
from harness.cli.serve import serve
from harness.cli.serve_device import serve_device
from harness.cli.track import track
from harness.cli.tune import tune
from harness.cli.ui import ui
from harness.cli.verify import verify
from harness.core.errors import HarnessError
from harness.core.files import full_disk
from harness.runtime.errors import ModelError

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
    help="Prove that SAM 3 compiled by TVM is SAM 3.",
)


@app.callback(invoke_without_command=True)
def version_option(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    """Prove that SAM 3 compiled by TVM is SAM 3."""
    if version:
        console.print(f"sam3-tvm {__version__}")
        raise typer.Exit


COMMANDS: dict[str, Callable[..., None]] = {
    "verify": verify,
    "explain": explain,
    "diagnose": diagnose,
    "budget": budget_command,
    "compile": compile_,
    "tune": tune,
    "pack": pack,
    "inspect": inspect,
    "segment": segment,
    "track": track,
    "ui": ui,
    "serve": serve,
    "serve-device": serve_device,
    "report": report,
    "list": list_,
    "doctor": doctor,
}
"""Every command by name, in the order of the help."""

for _name, _command in COMMANDS.items():
    app.command(_name, cls=ModelCommand if _command is compile_ else None)(_command)

INTERRUPTED = 130
"""Exit code after Ctrl-C: 128 plus the number of SIGINT, as shells count."""


class Terminated(KeyboardInterrupt):
    """Ends a command at SIGTERM or SIGHUP; after a plain interrupt inside `exec`, Python exits with SIGINT's code."""


def main() -> None:
    """Runs the command, and exits with its exit code."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # names of files may not be encodable
    sys.exit(exit_code(lambda: app(standalone_mode=False)))


def exit_code(command: Callable[[], int | None]) -> int:
    """Runs a command and returns its exit code; every expected error is one sentence on stderr.

    SIGTERM and SIGHUP end the command as Ctrl-C does, with 143 and 129.
    """
    signals: list[int] = []

    def interrupt(number: int, _frame: object) -> None:
        if not signals:  # another signal must not interrupt the cleanup
            signals.append(number)
            raise Terminated

    for number in (signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGTERM)):
        if signal.getsignal(number) is not signal.SIG_IGN:  # ignored under nohup
            signal.signal(number, interrupt)
    try:
        code = command() or 0
    except (HarnessError, ModelError, typer.TyperException) as error:
        message = error.format_message() if isinstance(error, typer.TyperException) else str(error)
        print_error(f"error: {message}")
        code = 2
    except (KeyboardInterrupt, typer.Abort):
        code = INTERRUPTED
    except OSError as error:
        if signals:
            code = INTERRUPTED  # the terminal is gone
        elif sentence := full_disk(error):
            print_error(f"error: {sentence}")
            code = 2
        else:
            raise
    if signals:
        code = 128 + signals[0]
    if signals or code == INTERRUPTED:
        with suppress(OSError):
            print_error("Interrupted: nothing half-written was left; what was cached will be used again.")
    return code
