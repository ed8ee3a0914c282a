"""Picks the source for an address: ``open_source("s3://bucket/train")``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stoker.errors import ConfigError
from stoker.source import arrow, mds, parquet, parquet_index, records
from stoker.source.array_rows import HDF5Source, ZarrSource
from stoker.source.arrow import ArrowSource
from stoker.source.base import Source
from stoker.source.clips import ClipSource
from stoker.source.files import FileSource
from stoker.source.image_folder import ImageFolderSource, ImagePrefixSource, ImageShardSource
from stoker.source.lance_source import LanceSource
from stoker.source.lmdb_source import LMDBSource
from stoker.source.mds import MDSSource
from stoker.source.objects import FsspecSource, ObjectSource
from stoker.source.pack import packed_shards
from stoker.source.parquet import ParquetSource
from stoker.source.records import NumpySource, TFRecordSource
from stoker.source.remote.backend import OBJECT_SCHEMES
from stoker.source.shards import ShardSource, expand

Place = str | Path
_ENDINGS: dict[Any, tuple[str, ...]] = {
    ParquetSource: parquet.ENDINGS,
    ArrowSource: arrow.ENDINGS,
    NumpySource: records.NUMPY_ENDINGS,
    TFRecordSource: records.TFRECORD_ENDINGS,
    HDF5Source: (".h5", ".hdf5"),
    ZarrSource: (".zarr",),
    LMDBSource: (".lmdb", ".mdb"),
    LanceSource: (".lance",),
}
_OF_SEVERAL = (ParquetSource, ArrowSource, NumpySource, TFRecordSource)
_MAGICS: dict[Any, bytes] = {
    ParquetSource: parquet_index.MAGIC,
    ArrowSource: arrow.MAGIC,
    NumpySource: b"\x93NUMPY",
    HDF5Source: b"\x89HDF\r\n\x1a\n",
}
_INSIDE: dict[Any, tuple[str, ...]] = {
    LMDBSource: ("data.mdb",),
    LanceSource: ("_versions",),
    ZarrSource: ("zarr.json", ".zarray", ".zgroup"),
}


def open_source(where: Place | Sequence[Place], **options: Any) -> Source:
    """Return a source for what ``where`` is; ``options`` are those of its class.

    ============================================== ==================================
    ``/data/train`` (a folder)                     :class:`ImageFolderSource`
    a folder that ``stoker pack`` made             :class:`ShardSource`
    ``/data/x.jpg``, a list of paths               :class:`FileSource`
    ``/data/train-{000..099}.tar``, a list of tars :class:`ShardSource`
    ``/data/*.parquet``, a folder of such files    :class:`ParquetSource`
    ``*.arrow``, ``*.feather``, a folder of them   :class:`ArrowSource`
    ``x.h5``, ``x.zarr``, a folder of LMDB         :class:`HDF5Source`, :class:`ZarrSource`,
                                                   :class:`LMDBSource`
    ``x.lance``, a folder of Lance, ``s3://...``   :class:`LanceSource`
    a folder of MDS shards with ``index.json``     :class:`MDSSource`
    ``x.npy``, ``*.npy``, a folder of them         :class:`NumpySource`
    ``x.tfrecord``, ..., a folder of them          :class:`TFRecordSource`
    any of audio or video, with ``length=``        :class:`ClipSource`
    ``s3://bucket/train-{000..099}.tar``           :class:`ShardSource`
    ``s3://bucket/train``, ``gs://``, ``az://``    :class:`ObjectSource`
    ``ftp://host/folder`` and others of fsspec     :class:`FsspecSource`
    ============================================== ==================================

    For class folders in object stores use :func:`open_image_folder`. Raises
    :class:`ConfigError` for an empty list, an option that the class does not have, and
    arguments that the class rejects; other errors as the class.
    """
    made: Source
    if "length" in options:  # only clips have one; a file of media is a sample otherwise
        made = _make(ClipSource, where, options)
        return made
    if (folder := _of_mds(where)) is not None:
        made = _make(MDSSource, folder, options)
        return made
    several = not isinstance(where, str | Path)
    locations = [str(where)] if isinstance(where, str | Path) else list(map(str, where))
    if not locations:
        raise ConfigError("where is empty: give an address, a path, or a list of them")
    kind, argument = _kind(locations, several)
    source: Source = _make(kind, argument, options)
    return source


def open_image_folder(
    root: Place, **options: Any
) -> ImageFolderSource | ImagePrefixSource | ImageShardSource:
    """Return the source of class folders at a path or an address, with classes and targets.

    The folders may be in tar shards: ``/data/train-{000..099}.tar``, or a folder that ``stoker
    pack`` made. Raises as :class:`ImageFolderSource`, :class:`ImagePrefixSource` and
    :class:`ImageShardSource` do.
    """
    kind: Any = ImagePrefixSource if "://" in str(root) else ImageFolderSource
    where: Any = str(root)
    if _are_shards([where]):
        kind, where = ImageShardSource, expand(where)
    elif "://" not in where and (shards := packed_shards(where)) is not None:
        kind, where = ImageShardSource, shards
    made: ImageFolderSource | ImagePrefixSource | ImageShardSource = _make(kind, where, options)
    return made


def _are_shards(locations: list[str]) -> bool:
    return any(".tar" in Path(each).name.lower() or each.endswith(".tgz") for each in locations)


def _kind(locations: list[str], several: bool) -> tuple[Any, Any]:
    """Return the class, and what its first argument is."""
    if _are_shards(locations):
        return ShardSource, expand(locations)
    if (kind := _format_of(locations[0])) is not None:
        return kind, locations if kind in _OF_SEVERAL else _only(locations, kind)
    remote = [location for location in locations if "://" in location]
    if several or not remote:
        if remote:
            raise ConfigError(
                f"a list with {remote[0]}: give ObjectSource the common address and the keys"
            )
        if not several and (shards := packed_shards(locations[0])) is not None:
            return ShardSource, shards
        is_folder = not several and Path(locations[0]).is_dir()
        return (ImageFolderSource, locations[0]) if is_folder else (FileSource, locations)
    scheme = locations[0].partition("://")[0].lower()
    return (ObjectSource if scheme in OBJECT_SCHEMES else FsspecSource), locations[0]


def _format_of(location: str) -> Any:
    """Return the class of files with many samples, by name or content; None for other files."""
    kind = _by_ending(location)
    path = Path(location)
    if kind is not None or "://" in location or not path.exists():
        return kind
    if path.is_dir():
        inside = list(path.iterdir())
        names = {file.name for file in inside}
        for kind, marks in _INSIDE.items():
            if names & set(marks):
                return kind
        kinds = {_by_ending(file.name) for file in inside} & set(_OF_SEVERAL)
        # Folders in it are classes, beside which there may be any file.
        is_flat = not any(file.is_dir() for file in inside)
        return kinds.pop() if len(kinds) == 1 and is_flat else None
    with path.open("rb") as file:
        begin = file.read(8)
    return next((kind for kind, magic in _MAGICS.items() if begin.startswith(magic)), None)


def _only(locations: list[str], kind: Any) -> str:
    if len(locations) > 1:
        raise ConfigError(f"{kind.__name__} takes one path, not {len(locations)}: open one")
    return locations[0]


def _of_mds(where: Place | Sequence[Place]) -> str | None:
    """Return the folder if it is one of MDS shards, which has an index of them."""
    if not isinstance(where, str | Path):
        return None
    if "://" in str(where):
        return str(where) if str(where).endswith(f"/{mds.INDEX}") else None
    path = Path(where)
    folder = path.parent if path.name == mds.INDEX else path
    is_one = (folder / mds.INDEX).is_file() and any(folder.glob("*.mds*"))
    return str(folder) if is_one else None


def _by_ending(name: str) -> Any:
    found = (kind for kind, endings in _ENDINGS.items() if name.lower().endswith(endings))
    return next(found, None)


def _make(kind: Any, argument: Any, options: dict[str, Any]) -> Any:
    try:
        return kind(argument, **options)
    except TypeError as error:
        if "keyword argument" not in str(error):
            raise
        raise ConfigError(f"{kind.__name__} for {argument!r}: {error}") from error
