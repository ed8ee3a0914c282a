"""Files of the Hugging Face Hub, read in place at hf://."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator

import pytest
from support.hub import Hub

from stoker.errors import StokerError
from stoker.source import ParquetSource, open_source

pytest.importorskip("huggingface_hub", reason="huggingface_hub is not installed")
pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed: pip install 'stoker[arrow]'")
pq = pytest.importorskip("pyarrow.parquet")
DATA = [os.urandom(1000) for _ in range(2000)]


def parquet(data: list[bytes]) -> bytes:
    into = io.BytesIO()
    pq.write_table(pa.table({"x": pa.array(data)}), into, data_page_size=4000, write_batch_size=4,
                   use_dictionary=False, write_page_index=True)  # fmt: skip
    return into.getvalue()


@pytest.fixture
def hub() -> Iterator[Hub]:
    files = {f"data/train-{n}.parquet": parquet(DATA[n * 1000 : n * 1000 + 1000]) for n in range(2)}
    with Hub({**files, "README.md": b"# Things"}) as hub:
        yield hub


@pytest.mark.exact("Parquet", "on the Hugging Face Hub, at `hf://`")
def test_parquet_is_read_in_place(hub: Hub) -> None:
    options = {"endpoint": hub.endpoint}
    source = open_source(f"{hub.url}/data/*.parquet", columns="x", storage_options=options)
    assert isinstance(source, ParquetSource) and len(source) == 2000
    before = hub.bytes
    rows = [1500, 3, 700]
    assert source.read(rows) == [DATA[row] for row in rows]
    assert hub.bytes - before < 3 * 8000
    before = hub.bytes
    again = ParquetSource(f"{hub.url}/data/", columns="x", storage_options=options)
    assert again.fingerprint == source.fingerprint
    assert hub.bytes - before < 2 * (128 << 10)  # footers only: the index of pages is kept
    hub.files["data/train-1.parquet"] = parquet(DATA[:900])
    changed = ParquetSource(f"{hub.url}/data/", columns="x",
                            storage_options={**options, "skip_instance_cache": True})  # fmt: skip
    assert len(changed) == 1900 and changed.fingerprint != source.fingerprint


def test_a_repository_that_is_not_there_is_not_asked_for_again(hub: Hub) -> None:
    began = hub.requests
    where = "hf://datasets/nobody/nothing/x.parquet"
    with pytest.raises(StokerError, match="nobody/nothing"):
        ParquetSource(where, storage_options={"endpoint": hub.endpoint})
    assert 0 < hub.requests - began < 10
