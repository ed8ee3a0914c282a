"""Fills a bucket of an S3 stand-in."""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor
from typing import Any

_numbers = itertools.count()


class Bucket:
    """A new bucket at an endpoint."""

    def __init__(self, endpoint: str) -> None:
        import boto3  # takes longer to import than the rest of a test file
        from botocore.config import Config

        self.endpoint = endpoint
        self.name = f"bucket-{next(_numbers)}"
        self._client = boto3.client(
            "s3",
            endpoint_url=endpoint,
            aws_access_key_id="test",
            aws_secret_access_key="test",
            region_name="us-east-1",
            config=Config(max_pool_connections=8),
        )
        self._client.create_bucket(Bucket=self.name)

    @property
    def url(self) -> str:
        return f"s3://{self.name}"

    def options(self, **more: Any) -> dict[str, Any]:
        """Storage options that lead to it."""
        return {
            "endpoint": self.endpoint,
            "access_key_id": "test",
            "secret_access_key": "test",
            "region": "us-east-1",
            "allow_http": True,
            "virtual_hosted_style_request": False,
            **more,
        }

    def put(self, objects: dict[str, bytes]) -> None:
        def one(key: str) -> None:
            self._client.put_object(Bucket=self.name, Key=key, Body=objects[key])

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(one, objects))

    def delete(self, key: str) -> None:
        self._client.delete_object(Bucket=self.name, Key=key)

    def close(self) -> None:
        self._client.close()
