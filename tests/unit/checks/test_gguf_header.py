"""Headers of GGUF files: whole, cut, hostile."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.checks import gguf_header
from serving.checks.gguf_header import read_header
from serving.checks.safetensors_header import HeaderError
from tests.unit.checks.builders import gguf_bytes
from tests.unit.checks.test_safetensors_header import Memory

METADATA = {
    "general.architecture": "qwen35moe",
    "qwen35moe.nextn_predict_layers": 1,
    "tokenizer.ggml.tokens": ["a", "b", "c"],
}
WHOLE = gguf_bytes(METADATA, ("output.weight", "blk.4.nextn.eh_proj.weight"))


def test_metadata_and_names_are_read() -> None:
    header = read_header(Memory(WHOLE + bytes(1000)), "file")
    assert header.architecture == "qwen35moe"
    assert header.count("nextn_predict_layers") == 1
    assert header.metadata["tokenizer.ggml.tokens"] == 3
    assert header.tensors == {"output.weight", "blk.4.nextn.eh_proj.weight"}


@pytest.mark.parametrize(("kind", "form", "value"), [(0, "<B", 7), (6, "<f", 0.5), (7, "<?", True)])
def test_every_kind_of_number_is_read(kind: int, form: str, value: float) -> None:
    key = struct.pack("<Q", 1) + b"k"
    raw = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + key + struct.pack("<I", kind)
    assert read_header(Memory(raw + struct.pack(form, value)), "file").metadata == {"k": value}


def test_a_cut_file_is_told_wherever_it_ends() -> None:
    for length in range(len(WHOLE)):
        with pytest.raises(HeaderError):
            read_header(Memory(WHOLE[:length]), "file")


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"ggml" + bytes(20), "does not begin as a GGUF file"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "GGUF version 1; 2 and 3 are known"),
        (b"GGUF" + struct.pack("<IQQ", 3, 2**40, 0), "which no file has"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 2**60), "a name of"),
        (
            b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1) + b"k"
            + struct.pack("<IIQ", 9, 10, 2**60),
            "is announced; 134217728 is the most",
        ),
        (
            b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1) + b"k"
            + struct.pack("<I", 99),
            "the unknown type 99",
        ),
    ],
)  # fmt: skip
def test_what_no_file_has_is_refused(content: bytes, text: str) -> None:
    with pytest.raises(HeaderError, match=text):
        read_header(Memory(content), "file")


def test_a_header_without_end_stops_at_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_header, "MAX_HEADER_BYTES", 2048)
    monkeypatch.setattr(gguf_header, "READ_BYTES", 512)
    source = Memory(gguf_bytes({f"key.{i}": "x" * 40 for i in range(500)}))
    with pytest.raises(HeaderError, match="longer than 2048 bytes"):
        read_header(source, "file")
    assert source.last_byte <= 2560


@given(st.binary(max_size=300))
def test_random_bytes_after_the_magic_never_crash(content: bytes) -> None:
    survives(b"GGUF" + struct.pack("<I", 3) + content)


@given(st.integers(4, len(WHOLE) - 1), st.integers(0, 255))
def test_a_changed_byte_never_crashes(at: int, byte: int) -> None:
    content = bytearray(WHOLE)
    content[at] = byte
    survives(bytes(content))


def survives(content: bytes) -> None:
    """Either a header or a HeaderError."""
    try:
        read_header(Memory(content), "file")
    except HeaderError as error:
        assert str(error)
