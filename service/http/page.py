"""The page at /: files of static/, as they are, with headers under which nothing but them runs in it.

Their links are relative, so that any prefix of a proxy works.
"""

from __future__ import annotations

import re
from hashlib import sha256
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

STATIC = Path(__file__).parent / "static"
INDEX = "index.html"
MEDIA_TYPES = {
    ".css": "text/css", ".html": "text/html", ".js": "text/javascript", ".svg": "image/svg+xml",
}  # fmt: skip
HEADERS = {
    # Trusted types: no script can put text into the page as markup.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",  # asks each time, with the ETag, so that all files are of one version
}


def page() -> list[BaseRoute]:
    """The routes of the page, at / and page/NAME."""
    return [_route("/" if file.name == INDEX else f"/page/{file.name}", file) for file in sorted(STATIC.iterdir())]


def _route(path: str, file: Path) -> Route:
    content = file.read_bytes()
    etag = f'"{sha256(content).hexdigest()[:32]}"'
    headers = HEADERS | {"ETag": etag}

    async def answer(request: Request) -> Response:
        if path == "/" and not request.scope["path"].endswith("/"):  # a proxy's prefix alone
            return Response(status_code=307, headers={"Location": request.scope["path"].rpartition("/")[2] + "/"})
        known = request.headers.get("if-none-match", "")
        if known == "*" or etag in (tag.strip().removeprefix("W/") for tag in known.split(",")):
            return Response(status_code=304, headers=headers)
        return Response(content, headers=headers, media_type=MEDIA_TYPES[file.suffix])

    route = Route(path, answer)
    if path == "/":
        route.path_regex = re.compile("/?$")
    return route
