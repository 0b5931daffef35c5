"""Messages and descriptors over one Unix socket.

Owns framing on the wire at either end. A descriptor may arrive with the bytes of an earlier message than its own, so received
descriptors form a queue that the counts in the frames take from. The training process never blocks on a send: what the socket
does not take is queued (`NonBlockingPipe`). One thread at a time reads, one at a time writes. Must not interpret messages.
"""

from __future__ import annotations

import array
import os
import socket
from collections import deque

from ringloader._core import protocol
from ringloader._core.messages import Message
from ringloader.errors import ProtocolError

# A buffer of this size comes from the allocator's free memory; from 128 KiB on it is mapped anew each time, which costs 15 us.
_CHUNK_NBYTES = 1 << 16
_ANCILLARY_NBYTES = socket.CMSG_SPACE(256 * 4)
# As numbers: or-ing members of an enum takes longer than the system call does.
_CLOEXEC, _DONTWAIT, _TRUNCATED = int(socket.MSG_CMSG_CLOEXEC), int(socket.MSG_DONTWAIT), int(socket.MSG_CTRUNC)


class Closed(Exception):
    """The peer has closed its end."""


class _Reader:
    """The receiving half: bytes and descriptors in, messages with their descriptors out."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._decoder = protocol.Decoder()
        self._descriptors: deque[int] = deque()
        self.may_have_more = False

    def read(self, flags: int) -> list[tuple[Message, list[int]]]:
        """Take one chunk from the socket. Raises BlockingIOError, Closed or ProtocolError.

        `may_have_more` then tells of a full chunk, or of one that ended early at a message with descriptors. Any other short
        read has emptied the socket, and asking again would cost a system call per message.
        """
        # CMSG_CLOEXEC: a child started by the user's code must not inherit a segment.
        try:
            chunk, ancillary, message_flags, _ = self._sock.recvmsg(_CHUNK_NBYTES, _ANCILLARY_NBYTES, flags | _CLOEXEC)
        except ConnectionResetError:
            raise Closed from None  # it left without reading what was sent
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                fds = array.array("i")
                fds.frombytes(data[: len(data) // fds.itemsize * fds.itemsize])
                self._descriptors.extend(fds)
        if message_flags & _TRUNCATED:
            raise ProtocolError("descriptors were lost on the way: the limit on open files (ulimit -n) is too low")
        if not chunk:
            raise Closed
        self.may_have_more = len(chunk) == _CHUNK_NBYTES or bool(ancillary)
        return [(message, self._take(count) if count else []) for message, count in self._decoder.feed(chunk)]

    def _take(self, count: int) -> list[int]:
        if count > len(self._descriptors):
            raise ProtocolError(f"a message promises {count} descriptors, {len(self._descriptors)} came")
        return [self._descriptors.popleft() for _ in range(count)]

    def close(self) -> None:
        while self._descriptors:
            os.close(self._descriptors.popleft())


class BlockingPipe:
    """A worker's end."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(True)
        self._sock = sock
        self._reader = _Reader(sock)

    def receive(self, *, wait: bool) -> list[tuple[Message, list[int]]]:
        """Return what has arrived, at least one message when `wait`. Raises Closed or ProtocolError."""
        found: list[tuple[Message, list[int]]] = []
        while True:
            try:
                found += self._reader.read(0 if wait and not found else _DONTWAIT)
            except BlockingIOError:
                return found
            if not self._reader.may_have_more and (found or not wait):
                return found

    def send(self, message: Message) -> None:
        """Send one message, blocking. Raises Closed."""
        try:
            self._sock.sendall(protocol.encode(message))
        except (BrokenPipeError, ConnectionResetError):
            raise Closed from None


class NonBlockingPipe:
    """The training process's end: a send that does not fit waits in a queue."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._reader = _Reader(sock)
        self._unsent: deque[tuple[memoryview, list[int]]] = deque()

    def fileno(self) -> int:
        return self._sock.fileno()

    @property
    def is_backed_up(self) -> bool:
        """Something waits to be sent; call `flush` when the socket is writable."""
        return bool(self._unsent)

    def send(self, message: Message, fds: list[int] | None = None) -> None:
        """Send or queue one message. Descriptors are duplicated while they wait. Raises ProtocolError for one too large."""
        frame = protocol.encode(message, len(fds) if fds else 0)
        if self._unsent:
            self._unsent.append((memoryview(frame), [os.dup(fd) for fd in fds or ()]))
            return
        sent = self._send_some(frame, fds)
        if sent < len(frame):
            rest = [os.dup(fd) for fd in fds or ()] if sent == 0 else []
            self._unsent.append((memoryview(frame)[sent:], rest))

    def flush(self) -> None:
        """Send what the socket takes now."""
        while self._unsent:
            frame, fds = self._unsent[0]
            sent = self._send_some(frame, fds)
            if sent == 0:
                return
            for fd in fds:
                os.close(fd)
            self._unsent[0] = (frame[sent:], [])
            if sent == len(frame):
                self._unsent.popleft()

    def receive(self, *, drain: bool = False) -> list[tuple[Message, list[int]]]:
        """Return the messages that have arrived; with `drain` to the last byte. Raises Closed when that is all there will be,
        ProtocolError for junk."""
        found: list[tuple[Message, list[int]]] = []
        while True:
            try:
                found += self._reader.read(0)
            except BlockingIOError:
                return found
            except Closed:
                if found:
                    return found
                raise
            if not drain and not self._reader.may_have_more:
                return found

    def _send_some(self, frame: bytes | memoryview, fds: list[int] | None) -> int:
        try:
            if fds:
                rights = array.array("i", fds)
                return self._sock.sendmsg([frame], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
            return self._sock.send(frame)
        except (BlockingIOError, InterruptedError):
            return 0
        except (BrokenPipeError, ConnectionResetError):
            return len(frame)  # the peer is gone: its death is told elsewhere, and nothing here waits for it

    def close(self) -> None:
        for _, fds in self._unsent:
            for fd in fds:
                os.close(fd)
        self._unsent.clear()
        self._reader.close()
        self._sock.close()
