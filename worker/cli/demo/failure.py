"""What ends the demo early."""

from messages import errors


class DemoFailed(errors.VolumeWorkerError):
    """Something in the story did not come out as it must."""


def ensure(holds: object, text: str) -> None:
    """Raises ``DemoFailed`` with the text unless it holds."""
    if not holds:
        raise DemoFailed(text)
