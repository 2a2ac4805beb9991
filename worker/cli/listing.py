"""What the commands that list records print."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import rich.text

from worker import reads
from worker.cli import output


def print_page(
    page: reads.Page,
    name: str,
    *,
    titles: Sequence[str],
    row: Callable[[Mapping[str, Any]], Sequence[rich.text.Text]],
    limit: int,
    as_json: bool,
) -> None:
    """Prints a page as a table or as JSON, and how to go on where there may be more."""
    if as_json:
        output.print_json(page.to_wire(name))
        return
    output.print_table(titles, [row(record) for record in page.records])
    if page.truncated or len(page.records) == limit:
        output.note(f"there may be more: --after {page.records[-1]['id']}")
