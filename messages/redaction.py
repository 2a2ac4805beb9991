"""Keeping secrets out of everything that people and programs other than the connector's see.

Two means, because either alone leaks: values that are known to be secret are replaced wherever they
stand, and values are replaced for the name they carry (``auth_password``, ``--password X``, …) even
where nobody said that they were secret.
"""

import functools
import re
from collections.abc import Iterable, Mapping
from typing import Any

MASK = "***"

_WORDS = "password|passwd|passphrase|secret|token|psk_key|private_key|auth_key"
_SECRET_NAME = re.compile(_WORDS, re.IGNORECASE)
_HARMLESS_NAMES = frozenset({"password-secret", "lease_token", "secret_type"})
# name=value, name: value, "name": "value", --name value, -n name -v value, 'name', 'value'.
# The text may be a program's and of any size: nothing here scans a part of it more than once
# (possessive quantifiers, and a name is tried from its first character only).
_NAMED_VALUE = re.compile(
    rf"""(?<![\w.-])(?=[\w.-]*?(?:{_WORDS}))(?P<name>[\w.-]++)
         (?P<between>(?:\\*["'])?(?:\s*+[=:]\s*+|\s++|(?<=["']),\s*+(?=["']))
             (?:["']?(?:-v|--value)(?:["']?,?\s++|=))?)
         (?P<quote>\\*["'])?(?P<value>(?(quote)(?:(?<=")[^"\n]*+|(?<=')[^'\n]*+)|[^\s"',;&}}\]]++))""",
    re.IGNORECASE | re.VERBOSE,
)
# iSCSI's URLs have a percent sign where others have a colon: iscsi://user%secret@host (libiscsi).
_URL_PASSWORD = re.compile(
    r"(?<![a-z0-9+.-])(?P<user>[a-z][a-z0-9+.-]*+://[^\s:%/@]*+[:%])[^\s@/]++@", re.IGNORECASE
)


def mask_text(text: str, secrets: Iterable[str] = ()) -> str:
    """``text`` with every known secret, and every value named like one, as ``***``."""
    for secret in sorted({s for s in secrets if s}, key=len, reverse=True):
        text = text.replace(secret, MASK)
    if "://" in text:
        text = _URL_PASSWORD.sub(rf"\g<user>{MASK}@", text)
    # Most texts name no secret, and finding that out is cheap.
    return _NAMED_VALUE.sub(_mask_value, text) if _SECRET_NAME.search(text) else text


def _mask_value(match: re.Match[str]) -> str:
    if match["name"] in _HARMLESS_NAMES or not match["value"]:
        return match[0]
    return f"{match['name']}{match['between']}{match['quote'] or ''}{MASK}"


def mask_tree(value: Any) -> Any:
    """A copy of JSON data in which every member named like a secret is ``***``."""
    match value:
        case Mapping():
            return {
                name: MASK if _names_secret(str(name)) and member is not None else mask_tree(member)
                for name, member in value.items()
            }
        case list() | tuple():
            return [mask_tree(member) for member in value]
        case _:
            return value


@functools.lru_cache(maxsize=1024)
def _names_secret(name: str) -> bool:
    return name not in _HARMLESS_NAMES and _SECRET_NAME.search(name) is not None
