from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from aiohttp import web
from swe_eval.making.words import ChatWriter

REPORT = "Bug in `add`\n\n`add(2, 3)` gives `-1`, expected `5`."
SECRET = ("    return first + second", "    assert add(20, 30) == 50", "`add(2, 3)` gives `-1`")


async def reword(answer: str | Exception | Callable[[dict[str, Any]], str]) -> str:
    async def post(url: str, body: bytes, headers: dict[str, str], timeout_s: float) -> bytes:
        assert url == "http://model/v1/chat/completions"
        assert headers["Authorization"] == "Bearer key"
        if isinstance(answer, Exception):
            raise answer
        text = answer(json.loads(body)) if callable(answer) else answer
        return json.dumps({"choices": [{"message": {"content": text}}]}).encode()

    writer = ChatWriter(url="http://model/v1/", model="m", key="key", post=post)
    return await writer.reword(REPORT, repository="shop", secret=SECRET, seed=3)


async def test_the_models_words_are_taken() -> None:
    def answer(body: dict[str, Any]) -> str:
        assert (body["model"], body["seed"], body["temperature"]) == ("m", 3, 0.0)
        return "Adding subtracts\n\nI called `add(2, 3)` and got -1."

    assert await reword(answer) == "Adding subtracts\n\nI called `add(2, 3)` and got -1."


@pytest.mark.parametrize(
    "answer",
    [
        TimeoutError(),
        OSError("refused"),
        KeyError("choices"),
        "",
        "x" * 5000,
        "Use\n\nreturn  first + second",
        "Try `assert add(20, 30) == 50`",
    ],
    ids=["late", "no endpoint", "odd answer", "empty", "long", "the repair", "a hidden test"],
)
async def test_else_the_template_stands_and_the_reason_is_logged(
    answer: str | Exception, caplog: pytest.LogCaptureFixture
) -> None:
    assert await reword(answer) == REPORT
    assert len(caplog.records) == 1


async def test_what_the_template_says_itself_is_no_secret() -> None:
    text = "Sum is wrong\n\n`add(2, 3)` gives `-1`."
    assert await reword(text) == text


async def endpoint(request: web.Request) -> web.Response:
    """A chat endpoint; the model's name says what it does."""
    body = await request.json()
    assert request.headers["Authorization"] == "Bearer key"
    match body["model"]:
        case "refuses":
            return web.Response(status=500)
        case "talks":
            return web.Response(body=b"x" * (2 << 20))
    return web.json_response({"choices": [{"message": {"content": "Sum is wrong"}}]})


@pytest.mark.parametrize(
    ("model", "logged"), [("good", ""), ("refuses", "500"), ("talks", "more than 1048576 bytes")]
)
async def test_the_endpoint_is_asked_over_http(
    model: str, logged: str, caplog: pytest.LogCaptureFixture
) -> None:
    app = web.Application()
    app.router.add_post("/v1/chat/completions", endpoint)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    try:
        await site.start()
        host, port = runner.addresses[0][:2]
        writer = ChatWriter(url=f"http://{host}:{port}/v1", model=model, key="key")
        text = await writer.reword(REPORT, repository="shop", secret=SECRET, seed=3)
    finally:
        await runner.cleanup()
    assert text == (REPORT if logged else "Sum is wrong")
    assert logged in caplog.text
