"""An S3 server that lists fast: keys and versions are what a test says."""

from __future__ import annotations

import bisect
import threading
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Self
from urllib.parse import parse_qs, urlsplit

PAGE = 1000


class ListServer:
    """Lists :attr:`keys`, which are sorted, as the content of any bucket."""

    def __init__(self, keys: Sequence[str]) -> None:
        self.keys = keys
        self.versions: dict[str, str] = {}
        self.requests = 0
        self.failing = 0
        """How many of the next requests are answered 503."""
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                query = {
                    name: value[0] for name, value in parse_qs(urlsplit(self.path).query).items()
                }
                server.requests += 1
                key = self.path.partition("/bucket/")[2]
                if "list-type" in query:
                    status, body = server.answer(query)
                else:
                    status, body = (200, key.encode()) if key in server.keys else (404, b"")
                self.send_response(status)
                self.send_header("etag", f'"{server.versions.get(key, "v1")}"')
                self.send_header("last-modified", "Mon, 01 Jan 2024 00:00:00 GMT")
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        threading.Thread(target=self._http.serve_forever, daemon=True).start()

    def answer(self, query: dict[str, str]) -> tuple[int, bytes]:
        """Return the status and the body for one request."""
        if self.failing > 0:
            self.failing -= 1
            return 503, b"<Error><Code>SlowDown</Code></Error>"
        prefix = query.get("prefix", "")
        after = query.get("continuation-token") or query.get("start-after", "")
        begin = max(bisect.bisect_left(self.keys, prefix), bisect.bisect_right(self.keys, after))
        end = bisect.bisect_left(self.keys, prefix + "\U0010ffff")
        if "delimiter" in query:
            return 200, self._folders(prefix, begin, end)
        page = self.keys[begin : min(end, begin + PAGE)]
        more = begin + PAGE < end
        token = f"<NextContinuationToken>{page[-1]}</NextContinuationToken>" if more else ""
        return 200, _document(
            f"<IsTruncated>{str(more).lower()}</IsTruncated>{token}", page, self.versions
        )

    def _folders(self, prefix: str, begin: int, end: int) -> bytes:
        below = [key[len(prefix) :] for key in self.keys[begin:end]]
        folders = sorted({name.partition("/")[0] for name in below if "/" in name})
        listed = "".join(
            f"<CommonPrefixes><Prefix>{prefix}{folder}/</Prefix></CommonPrefixes>"
            for folder in folders
        )
        beside = [prefix + name for name in below if "/" not in name]
        return _document(f"<IsTruncated>false</IsTruncated>{listed}", beside, self.versions)

    @property
    def options(self) -> dict[str, object]:
        """Storage options that lead to it."""
        return {
            "endpoint": f"http://127.0.0.1:{self._http.server_port}",
            "access_key_id": "test",
            "secret_access_key": "test",
            "region": "us-east-1",
            "allow_http": True,
            "virtual_hosted_style_request": False,
        }

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.shutdown()
        self._http.server_close()


def _document(head: str, keys: Sequence[str], versions: dict[str, str]) -> bytes:
    contents = "".join(
        f"<Contents><Key>{key}</Key><LastModified>2024-01-01T00:00:00.000Z</LastModified>"
        f'<ETag>"{versions.get(key, "v1")}"</ETag><Size>{len(key)}</Size></Contents>'
        for key in keys
    )
    return f'<?xml version="1.0"?><ListBucketResult>{head}{contents}</ListBucketResult>'.encode()
