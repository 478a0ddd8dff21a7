"""Chromium without a window, told over a pipe what to open and asked what it made of it."""

import base64
import contextlib
import itertools
import json
import os
import select
import shutil
import subprocess

NAMES = ("chromium", "chromium-browser", "google-chrome")
SECONDS = 60
"""Longer than a browser is silent on a busy machine."""
CHUNK = 1 << 16


def find_browser():
    """Return a Chromium's path, or None."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    """A tab of a browser that speaks the DevTools protocol over a pipe, a zero byte after each message."""

    def __init__(self, reader, writer):
        self.reader, self.writer, self.buffer = reader, writer, b""
        self.numbers = itertools.count(1)
        self.requests, self.loaded = [], False
        target = self._ask("Target.createTarget", url="about:blank")["targetId"]
        self.session = self._ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Network", "Runtime"):
            self.ask(f"{domain}.enable")

    def ask(self, method, **params):
        return self._ask(method, self.session, **params)

    def open(self, url):
        """Load a page and forget what was asked for before."""
        self.requests, self.loaded = [], False
        self.ask("Page.navigate", url=url)
        while not self.loaded:
            self._receive()

    def value(self, expression):
        """Return what a JavaScript expression is on the page."""
        return self.ask("Runtime.evaluate", expression=expression, returnByValue=True)["result"].get("value")

    def screenshot(self):
        """Return a PNG of the whole page."""
        return base64.b64decode(self.ask("Page.captureScreenshot", captureBeyondViewport=True)["data"])

    def _ask(self, method, session=None, **params):
        number = next(self.numbers)
        message = {"id": number, "method": method, "params": params} | ({"sessionId": session} if session else {})
        os.write(self.writer, json.dumps(message).encode() + b"\0")
        while (answer := self._receive()).get("id") != number:
            pass
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        return answer["result"]

    def _receive(self):
        message = json.loads(self._message())
        if message.get("method") == "Network.requestWillBeSent":
            self.requests.append(message["params"]["request"]["url"])
        self.loaded |= message.get("method") == "Page.loadEventFired"
        return message

    def _message(self):
        while b"\0" not in self.buffer:
            if not select.select([self.reader], [], [], SECONDS)[0]:
                raise TimeoutError(f"the browser has said nothing for {SECONDS} s")
            data = os.read(self.reader, CHUNK)
            if not data:
                raise RuntimeError("the browser has ended")
            self.buffer += data
        message, _, self.buffer = self.buffer.partition(b"\0")
        return message


@contextlib.contextmanager
def browse(path, profile):
    """Start the browser at ``path`` with a profile folder of its own; it ends with the context."""
    commands, ours = os.pipe()
    answers, theirs = os.pipe()
    arguments = ["--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe", "--no-first-run"]
    # The browser wants its pipe at 3 and 4, whichever numbers were free here; bash, since sh may know one digit only.
    shell = ["bash", "-c", f'exec "$@" 3<&{commands} 4>&{theirs}', "bash"]
    process = subprocess.Popen(
        [*shell, path, *arguments, f"--user-data-dir={profile}"], pass_fds=(commands, theirs), stderr=subprocess.DEVNULL
    )
    os.close(commands)
    os.close(theirs)
    try:
        yield Browser(answers, ours)
    finally:
        process.terminate()
        process.wait(SECONDS)
        os.close(answers)
        os.close(ours)
