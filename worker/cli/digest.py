"""``volume-worker digest``: the digest that copies are compared by."""

import pathlib
from typing import Annotated

import typer

from worker.cli import options, output
from worker.transfer import digest as digests


def digest(
    path: Annotated[pathlib.Path, typer.Argument(metavar="PATH", help="A file or block device.")],
    *,
    config: options.Config = None,
    as_json: options.Json = False,
) -> None:
    """Prints the blake2b-4m digest of a file or block device."""
    found = digests.digest_path(path)
    if as_json:
        output.print_json({"path": str(path), "digest": found})
    else:
        output.say(found)
