"""Static files with an ETag, and the page at /.

The page consists of files in static/. Its headers let the browser run only those. Its links are relative, so that any
prefix of a proxy works.
"""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

from service.http.routes.request import Request

if TYPE_CHECKING:
    from service.http.routes.service import Service

MEDIA_TYPES = {
    ".css": "text/css; charset=utf-8", ".html": "text/html; charset=utf-8", ".js": "text/javascript; charset=utf-8",
    ".json": "application/json", ".png": "image/png", ".svg": "image/svg+xml",
}  # fmt: skip
STATIC = Path(__file__).parent.parent / "static"
INDEX = "index.html"
PAGE_HEADERS = {
    # Trusted types: no script can put text into the page as markup.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",  # the browser asks each time, so that all files have one version
}


class File:
    """label: the path in metrics, if it differs from its own."""

    def __init__(self, content: bytes, suffix: str, headers: Mapping[str, str], label: str = ""):
        self.content, self.label = content, label
        self.etag = f'"{sha256(content).hexdigest()[:32]}"'
        self._headers = {**headers, "ETag": self.etag}
        self._type = {"Content-Type": MEDIA_TYPES[suffix]}

    async def handler(self, service: Service, request: Request) -> None:
        known = (request.fields.get(b"if-none-match") or b"").decode("latin-1")
        if known == "*" or self.etag in (tag.strip().removeprefix("W/") for tag in known.split(",")):
            await request.respond(b"", self._headers, 304)
        else:
            await request.respond(self.content, self._type | self._headers)


class Index(File):
    async def handler(self, service: Service, request: Request) -> None:
        if request.path.endswith("/"):
            await super().handler(service, request)
        else:  # only the prefix of a proxy
            await request.respond(b"", {"Location": request.path.rpartition("/")[2] + "/"}, 307)


def page() -> dict[str, File]:
    """Return the files of the page by path: / and page/NAME."""
    files: dict[str, File] = {"/": Index((STATIC / INDEX).read_bytes(), ".html", PAGE_HEADERS)}
    for file in sorted(STATIC.iterdir()):
        if file.name != INDEX:
            files[f"/page/{file.name}"] = File(file.read_bytes(), file.suffix, PAGE_HEADERS)
    return files
