"""A headless Chromium that a test controls as a person would: it types, clicks and reads."""

from __future__ import annotations

import base64
import contextlib
import json
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
from websockets.sync.client import ClientConnection, connect

from scorekit.processes import end_with_parent
from testing.servers import PATIENCE_S, wait_until
from tests.kits.browser import BROWSER

#: Keys that a test presses: name -> what the protocol calls it.
_KEYS = {"Tab": 9, "Enter": 13, "Escape": 27}


#: Replaces a page's fetch: `gate(url, n)` stands before its nth request but those to /v1/info and
#: /page/rows, and may wait, or throw as a network that is gone. `answered`: of how many something
#: came.
GATE = """(() => { const real = globalThis.fetch; let n = 0; globalThis.gate = () => {};
globalThis.fetch = async (url, request) => { if (!/info$|rows$/.test(url)) await gate(url, ++n);
try { return await real(url, request); }
finally { globalThis.answered = (globalThis.answered ?? 0) + 1; } }; })()"""


class Tab:
    """A tab of a browser, over the DevTools protocol.

    errors: exceptions of its scripts, and violations of its security policy.
    """

    def __init__(self, socket: ClientConnection) -> None:
        self._socket = socket
        self._last_id = 0
        self.errors: list[str] = []
        for domain in ("Page", "Runtime", "Log"):
            self.ask(f"{domain}.enable")
        self.ask("Emulation.setFocusEmulationEnabled", enabled=True)  # one of many tabs

    def ask(self, method: str, **params: Any) -> dict[str, Any]:
        """Return a command's result."""
        self._last_id += 1
        self._socket.send(json.dumps({"id": self._last_id, "method": method, "params": params}))
        while True:
            message = json.loads(self._socket.recv(PATIENCE_S))
            if message.get("id") == self._last_id:
                assert "error" not in message, message
                return message["result"]
            self._note(message)

    def _note(self, message: dict[str, Any]) -> None:
        if message["method"] == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(message["params"]["exceptionDetails"]))
        elif message["method"] == "Log.entryAdded":
            entry = message["params"]["entry"]
            if entry["source"] != "network":  # a refused request is one of the page's stories
                self.errors.append(entry["text"])

    def js(self, expression: str) -> Any:
        """Return the value of an expression. A promise is awaited."""
        reply = self.ask(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in reply, reply["exceptionDetails"]
        return reply["result"].get("value")

    def wait(self, expression: str) -> None:
        """Return when an expression is true."""
        deadline = time.monotonic() + PATIENCE_S
        while not self.js(f"Boolean({expression})"):
            assert time.monotonic() < deadline, (
                f"{expression}; {self.js('document.body.innerText')}"
            )
            time.sleep(0.02)

    def open(self, url: str, width: int = 1000, height: int = 900) -> Tab:
        """Show a page in a window of that size."""
        self.ask(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        self.ask("Page.navigate", url=url)
        self.wait(f"document.readyState === 'complete' && location.href.startsWith({url!r})")
        return self

    def fill(self, selector: str, value: str) -> None:
        """Put a text into a control, as if it were typed or pasted."""
        self.js(
            f"(() => {{ const one = document.querySelector({json.dumps(selector)});"
            f"one.value = {json.dumps(value)};"
            "for (const e of ['input', 'change']) one.dispatchEvent(new Event(e)); })()"
        )

    def click(self, selector: str, text: str = "") -> None:
        """Click the first element that matches a selector and contains the text."""
        is_clicked = self.js(
            f"(() => {{ const one = [...document.querySelectorAll({json.dumps(selector)})]"
            f".find((e) => e.textContent.includes({json.dumps(text)}));"
            "one?.click(); return Boolean(one); })()"
        )
        assert is_clicked, f"no {selector} with {text!r}"

    def press(self, key: str) -> None:
        """Press a key."""
        key_event = {"key": key, "code": key, "windowsVirtualKeyCode": _KEYS[key]}
        text = {"text": "\r"} if key == "Enter" else {}
        self.ask("Input.dispatchKeyEvent", type="keyDown", **key_event, **text)
        self.ask("Input.dispatchKeyEvent", type="keyUp", **key_event)

    def drag(self, *points: tuple[float, float]) -> None:
        """Press the mouse at the first point, move it over the others, release it at the last."""
        for k, (x, y) in enumerate(points):
            kind = "mouseMoved" if k else "mousePressed"
            self.ask("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)
        x, y = points[-1]
        self.ask(
            "Input.dispatchMouseEvent", type="mouseReleased", x=x, y=y, button="left", clickCount=1
        )

    def screenshot(self, path: Path, full_page: bool = False) -> None:
        """Write what is seen, or the whole page, as PNG."""
        reply = self.ask("Page.captureScreenshot", captureBeyondViewport=full_page)
        path.write_bytes(base64.b64decode(reply["data"]))


@contextlib.contextmanager
def running_browser(folder: Path) -> Iterator[str]:
    """Start a browser with a profile in `folder`; yield the address of its DevTools."""
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    flags += ["--remote-debugging-port=0", f"--user-data-dir={folder}", "about:blank"]
    port_file = folder / "DevToolsActivePort"
    process = subprocess.Popen(
        [str(BROWSER), *flags],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        preexec_fn=end_with_parent(),
    )
    try:
        wait_until(
            lambda: process.poll() is not None or (port_file.exists() and port_file.read_text())
        )
        assert process.poll() is None, "the browser has ended"
        yield f"http://127.0.0.1:{port_file.read_text().splitlines()[0]}"
    finally:
        process.terminate()
        process.wait(PATIENCE_S)


@contextlib.contextmanager
def new_tab(browser: str) -> Iterator[Tab]:
    """Open an empty tab of a running browser."""
    tab_info = httpx.put(f"{browser}/json/new?about:blank").json()
    with connect(tab_info["webSocketDebuggerUrl"], max_size=2**26, proxy=None) as socket:
        yield Tab(socket)
    httpx.get(f"{browser}/json/close/{tab_info['id']}")
