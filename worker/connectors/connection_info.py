"""Reading a connection info's ``data``: strict about what is needed, blind to what is not.

os-brick and Cinder add members as they go; those are left alone.
"""

from collections.abc import Mapping
from typing import Any, TypeVar

import pydantic

from messages import errors

Model = TypeVar("Model", bound=pydantic.BaseModel)


def parse(model: type[Model], data: Mapping[str, Any]) -> Model:
    """Checks ``data`` and returns the members that ``model`` knows.

    Raises:
        InvalidConnector: naming each member that is missing or wrong, and no value of it, since
            some are secrets.
    """
    try:
        return model.model_validate(dict(data))
    except pydantic.ValidationError as error:
        faults = "; ".join(
            f"{'.'.join(str(step) for step in fault['loc']) or 'data'}: {fault['msg']}"
            for fault in error.errors(include_input=False, include_url=False)
        )
    raise errors.InvalidConnector(f"the connection info cannot be used: {faults}")


def check_access(access_mode: str, *, read_only: bool) -> None:
    """Raises ``InvalidConnector`` where the connection does not allow what is wanted of it."""
    if access_mode == "ro" and not read_only:
        raise errors.InvalidConnector("the connection is read-only; attach it so")
