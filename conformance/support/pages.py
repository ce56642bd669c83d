"""Runs `sam3-tvm ui` as a real process, and the system's Chromium, for tests of the page."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from conformance.support.bare import BARE

ROOT = Path(__file__).resolve().parents[2]
CHROMIUM = ("chromium", "chromium-browser")
"""Names of the program in Debian and in Ubuntu."""
READY = re.compile(r"Open ((http://\S+/)\?token=\w{32}) in a browser")


def command(*arguments: str | Path) -> list[str]:
    return [sys.executable, "-c", BARE, *map(str, arguments)]


def environment() -> dict[str, str]:
    return {**os.environ, "COLUMNS": "200", "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}


def run(*arguments: str | Path, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*arguments), capture_output=True, text=True, env=environment(), cwd=cwd, timeout=600, check=False
    )


@dataclass(frozen=True)
class Served:
    """A server of the page.

    Attributes:
        address: What is to be opened in a browser; it has a token.
        url: Where it is.
        told: What it printed before it was ready.
    """

    address: str
    url: str
    told: str

    def client(self) -> httpx.Client:
        """A client that has opened the page."""
        return httpx.Client(base_url=self.url, cookies=httpx.get(self.address).cookies, timeout=60)


@contextmanager
def served(model: Path, *arguments: str | Path) -> Iterator[Served]:
    """Serves `sam3-tvm ui` on a free port; it is interrupted in the end as by Ctrl-C and must end quietly."""
    with subprocess.Popen(
        command("ui", "--model", model, "--port", "0", *arguments),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
    ) as process:
        try:
            yield _ready(process)
            process.send_signal(signal.SIGINT)
            printed, errors = process.communicate(timeout=60)
        finally:
            process.kill()
    assert (process.returncode, errors) == (0, ""), errors
    assert "Stopped" in printed


def _ready(process: subprocess.Popen[str]) -> Served:
    assert process.stdout is not None and process.stderr is not None
    told = []
    for line in process.stdout:
        told.append(line)
        if found := READY.match(line):
            return Served(*found.groups(), "".join(told))
    raise AssertionError(f"it ended: {''.join(told)}{process.stderr.read()}")


def lacking(model: Path, folder: Path, entries: tuple[str, ...]) -> Path:
    """Copies a compiled model without some entry points, as if it was compiled without them."""
    import json

    shutil.copytree(model, folder, copy_function=os.link)
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text(encoding="utf-8"))
    for name in entries:
        del manifest["entries"][name]
    path.unlink()
    path.write_text(json.dumps(manifest), encoding="utf-8")
    return folder


@contextmanager
def chromium() -> Iterator[Any]:
    """Starts the system's Chromium without a window; skips the test if there is none."""
    program = next(filter(None, map(shutil.which, CHROMIUM)), None)
    if program is None:
        pytest.skip("Chromium is not installed: apt install chromium")
    from playwright.sync_api import sync_playwright

    arguments = ["--no-sandbox"] if hasattr(os, "geteuid") and os.geteuid() == 0 else []
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=program, args=arguments)
        try:
            yield browser
        finally:
            browser.close()
