"""Completion in shells: the script that they are given, and what it asks the command."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

CLI = (sys.executable, "-P", "-m", "outrider.cluster.cli")


def run(*args: str, **variables: str) -> str:
    environment = {**os.environ, "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1", **variables}
    done = subprocess.run([*CLI, *args], capture_output=True, text=True, timeout=60, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("shell", "part"),
    [
        ("bash", "complete -o default -F _outrider_completion outrider"),
        ("zsh", "compdef _outrider_completion outrider"),
        ("fish", "complete --command outrider"),
    ],
)
def test_the_script_is_printed(shell: str, part: str) -> None:
    assert part in run("--show-completion", shell)


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("outrider s", {"status", "supervise"}),
        ("outrider check", {"check-exactness"}),
        ("outrider status --w", {"--watch"}),
        *((f"outrider {name} --addr", {"--address"}) for name in ("bench", "generate", "profile", "check-exactness")),
        ("outrider nothing-of-the-kind", set()),
    ],
)
def test_commands_and_options_are_completed(words: str, found: set[str]) -> None:
    position = str(len(words.split()) - 1)
    answer = run(COMP_WORDS=words, COMP_CWORD=position, _OUTRIDER_COMPLETE="complete_bash")
    assert set(answer.split()) == found


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash here")
def test_bash_completes_with_it(tmp_path: Path) -> None:
    """The script as bash runs it, with a command of that name on its path."""
    command = tmp_path / "outrider"
    command.write_text(f'#!/bin/sh\nexec {" ".join(CLI)} "$@"\n')
    command.chmod(0o755)
    script = run("--show-completion", "bash")
    program = f"""{script}
COMP_WORDS=(outrider stat) COMP_CWORD=1
_outrider_completion outrider
printf '%s\\n' "${{COMPREPLY[@]}}"
"""
    environment = {**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-c", program], capture_output=True, text=True, timeout=60, env=environment, check=False
    )
    assert done.stdout.split() == ["status"], done.stderr
