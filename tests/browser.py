"""A headless Chromium that tests look at pages with, by its debugging protocol."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import json
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tornado.websocket import websocket_connect

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")


def find_browser() -> str | None:
    """Return the path of a browser, or None if there is none."""
    return next(filter(None, map(shutil.which, NAMES)), None)


async def _connected(address: str) -> Any:
    return await websocket_connect(address, max_message_size=2**26)


class Browser:
    """A page of a running browser."""

    def __init__(self, address: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._numbers = itertools.count()
        # Emulated settings last as long as the connection, so it stays open.
        self._connection = self._loop.run_until_complete(_connected(address))

    def evaluate(self, expression: str) -> Any:
        """Return the value of a JavaScript expression in the page."""
        answer = self._ask("Runtime.evaluate", expression=expression, returnByValue=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(answer["exceptionDetails"]["exception"].get("description"))
        return answer["result"].get("value")

    def wait_for(self, expression: str, within_s: float = 30.0) -> Any:
        """Wait until an expression is true in the page, and return its value."""
        until = time.monotonic() + within_s
        value = None
        while time.monotonic() < until:
            # While a page is loading, names in the expression may not exist yet.
            with contextlib.suppress(RuntimeError):
                if value := self.evaluate(expression):
                    return value
            time.sleep(0.1)
        raise AssertionError(f"{expression} is {value!r} after {within_s:g} s")

    def show(self, url: str, width: int = 1400, height: int = 1000, scheme: str = "light") -> None:
        """Go to a page."""
        self._ask("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self._ask("Emulation.setEmulatedMedia", features=features)
        self._ask("Page.navigate", url=url)

    def picture(self, path: Path) -> None:
        """Write a picture of the page."""
        path.write_bytes(base64.b64decode(self._ask("Page.captureScreenshot")["data"]))

    def close(self) -> None:
        """Close the connection."""

        async def close() -> None:
            self._connection.close()

        self._loop.run_until_complete(close())
        self._loop.close()

    def _ask(self, method: str, **params: Any) -> Any:
        number = next(self._numbers)

        async def ask() -> Any:
            await self._connection.write_message(json.dumps({"id": number, "method": method, "params": params}))
            while message := await self._connection.read_message():
                answer = json.loads(message)
                if answer.get("id") == number:
                    return answer
            raise RuntimeError("the browser has ended")

        answer = self._loop.run_until_complete(asyncio.wait_for(ask(), 30))
        if "error" in answer:
            raise RuntimeError(answer["error"]["message"])
        return answer["result"]


@contextlib.contextmanager
def opened(browser: str, folder: Path) -> Iterator[Browser]:
    """Start a browser with its profile in a folder, and end it after the block."""
    command = [browser, "--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-extensions"]
    command += ["--remote-debugging-port=0", "--remote-allow-origins=*", f"--user-data-dir={folder}", "about:blank"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        port_file = folder / "DevToolsActivePort"
        until = time.monotonic() + 30
        while not port_file.exists() or not port_file.read_text().strip():
            if process.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"{browser} does not start: {process.poll()}")
            time.sleep(0.05)
        port = int(port_file.read_text().split()[0])
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/json/list", timeout=10) as answer:
            pages = json.load(answer)
        page = Browser(next(page["webSocketDebuggerUrl"] for page in pages if page["type"] == "page"))
        try:
            yield page
        finally:
            page.close()
    finally:
        process.terminate()
        process.wait(10)
