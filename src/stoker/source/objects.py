"""Data sets of objects: in S3, Google Cloud Storage, Azure, behind HTTP, or what fsspec reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from stoker.errors import ConfigError
from stoker.source.key_listing import DAY, KeyListing
from stoker.source.key_source import KeySource
from stoker.source.pace import Pace
from stoker.source.remote.address import Address, address_of
from stoker.source.remote.client import Client


class ObjectSource(KeySource):
    """The objects under a prefix, or those of a list of keys, read through obstore.

    Addresses are ``s3://bucket/prefix``, ``gs://bucket/prefix``, ``az://container/prefix``,
    ``http(s)://host/path`` and ``file:///folder``. A prefix is a folder: ``s3://b/train`` stands
    for the objects below ``train/``. Samples are in the order of the bytes of their keys; empty
    objects that only mark a folder are left out. Web servers do not list: there ``keys`` are
    needed.

    :class:`KeySource` says how it reads, :class:`KeyListing` when a stored listing is used again.
    """

    def __init__(
        self,
        url: str,
        keys: Sequence[str] | None = None,
        *,
        storage_options: Mapping[str, Any] | None = None,
        pace: Pace | None = None,
        listing_max_age: float = DAY,
    ) -> None:
        """List the objects below ``url``, or look up those of ``keys``, which are below it.

        ``storage_options`` go to obstore: what its store of that kind knows (``endpoint``,
        ``region``, ``virtual_hosted_style_request``, ``credential_provider``, ...), options of
        its HTTP client (``allow_http``, ``read_timeout``, ...; also as ``client_options``), and
        ``retry_config``, whose retries come below those of ``pace``; by default it has none.
        Without credentials there, obstore looks where its store usually does (environment,
        instance metadata; not in configuration files). ``credential_provider`` is a provider
        that pickles, or a class like ``obstore.auth.boto3.Boto3CredentialProvider``, of which
        each helper process makes its own.
        ``listing_max_age`` is in seconds; 0 lists again each time.

        Raises :class:`ConfigError` for a bad address or option, rejected credentials, no objects,
        or without obstore; :class:`SampleNotFound` for a key that is not there;
        :class:`SourceUnavailable` when the storage does not answer.
        """
        address = address_of(url, storage_options)
        self._find(address, keys, pace or Pace(), listing_max_age)

    def _find(
        self,
        address: Address,
        keys: Sequence[str] | None,
        pace: Pace,
        listing_max_age: float,
        in_process: bool = False,
    ) -> None:
        """List and hold."""
        prefix = address.prefix.rstrip("/") + "/" if address.prefix.strip("/") else address.prefix
        client = Client(address.place, pace, in_process)
        listing = KeyListing(client, address, listing_max_age)
        if keys is None:
            found = listing.below(prefix)
        else:
            found = listing.of([prefix + key for key in check_keys(keys)])
        names = found.without_prefix(len(prefix.encode()))
        self._hold(client, address.root, prefix, names, listing.stored)


def check_keys(keys: Sequence[str]) -> Sequence[str]:
    """Return ``keys``; raises ConfigError when it is one key, or none, or not of text."""
    if isinstance(keys, str | bytes):
        raise ConfigError(f"keys={keys!r} is one key: give a list of keys")
    if not len(keys):
        raise ConfigError("keys is empty: a source needs at least one object")
    for key in keys:
        if not isinstance(key, str) or not key:
            raise ConfigError(f"keys has {key!r}: keys are texts that are not empty")
    return keys


class FsspecSource(ObjectSource):
    """The files below a folder of any file system of fsspec, or those of a list of paths.

    For what :class:`ObjectSource` does not read. fsspec does not say which version of a file it
    reads, so one that was replaced is noticed only by its size. Listings are not stored, because
    fsspec cannot list in pages.
    """

    def __init__(
        self,
        url: str,
        keys: Sequence[str] | None = None,
        *,
        storage_options: Mapping[str, Any] | None = None,
        pace: Pace | None = None,
    ) -> None:
        """List the files below ``url``, or look up those of ``keys``, which are below it.

        ``storage_options`` go to the file system. ``memory://`` is read in this process, and so
        in children only after a fork; everything else in the helper process.

        Raises as :class:`ObjectSource` does.
        """
        address = address_of(url, storage_options, by_fsspec=True)
        in_memory = url.partition("://")[0].lower() == "memory"
        self._find(address, keys, pace or Pace(), 0.0, in_process=in_memory)
