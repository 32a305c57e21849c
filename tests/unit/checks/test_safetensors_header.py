"""Headers of safetensors files: whole, cut, damaged, hostile."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.checks import safetensors_header
from serving.checks.safetensors_header import HeaderError, read_header
from serving.checks.source import LocalFolder
from serving.demo import NAMES, checkpoint_path
from tests.unit.checks.builders import TRUNK, header_of


class Memory:
    """A source of one file in memory that remembers what was read."""

    place = "memory"

    def __init__(self, content: bytes, size: int | None = None) -> None:
        self.content = content
        self.sizes = {"file": len(content) if size is None else size}
        self.last_byte = 0

    def read(self, name: str, start: int, length: int) -> bytes:
        found = self.content[start : start + length]
        self.last_byte = max(self.last_byte, start + len(found))
        return found


def packed(header: Any, data: int = 0) -> Memory:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return Memory(struct.pack("<Q", len(raw)) + raw + bytes(data))


def entry(*offsets: Any, dtype: Any = "BF16", shape: Any = (2,)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": list(offsets)}


def test_names_types_and_shapes_are_read() -> None:
    raw, data = header_of(TRUNK)
    tensors = read_header(Memory(raw + bytes(data)), "file")
    assert {name: (t.dtype, t.shape) for name, t in tensors.items()} == TRUNK


@pytest.mark.parametrize("name", NAMES)
def test_the_demo_models_headers_agree_with_their_files(name: str) -> None:
    folder = LocalFolder(checkpoint_path(name))
    tensors = read_header(folder, "model.safetensors")
    data = sum(tensor.bytes for tensor in tensors.values())
    assert 0 < folder.sizes["model.safetensors"] - data < 100_000


def test_no_byte_of_the_data_is_read_beyond_the_first_stretch() -> None:
    raw, data = header_of(TRUNK | {"large": ("F32", (1_000_000,))})
    source = Memory(raw + bytes(data))
    read_header(source, "file")
    assert source.last_byte <= safetensors_header.FIRST_READ_BYTES < len(source.content)


def test_a_long_header_takes_a_second_read_up_to_its_end() -> None:
    raw, data = header_of({f"layer.{i}.weight": ("BF16", (4,)) for i in range(5000)})
    source = Memory(raw + bytes(data))
    assert len(read_header(source, "file")) == 5000
    assert source.last_byte == len(raw) > safetensors_header.FIRST_READ_BYTES


def test_an_announced_header_beyond_the_bound_is_not_read() -> None:
    length = safetensors_header.MAX_HEADER_BYTES + 1
    source = Memory(struct.pack("<Q", length) + bytes(2**20), size=2**40)
    with pytest.raises(HeaderError, match="100000001 bytes is announced; 100000000 is the most"):
        read_header(source, "file")
    assert source.last_byte == safetensors_header.FIRST_READ_BYTES


@pytest.mark.parametrize(
    ("source", "text"),
    [
        (Memory(b""), "0 bytes, too short"),
        (Memory(b"1234567"), "7 bytes, too short"),
        (
            Memory(struct.pack("<Q", 50) + b"{}"),
            "a header of 50 bytes is announced in a file of 10",
        ),
        (Memory(struct.pack("<Q", 50) + b"{}", size=99), "ends within its header, after 10 bytes"),
        (packed(b"not json"), "the header is not JSON"),
        (packed(b"[" * 100_000), "the header is not JSON"),
        (packed(b"\xff\xfe"), "the header is not JSON"),
        (packed([]), "the header is no JSON object"),
        (packed({"w": 3}), "'w' has no usable dtype and shape"),
        (packed({"w": entry(0, 4, shape=[-1])}), "'w' has no usable dtype and shape"),
        (packed({"w": entry(0, 4, shape=[2.0])}), "'w' has no usable dtype and shape"),
        (packed({"w": entry(0, 4, shape=[1] * 99)}), "'w' has no usable dtype and shape"),
        (packed({"w": entry(4, 0)}), "'w' has no usable data_offsets"),
        (packed({"w": entry(0)}), "'w' has no usable data_offsets"),
        (packed({"w": entry(0, 6)}), "'w', BF16 [2], has 6 bytes instead of 4"),
        (packed({"w": entry(0, 4)}, 3), "bytes, its tensors need"),
        (packed({"w": entry(0, 4)}, 5), "bytes, its tensors end after"),
        (packed({"v": entry(0, 4), "w": entry(2, 6)}, 6), "overlap or leave a gap at byte 4"),
        (packed({"v": entry(0, 4), "w": entry(6, 10)}, 10), "overlap or leave a gap at byte 4"),
    ],
)
def test_a_damaged_file_is_told_in_one_sentence(source: Memory, text: str) -> None:
    with pytest.raises(HeaderError) as error:
        read_header(source, "file")
    assert text in str(error.value)


def test_a_type_from_the_future_is_taken_as_it_is() -> None:
    tensors = read_header(packed({"w": entry(0, 5, dtype="F3_NEW")}, 5), "file")
    assert tensors["w"].bytes == 5


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=12,
)


@given(st.binary(max_size=200))
def test_random_bytes_never_crash(content: bytes) -> None:
    survives(Memory(content))


@given(json_values | st.dictionaries(st.text(max_size=4), json_values))
def test_random_json_never_crashes(header: Any) -> None:
    survives(packed(header, 16))


@given(st.integers(0, 2**64 - 1), st.binary(max_size=64), st.integers(0, 2**63))
def test_any_announced_length_never_crashes(length: int, rest: bytes, size: int) -> None:
    survives(Memory(struct.pack("<Q", length) + rest, size=size))


@given(st.data())
def test_a_changed_byte_never_crashes(data: st.DataObject) -> None:
    raw, size = header_of({"a.weight": ("BF16", (2, 2)), "b.weight": ("F32", (3,))})
    content = bytearray(raw + bytes(size))
    at = data.draw(st.integers(0, len(content) - 1))
    content[at] = data.draw(st.integers(0, 255))
    survives(Memory(bytes(content)))


def survives(source: Memory) -> None:
    """Either tensors or a HeaderError, within the bounds."""
    try:
        for tensor in read_header(source, "file").values():
            assert tensor.bytes >= 0
    except HeaderError as error:
        assert str(error)


def test_a_file_that_cannot_be_opened_is_an_error_of_its_own(tmp_path: Path) -> None:
    from serving.checks.errors import CheckError

    folder = LocalFolder(tmp_path / "none")
    with pytest.raises(CheckError, match=r"none: cannot be read \(no such file or directory\)"):
        _ = folder.sizes
