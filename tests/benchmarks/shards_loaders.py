"""The formats that come with a loader: MosaicML's MDS, WebDataset, LitData and ArrayRecord.

Each is written and read by its own package, with the options that its documentation gives for local data.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from tests.benchmarks.shards_formats import ARRAYS, LEVEL, Reader, pack_row, unpack_row
from tests.benchmarks.shards_rawset import RawSet, Row

_SHARD_BYTES = 64 << 20


class _Stand(MetaPathFinder, Loader):
    """Stands in for packages that MDS imports, and uses for images and tokenizers only."""

    _names = frozenset({"torchvision", "transformers"})

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        stands = fullname.partition(".")[0] in self._names
        return ModuleSpec(fullname, self, is_package=True) if stands else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Empty(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


class _Empty(ModuleType):
    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


def _mosaic() -> Any:
    if not any(isinstance(finder, _Stand) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Stand())
    import streaming

    return streaming


class Mosaic:
    """MDS by `MDSWriter`, zstd:3, shards of 64 MiB; read by `StreamingDataset`, which unpacks them beside."""

    name = "MosaicML MDS zstd"
    unpacks = True
    """Reading leaves unpacked shards in the folder instead of the packed ones."""
    _columns = {"ids": "ndarray:uint32", "logprobs": "ndarray:float32"}
    _columns |= {"sampled": "ndarray:uint8", "loss_mask": "ndarray:uint8"}
    _columns |= {"reward": "float64", "record": "bytes"}

    def load(self) -> None:
        _mosaic()

    def write(self, rows: RawSet, folder: Path) -> None:
        writer = _mosaic().MDSWriter(
            out=str(folder / "mds"),
            columns=self._columns,
            compression=f"zstd:{LEVEL}",
            size_limit=_SHARD_BYTES,
        )
        with writer:
            for row in rows:
                arrays = {name: getattr(row, name) for name in ARRAYS}
                writer.write({**arrays, "reward": row.reward, "record": row.record})

    def open(self, folder: Path, keys: Sequence[str]) -> Reader:
        return _MosaicReader(folder)


class _MosaicReader:
    def __init__(self, folder: Path) -> None:
        streaming = _mosaic()
        streaming.base.util.clean_stale_shared_memory()
        self._data = streaming.StreamingDataset(
            local=str(folder / "mds"), shuffle=False, batch_size=1, num_canonical_nodes=1
        )

    def rows(self, *, record: bool) -> Iterator[Row]:
        return (self._row(fields) for fields in self._data)

    def one(self, index: int) -> Row:
        return self._row(self._data[index])

    def close(self) -> None:
        pass

    @staticmethod
    def _row(fields: dict[str, Any]) -> Row:
        arrays = {name: fields[name] for name in ARRAYS}
        return Row(**arrays, reward=float(fields["reward"]), record=fields["record"])


class WebDataset:
    """Tar files of about 64 MiB, zstd as a whole; a row is a sample of `.npy` members and its record."""

    name = "WebDataset tar.zst"

    def load(self) -> None:
        import webdataset  # noqa: F401

    def write(self, rows: RawSet, folder: Path) -> None:
        import webdataset
        import zstandard

        writer, stream, size, number = None, None, 0, 0
        for index, row in enumerate(rows):
            if writer is None or size > _SHARD_BYTES:
                if writer is not None and stream is not None:
                    writer.close()
                    stream.close()
                file = (folder / f"rows-{number:06d}.tar.zst").open("wb")
                stream = zstandard.ZstdCompressor(level=LEVEL).stream_writer(file)
                writer, size, number = webdataset.TarWriter(stream), 0, number + 1
            arrays = {f"{name}.npy": getattr(row, name) for name in ARRAYS}
            reward = np.array(row.reward)
            writer.write(
                {"__key__": f"{index:08d}", **arrays, "reward.npy": reward, "record.bin": row.record}
            )
            size += sum(array.nbytes for array in arrays.values()) + len(row.record)
        if writer is not None and stream is not None:
            writer.close()
            stream.close()

    def open(self, folder: Path, keys: Sequence[str]) -> Reader:
        return _WebDatasetReader(folder)


class _WebDatasetReader:
    def __init__(self, folder: Path) -> None:
        self._paths = sorted(folder.glob("rows-*.tar.zst"))

    def rows(self, *, record: bool) -> Iterator[Row]:
        import webdataset
        import zstandard
        from webdataset.tariterators import group_by_keys, tar_file_expander

        def opened() -> Iterator[dict[str, Any]]:
            for path in self._paths:
                with path.open("rb") as file, zstandard.ZstdDecompressor().stream_reader(file) as stream:
                    yield {"url": str(path), "stream": stream}

        def wanted(name: str) -> bool:
            return record or not name.endswith("record.bin")

        files = tar_file_expander(opened(), select_files=wanted)
        decode = webdataset.autodecode.Decoder([webdataset.autodecode.basichandlers])
        for sample in group_by_keys(files):
            sample = decode(sample)
            arrays = {name: sample[f"{name}.npy"] for name in ARRAYS}
            yield Row(**arrays, reward=float(sample["reward.npy"]), record=sample.get("record.bin", b""))

    def one(self, index: int) -> Row:
        for number, row in enumerate(self.rows(record=True)):
            if number == index:
                return row
        raise IndexError(index)

    def close(self) -> None:
        pass


class LitData:
    """LitData's chunks of 64 MB by its own writer, zstd over whole chunks or over batches of 8 rows. Its
    reader puts whole chunks in their unpacked form in place of the compressed ones."""

    unpacks = True

    def __init__(self, wrap: str) -> None:
        self.name = f"LitData zstd, by {wrap}"
        self._wrap = wrap

    def load(self) -> None:
        import litdata  # noqa: F401

    def write(self, rows: RawSet, folder: Path) -> None:
        from litdata.streaming.writer import BinaryWriter

        folder = folder / "chunks"
        folder.mkdir()
        writer = BinaryWriter(
            cache_dir=str(folder),
            chunk_bytes=_SHARD_BYTES,
            compression=f"zstd:{LEVEL}",
            compression_level=self._wrap,
            compression_batch_size=8 if self._wrap == "batch" else None,
        )
        for index, row in enumerate(rows):
            arrays = {name: np.ascontiguousarray(getattr(row, name)) for name in ARRAYS}
            writer[index] = {**arrays, "reward": row.reward, "record": row.record}
        writer.done()
        writer.merge()

    def open(self, folder: Path, keys: Sequence[str]) -> Reader:
        return _LitDataReader(folder / "chunks")


class _LitDataReader:
    def __init__(self, folder: Path) -> None:
        from litdata import StreamingDataset

        self._data = StreamingDataset(str(folder), shuffle=False)

    def rows(self, *, record: bool) -> Iterator[Row]:
        return (self._row(fields) for fields in self._data)

    def one(self, index: int) -> Row:
        return self._row(self._data[index])

    def close(self) -> None:
        pass

    @staticmethod
    def _row(fields: dict[str, Any]) -> Row:
        arrays = {name: np.asarray(fields[name]) for name in ARRAYS}
        return Row(**arrays, reward=float(fields["reward"]), record=fields["record"])


class ArrayRecord:
    """ArrayRecord, zstd:3, msgpack values; chunks of `group` rows."""

    def __init__(self, group: int) -> None:
        self.name = f"ArrayRecord zstd, {group} rows"
        self._group = group

    def write(self, rows: RawSet, folder: Path) -> None:
        import msgpack
        from array_record.python.array_record_module import ArrayRecordWriter

        writer = ArrayRecordWriter(str(folder / "rows"), f"group_size:{self._group},zstd:{LEVEL}")
        for row in rows:
            writer.write(msgpack.packb(pack_row(row)))
        writer.close()

    def open(self, folder: Path, keys: Sequence[str]) -> Reader:
        return _ArrayRecordReader(folder / "rows", self._group)


class _ArrayRecordReader:
    def __init__(self, path: Path, group: int) -> None:
        import msgpack
        from array_record.python.array_record_module import ArrayRecordReader

        self._path = str(path)
        self._unpack = msgpack.unpackb
        # Without read-ahead for single rows, as its own data source does.
        self._single = ArrayRecordReader(self._path, "readahead_buffer_size:0")
        self._many = max(group, 8)

    def rows(self, *, record: bool) -> Iterator[Row]:
        count = self._single.num_records()
        for start in range(0, count, self._many):
            numbers = list(range(start, min(start + self._many, count)))
            yield from (unpack_row(self._unpack(data)) for data in self._single.read(numbers))

    def one(self, index: int) -> Row:
        return unpack_row(self._unpack(self._single.read([index])[0]))

    def close(self) -> None:
        self._single.close()
