"""Bytes and messages: framing, size limits, field types.

Owns the frame: 2 bytes magic, 1 byte descriptor count, 1 byte reserved (0), 4 bytes body length (little endian), then one
msgpack array `[tag, field, ...]`. Whatever is not exactly that is a `ProtocolError`, after which the stream is useless and its
peer has to go: there is no resynchronising inside a message. Must not read or write a descriptor.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import fields
from operator import attrgetter
from typing import Any

import msgpack

from ringloader._core import messages
from ringloader._core.messages import Message
from ringloader.errors import ProtocolError

MAGIC = 0x4C52
_HEADER = struct.Struct("<HBBI")
HEADER_NBYTES = _HEADER.size
# Guards the parent's memory against a garbage length; far above any honest message (a batch's strings, a spec's arguments).
MAX_BODY_NBYTES = 256 << 20
# The kernel takes 253 descriptors a message; a Fill attaches as many segments as its worker has not mapped yet.
MAX_DESCRIPTORS = 128

_KINDS: tuple[type[Any], ...] = (
    messages.Setup,
    messages.Fill,
    messages.Cancel,
    messages.DropSegment,
    messages.Stop,
    messages.Ready,
    messages.StartFailed,
    messages.Filled,
    messages.NeedRoom,
    messages.Failed,
    messages.Cancelled,
    messages.DropSession,
    messages.StreamState,
    messages.Ended,
    messages.Call,
    messages.Called,
)
_WIRE_TYPES = {"int": int, "str": str, "bytes": bytes, "bool": bool}


def _wire_type(annotation: str) -> type:
    return _WIRE_TYPES.get(annotation) or {"list": list, "dict": dict}[annotation.partition("[")[0]]


def _getter(kind: type[Any]) -> Callable[[Any], tuple[Any, ...]]:
    """Return what reads all fields of a message at once: code of C, since every batch is two messages."""
    names = [field.name for field in fields(kind)]
    if len(names) > 1:
        return attrgetter(*names)
    return lambda message: (getattr(message, names[0]),)


_FIELDS = {kind: _getter(kind) for kind in _KINDS}
_TAGS = {kind: tag for tag, kind in enumerate(_KINDS)}
_EXPECTED = tuple((int, *(_wire_type(str(field.type)) for field in fields(kind))) for kind in _KINDS)


def encode(message: Message, num_descriptors: int = 0) -> bytes:
    """Return the message's frame. Raises ProtocolError, naming the size, when it is over the limit."""
    kind = type(message)
    # Not by packb, whose own call costs half as much again.
    body: bytes = msgpack.Packer(unicode_errors="surrogatepass").pack((_TAGS[kind], *_FIELDS[kind](message)))
    if len(body) > MAX_BODY_NBYTES:
        raise ProtocolError(
            f"a {kind.__name__} message of {len(body):,} bytes is over the limit of {MAX_BODY_NBYTES:,} bytes",
            nbytes=len(body),
            limit=MAX_BODY_NBYTES,
        )
    return _HEADER.pack(MAGIC, num_descriptors, 0, len(body)) + body


class Decoder:
    """Turns a stream of bytes into `(message, descriptor count)` pairs."""

    def __init__(self) -> None:
        self._pending = bytearray()

    def feed(self, chunk: bytes) -> list[tuple[Message, int]]:
        """Take the next bytes of the stream; return the messages that are now whole. Raises ProtocolError."""
        if self._pending:
            self._pending += chunk
            data: bytes | bytearray = self._pending
        else:
            data = chunk
        found: list[tuple[Message, int]] = []
        start = 0
        while len(data) - start >= HEADER_NBYTES:
            num_descriptors, length = _read_header(data, start)
            end = start + HEADER_NBYTES + length
            if len(data) < end:
                break
            found.append((_read_body(data[start + HEADER_NBYTES : end]), num_descriptors))
            start = end
        if data is self._pending:
            del self._pending[:start]
        elif start < len(data):
            self._pending += data[start:]
        return found

    @property
    def num_pending(self) -> int:
        """Bytes of an unfinished message."""
        return len(self._pending)


def _read_header(data: bytes | bytearray, start: int) -> tuple[int, int]:
    magic, num_descriptors, reserved, length = _HEADER.unpack_from(data, start)
    if magic != MAGIC or reserved != 0:
        raise ProtocolError(
            f"bytes {bytes(data[start : start + HEADER_NBYTES])!r} are no frame of this protocol: code in the worker writes "
            "into a descriptor that is not its own, or the releases differ"
        )
    if length > MAX_BODY_NBYTES:
        raise ProtocolError(f"a frame of {length:,} bytes is over the limit of {MAX_BODY_NBYTES:,} bytes", nbytes=length)
    if num_descriptors > MAX_DESCRIPTORS:
        raise ProtocolError(f"a frame with {num_descriptors} descriptors is over the limit of {MAX_DESCRIPTORS}")
    return num_descriptors, length


def _read_body(body: bytes | bytearray) -> Message:
    try:
        # The limits of unpackb follow the length of the body: no array header can promise more than is there.
        values = msgpack.unpackb(body, strict_map_key=False, unicode_errors="surrogatepass")
    except Exception as error:
        raise ProtocolError(f"a body of {len(body):,} bytes is no msgpack value: {error}") from error
    if type(values) is not list or not values or type(values[0]) is not int or not 0 <= values[0] < len(_KINDS):
        raise ProtocolError("a body is no message of this protocol")
    expected = _EXPECTED[values[0]]
    if tuple(map(type, values)) != expected:
        got = [type(value).__name__ for value in values[1:]]
        raise ProtocolError(f"a {_KINDS[values[0]].__name__} message has fields of types {got}")
    message: Message = _KINDS[values[0]](*values[1:])
    return message
