"""A real browser without a window, driven by its own protocol through two pipes: nothing to install but Chromium."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
FLAGS += ["--disable-component-update", "--disable-sync", "--disable-dev-shm-usage", "--remote-debugging-pipe"]


def find() -> str | None:
    found = (shutil.which(program) for program in PROGRAMS)
    return next(filter(None, found), None) if hasattr(os, "fork") else None


class Browser:
    """One page. `errors` holds what it complained about since it was opened."""

    def __init__(self, program: str):
        self.folder = tempfile.mkdtemp()
        its_in, self.out = os.pipe()
        self.in_, its_out = os.pipe()

        def wire() -> None:  # the browser reads from 3 and writes to 4
            os.dup2(its_in, 103)
            os.dup2(its_out, 104)
            os.dup2(103, 3)
            os.dup2(104, 4)

        command = [program, *FLAGS, f"--user-data-dir={self.folder}", "about:blank"]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self.process = subprocess.Popen(command, preexec_fn=wire, close_fds=False, **quiet)
        os.close(its_in)
        os.close(its_out)
        self.number, self.left, self.errors, self.session = 0, b"", [], None
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Runtime", "Log", "Page"):
            self.ask(f"{domain}.enable")

    def ask(self, method: str, **params: Any) -> dict[str, Any]:
        """One command and its answer; complaints that come in between are kept."""
        self.number += 1
        message = {"id": self.number, "method": method, "params": params}
        message |= {"sessionId": self.session} if self.session else {}
        os.write(self.out, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + 60
        while True:
            while b"\0" not in self.left:
                if not select.select([self.in_], [], [], max(0.0, deadline - time.monotonic()))[0]:
                    raise TimeoutError(f"the browser did not answer {method}")
                some = os.read(self.in_, 1 << 20)
                assert some, f"the browser ended at {method}"
                self.left += some
            text, _, self.left = self.left.partition(b"\0")
            found = json.loads(text)
            kind = found.get("method", "")
            if kind == "Runtime.exceptionThrown" or (
                kind == "Log.entryAdded" and found["params"]["entry"]["level"] in ("error", "warning")
            ) or (kind == "Runtime.consoleAPICalled" and found["params"]["type"] in ("error", "warning")):  # fmt: skip
                self.errors.append(found["params"])
            if found.get("id") == self.number:
                assert "error" not in found, (method, found["error"])
                return found["result"]

    def run(self, script: str) -> Any:
        """The value of an expression in the page."""
        found = self.ask("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def open(self, path: Path, link: str = "") -> None:
        self.errors.clear()
        self.ask("Page.navigate", url="about:blank")
        self.ask("Page.navigate", url=path.resolve().as_uri() + link)
        deadline = time.monotonic() + 60
        while self.run("document.body && document.body.dataset.ready") != "yes":
            assert not self.errors, self.errors
            assert time.monotonic() < deadline, "the page does not come up"
            time.sleep(0.02)

    def press(self, key: str) -> None:
        text = {"text": key} if len(key) == 1 else {}
        codes = {"ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40, "PageDown": 34, "End": 35}
        for kind in ("keyDown", "keyUp"):
            code = codes.get(key, ord(key[0]))
            self.ask("Input.dispatchKeyEvent", type=kind, key=key, windowsVirtualKeyCode=code, **text)

    def texts(self, selector: str) -> list[str]:
        return self.run(f"[...document.querySelectorAll({json.dumps(selector)})].map((x) => x.textContent)")

    def picture(self, path: Path, width: int, height: int, media: str = "", scale: float = 1.0) -> None:
        """The first `height` pixels of the page as PNG."""
        size = {"width": width, "height": height, "deviceScaleFactor": scale, "mobile": False}
        self.ask("Emulation.setDeviceMetricsOverride", **size)
        self.ask("Emulation.setEmulatedMedia", media=media)
        time.sleep(0.5)
        path.write_bytes(base64.b64decode(self.ask("Page.captureScreenshot")["data"]))

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(20)
        os.close(self.in_)
        os.close(self.out)
        shutil.rmtree(self.folder, ignore_errors=True)
