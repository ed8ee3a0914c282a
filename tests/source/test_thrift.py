"""Thrift's compact protocol: written and read again, and what is none."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.errors import SampleCorrupt
from stoker.source import thrift

_PLAIN = st.one_of(
    st.tuples(st.just(thrift.I32), st.integers(-(2**31), 2**31 - 1)),
    st.tuples(st.just(thrift.I64), st.integers(-(2**63), 2**63 - 1)),
    st.tuples(st.just(thrift.BINARY), st.binary(max_size=20)),
    st.tuples(st.just(thrift.DOUBLE), st.binary(min_size=8, max_size=8)),
    st.tuples(st.just(thrift.BYTE), st.integers(0, 255)),
    st.booleans().map(lambda yes: (thrift.TRUE if yes else thrift.FALSE, yes)),
    st.lists(st.integers(-9, 9), max_size=40).map(lambda x: (thrift.LIST, (thrift.I32, x))),
)
_NUMBERS = st.integers(1, 300)


def _containers(children: Any) -> Any:
    structs = st.dictionaries(_NUMBERS, children, max_size=4)
    return structs.map(lambda x: (thrift.STRUCT, x)) | st.lists(structs, max_size=4).map(
        lambda x: (thrift.LIST, (thrift.STRUCT, x))
    )


STRUCTS = st.dictionaries(_NUMBERS, st.recursive(_PLAIN, _containers, max_leaves=8), max_size=4)


@given(STRUCTS, st.binary(max_size=5))
def test_what_was_written_is_read(fields: thrift.Struct, after: bytes) -> None:
    written = thrift.write_struct(fields)
    assert thrift.read_struct(written + after) == (fields, len(written))
    assert thrift.read_struct(b"x" + written, 1) == (fields, 1 + len(written))


@given(STRUCTS, st.data())
def test_what_is_cut_off_is_corrupt(fields: thrift.Struct, data: st.DataObject) -> None:
    written = thrift.write_struct(fields)
    with pytest.raises(SampleCorrupt, match="is not Thrift"):
        thrift.read_struct(written[: data.draw(st.integers(0, len(written) - 1))])


@given(st.binary(max_size=200))
def test_anything_else_is_read_or_corrupt(data: bytes) -> None:
    with suppress(SampleCorrupt):
        thrift.read_struct(data)


def test_depth_and_lengths_are_limited() -> None:
    for data in (b"\x1c" * 10_000, b"\x19\xfc" + b"\xff" * 8 + b"\x7f", b"\x16" + b"\xff" * 20):
        with pytest.raises(SampleCorrupt):
            thrift.read_struct(data)
