"""A prepared dataset on disk or in an object store: how it is written, and read by record id.

A dataset's folder holds WebDataset-compatible tars, `index.arrow` (36 bytes a record: shard,
offset, length, label, 16-byte digest of the stored bytes), `sources.arrow` (digests of the
original bytes and of the decoded pixels, original key) and the manifest. The index is mapped into
memory, so that readers on one node share it and their own memory does not grow with N.

writing.py  tars and tables     store.py  ShardStore     index.py  the mapped index
reads.py    reads that may fail or hang     cache.py  what was read, on a local disk
"""

from pipeline.data.shards.cache import CacheSettings
from pipeline.data.shards.faults import StorageFault
from pipeline.data.shards.store import MAX_CHECKED_BYTES, ShardStore
from pipeline.data.shards.writing import (
    INDEX_NAME,
    INDEX_SCHEMA,
    ROWS_PER_BATCH,
    SOURCES_NAME,
    SOURCES_SCHEMA,
    STORED_DIGEST_BYTES,
    TableWriter,
    build_shard,
    shard_name,
    stored_digest,
)

__all__ = [
    "INDEX_NAME",
    "INDEX_SCHEMA",
    "MAX_CHECKED_BYTES",
    "ROWS_PER_BATCH",
    "SOURCES_NAME",
    "SOURCES_SCHEMA",
    "STORED_DIGEST_BYTES",
    "CacheSettings",
    "ShardStore",
    "StorageFault",
    "TableWriter",
    "build_shard",
    "shard_name",
    "stored_digest",
]
