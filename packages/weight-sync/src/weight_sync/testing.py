"""A stand-in for an engine: SGLang's HTTP API over a dictionary of bytes, with faults on demand.

For tests of what talks to engines; it generates nothing.
"""

import asyncio
import hashlib
import json
from collections import deque
from enum import StrEnum
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from aiohttp import web

from weight_sync.codecs import safetensors_file
from weight_sync.core.fused_names import fused_parts
from weight_sync.core.manifest import digest
from weight_sync.stores.base import Step, no_step


class Fault(StrEnum):
    """What goes wrong in the next load, pause or continue."""

    REFUSE = "refuse"
    """Answers 400 and changes nothing."""
    TEAR = "tear"
    """Loads half of the tensors, then answers 500."""
    TEAR_SILENTLY = "tear silently"
    """Loads half of the tensors, and reports the new label and success."""
    STALE = "stale"
    """Keeps the old tensors, and reports the new label and success."""
    KEEP_LABEL = "keep label"
    """Loads all, but goes on reporting the old label."""
    LOSE_ANSWER = "lose answer"
    """Loads all, then drops the connection."""
    HANG = "hang"
    """Never answers."""
    RESTART = "restart"
    """Dies half way and comes back with the weights it was started with."""


class FakeEngine:
    """One engine on a port of its own. Use as an async context manager."""

    def __init__(self, base_model: Path, *, port: int = 0, on_step: Step = no_step) -> None:
        """Serve the model in `base_model`, as an engine does that was started with it.

        Args:
            base_model: HF model folder.
            port: 0: a free one.
            on_step: called before every change of the weights or of the label.
        """
        self.base_model = base_model
        self._on_step = on_step
        self.tensors: dict[str, bytes] = {}
        self.label = ""
        self.paused = False
        self.unpaused_loads = 0
        """Loads that came while it was generating: must stay 0."""
        self.served: list[tuple[str, str]] = []
        """(label, root of the bytes) each time generation went on."""
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.faults: deque[Fault] = deque()
        """Taken by the loads that follow, one each."""
        self.load_s = 0.0
        """A load takes at least so long."""
        self.fuses = False
        """Reports checksums under names of its own, as an engine does that fuses tensors."""
        self.sglang = False
        """Names, joins and hashes tensors as SGLang does on a CPU."""
        self.server_info: dict[str, Any] = {"device": "cpu", "tp_size": 1}
        self.pause_faults: deque[Fault] = deque()
        self.url = ""
        self._runner: web.AppRunner | None = None
        self._port = port
        self.restart()

    def restart(self) -> None:
        """Forget every update, as a process does that was killed and started again."""
        self.tensors = _load(self.base_model)
        self.label = "default"
        self.paused = False

    async def start(self) -> None:
        """Listen; after `stop`, on the same port again."""
        app = web.Application()
        app.router.add_get("/model_info", self._model_info)
        app.router.add_get("/server_info", self._server_info)
        app.router.add_post("/pause_generation", self._pause)
        app.router.add_post("/continue_generation", self._continue)
        app.router.add_post("/update_weights_from_disk", self._update)
        app.router.add_post("/weights_checker", self._checksums)
        # Without a grace for connections: a stop in a test is the death of a process.
        self._runner = web.AppRunner(app, shutdown_timeout=0.05)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self._port, reuse_address=True)
        await site.start()
        self._port = self._runner.addresses[0][1]
        self.url = f"http://127.0.0.1:{self._port}"

    async def stop(self) -> None:
        """Stop listening."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.stop()

    def root(self) -> str:
        """Return a hash of what it holds."""
        return root_of(self.tensors)

    async def _model_info(self, request: web.Request) -> web.Response:
        return web.json_response(
            {
                "weight_version": self.label,
                "model_path": str(self.base_model),
                "tokenizer_path": str(self.base_model),
            }
        )

    async def _server_info(self, request: web.Request) -> web.Response:
        return web.json_response(self.server_info)

    async def _pause(self, request: web.Request) -> web.Response:
        body = await self._body(request)
        if self.pause_faults:
            fault = self.pause_faults.popleft()
            if fault is Fault.HANG:
                await asyncio.Event().wait()
            return web.json_response({"message": str(fault)}, status=400)
        self.paused = True
        return web.json_response({"status": "ok", "mode": body.get("mode")})

    async def _continue(self, request: web.Request) -> web.Response:
        await self._body(request)
        self.paused = False
        self.served.append((self.label, self.root()))
        return web.json_response({"status": "ok"})

    async def _update(self, request: web.Request) -> web.Response:
        body = await self._body(request)
        if not self.paused:
            self.unpaused_loads += 1
        await asyncio.sleep(self.load_s)
        fault = self.faults.popleft() if self.faults else None
        if fault is Fault.REFUSE:
            return web.json_response({"success": False, "message": "refused"}, status=400)
        if fault is Fault.HANG:
            await asyncio.Event().wait()
        try:
            new = _load(Path(body["model_path"]))
        except OSError as error:
            return web.json_response({"success": False, "message": str(error)}, status=400)
        if fault is Fault.RESTART:
            self.restart()
            return web.json_response({"message": "gone"}, status=500)
        if fault is not Fault.STALE:
            self._load(new, torn=fault in (Fault.TEAR, Fault.TEAR_SILENTLY))
        if fault is Fault.TEAR:
            return web.json_response({"success": False, "message": "torn"}, status=500)
        if fault is not Fault.KEEP_LABEL:
            self._on_step("label")
            self.label = body["weight_version"]
        if fault is Fault.LOSE_ANSWER and request.transport is not None:
            request.transport.close()
        return web.json_response({"success": True, "message": "ok"})

    def _load(self, new: dict[str, bytes], *, torn: bool) -> None:
        """Take over the tensors one by one, as an engine does; torn: half of them."""
        for name, data in sorted(new.items())[: len(new) // 2 if torn else None]:
            self._on_step(f"load {name}")
            self.tensors[name] = data
        if not torn:
            self.tensors = new

    async def _checksums(self, request: web.Request) -> web.Response:
        await self._body(request)
        checksums = {name: digest(data) for name, data in self.tensors.items()}
        if self.fuses:
            checksums = {f"{name}.fused": checksum for name, checksum in checksums.items()}
        if self.sglang:
            checksums = {
                fused: hashlib.sha256(b"".join(self.tensors[name] for name in names)).hexdigest()[
                    :16
                ]
                for fused, names in fused_parts(self.tensors).items()
            }
        return web.json_response({"success": True, "ranks": [{"checksums": checksums}]})

    async def _body(self, request: web.Request) -> dict[str, Any]:
        body: dict[str, Any] = await request.json()
        self.calls.append((request.path, body))
        return body


def root_of(tensors: dict[str, bytes]) -> str:
    """Hash tensors by name and content."""
    return digest("\n".join(f"{n} {digest(d)}" for n, d in sorted(tensors.items())).encode())


def _load(folder: Path) -> dict[str, bytes]:
    """Read a model folder as an engine does: by its index, if it has one."""
    index = folder / "model.safetensors.index.json"
    names = {"model.safetensors"}
    if index.exists():
        names = set(json.loads(index.read_bytes())["weight_map"].values())
    found: dict[str, bytes] = {}
    for name in names:
        data = memoryview((folder / name).read_bytes())
        found |= {t.name: bytes(t.data) for t in safetensors_file.tensors(data)}
    return found
