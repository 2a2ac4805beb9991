"""A program that fails or hangs when a test says so, before the real one on a worker's PATH."""

import os
import pathlib
import shlex
import shutil
from collections.abc import Mapping
from typing import Final

_SCRIPT: Final = """#!/bin/sh
if [ -e {rule} ]; then
    {{ read -r how; read -r which; }} <{rule}
    case "$*" in
    $which)
        echo "$*" >>{hits}
        case "$how" in
        fail) echo "told to fail" >&2; exit 22 ;;
        hang) trap '' TERM; sleep 600 & while :; do sleep 600; done ;;
        esac ;;
    esac
fi
exec {real} "$@"
"""


class Tool:
    """The program in front of the real one."""

    def __init__(self, program: str, folder: pathlib.Path) -> None:
        real = shutil.which(program)
        assert real is not None, f"{program} is missing"
        self._folder = folder / "bin"
        self._folder.mkdir(parents=True)
        self._rule = self._folder / "rule"
        self._hits = self._folder / "hits"
        script = self._folder / program
        quoted = {
            "rule": shlex.quote(str(self._rule)),
            "hits": shlex.quote(str(self._hits)),
            "real": shlex.quote(real),
        }
        script.write_text(_SCRIPT.format(**quoted))
        script.chmod(0o755)

    @property
    def env(self) -> Mapping[str, str]:
        """For the worker that is to find it."""
        return {"PATH": f"{self._folder}:{os.environ['PATH']}"}

    def fail(self, which: str) -> None:
        """From now on it fails where its arguments match, as a shell's pattern."""
        self._set("fail", which)

    def hang(self, which: str) -> None:
        """From now on it hangs there with a child of its own, and both ignore SIGTERM."""
        self._set("hang", which)

    def mend(self) -> None:
        """It does what the real one does."""
        self._rule.unlink(missing_ok=True)

    def hits(self) -> int:
        """How often it was told so since."""
        return len(self._hits.read_text().splitlines()) if self._hits.exists() else 0

    def _set(self, how: str, which: str) -> None:
        self._hits.unlink(missing_ok=True)
        new = self._rule.with_suffix(".new")
        new.write_text(f"{how}\n{which}\n")
        new.replace(self._rule)
