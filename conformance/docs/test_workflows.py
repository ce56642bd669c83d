"""Holds the workflows and the container's file to the repository: they parse, are pinned, and run what exists."""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from conformance.support import reference
from harness.core.settings import REPOSITORY

WORKFLOWS = sorted((REPOSITORY / ".github" / "workflows").glob("*.yml"))
COMMIT = re.compile(r"[\w./-]+@[0-9a-f]{40}")
DIGEST = re.compile(r"^FROM \S+:\S+@sha256:[0-9a-f]{64}$", re.MULTILINE)
TARGETS = set(re.findall(r"^([\w -]+):", (REPOSITORY / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
IS_FILE = re.compile(r"(?:\.ci|conformance|perf|fixtures)/[\w./-]+|Containerfile|constraints\.txt")


def jobs(workflow: Path) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(workflow.read_text(encoding="utf-8"))["jobs"]
    assert found
    return found


def steps(workflow: Path) -> Iterator[dict[str, Any]]:
    for job in jobs(workflow).values():
        yield from job["steps"]


def scripts(workflow: Path) -> list[str]:
    return [step["run"] for step in steps(workflow) if "run" in step]


def programs(workflow: Path, name: str) -> Iterator[list[str]]:
    """The words after a program's name, in each line that begins with it or with its path."""
    for line in "\n".join(scripts(workflow)).splitlines():
        words = shlex.split(line, comments=True)
        if words and Path(words[0]).name == name:
            yield words[1:]


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda workflow: workflow.name)
class TestWorkflow:
    def test_its_actions_are_pinned_to_commits(self, workflow: Path) -> None:
        text = workflow.read_text(encoding="utf-8")
        used = [step["uses"] for step in steps(workflow) if "uses" in step]
        assert used and all(COMMIT.fullmatch(action) for action in used)
        assert len(re.findall(r"uses: \S+  # v[\d.]+$", text, re.MULTILINE)) == len(used), "name the version"

    def test_its_jobs_end_and_may_write_only_where_they_publish(self, workflow: Path) -> None:
        document = yaml.safe_load(workflow.read_text(encoding="utf-8"))
        assert document["permissions"] == {"contents": "read"}
        assert all("timeout-minutes" in job for job in jobs(workflow).values())
        writers = {(workflow.name, name) for name, job in jobs(workflow).items() if "permissions" in job}
        assert writers <= {("release.yml", "release")}
        needed = " ".join(str(job.get("needs", "")) for job in jobs(workflow).values())
        assert set(re.findall(r"\w+", needed)) <= set(jobs(workflow))

    def test_its_scripts_parse(self, workflow: Path) -> None:
        for script in scripts(workflow):
            plain = re.sub(r"\$\{\{.*?\}\}", "x", script)
            done = subprocess.run(["bash", "-n"], input=plain, capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stderr + script

    def test_it_runs_targets_commands_and_files_that_exist(self, workflow: Path) -> None:
        known = reference.options()
        for target, *_ in programs(workflow, "make"):
            assert any(target in names.split() for names in TARGETS), target
        for command, *arguments in programs(workflow, "sam3-tvm"):
            assert {argument for argument in arguments if argument.startswith("--")} <= known[command], command
        for script in scripts(workflow):
            for file in IS_FILE.findall(script):
                assert (REPOSITORY / file).exists(), file


def test_the_container_is_built_from_an_image_by_its_digest() -> None:
    text = (REPOSITORY / "Containerfile").read_text(encoding="utf-8")
    assert len(DIGEST.findall(text)) == len(re.findall(r"^FROM", text, re.MULTILINE)) == 1
    assert "[verify]" not in text, "the base installation alone"


def test_a_release_runs_the_commands_of_the_front_page() -> None:
    """Those that need no checkpoint, as they are shown."""
    page = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    shown = [shlex.split(line, comments=True) for line in re.findall(r"^    \$ (sam3-tvm .*)$", page, re.MULTILINE)]
    run = [*programs(REPOSITORY / ".github" / "workflows" / "release.yml", "sam3-tvm")]
    assert len(shown) >= 6
    assert [words for words in shown if words[1:] not in run] == []
