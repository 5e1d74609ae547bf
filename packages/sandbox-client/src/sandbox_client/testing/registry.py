"""A registry on loopback, to pull images from without a network."""

import gzip
import hashlib
import io
import json
import platform
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from sandbox_client.testing.host_image import write_host_image

__all__ = ["Registry"]

_DOCKER = "application/vnd.docker"
_MANIFEST = f"{_DOCKER}.distribution.manifest.v2+json"
_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}


class Registry:
    """Offers images over the registry protocol, which dockerd takes without TLS on loopback."""

    def __init__(self) -> None:
        self._manifests: dict[str, bytes] = {}
        self._blobs: dict[str, bytes] = {}
        self.pulls: Counter[str] = Counter()
        """How often each image's manifest was read."""
        self.too_often = False
        """Whether to refuse every pull, as a registry does that was asked too often."""
        self.delay_s = 0.0
        """Time that every answer takes."""
        handler = type("Handler", (_Handler,), {"registry": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.host = f"127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        """Stops serving."""
        self._server.shutdown()
        self._server.server_close()

    def add(
        self,
        name: str,
        files: Mapping[str, str | bytes],
        environ: Sequence[str] = (),
        programs: Sequence[str] = ("sh", "cat", "ls", "sed", "stat", "env"),
        *,
        python: bool = False,
    ) -> str:
        """Offers an image with some files and programs of this host; returns its reference."""
        layer = io.BytesIO()
        write_host_image(layer, programs=programs, python=python, files=files)
        packed = gzip.compress(layer.getvalue(), 1)
        config = {
            "architecture": _ARCHITECTURES[platform.machine()],
            "os": "linux",
            "config": {"Env": list(environ)},
            "rootfs": {"type": "layers", "diff_ids": [_digest(layer.getvalue())]},
            "history": [{"created_by": name}],
        }
        manifest = {
            "schemaVersion": 2,
            "mediaType": _MANIFEST,
            "config": self._blob("container.image.v1+json", json.dumps(config).encode()),
            "layers": [self._blob("image.rootfs.diff.tar.gzip", packed)],
        }
        self._manifests[name] = json.dumps(manifest).encode()
        return f"{self.host}/{name}:latest"

    def _blob(self, kind: str, content: bytes) -> dict[str, object]:
        self._blobs[_digest(content)] = content
        return {
            "mediaType": f"{_DOCKER}.{kind}",
            "size": len(content),
            "digest": _digest(content),
        }

    def answer(self, path: str) -> tuple[int, str, bytes]:
        """Status, content type and content for a path."""
        match path.strip("/").split("/"):
            case ["v2"]:
                return 200, "application/json", b"{}"
            case ["v2", name, "manifests", _] if self.too_often:
                error = {"errors": [{"code": "TOOMANYREQUESTS", "message": f"too often: {name}"}]}
                return 429, "application/json", json.dumps(error).encode()
            case ["v2", name, "manifests", _] if name in self._manifests:
                return 200, _MANIFEST, self._manifests[name]
            case ["v2", _, "blobs", digest] if digest in self._blobs:
                return 200, "application/octet-stream", self._blobs[digest]
        error = {"errors": [{"code": "MANIFEST_UNKNOWN", "message": "manifest unknown"}]}
        return 404, "application/json", json.dumps(error).encode()


class _Handler(BaseHTTPRequestHandler):
    registry: Registry

    def do_GET(self) -> None:
        """Answers from the registry."""
        time.sleep(self.registry.delay_s)
        status, kind, content = self.registry.answer(self.path)
        parts = self.path.split("/")
        if self.command == "GET" and "manifests" in parts and status == 200:
            self.registry.pulls[parts[2]] += 1
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Docker-Content-Digest", _digest(content))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    do_HEAD = do_GET  # noqa: N815 -- the library's name

    def log_message(self, *args: object) -> None:
        """Silent."""


def _digest(content: bytes) -> str:
    return f"sha256:{hashlib.sha256(content).hexdigest()}"
