"""A local hub of Hugging Face: as much of its HTTP interface as huggingface_hub uses to read and write a dataset.

Written after huggingface_hub 2.4 (hf_file_system.py, _commit_api.py, lfs.py): files that end in .safetensors go by git
LFS, everything else within the commit. Uploads by Xet are not served: run with HF_HUB_DISABLE_XET=1.
"""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

REPO = "user/name"


class LocalHub:
    """One dataset repository, ``user/name``."""

    def __init__(self) -> None:
        self.endpoint = ""
        self.files: dict[str, bytes] = {".gitattributes": b"*.safetensors filter=lfs\n"}
        self.objects: dict[str, bytes] = {}  # of LFS, by sha256
        self.commits: list[list[str]] = []  # the paths of each
        self.failures: list[int] = []  # statuses with which the next commits are refused


@contextmanager
def local_hub() -> Iterator[LocalHub]:
    hub = LocalHub()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            _get(hub, self)

        def do_HEAD(self) -> None:
            _get(hub, self)

        def do_PUT(self) -> None:
            content = _body(self)
            oid = self.path.rpartition("/")[2]
            good = hashlib.sha256(content).hexdigest() == oid
            if good:
                hub.objects[oid] = content
            _answer(self, 200 if good else 400, {})

        def do_POST(self) -> None:
            _post(hub, self)

        def log_message(self, *_: object) -> None:
            """Quiet."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.endpoint = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _get(hub: LocalHub, handler: BaseHTTPRequestHandler) -> None:
    path = unquote(urlsplit(handler.path).path)
    api, resolve = f"/api/datasets/{REPO}", f"/datasets/{REPO}/resolve/main/"
    if path in (api, f"{api}/revision/main"):
        _answer(handler, 200, {"id": REPO, "sha": "0" * 40, "private": True, "tags": [], "downloads": 0, "likes": 0})
    elif path.startswith(f"{api}/tree/main"):
        folder = path.removeprefix(f"{api}/tree/main").strip("/")
        listed = _tree(hub, folder)
        if folder and not listed:
            _missing(handler, "EntryNotFound")
        else:
            _answer(handler, 200, listed)
    elif path.startswith(resolve) and path.removeprefix(resolve) in hub.files:
        content = hub.files[path.removeprefix(resolve)]
        handler.send_response(200)
        handler.send_header("Content-Length", str(len(content)))
        handler.send_header("ETag", f'"{hashlib.sha1(content).hexdigest()}"')
        handler.send_header("X-Repo-Commit", "0" * 40)
        handler.end_headers()
        if handler.command == "GET":
            handler.wfile.write(content)
    else:
        _missing(handler, "EntryNotFound" if REPO in path else "RepoNotFound")


def _post(hub: LocalHub, handler: BaseHTTPRequestHandler) -> None:
    path, content = unquote(urlsplit(handler.path).path), _body(handler)
    api = f"/api/datasets/{REPO}"
    if path == f"{api}/preupload/main":
        modes = [
            {
                "path": one["path"],
                "uploadMode": "lfs" if one["path"].endswith(".safetensors") else "regular",
                "shouldIgnore": False,
            }
            for one in json.loads(content)["files"]
        ]
        _answer(handler, 200, {"files": modes})
    elif path == f"/datasets/{REPO}.git/info/lfs/objects/batch":
        objects = []
        for one in json.loads(content)["objects"]:
            upload = {"upload": {"href": f"{hub.endpoint}/lfs/{one['oid']}"}}
            objects.append({**one} if one["oid"] in hub.objects else {**one, "actions": upload})
        _answer(handler, 200, {"transfer": "basic", "objects": objects})
    elif path == f"{api}/commit/main":
        if hub.failures:
            _answer(handler, hub.failures.pop(0), {"error": "A commit has happened since."})
            return
        changed = {}
        for line in content.splitlines():
            entry = json.loads(line)
            value = entry["value"]
            if entry["key"] == "file":
                changed[value["path"]] = base64.b64decode(value["content"])
            elif entry["key"] == "lfsFile":
                changed[value["path"]] = hub.objects[value["oid"]]
        hub.files |= changed
        hub.commits.append(list(changed))
        _answer(handler, 200, {"commitUrl": f"{hub.endpoint}/datasets/{REPO}/commit/1", "commitOid": "1" * 40})
    elif path == f"{api}/paths-info/main":
        _answer(handler, 200, [])
    else:
        _missing(handler, "RepoNotFound")


def _tree(hub: LocalHub, folder: str) -> list[dict[str, object]]:
    prefix = f"{folder}/" if folder else ""
    found: dict[str, dict[str, object]] = {}
    for path, content in hub.files.items():
        if path.startswith(prefix):
            name, slash, _ = path.removeprefix(prefix).partition("/")
            oid = hashlib.sha1(content).hexdigest()
            size = 0 if slash else len(content)
            found[name] = {
                "type": "directory" if slash else "file", "oid": oid, "size": size, "path": prefix + name
            }  # fmt: skip
    return list(found.values())


def _body(handler: BaseHTTPRequestHandler) -> bytes:
    if handler.headers.get("Transfer-Encoding") == "chunked":
        content = b""
        while size := int(handler.rfile.readline(), 16):
            content += handler.rfile.read(size)
            handler.rfile.readline()
        handler.rfile.readline()
        return content
    return handler.rfile.read(int(handler.headers.get("Content-Length", 0)))


def _answer(handler: BaseHTTPRequestHandler, status: int, body: object) -> None:
    content = json.dumps(body).encode()
    handler.send_response(status)
    handler.send_header("Content-Type", "application/json")
    handler.send_header("Content-Length", str(len(content)))
    handler.end_headers()
    if handler.command != "HEAD":
        handler.wfile.write(content)


def _missing(handler: BaseHTTPRequestHandler, code: str) -> None:
    handler.send_response(404)
    handler.send_header("X-Error-Code", code)
    handler.send_header("X-Error-Message", "not found")
    handler.send_header("Content-Length", "0")
    handler.end_headers()
