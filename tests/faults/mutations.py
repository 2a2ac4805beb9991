"""Messages that a seed has spoilt: valid requests of every method, changed as nobody should.

Message ``index`` of a seed is always the same, whichever others are made.
"""

import dataclasses
import json
import random
import struct
import uuid
from collections.abc import Callable, Sequence
from typing import Any, Final

from messages import requests
from tests.services import raw_amqp

FLAGS: Final = {
    "content_type": 0x8000,
    "content_encoding": 0x4000,
    "headers": 0x2000,
    "delivery_mode": 0x1000,
    "priority": 0x0800,
    "correlation_id": 0x0400,
    "reply_to": 0x0200,
    "expiration": 0x0100,
    "message_id": 0x0080,
    "timestamp": 0x0040,
    "type": 0x0020,
    "user_id": 0x0010,
    "app_id": 0x0008,
}
"""The bit of each property, in the order in which they travel."""
LIMIT: Final = 16 * 1024
"""Bytes of a body that the worker is to accept; some have more."""


@dataclasses.dataclass
class Message:
    """One message as it is sent; properties are encoded already."""

    index: int
    body: bytes
    properties: dict[str, bytes]
    changes: list[str] = dataclasses.field(default_factory=list)
    """What was done to it."""

    @property
    def flags(self) -> int:
        """Which properties there are."""
        return sum(FLAGS[name] for name in self.properties)

    @property
    def wire(self) -> bytes:
        """The properties as they travel."""
        return b"".join(self.properties[name] for name in FLAGS if name in self.properties)

    def text(self, name: str) -> str:
        """A short property as a reader sees it, whatever its bytes are; "" where it is missing."""
        return self.properties.get(name, b"\0")[1:].decode("utf-8", "backslashreplace")


@dataclasses.dataclass(frozen=True)
class Maker:
    """Makes the messages of a seed."""

    seed: str
    namespace: str
    reply_queue: str
    volumes: Sequence[str]
    """Ids of volumes that there are."""

    def message(self, index: int) -> Message:
        """The message of that number."""
        dice = random.Random(f"{self.seed}-{index}")
        identity = str(uuid.UUID(int=dice.getrandbits(128), version=4))
        data = self._request(dice, identity)
        body = json.dumps(data).encode()
        plain = {
            "content_type": b"application/json",
            "correlation_id": f"{index}-c".encode(),
            "reply_to": self.reply_queue.encode(),
            "message_id": identity.encode(),
            # By which its letter is known, whatever becomes of the rest.
            "app_id": str(index).encode(),
        }
        properties = {name: raw_amqp.short(value) for name, value in plain.items()}
        made = Message(index, body, properties | {"delivery_mode": b"\2"})
        for change in dice.sample(CHANGES, dice.choice((1, 1, 1, 2, 3))):
            made.changes.append(change.__name__)
            change(self, dice, made)
        return made

    def _request(self, dice: random.Random, identity: str) -> dict[str, Any]:
        method = dice.choice(list(requests.METHODS))
        volume = dice.choice([*self.volumes, str(uuid.UUID(int=dice.getrandbits(128)))])
        connector = {"host": f"client-{dice.randrange(3)}", "initiator": "iqn.2004-10.org.e:h"}
        every = {
            "volume": {"name": "v", "size_bytes": 2**20, "metadata": {"a": "b"}},
            "volume_id": volume,
            "new_size_bytes": 2**21,
            "cascade": False,
            "connector": connector,
            "mountpoint": "/dev/vdb",
            "mode": "rw",
            "source_volume_id": volume,
            "destination_volume_id": dice.choice(self.volumes),
            "remote": None,
            "job_id": dice.choice([identity, str(uuid.UUID(int=dice.getrandbits(128)))]),
            "refresh": True,
            "all": True,
            "limit": 10,
        }
        known = requests.METHODS[method].args.model_fields or every
        args = {name: value for name, value in every.items() if name in known}
        return {"method": method, "version": "1.0", "args": args}


Change = Callable[[Maker, random.Random, Message], None]

# The body


def _odd(dice: random.Random) -> str:
    """A JSON text that is not what anybody expects there."""
    depth = dice.choice((40, 3000))
    return dice.choice(
        (
            "null",
            "true",
            "-1",
            "0",
            "1.5",
            "1e999",
            "NaN",
            "-Infinity",
            str(2**63),
            str(10**300),
            "1" * 5000,
            "01",
            '""',
            '"\\u0000"',
            '"\\ud800"',
            '"\\udc00\\ud800"',
            '"\\u202e\\u200b"',
            '"../../etc/passwd"',
            '"-rf"',
            '"$(reboot)"',
            f'"{"x" * dice.choice((256, 5000, LIMIT))}"',
            f'"{"é" * 200}"',
            '"\\n\\u001b[31m"',
            "[]",
            "{}",
            "[[{}]]",
            '{"": {"": ""}}',
            f"[{','.join(['0'] * 2000)}]",
            "[" * depth + "]" * depth,
            '{"a":' * depth + "0" + "}" * depth,
            f'"{uuid.UUID(int=dice.getrandbits(128))}"',
        )
    )


def _places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [path]
    if isinstance(value, dict):
        for name, member in value.items():
            found += _places(member, (*path, name))
    return found


def replaces_a_value(_: Maker, dice: random.Random, message: Message) -> None:
    """Another value, somewhere."""
    _with_place(dice, message, lambda parent, name: parent.update({name: "@odd@"}))


def adds_a_member(_: Maker, dice: random.Random, message: Message) -> None:
    """A member that nobody knows."""
    name = dice.choice(("x", "", "volume_id", "args", "__class__", "a\0b", "é" * 50))
    _with_place(dice, message, lambda parent, _: parent.update({name: "@odd@"}))


def removes_a_member(_: Maker, dice: random.Random, message: Message) -> None:
    """One member is missing."""
    _with_place(dice, message, lambda parent, name: parent.pop(name))


def repeats_a_member(_: Maker, dice: random.Random, message: Message) -> None:
    """The same name twice, with another value."""
    body = message.body.decode(errors="surrogateescape")
    again = dice.choice(('"method":', '"version":', '"args":', '"volume_id":'))
    text = body.replace("{", "{" + again + _odd(dice) + ",", dice.choice((1, 2)))
    message.body = text.encode(errors="surrogateescape")


def _with_place(
    dice: random.Random, message: Message, change: Callable[[dict[str, Any], str], object]
) -> None:
    try:
        data = json.loads(message.body)
    except (ValueError, RecursionError):
        return
    places = [path for path in _places(data) if path]
    if not places:
        return
    *parents, name = dice.choice(places)
    parent = data
    for one in parents:
        parent = parent[one]
    change(parent, name)
    message.body = json.dumps(data).replace('"@odd@"', _odd(dice)).encode()


def is_other_json(_: Maker, dice: random.Random, message: Message) -> None:
    """JSON, and no request at all."""
    message.body = _odd(dice).encode(errors="surrogatepass")


def flips_bits(_: Maker, dice: random.Random, message: Message) -> None:
    """As on a bad line."""
    body = bytearray(message.body or b"\0")
    for _flip in range(dice.choice((1, 2, 20))):
        body[dice.randrange(len(body))] ^= 1 << dice.randrange(8)
    message.body = bytes(body)


def cuts_the_body(_: Maker, dice: random.Random, message: Message) -> None:
    """The end, the beginning, or everything is missing."""
    at = dice.randrange(len(message.body) + 1)
    message.body = dice.choice((message.body[:at], message.body[at:], b""))


def inserts_bytes(_: Maker, dice: random.Random, message: Message) -> None:
    """Bytes where none belong."""
    at = dice.randrange(len(message.body) + 1)
    new = dice.choice(
        (
            b"\0",
            b"\xff\xfe",
            b"\xef\xbb\xbf",
            b"\xed\xa0\x80",
            b"}",
            b"\n",
            dice.randbytes(dice.choice((1, 30, 2000))),
        )
    )
    message.body = message.body[:at] + new + message.body[at:]


def changes_the_encoding(_: Maker, dice: random.Random, message: Message) -> None:
    """Another encoding than UTF-8."""
    text = message.body.decode("latin-1")
    message.body = text.encode(dice.choice(("utf-16", "utf-32", "utf-8-sig", "utf-7")))


def is_too_large(_: Maker, dice: random.Random, message: Message) -> None:
    """More than is accepted, of blanks or of anything."""
    more = LIMIT + dice.choice((0, 1, 200_000))
    message.body += dice.choice((b" ", b"\n", b"\0", b"[")) * more


# The properties


def changes_message_id(_: Maker, dice: random.Random, message: Message) -> None:
    """No id, or none as the contract has it."""
    identity = uuid.UUID(int=dice.getrandbits(128))
    value = dice.choice(
        (
            None,
            b"",
            f"{message.index}-m".encode(),
            f"{message.index}-\xff".encode("latin-1"),
            identity.hex.encode(),
            str(identity).upper().encode(),
            identity.urn.encode(),
            b"%d-" % message.index + b"x" * 240,
            b"%d-\0'; DROP TABLE jobs; --" % message.index,
            b"%d-" % message.index + b"\xff" * 240,
        )
    )
    _set(message, "message_id", value)


def changes_reply_to(maker: Maker, dice: random.Random, message: Message) -> None:
    """Nobody to be answered, or somebody else."""
    value = dice.choice(
        (
            None,
            b"",
            b"no-such-queue",
            maker.namespace.encode(),
            f"{maker.namespace}.dead".encode(),
            f"{maker.namespace}.host-a@sim".encode(),
            b"reply-\xff",
            b"q" * 255,
            b"amq.rabbitmq.reply-to",
            b"a b\0c",
        )
    )
    _set(message, "reply_to", value)


def changes_correlation_id(_: Maker, dice: random.Random, message: Message) -> None:
    """None, or one of any bytes; the number stays in it."""
    begins = b"%d-" % message.index
    more = dice.choice((None, b"", b"\xff\xfe", b"\xff" * 240, b"\0", b"c" * 240, "é".encode()))
    _set(message, "correlation_id", None if more is None else begins + more)


def changes_small_properties(_: Maker, dice: random.Random, message: Message) -> None:
    """Those that the worker does not look at, or should not."""
    for name in dice.sample(
        ["content_type", "content_encoding", "priority", "timestamp", "type", "delivery_mode"], 2
    ):
        match name:
            case "priority":
                message.properties[name] = bytes([dice.randrange(256)])
            case "delivery_mode":
                message.properties[name] = bytes([dice.choice((1, 2))])
            case "timestamp":
                moment = dice.choice((0, 2**31, 2**40, 2**63, 2**64 - 1))
                message.properties[name] = struct.pack(">Q", moment)
            case _:
                value = dice.choice((b"", b"text/plain", b"\xff" * 255, b"gzip", b"t" * 255, b"\0"))
                message.properties[name] = raw_amqp.short(value)


def expires(_: Maker, dice: random.Random, message: Message) -> None:
    """An expiration, which the contract does not want."""
    message.properties["expiration"] = raw_amqp.short(dice.choice((b"0", b"1", b"100", b"600000")))


def is_refused_by_the_broker(_: Maker, dice: random.Random, message: Message) -> None:
    """What a broker may not even take."""
    name, value = dice.choice((("expiration", b"soon"), ("user_id", b"nobody")))
    if dice.random() < 0.2:
        message.properties[name] = raw_amqp.short(value)


def changes_known_headers(_: Maker, dice: random.Random, message: Message) -> None:
    """The contract's headers, with values of any kind."""
    known = ("deadline", "status-updates", "parent-job", "traceparent", "x-undecodable", "x-death")
    names = dice.sample(known, dice.choice((1, 2)))
    texts = (
        b"2020-01-01T00:00:00Z",
        b"2999-01-01T00:00:00Z",
        b"9999-12-31T23:59:59-23:59",
        b"0001-01-01T00:00:00+23:59",
        b"tomorrow",
        str(uuid.UUID(int=dice.getrandbits(128))).encode(),
        b"00-" + b"a" * 32 + b"-" + b"b" * 16 + b"-01",
    )
    _set_headers(
        message,
        [
            (
                name.encode(),
                b"S" + raw_amqp.long(dice.choice(texts)) if dice.random() < 0.5 else _field(dice),
            )
            for name in names
        ],
    )


def adds_headers(_: Maker, dice: random.Random, message: Message) -> None:
    """Headers of every type there is, within each other too."""
    names = (b"a", b"reason", b"job-id", b"", b"\xff", "é".encode(), b"n" * 255, b"x-delay")
    _set_headers(
        message, [(dice.choice(names), _field(dice)) for _ in range(dice.choice((1, 5, 60)))]
    )


def nests_headers(_: Maker, dice: random.Random, message: Message) -> None:
    """Tables or arrays within each other, far down."""
    wire = b""
    kind = dice.choice((b"F", b"A"))
    for _level in range(dice.choice((10, 31, 33, 300))):
        wire = (b"\1a" if kind == b"F" else b"") + kind + raw_amqp.long(wire)
    _set_headers(message, [(b"deep", kind + raw_amqp.long(wire))])


def _field(dice: random.Random, depth: int = 0) -> bytes:
    """A header's value, kind first."""
    kind = dice.choice("tbBsuIilfdDSATFVx" if depth < 3 else "tbIlSVx")
    many = range(dice.randrange(4))
    match kind:
        case "S" | "x":
            text = dice.choice((b"", b"text", b"\xff\xfe", b"\0", dice.randbytes(40), b"x" * 3000))
            return kind.encode() + raw_amqp.long(text)
        case "A":
            return b"A" + raw_amqp.long(b"".join(_field(dice, depth + 1) for _ in many))
        case "F":
            members = (raw_amqp.short(b"%d" % n) + _field(dice, depth + 1) for n in many)
            return b"F" + raw_amqp.long(b"".join(members))
        case "f" | "d":
            number = dice.choice((0.0, -1.5, 1e30))
            return kind.encode() + struct.pack(f">{kind}", number)
        case "D":
            return b"D" + struct.pack(">Bi", dice.randrange(256), dice.randrange(-(2**31), 2**31))
        case _:
            size = {"t": 1, "b": 1, "B": 1, "s": 2, "u": 2, "I": 4, "i": 4, "V": 0}.get(kind, 8)
            return kind.encode() + dice.randbytes(size)


def _set(message: Message, name: str, value: bytes | None) -> None:
    if value is None:
        message.properties.pop(name, None)
    else:
        message.properties[name] = raw_amqp.short(value)


def _set_headers(message: Message, fields: Sequence[tuple[bytes, bytes]]) -> None:
    before = message.properties.get("headers", raw_amqp.long(b""))[4:]
    more = b"".join(raw_amqp.short(name) + field for name, field in fields)
    message.properties["headers"] = raw_amqp.long(before + more)


CHANGES: Final[Sequence[Change]] = (
    replaces_a_value,
    replaces_a_value,
    replaces_a_value,
    adds_a_member,
    removes_a_member,
    repeats_a_member,
    is_other_json,
    flips_bits,
    flips_bits,
    cuts_the_body,
    inserts_bytes,
    changes_the_encoding,
    is_too_large,
    changes_message_id,
    changes_reply_to,
    changes_correlation_id,
    changes_small_properties,
    expires,
    is_refused_by_the_broker,
    changes_known_headers,
    adds_headers,
    nests_headers,
)
