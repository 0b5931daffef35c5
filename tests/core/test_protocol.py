"""Framing: any split of a stream gives the same messages, anything else gives ProtocolError."""

from __future__ import annotations

from dataclasses import fields
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ringloader._core import messages as msg
from ringloader._core import protocol
from ringloader.errors import ProtocolError

INT64 = st.integers(-(2**63), 2**63 - 1)
# Lone surrogates travel too.
TEXT = st.text(st.characters(exclude_categories=()), max_size=20)
PLAIN = st.recursive(
    st.none() | st.booleans() | INT64 | TEXT | st.binary(max_size=20) | st.floats(allow_nan=False),
    lambda child: st.lists(child, max_size=3) | st.dictionaries(TEXT, child, max_size=3),
    max_leaves=5,
)
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "int": INT64,
    "str": TEXT,
    "bytes": st.binary(max_size=300),
    "bool": st.booleans(),
    "list[list[int]]": st.lists(st.lists(INT64, max_size=3), max_size=3),
    "dict[str, object]": st.dictionaries(TEXT, PLAIN, max_size=4),
}
KINDS = (*msg.ToWorker.__args__, *msg.FromWorker.__args__)
MESSAGES = st.one_of([st.builds(kind, **{field.name: VALUES[str(field.type)] for field in fields(kind)}) for kind in KINDS])
STREAMS = st.lists(st.tuples(MESSAGES, st.integers(0, protocol.MAX_DESCRIPTORS)), max_size=5)


def _pieces(stream: bytes, cuts: list[int]) -> list[bytes]:
    places = [0, *sorted(cut % (len(stream) + 1) for cut in cuts), len(stream)]
    return [stream[start:end] for start, end in pairwise(places)]


@given(STREAMS, st.lists(st.integers(0, 1 << 16), max_size=12))
def test_p24_any_split_of_a_stream_gives_the_same_messages(sent: list[tuple[Any, int]], cuts: list[int]) -> None:
    """Types, values and descriptor counts, in order, and nothing is left over."""
    stream = b"".join(protocol.encode(message, count) for message, count in sent)
    decoder = protocol.Decoder()
    found = [pair for piece in _pieces(stream, cuts) for pair in decoder.feed(piece)]
    assert found == sent
    assert [type(message) for message, _ in found] == [type(message) for message, _ in sent]
    assert decoder.num_pending == 0


@given(STREAMS.filter(bool))
def test_p24_byte_by_byte_is_a_split_too(sent: list[tuple[Any, int]]) -> None:
    """Each message is there with its last byte, not before."""
    decoder = protocol.Decoder()
    for message, count in sent:
        frame = protocol.encode(message, count)
        for byte in frame[:-1]:
            assert decoder.feed(bytes([byte])) == []
        assert decoder.feed(frame[-1:]) == [(message, count)]


def _feed_all(stream: bytes, cuts: list[int]) -> str:
    """What becomes of a stream: "error", or how many messages and how many bytes are waited for."""
    decoder, found = protocol.Decoder(), 0
    try:
        for piece in _pieces(stream, cuts):
            found += len(decoder.feed(piece))
    except ProtocolError:
        return "error"
    return f"{found} messages, {decoder.num_pending} bytes"


@given(st.binary(min_size=protocol.HEADER_NBYTES, max_size=200), st.lists(st.integers(0, 200), max_size=4))
@example(b"hello world", [])
@example(b"\x00" * 64, [3])
def test_p24_garbage_is_an_error_whatever_comes_after_it(garbage: bytes, cuts: list[int]) -> None:
    """Bytes that are no frame are refused with their first eight, however they are cut."""
    if garbage[:2] != protocol.MAGIC.to_bytes(2, "little"):
        assert _feed_all(garbage, cuts) == "error"


@given(st.binary(max_size=64), st.integers(0, 255), st.lists(st.integers(0, 200), max_size=4))
@example(b"\xdd\xff\xff\xff\xff" * 8, 0, [])  # arrays that promise four thousand million elements
@example(b"\x91" * 60 + b"\x00", 0, [])  # deep nesting
@example(b"\x9c\x01", 0, [])
@example(b"\x92\x04\xc0", 0, [])  # a Stop whose version is nil
@example(b"\x92\xc3\x01", 0, [])  # the tag is True, which is 1 to ==
@example(b"\x91\x80", 0, [])
@example(b"", 0, [])
def test_p24_frame_of_garbage_is_an_error_or_a_message(body: bytes, count: int, cuts: list[int]) -> None:
    """A well-formed frame around any body is decided at once: never a wait, never another exception."""
    frame = protocol._HEADER.pack(protocol.MAGIC, count, 0, len(body)) + body
    outcome = _feed_all(frame, cuts)
    assert outcome in ("error", "1 messages, 0 bytes")
    if count > protocol.MAX_DESCRIPTORS:
        assert outcome == "error"


@given(MESSAGES, st.integers(0), st.integers(1, 255), st.lists(st.integers(0, 1 << 12), max_size=4))
def test_p24_one_changed_byte_never_hangs_the_stream(message: Any, place: int, change: int, cuts: list[int]) -> None:
    """With one byte wrong the decoder gives an error, or messages of the protocol, or waits for a length it believes."""
    frame = bytearray(protocol.encode(message) + protocol.encode(msg.Stop(1)))
    frame[place % len(frame)] ^= change
    outcome = _feed_all(bytes(frame), cuts)
    if outcome != "error" and not outcome.endswith(" 0 bytes"):
        # It waits: only the length of a frame can have it do so, and that has a bound.
        assert place % len(frame) in _length_places(message)


def _length_places(message: Any) -> set[int]:
    first = len(protocol.encode(message))
    return {start + k for start in (0, first) for k in range(4, protocol.HEADER_NBYTES)}


@pytest.mark.parametrize("nbytes", [protocol.MAX_BODY_NBYTES + 1, 2**32 - 1])
def test_p24_length_beyond_the_limit_is_refused_before_it_comes(nbytes: int) -> None:
    """A header alone is enough; no memory is taken for what it promises."""
    header = protocol._HEADER.pack(protocol.MAGIC, 0, 0, nbytes)
    with pytest.raises(ProtocolError, match=f"{nbytes:,} bytes is over the limit"):
        protocol.Decoder().feed(header)


def test_p24_message_beyond_the_limit_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sender is told kind and size."""
    monkeypatch.setattr(protocol, "MAX_BODY_NBYTES", 100)
    with pytest.raises(ProtocolError, match=r"a Failed message of \d+ bytes is over the limit of 100 bytes"):
        protocol.encode(msg.Failed(1, 1, "sample", 0, "E", "x" * 200, "", {}))


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_p24_field_of_another_type_is_refused(kind: type) -> None:
    """Every field is checked for its very type: True is no int, a list no dict."""
    plain: dict[str, Any] = {"int": 1, "str": "s", "bytes": b"b", "bool": True, "list[list[int]]": [], "dict[str, object]": {}}
    values = {field.name: plain[str(field.type)] for field in fields(kind)}
    assert protocol.Decoder().feed(protocol.encode(kind(**values)))[0][0] == kind(**values)
    for name, value in values.items():
        wrong = 1 if isinstance(value, bool) else True if isinstance(value, int) else None
        with pytest.raises(ProtocolError, match=f"a {kind.__name__} message has fields of types"):
            protocol.Decoder().feed(protocol.encode(kind(**{**values, name: wrong})))
