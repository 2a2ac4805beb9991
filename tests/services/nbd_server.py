"""An NBD server of the tests' own, in a thread, that can lack, refuse or break anything."""

import contextlib
import dataclasses
import errno
import pathlib
import socket
import struct
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator

READ, WRITE, DISCONNECT, FLUSH, WRITE_ZEROES, STATUS = 0, 1, 2, 3, 6, 7
SIMPLE, STRUCTURED = 0x67446698, 0x668E33EF


@dataclasses.dataclass
class Server:
    """An NBD server with one export, whose every ability can be taken away."""

    content: bytearray
    can_structured: bool = True
    can_status: bool = True
    can_zero: bool = True
    can_flush: bool = True
    can_go: bool = True
    read_only: bool = False
    blocks: tuple[int, int, int] | None = None
    extents: Callable[[int, int], list[tuple[int, int]]] = lambda _, length: [(length, 0)]
    fails: dict[int, int] = dataclasses.field(default_factory=dict)
    """Error numbers by command."""
    answers: dict[int, bytes] = dataclasses.field(default_factory=dict)
    """Raw bytes to answer by command, instead of a reply."""
    greeting: bytes = b"NBDMAGICIHAVEOPT" + struct.pack(">H", 3)
    seen: list[tuple[int, int, int, int]] = dataclasses.field(default_factory=list)
    """Commands with their flags, offsets and lengths."""
    delay: Callable[[int], float] = lambda _: 0.0
    uri: str = ""

    @contextlib.contextmanager
    def listening(self, folder: pathlib.Path) -> Iterator["Server"]:
        path = folder / "nbd.sock"
        self.uri = f"nbd+unix:///vol%20ume?socket={urllib.parse.quote(str(path))}"
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(path))
            listener.listen()
            threading.Thread(target=self._accept, args=(listener,), daemon=True).start()
            yield self
            # Wakes accept(2), which a mere close would not.
            listener.shutdown(socket.SHUT_RDWR)

    def _accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                link, _ = listener.accept()
                threading.Thread(target=self._serve, args=(link,), daemon=True).start()

    def _serve(self, link: socket.socket) -> None:
        with link, link.makefile("rb") as stream, contextlib.suppress(OSError, struct.error):
            link.sendall(self.greeting)
            stream.read(4)
            if self._shake_hands(link, stream.read):
                self._transmit(link, stream.read)

    def _shake_hands(self, link: socket.socket, read: Callable[[int], bytes]) -> bool:
        def reply(option: int, kind: int, data: bytes = b"") -> None:
            link.sendall(struct.pack(">QIII", 0x3E889045565A9, option, kind, len(data)) + data)

        while True:
            _, option, length = struct.unpack(">QII", read(16))
            data = read(length)
            flags = 1 | self.read_only << 1 | self.can_flush << 2 | self.can_zero << 6
            export = struct.pack(">QH", len(self.content), flags)
            if option == 1:
                link.sendall(export)
                return True
            if option == 8 and self.can_structured:
                reply(8, 1)
            elif option == 10 and self.can_status:
                reply(10, 4, struct.pack(">I", 42) + b"base:allocation")
                reply(10, 1)
            elif option == 7 and self.can_go:
                if not data[4:].startswith(b"vol ume"):
                    reply(7, 1 << 31 | 6, b"no such volume")
                    continue
                reply(7, 3, struct.pack(">H", 0) + export)
                if self.blocks:
                    reply(7, 3, struct.pack(">HIII", 3, *self.blocks))
                reply(7, 1)
                return True
            else:
                reply(option, 1 << 31 | 1)

    def _transmit(self, link: socket.socket, read: Callable[[int], bytes]) -> None:
        lock = threading.Lock()

        def send(data: bytes, seconds: float) -> None:
            time.sleep(seconds)
            with lock, contextlib.suppress(OSError):
                link.sendall(data)

        while True:
            _, flags, command, cookie, offset, length = struct.unpack(">IHHQQI", read(28))
            payload = read(length) if command == WRITE else b""
            self.seen.append((command, flags, offset, length))
            if command == DISCONNECT:
                return
            answer = self.answers.get(command)
            if answer == b"":
                return
            if answer is None:
                answer = self._answer(command, cookie, offset, length, payload)
            threading.Thread(target=send, args=(answer, self.delay(len(self.seen)))).start()

    def _answer(self, command: int, cookie: int, offset: int, length: int, payload: bytes) -> bytes:
        error = self.fails.get(command, 0)
        if command in (READ, WRITE) and self.blocks:
            minimum, _, maximum = self.blocks
            whole = offset % minimum == 0 and length % minimum == 0 and length <= maximum
            error = error or (0 if whole else errno.EINVAL)
        if error and self.can_structured and command in (READ, STATUS):
            text = b"as told"
            return self._chunk(cookie, 32769, struct.pack(">IH", error, len(text)) + text)
        if command == WRITE and not error:
            self.content[offset : offset + length] = payload
        elif command == WRITE_ZEROES and not error:
            self.content[offset : offset + length] = bytes(length)
        elif command == STATUS and self.can_structured:
            pairs = b"".join(struct.pack(">II", *pair) for pair in self.extents(offset, length))
            return self._chunk(cookie, 5, struct.pack(">I", 42) + pairs)
        elif command == READ and self.can_structured:
            return self._read(cookie, offset, length)
        simple = struct.pack(">IIQ", SIMPLE, error, cookie)
        if command == READ and not error:
            simple += self.content[offset : offset + length]
        return simple

    def _read(self, cookie: int, offset: int, length: int) -> bytes:
        data = self.content[offset : offset + length]
        half = length // 2
        if not any(data[:half]) and half:
            first = self._chunk(cookie, 2, struct.pack(">QI", offset, half), last=False)
            rest = struct.pack(">Q", offset + half) + data[half:]
            return first + self._chunk(cookie, 1, rest)
        return self._chunk(cookie, 1, struct.pack(">Q", offset) + data)

    @staticmethod
    def _chunk(cookie: int, kind: int, data: bytes, *, last: bool = True) -> bytes:
        return struct.pack(">IHHQI", STRUCTURED, last, kind, cookie, len(data)) + data

    def count(self, command: int) -> int:
        return sum(seen[0] == command for seen in self.seen)
