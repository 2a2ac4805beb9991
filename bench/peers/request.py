"""The request that every peer is sent: that which the worker gets."""

import uuid
from typing import Any


def arguments() -> dict[str, Any]:
    """Of ``create_volume``, with a name of its own."""
    return {"volume": {"name": str(uuid.uuid4()), "size_bytes": 1 << 30}}


def check(sent: Any, answered: Any) -> None:
    """Ends the benchmark where the answer is another one than the echo."""
    if answered != sent:
        raise SystemExit(f"the call failed: {answered!r}")
