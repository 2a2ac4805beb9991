#!/usr/bin/env python3
"""Writes the outside contract as JSON Schemas, from the models and names that the code uses.

tools/contract_schemas.py            writes docs/contract/schemas.json
tools/contract_schemas.py --check    fails where that file is not up to date
"""

import argparse
import json
import pathlib
import sys
from collections.abc import Mapping
from typing import Any, Final

ROOT: Final = pathlib.Path(__file__).resolve().parent.parent
FILE: Final = ROOT / "docs" / "contract" / "schemas.json"

if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))

from messages import (  # noqa: E402
    envelope,
    errors,
    findings,
    letters,
    replies,
    requests,
    resources,
    topology,
)

Schema = dict[str, Any]

_EXAMPLE: Final = topology.Topology("NS")
_RECORDS: Final = (
    resources.Volume,
    resources.Attachment,
    resources.Connection,
    resources.Job,
    resources.Progress,
    findings.Finding,
)
_ID: Final[Schema] = {"type": "string", "format": "uuid"}
_TIME: Final[Schema] = {"type": "string", "format": "date-time"}
_TEXT: Final[Schema] = {"type": "string"}
_COUNT: Final[Schema] = {"type": "integer", "minimum": 0}


def build() -> dict[str, Any]:
    """The whole contract as JSON data."""
    definitions: dict[str, Schema] = {}
    for model in _RECORDS:
        definitions[model.__name__] = _take_out(_schema_of(model), definitions)
    arguments = {
        name: _take_out(_schema_of(method.args), definitions)
        for name, method in sorted(requests.METHODS.items())
    }
    definitions["Error"] = _error()
    major, minor = requests.VERSION
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$comment": "Written by tools/contract_schemas.py; not to be edited.",
        "version": f"{major}.{minor}",
        "$defs": dict(sorted(definitions.items())),
        "methods": {
            name: {
                "kind": method.kind.name.lower(),
                "despite_deadline": method.despite_deadline,
                "args": arguments[name],
                "result": _results().get(name),
            }
            for name, method in sorted(requests.METHODS.items())
        },
        "errors": _errors(),
        "messages": _messages(),
        "headers": _headers(),
        "topology": _topology(),
    }


def _schema_of(model: Any) -> Schema:
    schema: Schema = model.model_json_schema(ref_template="#/$defs/{model}")
    return schema


def _take_out(schema: Schema, definitions: dict[str, Schema]) -> Schema:
    """Moves a schema's own definitions to those that all share."""
    for name, definition in schema.pop("$defs", {}).items():
        known = definitions.setdefault(name, definition)
        if known != definition:
            raise ValueError(f"two models are named {name}")
    return schema


def _object(properties: Mapping[str, Schema], *optional: str, closed: bool = False) -> Schema:
    schema: Schema = {
        "type": "object",
        "properties": dict(properties),
        "required": [name for name in properties if name not in optional],
    }
    return {**schema, "additionalProperties": False} if closed else schema


def _ref(name: str) -> Schema:
    return {"$ref": f"#/$defs/{name}"}


def _or_null(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


def _list_of(name: str) -> Schema:
    return {"type": "array", "items": _ref(name)}


def _results() -> dict[str, Schema]:
    volume, nothing = _ref("Volume"), _object({})
    return {
        "create_volume": volume,
        "delete_volume": nothing,
        "extend_volume": volume,
        "create_export": volume,
        "ensure_export": volume,
        # Ending what has ended is told by the empty object.
        "remove_export": {"anyOf": [volume, {"type": "object", "maxProperties": 0}]},
        "validate_connector": nothing,
        "initialize_connection": _object(
            {"connection_id": _ID, "driver_volume_type": _TEXT, "data": {"type": "object"}}
        ),
        "terminate_connection": nothing,
        "attach_volume": _ref("Attachment"),
        "detach_volume": nothing,
        "copy_volume_data": _object(
            {
                "total_bytes": _COUNT,
                "copied_bytes": _COUNT,
                "zeroed_bytes": _COUNT,
                "resumed_from_bytes": _COUNT,
                "seconds": {"type": "number", "minimum": 0},
                "digest": _or_null(_TEXT),
            }
        ),
        "get_volume_stats": {"type": "object"},
        "reconcile": _page("findings", "Finding"),
        "get_volume": volume,
        "get_job": _ref("Job"),
        "cancel_job": _ref("Job"),
        "throttle_job": _ref("Job"),
        "list_volumes": _page("volumes", "Volume"),
        "list_jobs": _page("jobs", "Job"),
    }


def _page(name: str, record: str) -> Schema:
    """A list that may have been cut for its size: the next page begins after its last record."""
    return _object({name: _list_of(record), "truncated": {"const": True}}, "truncated")


def _error() -> Schema:
    return _object(
        {
            "code": {"type": "string", "examples": sorted(errors.BY_CODE)},
            "message": _TEXT,
            "retryable": {"type": "boolean"},
            "details": {"type": "object"},
        }
    )


def _errors() -> dict[str, Any]:
    return {
        code: {
            "retryable": cls.retryable,
            "meaning": " ".join((cls.__doc__ or "").split()),
        }
        for code, cls in sorted(errors.BY_CODE.items())
    }


def _messages() -> dict[str, Schema]:
    answered: dict[str, Schema] = {
        "job_id": _or_null(_ID),
        "method": _or_null(_TEXT),
        "replayed": {"const": True},
    }
    state: Schema = {"enum": [str(state) for state in resources.JobState]}
    event: dict[str, Schema] = {"at": _TIME, "seq": {"type": "integer", "minimum": 1}}
    return {
        "request": _object(
            {
                "method": {"enum": sorted(requests.METHODS)},
                "version": {"type": "string", "pattern": r"^[0-9]{1,9}\.[0-9]{1,9}$"},
                "args": {"type": "object"},
            },
            closed=True,
        ),
        "result": _object(
            {**answered, "ok": {"const": True}, "result": {"type": "object"}}, "replayed"
        ),
        "failure": _object(
            {**answered, "ok": {"const": False}, "error": _ref("Error")}, "replayed"
        ),
        "status": _object(
            {
                "job_id": _ID,
                "method": _TEXT,
                "state": state,
                "attempt": _COUNT,
                "progress": _or_null(_ref("Progress")),
                "at": _TIME,
            }
        ),
        "volume_event": _object({**event, "volume": _ref("Volume")}),
        "job_event": _object({**event, "job": _ref("Job")}),
        "stats_event": _object({**event, "stats": {"type": "object"}}),
    }


def _headers() -> dict[str, Any]:
    return {
        "content_type": envelope.CONTENT_TYPE,
        "request": {
            "deadline": _TIME,
            "status-updates": {"type": "boolean"},
            "parent-job": _ID,
            "traceparent": _TEXT,
        },
        "reply_types": [str(kind) for kind in replies.ReplyType],
        "dead_letter": list(letters.REASON_HEADERS),
        "dead_letter_of_a_replayed_job": [letters.REPLAYS, letters.HISTORY],
        "dead_letter_without_its_senders_headers": [letters.LEFT_OUT],
    }


def _topology() -> dict[str, Any]:
    names = _EXAMPLE
    return {
        "requests": {"exchange": names.requests, "type": "topic"},
        "events": {"exchange": names.events, "type": "topic"},
        "dead": {
            "exchange": names.dead,
            "type": "fanout",
            "queue": names.dead,
            "arguments": dict(names.dead_queue_arguments()),
        },
        "address": {
            "queue": names.queue("HOST@BACKEND"),
            "bound_to": names.requests,
            "routing_key": topology.address("HOST", "BACKEND"),
            "arguments": dict(names.queue_arguments()),
        },
        "event_keys": {
            "volume": names.volume_event("VOLUME_ID", "STATUS"),
            "job": names.job_event("JOB_ID", "STATE"),
            "stats": names.stats_event("HOST@BACKEND"),
        },
    }


def text() -> str:
    """The file's content."""
    return json.dumps(build(), indent=2, ensure_ascii=False) + "\n"


def main() -> int:
    """The command; its exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing, fail if outdated")
    wanted = text()
    if parser.parse_args().check:
        if FILE.exists() and FILE.read_text("utf-8") == wanted:
            return 0
        print(f"{FILE.relative_to(ROOT)} is outdated; run {pathlib.Path(__file__).name}")
        return 1
    FILE.parent.mkdir(parents=True, exist_ok=True)
    FILE.write_text(wanted, "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
