"""A small HTTP server that serves a dict of files, with ranges, and misbehaves on request."""

import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class FaultyServer:
    """`faults` is consumed a GET at a time, and may be endless; once it is empty all goes well. `requests` records."""

    def __init__(self, files: dict[str, bytes], faults=(), delay: float = 0.0):
        self.files, self.faults, self.delay = files, iter(faults), delay
        self.requests: list[tuple[str, str | None]] = []  # (path, Range)
        self.http = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.http.daemon_threads = True
        self.http.handle_error = lambda *request: None  # clients hang up, or are killed
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}"

    def __enter__(self) -> "FaultyServer":
        threading.Thread(target=self.http.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *exception) -> None:
        self.http.shutdown()
        self.http.server_close()

    def _handler(server) -> type[BaseHTTPRequestHandler]:
        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *args) -> None:
                pass

            def do_HEAD(self) -> None:
                self.send_response(200 if self.path in server.files else 404)
                self.end_headers()

            def do_GET(self) -> None:
                server.requests.append((self.path, self.headers.get("Range")))
                fault = next(server.faults, None)
                if fault:
                    return fault(self, server.files.get(self.path, b""))
                if self.path not in server.files:
                    return status(404)(self, b"")
                respond(self, server.files[self.path], delay=server.delay)

        return Handler


def respond(handler, body: bytes, *, ranges=True, announce=None, send=None, stall=0.0, delay=0.0) -> None:
    """200 or 206; `announce` overrides Content-Length, `send` is how many bytes really go out."""
    asked = handler.headers.get("Range") if ranges else None
    start = int(asked.removeprefix("bytes=").removesuffix("-")) if asked else 0
    if asked and start >= len(body):
        return status(416)(handler, body)
    handler.send_response(206 if asked else 200)
    if asked:
        handler.send_header("Content-Range", f"bytes {start}-{len(body) - 1}/{len(body)}")
    # what a hostile server would like the file to be called
    handler.send_header("Content-Disposition", 'attachment; filename="../../../escaped.parquet"')
    part = body[start:]
    handler.send_header("Content-Length", str(len(part) if announce is None else announce))
    handler.end_headers()
    part = part[:send]
    for i in range(0, len(part), 2**15):
        handler.wfile.write(part[i : i + 2**15])
        time.sleep(delay)
    handler.wfile.flush()
    time.sleep(stall)


Fault = Callable[[BaseHTTPRequestHandler, bytes], None]


def status(code: int, **headers: str) -> Fault:
    def fault(handler, body: bytes) -> None:
        handler.send_response(code)
        for name, value in headers.items():
            handler.send_header(name.replace("_", "-"), value)
        handler.send_header("Content-Length", "0")
        handler.end_headers()

    return fault


def truncate(handler, body: bytes) -> None:
    respond(handler, body, send=len(body) // 3)


def nothing(handler, body: bytes) -> None:
    respond(handler, body, send=0)


def stall(handler, body: bytes) -> None:
    respond(handler, body, send=len(body) // 3, stall=1.0)


def silence(handler, body: bytes) -> None:
    time.sleep(1.0)


def announce_less(handler, body: bytes) -> None:
    respond(handler, body, ranges=False, announce=len(body) // 2, send=len(body) // 2)


def announce_more(handler, body: bytes) -> None:
    respond(handler, body, ranges=False, announce=2 * len(body))


def corrupt(handler, body: bytes) -> None:
    respond(handler, body[:-8] + b"no  PAR1", ranges=False)


def error_page(handler, body: bytes) -> None:
    respond(handler, b"<html>all is well</html>", ranges=False)


def no_ranges(handler, body: bytes) -> None:
    respond(handler, body, ranges=False, send=len(body) // 2)


def wrong_range(handler, body: bytes) -> None:
    handler.send_response(206)
    handler.send_header("Content-Range", f"bytes 7-{len(body) - 1}/{len(body)}")
    handler.send_header("Content-Length", str(len(body) - 7))
    handler.end_headers()
    handler.wfile.write(body[7:])
