"""SSE framing by bytes: the same frames however the bytes arrive, and not one byte lost."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from homeport_proxy.sse import Framer, data_of, event_of, with_data

FRAMES = st.lists(
    st.sampled_from(
        [
            b"data: one\n\n",
            b"event: x\ndata: {}\n\n",
            b": ping\n\n",
            b"data: a\r\ndata: b\r\n\r\n",
            b"data\n\n",
            b"id: 7\rdata:x\r\r",
            "data: é\n\n".encode(),
        ]
    ),
    max_size=8,
)


def cut(data: bytes, at: list[int]) -> list[bytes]:
    points = sorted({0, len(data), *(point % (len(data) + 1) for point in at)})
    return [data[a:b] for a, b in itertools.pairwise(points)]


@settings(max_examples=120, deadline=None)
@given(FRAMES, st.lists(st.integers(0, 500), max_size=12), st.sampled_from([b"", b"data: unfin"]))
def test_any_split_gives_the_same_frames(frames: list[bytes], at: list[int], rest: bytes) -> None:
    whole = Framer()
    expected = whole.feed(b"".join(frames) + rest)
    framer = Framer()
    found = [frame for piece in cut(b"".join(frames) + rest, at) for frame in framer.feed(piece)]
    left = framer.flush()
    assert b"".join(frame for frame, _ in found) + left == b"".join(frames) + rest
    assert [data_of(frame) for frame, _ in found if data_of(frame)] == [
        data_of(frame) for frame, _ in expected if data_of(frame)
    ]


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 40), st.lists(st.integers(0, 300), max_size=10))
def test_a_frame_above_the_cap_passes_in_pieces(cap: int, at: list[int]) -> None:
    data = b"data: " + b"x" * 100 + b"\n\n" + b"data: y\n\n"
    framer = Framer(cap)
    found = [frame for piece in cut(data, at) for frame in framer.feed(piece)]
    assert b"".join(frame for frame, _ in found) + framer.flush() == data
    assert not framer.pending
    assert all(len(frame) <= cap + 120 for frame, is_frame in found if not is_frame)


def test_fields() -> None:
    frame = b'event: message_start\r\ndata: {"a":1}\r\n\r\n'
    assert (event_of(frame), data_of(frame)) == (b"message_start", b'{"a":1}')
    assert with_data(frame, b"{}") == b"event: message_start\r\ndata: {}\r\n\r\n"
    assert data_of(b"data:x\ndata: y\n\n") == b"x\ny"
    assert with_data(b"id: 1\ndata: a\ndata: b\n\n", b"c") == b"id: 1\ndata: c\n\n"
