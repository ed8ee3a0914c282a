"""Lists a prefix of any size: page by page, taking up where it broke off."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from stoker.source.keys import Keys, KeyTable
from stoker.source.remote.backend import Backend, Entry

Page = list[Entry]
Ask = Callable[[Callable[[], Page | None]], Page | None]
"""Calls what it is given until that succeeds or is given up."""


def list_prefix(backend: Backend, prefix: str, ask: Ask) -> Keys:
    """Return all objects whose keys begin with ``prefix``, sorted by key.

    A page that fails is asked for again through ``ask``, from the last key on where the storage
    lists in order, from the beginning where it does not. One thread.
    """
    table = KeyTable()
    pages: Iterator[Page] | None = None

    def next_page() -> Page | None:
        nonlocal table, pages
        if pages is None:
            if not table.is_sorted:
                table = KeyTable()
            pages = iter(backend.pages(prefix, table.last.decode()))
        try:
            return next(pages, None)
        except BaseException:
            pages = None
            raise

    while (page := ask(next_page)) is not None:
        table.add(page)
    return table.finish()
