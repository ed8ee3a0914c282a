"""Samples as plain bytes: what comes back, what is refused, and what bad bytes may do."""

from __future__ import annotations

import pickle
import struct
from collections import OrderedDict, namedtuple
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from PIL import Image
from support.parts import Squares

from stoker.epoch.codec import decode, dumps, encode
from stoker.errors import ConfigError, SampleCorrupt
from stoker.pytorch import wrap
from stoker.pytorch.wrapped import same

SAMPLES: list[Any] = [
    (np.arange(24, dtype=np.uint8).reshape(2, 4, 3), 3),
    np.zeros((0, 3)),
    np.array(7, ">i2"),
    np.array([True, False]),
    np.array(["text", "ü"]),
    np.arange(3).view("M8[s]"),
    np.float32(1.5) * np.ones((3, 5), np.float32).T,
    np.arange(10)[::-2],
    np.int64(3),
    np.str_("three"),
    torch.arange(6).reshape(2, 3),
    torch.tensor(2.5),
    torch.zeros(0, 3),
    torch.tensor([True, False]),
    torch.full((3,), 2.5, dtype=torch.bfloat16),
    torch.ones(3, dtype=torch.float8_e4m3fn),
    torch.ones(3, 4).t(),
    torch.tensor([1 + 2j]).conj(),
    {"x": np.arange(5.0), "y": [1, "two", None, (True, ())], 3: b"raw", None: {}, b"k": []},
    2**80,
    -(2**63) - 1,
    1 - 2j,
    float("nan"),
    Image.new("RGB", (3, 2), (1, 2, 3)),
    Image.new("1", (9, 2), 1),
    Image.new("I;16", (3, 2), 999),
    Image.new("LA", (3, 2), (9, 8)),
]


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: type(sample).__name__)
def test_plain_samples_come_back_the_same(sample: Any) -> None:
    assert same(decode(memoryview(encode(sample))), sample)


leaves = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.binary()
    | st.complex_numbers()
    | hnp.arrays(
        hnp.scalar_dtypes().filter(lambda dtype: dtype.itemsize > 0 and dtype.kind != "V"),
        hnp.array_shapes(min_dims=0, min_side=0, max_side=4),
    )
)
keys = st.none() | st.booleans() | st.integers() | st.text() | st.binary()
plain = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(keys, inner, max_size=4)
    ),
    max_leaves=12,
)


@given(plain)
def test_any_plain_sample_comes_back_the_same(sample: Any) -> None:
    assert same(decode(memoryview(encode(sample))), sample)


@given(st.permutations(range(4)), st.booleans())
def test_the_order_of_axes_in_memory_is_kept(axes: list[int], of_torch: bool) -> None:
    array: Any = np.arange(120.0).reshape(2, 3, 4, 5).transpose(axes)
    if of_torch:
        tensor = torch.from_numpy(array)
        back = decode(memoryview(encode(tensor)))
        assert torch.equal(back, tensor) and back.stride() == tensor.stride()
    else:
        back = decode(memoryview(encode(array)))
        assert np.array_equal(back, array) and back.strides == array.strides


def test_a_palette_and_plain_info_come_along() -> None:
    image = Image.new("P", (4, 4), 2)
    image.putpalette(list(range(30)))
    image.info = {"transparency": 3, "dpi": (72, 72), "object": object()}
    back = decode(memoryview(encode(image)))
    assert back.convert("RGBA").tobytes() == image.convert("RGBA").tobytes()
    assert back.info == {"transparency": 3, "dpi": (72, 72)}


def test_a_view_is_stored_without_what_it_views() -> None:
    large = torch.zeros(100_000)
    assert len(encode((large[:10], large.numpy()[:10]))) < 200


def test_bytes_are_views_and_wider_numbers_aligned() -> None:
    raw = bytearray(encode(np.zeros((4, 4, 3), np.uint8)))
    pixels = decode(memoryview(raw))
    raw[-1] = 9
    assert pixels[-1, -1, -1] == 9 and pixels.flags.writeable
    assert decode(memoryview(bytes(raw))).flags.writeable
    packed = encode(np.arange(5.0))
    assert decode(memoryview(b"x" + packed)[1:]).flags.aligned


Pair = namedtuple("Pair", "image target")
cyclic: list[Any] = []
cyclic.append(cyclic)


@pytest.mark.parametrize(
    ("sample", "named"),
    [
        (Pair(1, 2), "Pair"),
        (OrderedDict(a=1), "collections.OrderedDict"),
        ([{1, 2}], "builtins.set"),
        ({"a": range(3)}, "builtins.range"),
        ({(1, 2): 3}, "key of type tuple"),
        (np.array([{}]), "dtype object"),
        (np.zeros(2, [("a", "i4")]), "dtype"),
        (torch.eye(2).to_sparse(), "to_dense"),
        (torch.zeros(2, requires_grad=True), "detach"),
        (torch.nn.Parameter(torch.zeros(2)), "Parameter"),
        ("\ud800", "not Unicode"),
        (cyclic, "32 deep"),
    ],
    ids=lambda value: value if type(value) is str and value.isascii() else type(value).__name__,
)
def test_other_types_are_refused_by_name_unless_private(sample: Any, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        encode(sample)
    data = memoryview(encode(sample, private=True))
    if not isinstance(sample, torch.Tensor) and sample is not cyclic:
        assert same(decode(data, private=True), sample)
    with pytest.raises(SampleCorrupt, match="version 0"):
        decode(data)


def message(tree: Any, values: bytes = b"", version: int = 2) -> memoryview:
    head = msgspec.msgpack.encode(tree)
    return memoryview(struct.pack("<BI", version, len(head)) + head + values)


LIST, TUPLE, DICT, _, _, SCALAR, ARRAY, TENSOR, IMAGE = range(9)
deep: Any = None
for _ in range(40):
    deep = [LIST, deep]


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x02",
        pickle.dumps((1, 2)),
        message(None, version=1),
        message(None, b"more"),
        message(deep),
        message([]),
        message([99]),
        message([[LIST]]),
        message({"a": 1}),
        message([DICT, 1]),
        message([DICT, [LIST], 1]),
        message([DICT, 1, 1, 1, 2]),
        message([ARRAY, "|O", [1], None], bytes(8)),
        message([ARRAY, "V8", [1], None], bytes(8)),
        message([ARRAY, "S0", [1 << 40], None]),
        message([ARRAY, "<i4", [1 << 40], None], bytes(4)),
        message([ARRAY, "<i4", [-1], None], bytes(4)),
        message([ARRAY, "<i4", [-1, -1], None], bytes(4)),
        message([ARRAY, "<i4", [1] * 64, None], bytes(4)),
        message([ARRAY, "<i4", [1, 1], [0, 0]], bytes(4)),
        message([ARRAY, "<i4", [True], None], bytes(4)),
        message([ARRAY, "<U1", [1], None], b"\xff\xff\xff\x7f"),
        message([SCALAR, "<i8"], bytes(4)),
        message([TENSOR, "quint8", [1], None], bytes(1)),
        message([TENSOR, "float32", [2], None], bytes(4)),
        message([IMAGE, "L", 1 << 20, 1 << 20, 1, None, []], bytes(1)),
        message([IMAGE, "L", 2, 2, 3, None, []], bytes(3)),
        message([IMAGE, "nonsense", 2, 2, 4, None, []], bytes(4)),
        message([IMAGE, "L", 2, 2, 4, None, 7], bytes(4)),
        memoryview(struct.pack("<BI", 2, 5) + b"\xdd\xff\xff\xff\xff"),
        memoryview(struct.pack("<BI", 2, 100_000) + b"\x91" * 100_000),
    ],
)
def test_bad_bytes_are_a_corrupt_sample(data: Any) -> None:
    with pytest.raises(SampleCorrupt, match="no sample as Stoker writes it"):
        decode(memoryview(data))


def test_truth_values_are_0_and_1() -> None:
    array, tensor = decode(
        message([TUPLE, [ARRAY, "|b1", [3], None], [TENSOR, "bool", [3], None]], b"\0\1\7" * 2)
    )
    assert np.flatnonzero(array).tolist() == tensor.nonzero().flatten().tolist() == [1, 2]
    assert array.view(np.uint8).max() == tensor.view(torch.uint8).max() == 1


def test_a_named_data_set_of_other_types_is_refused_when_it_is_wrapped() -> None:
    class Named(Squares):
        def __getitem__(self, index: int) -> Any:
            return Pair(*super().__getitem__(index))

    class Sometimes(Squares):
        def __getitem__(self, index: int) -> Any:
            return {1, 2} if index == 1 else super().__getitem__(index)

    with pytest.raises(ConfigError, match=r"Pair, which is not kept.*leave name= out"):
        wrap(Named(), name="pairs")
    assert type(wrap(Named())[2]) is Pair
    with pytest.raises(SampleCorrupt, match=r"Sometimes\[1\]: a sample holds a builtins.set"):
        wrap(Sometimes(100), name="sometimes")[1]


PICKLED: list[Any] = [
    (torch.arange(6).reshape(2, 3), 3),
    torch.tensor(2.5),
    torch.zeros(3, dtype=torch.bfloat16),
    torch.ones(3, 4).t(),
    torch.eye(3).to_sparse(),
    {"x": np.arange(5.0), "y": [1, "two", None], "z": b"raw"},
    OrderedDict(a=1),
    np.array(["text"]),
    float("nan"),
    Image.new("RGB", (3, 2), (1, 2, 3)),
    {1, 2},
]


@pytest.mark.parametrize("sample", PICKLED, ids=lambda sample: type(sample).__name__)
def test_pickled_samples_come_back_the_same(sample: Any) -> None:
    back = pickle.loads(memoryview(dumps(sample)))
    if isinstance(sample, torch.Tensor) and sample.is_sparse:
        assert torch.equal(back.to_dense(), sample.to_dense())
    else:
        assert same(sample, back)


def test_a_view_is_pickled_without_what_it_views() -> None:
    large = torch.zeros(100_000)
    assert len(dumps(large[:10])) < 500
    assert len(dumps(torch.zeros(100_000, dtype=torch.bfloat16)[:10])) < 1000


def test_what_was_pickled_is_writable_and_its_own() -> None:
    raw = bytearray(dumps((torch.zeros(3), np.zeros(3))))
    tensor, array = pickle.loads(memoryview(raw))
    tensor += 1
    array += 1
    assert [part.sum() for part in pickle.loads(memoryview(raw))] == [0, 0]
