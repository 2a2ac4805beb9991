"""The command ``volume-worker``: thin commands over plain functions."""

from worker.cli import app


def main() -> None:
    """The entry point of the installed command."""
    app.main()
