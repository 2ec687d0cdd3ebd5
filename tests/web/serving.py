# SPDX-License-Identifier: Apache-2.0
"""Serves a folder on 127.0.0.1, for the tests and for `make web`."""

from __future__ import annotations

import contextlib
import functools
import http.server
import pathlib
import sys
import threading
from collections.abc import Iterator


class Handler(http.server.SimpleHTTPRequestHandler):
    extensions_map = http.server.SimpleHTTPRequestHandler.extensions_map | {
        ".js": "text/javascript",
        ".md": "text/plain; charset=utf-8",  # some browsers save text/markdown
        ".wasm": "application/wasm",
        ".wgsl": "text/plain; charset=utf-8",
    }

    def end_headers(self) -> None:
        self.send_header("Cache-Control", "no-store")
        super().end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextlib.contextmanager
def serve(folder: pathlib.Path, port: int = 0) -> Iterator[str]:
    handler = functools.partial(Handler, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", port), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


if __name__ == "__main__":
    with serve(pathlib.Path(sys.argv[1]), int(sys.argv[2])) as address:
        print(f"{address}/   (Ctrl-C ends it)", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            threading.Event().wait()
