"""Storage tools that misbehave: scripts that come first on a worker's ``PATH``."""

import os
import pathlib
import shutil
from collections.abc import Mapping
from typing import Any, Final

ANSWERS: Final = """#!/bin/sh
# As tgtadm against a tgtd without targets, but for one operation.
{always}
case "$*" in
    *"{operation}"*)
        {instead}
        ;;
    *"--op show --mode portal"*)
        echo "Portal: 127.0.0.1:3260,1"
        ;;
esac
"""

BACKEND: Final[Mapping[str, Any]] = {"driver": "file", "target": "tgt", "directory": "{}/iscsi"}
"""A backend whose target is whatever ``tgtadm`` is."""
NEW_TARGET: Final = "--op new --mode target"


def tgtadm(
    folder: pathlib.Path, operation: str, instead: str, *, always: str = ""
) -> dict[str, str]:
    """Puts a ``tgtadm`` into a folder; returns the environment in which it is found first.

    Args:
        instead: what it does (sh) where its arguments have ``operation``.
        always: what it does before anything else.
    """
    script = ANSWERS.format(operation=operation, instead=instead, always=always)
    write(folder / "tgtadm", script)
    path = f"{folder}{os.pathsep}{os.environ['PATH']}"
    assert shutil.which("tgtadm", path=path) == str(folder / "tgtadm")
    return {"PATH": path}


def write(path: pathlib.Path, script: str) -> None:
    """Writes a program, in one step: one that runs keeps its old text."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f".{path.name}.new")
    new.write_text(script)
    new.chmod(0o755)
    new.replace(path)
