"""The pre-shared keys of an NBD server, in the files that QEMU's ``tls-creds-psk`` reads.

See QEMU's ``docs/system/tls.rst``, "TLS-PSK".
"""

import pathlib
import secrets
from collections.abc import Iterable, Mapping
from typing import Final

from worker import durable

# ffdhe2048 of RFC 7919, appendix A.1. Without it QEMU looks for a prime of its own at every start,
# which takes seconds.
DH_PARAMETERS: Final = b"""\
-----BEGIN DH PARAMETERS-----
MIIBCAKCAQEA//////////+t+FRYortKmq/cViAnPTzx2LnFg84tNpWp4TZBFGQz
+8yTnc4kmz75fS/jY2MMddj2gbICrsRhetPfHtXV/WVhJDP1H18GbtCFY2VVPe0a
87VXE15/V8k1mE8McODmi3fipona8+/och3xWKE2rec1MKzKT0g6eXq8CrGCsyT7
YdEIqUuyyOP7uWrat2DX9GgdT0Kj3jlN9K5W7edjcrsZCwenyO4KbXCeAvzhzffi
7MA0BM0oNC9hkXL+nOmFg/+OTxIy7vKBg8P+OxtMb61zO7X8vC7CIAXFjvGDfRaD
ssbzSibBsu/6iGtCOGEoXJf//////////wIBAg==
-----END DH PARAMETERS-----
"""


def new_credentials() -> Mapping[str, str]:
    """A name and a key of 256 bits, in hexadecimal."""
    return {"username": f"c-{secrets.token_hex(8)}", "psk_key": secrets.token_hex(32)}


class Keys:
    """The keys that let clients in.

    Args:
        folder: made with mode 0700 when keys are first written.
    """

    def __init__(self, folder: pathlib.Path) -> None:
        self._folder = folder.absolute()

    async def write(self, credentials: Iterable[Mapping[str, str]]) -> None:
        """Lets in who has one of these credentials, and nobody else.

        GnuTLS reads the file in each handshake: a new key counts at once, as does the lack of one.

        Raises:
            TargetError: the file cannot be written.
        """
        durable.make_private(self._folder)
        parameters = self._folder / "dh-params.pem"
        if not parameters.exists():
            await durable.write(parameters, DH_PARAMETERS)
        lines = sorted(f"{each['username']}:{each['psk_key']}\n" for each in credentials)
        await durable.write(self._folder / "keys.psk", "".join(lines).encode())

    def usernames(self) -> set[str]:
        """Whose keys let in now."""
        try:
            lines = (self._folder / "keys.psk").read_text().splitlines()
        except FileNotFoundError:
            return set()
        return {line.partition(":")[0] for line in lines if line}

    def server_object(self, name: str) -> Mapping[str, str]:
        """QEMU's object with these keys, for a server."""
        return {
            "qom-type": "tls-creds-psk",
            "id": name,
            "endpoint": "server",
            "dir": str(self._folder),
        }
