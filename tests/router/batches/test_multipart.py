"""Forms come in whatever pieces a network makes of them, and are the same."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.batches.multipart import Malformed, MultipartReader, PartBegins, PartEnds, boundary_of

FORM = (
    b'preamble\r\n--bound\r\nContent-Disposition: form-data; name="a"\r\n\r\n\r\n--bound\r\n'
    b'content-type: text/plain\r\nCONTENT-DISPOSITION: form-data; filename="x \\"y\\".jsonl"; name="file"\r\n\r\n'
    b"one\r\n--boun\r\n--bound-\n\r\n\r\n--bound--\r\nepilogue"
)


def parts_of(pieces: list[bytes]) -> list[tuple[str, str | None, bytes]]:
    reader = MultipartReader(b"bound")
    found: list[tuple[str, str | None, bytes]] = []
    is_open = False
    for piece in pieces:
        for one in reader.feed(piece):
            if isinstance(one, PartBegins):
                assert not is_open
                found.append((one.name, one.filename, b""))
                is_open = True
            elif isinstance(one, PartEnds):
                assert is_open
                is_open = False
            else:
                assert is_open
                found[-1] = (*found[-1][:2], found[-1][2] + one)
    assert reader.is_over and not is_open
    return found


WHOLE = [("a", None, b""), ("file", 'x "y".jsonl', b"one\r\n--boun\r\n--bound-\n\r\n")]


@pytest.mark.parametrize("size", [1, 2, 3, 7, len(FORM)])
def test_pieces_of_any_size_give_the_same_parts(size: int) -> None:
    if b"--bound-\n" in FORM:
        with pytest.raises(Malformed, match="followed by something else"):
            parts_of([FORM[at : at + size] for at in range(0, len(FORM), size)])
    form = FORM.replace(b"\r\n--bound-\n", b"\r\n--bounx-\n")
    expected = [WHOLE[0], ("file", 'x "y".jsonl', b"one\r\n--boun\r\n--bounx-\n\r\n")]
    assert expected == parts_of([form[at : at + size] for at in range(0, len(form), size)])


@given(content=st.binary(max_size=300), cuts=st.lists(st.integers(0, 500), max_size=8))
def test_any_content_comes_through(content: bytes, cuts: list[int]) -> None:
    content = content.replace(b"\r\n--bound", b"")
    form = b'--bound\r\nContent-Disposition: form-data; name="file"\r\n\r\n' + content + b"\r\n--bound--"
    edges = sorted({0, *(cut % len(form) for cut in cuts), len(form)})
    pieces = [form[a:b] for a, b in itertools.pairwise(edges)]
    assert [("file", None, content)] == parts_of(pieces)


def test_what_is_held_of_a_part_is_bounded() -> None:
    reader = MultipartReader(b"bound")
    list(reader.feed(b'--bound\r\nContent-Disposition: form-data; name="file"\r\n\r\n'))
    for _ in range(100):
        list(reader.feed(b"x" * 10_000))
        assert len(reader._buffer) < 100
    with pytest.raises(Malformed, match="headers of a part are longer"):
        list(MultipartReader(b"b").feed(b"--b\r\n" + b"x" * 9000))
    with pytest.raises(Malformed, match="more than 16 parts"):
        list(MultipartReader(b"b").feed(b'--b\r\nContent-Disposition: form-data; name="f"\r\n\r\n\r\n' * 17))


@pytest.mark.parametrize(
    ("content_type", "boundary"),
    [
        ("multipart/form-data; boundary=abc", b"abc"),
        ('Multipart/Form-Data; charset=x; BOUNDARY="a b"', b"a b"),
        ("multipart/mixed; boundary=abc", None),
        ("multipart/form-data", None),
        ("", None),
    ],
)
def test_the_boundary_is_in_the_header(content_type: str, boundary: bytes | None) -> None:
    if boundary is None:
        with pytest.raises(Malformed, match="multipart/form-data; boundary="):
            boundary_of(content_type)
    else:
        assert boundary == boundary_of(content_type)
