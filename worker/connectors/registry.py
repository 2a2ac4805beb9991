"""Every connector of this host, by the kind of connection info that it attaches."""

from collections.abc import Mapping
from typing import Any

from messages import errors
from worker import plugins, process
from worker.connectors import base


class Registry:
    """Makes connectors when they are first needed."""

    def __init__(self, context: base.Context) -> None:
        self._context = context
        self._made: dict[str, base.Connector] = {}

    @property
    def execute(self) -> process.Executor:
        """What the connectors run programs with."""
        return self._context.execute

    def get(self, driver_volume_type: str) -> base.Connector:
        """The connector for a kind of connection info.

        Raises:
            NotSupported: this host has none for it.
        """
        if driver_volume_type not in self._made:
            try:
                kind = plugins.load("connectors", driver_volume_type)
            except plugins.UnknownPlugin as error:
                raise errors.NotSupported(f"this host cannot attach: {error}") from None
            self._made[driver_volume_type] = kind(self._context)
        return self._made[driver_volume_type]

    def all(self) -> Mapping[str, base.Connector]:
        """Every connector that is installed, by what it attaches."""
        return {name: self.get(name) for name in plugins.names("connectors")}

    async def properties(self) -> Mapping[str, Any]:
        """What this host tells a target about itself, as os-brick's connector properties."""
        properties: dict[str, Any] = {}
        for connector in self.all().values():
            properties |= await connector.get_connector_properties()
        return properties
