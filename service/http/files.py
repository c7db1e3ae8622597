"""Files that are answered as they are, with an ETag."""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import sha256
from typing import TYPE_CHECKING

from service.http.request import Request, header_lines

if TYPE_CHECKING:
    from service.http.context import Service

MEDIA_TYPES = {
    ".css": "text/css; charset=utf-8", ".html": "text/html; charset=utf-8", ".js": "text/javascript; charset=utf-8",
    ".json": "application/json", ".png": "image/png", ".svg": "image/svg+xml",
}  # fmt: skip


class File:
    """label: the path by which metrics name it, if not its own."""

    reads_body = runs_model = is_refused_early = False
    request = None

    def __init__(self, content: bytes, suffix: str, headers: Mapping[str, str], label: str = ""):
        self.content, self.label = content, label
        self.etag = f'"{sha256(content).hexdigest()[:32]}"'
        self._headers = header_lines({**headers, "ETag": self.etag})
        self._type = header_lines({"Content-Type": MEDIA_TYPES[suffix]})

    def handler(self, service: Service, request: Request) -> None:
        known = (request.fields.get(b"if-none-match") or b"").decode("latin-1")
        if known == "*" or self.etag in (tag.strip().removeprefix("W/") for tag in known.split(",")):
            request.respond(b"", self._headers, 304)
        else:
            request.respond(self.content, self._type + self._headers)
