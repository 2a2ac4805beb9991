"""``--edit``: what is changed in a request before it is replayed, by a merge patch (RFC 7396)."""

import json
from collections.abc import Mapping
from typing import Any, Final

from messages import envelope, errors, requests

_MEMBERS: Final = frozenset({"method", "version", "args"})


class NotEditable(errors.VolumeWorkerError):
    """The request is none that can be changed here and there."""


def apply(edit: Mapping[str, Any], body: bytes) -> bytes:
    """The request as edited: a patch of its arguments, or of all where it names other members.

    Raises:
        NotEditable: there is no request to be patched, and the edit is no whole one.
    """
    try:
        data = envelope.parse_json(body)
    except errors.InvalidRequest:
        data = None
    major, minor = requests.VERSION
    version = f"{major}.{minor}"
    if isinstance(data, dict):
        merged = _merge(data, edit if _MEMBERS & edit.keys() else {"args": edit})
        return json.dumps({"version": version, **merged}).encode()
    if not {"method", "args"} <= edit.keys():
        raise NotEditable(
            "its body is no JSON object: give --edit a whole request, with method and args"
        )
    return json.dumps({"version": version, **edit}).encode()


def _merge(target: object, patch: object) -> Any:
    if not isinstance(patch, Mapping):
        return patch
    merged = dict(target) if isinstance(target, Mapping) else {}
    for name, value in patch.items():
        if value is None:
            merged.pop(name, None)
        else:
            merged[name] = _merge(merged.get(name), value)
    return merged
