"""A local S3: moto's server in this process, on a free port."""

from __future__ import annotations

import logging
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest


class LocalS3:
    """A bucket ``bucket`` and ways to look at it and to spoil what is in it."""

    def __init__(self, endpoint: str, client: Any) -> None:
        self.endpoint, self.client = endpoint, client

    def names(self, prefix: str = "") -> list[str]:
        pages = self.client.get_paginator("list_objects_v2").paginate(Bucket="bucket", Prefix=prefix)
        return [one["Key"] for page in pages for one in page.get("Contents", [])]

    def get(self, key: str) -> bytes:
        content: bytes = self.client.get_object(Bucket="bucket", Key=key)["Body"].read()
        return content

    def put(self, key: str, content: bytes) -> None:
        self.client.put_object(Bucket="bucket", Key=key, Body=content)

    def empty(self) -> None:
        for name in self.names():
            self.client.delete_object(Bucket="bucket", Key=name)


@contextmanager
def local_s3(patch: pytest.MonkeyPatch) -> Iterator[LocalS3]:
    """Serve, and point this process and those it starts to it."""
    import boto3
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN"):
        patch.delenv(name, raising=False)
    patch.setenv("AWS_ACCESS_KEY_ID", "test")
    patch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    patch.setenv("NO_PROXY", "127.0.0.1")
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    endpoint = f"http://{host}:{port}"
    patch.setenv("AWS_ENDPOINT_URL", endpoint)
    try:
        urllib.request.urlopen(urllib.request.Request(f"{endpoint}/moto-api/reset", method="POST")).close()
        client = boto3.client("s3", endpoint_url=endpoint, region_name="us-east-1")
        client.create_bucket(Bucket="bucket")
        yield LocalS3(endpoint, client)
    finally:
        server.stop()
