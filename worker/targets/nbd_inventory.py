"""What an NBD server's exports, nodes and keys are named, and how they differ from the records."""

import base64
import uuid
from collections.abc import Collection, Iterator, Mapping, Sequence

from worker.targets import base


def export_id(connection: base.Connection) -> str:
    """The id of a connection's export in the daemon."""
    # With the mode, which QEMU does not tell: one that was recorded otherwise is another export.
    return f"{connection.access_mode}-{connection.id}"


def node_name(volume_id: uuid.UUID) -> str:
    """The name of a volume's block node in the daemon."""
    # QEMU takes 31 characters at most, and a letter first: a UUID has 36, in base 32 it has 26.
    return "v" + base64.b32encode(volume_id.bytes).decode().rstrip("=").lower()


def _volume_of(node: str) -> uuid.UUID | None:
    try:
        volume_id = uuid.UUID(bytes=base64.b32decode(node[1:].upper() + "======"))
    except ValueError:
        return None
    return volume_id if node == node_name(volume_id) else None


def compare(
    exports: Sequence[base.Export], shown: Mapping[str, str], nodes: Mapping[str, str]
) -> Iterator[base.Difference]:
    """Compares the daemon's exports (with their nodes) and nodes (with their files)."""
    wanted = {
        export_id(connection): export for export in exports for connection in export.connections
    }
    for name, export in wanted.items():
        if name not in shown:
            yield _missing(name, export, "is not served")
        elif nodes.get(shown[name]) != str(export.path):
            yield _missing(name, export, f"is served from {nodes.get(shown[name])}")
    for name in shown.keys() - wanted.keys():
        volume_id = _volume_of(shown[name])
        what = f"the NBD export {name} of {nodes.get(shown[name])} belongs to no connection"
        yield base.Difference(base.Fault.UNOWNED, name, what, volume_id)
    for node in nodes.keys() - set(shown.values()):
        what = f"the NBD server holds {nodes[node]} open, and serves it to nobody"
        yield base.Difference(base.Fault.UNOWNED, node, what, _volume_of(node))


def all_missing(exports: Sequence[base.Export]) -> Iterator[base.Difference]:
    """What is missing where no daemon runs."""
    for export in exports:
        what = f"volume {export.volume.id} is exported, and no NBD server runs"
        yield base.Difference(
            base.Fault.MISSING, node_name(export.volume.id), what, export.volume.id
        )


def compare_keys(
    exports: Sequence[base.Export], usernames: Collection[str]
) -> Iterator[base.Difference]:
    """Compares whose keys let in with whose should."""
    wanted = {
        connection.credentials["username"]: export
        for export in exports
        for connection in export.connections
        if "username" in connection.credentials
    }
    for name in wanted.keys() - set(usernames):
        yield _missing(name, wanted[name], "has a key that does not let in")
    for name in set(usernames) - wanted.keys():
        what = f"the key of {name} lets in to the NBD server, and belongs to no connection"
        yield base.Difference(base.Fault.UNOWNED, name, what)


def _missing(name: str, export: base.Export, what: str) -> base.Difference:
    text = f"a connection of volume {export.volume.id} (NBD {name}) {what}"
    return base.Difference(base.Fault.MISSING, name, text, export.volume.id)
