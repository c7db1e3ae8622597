"""Static files with an ETag, the page at /, and the documentation at /docs.

The page consists of files in static/, and the documentation of files of Swagger UI's package. Their headers let the
browser run only those. Their links are relative, so that any prefix of a proxy works.
"""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Mapping
from hashlib import sha256
from importlib import resources
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from fastapi.openapi.docs import get_swagger_ui_html

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


def documentation(document: dict[str, Any]) -> dict[str, File]:
    """Return the OpenAPI document and its page by path. Swagger UI comes with its package: the page works offline."""
    swagger = version("fastapi-swagger")
    page = get_swagger_ui_html(
        openapi_url="openapi.json",
        title=f"{document['info']['title']}: API",
        swagger_js_url=f"docs/assets/swagger-ui-bundle.js?{swagger}",
        swagger_css_url=f"docs/assets/swagger-ui.css?{swagger}",
        swagger_favicon_url=f"docs/assets/favicon-32x32.png?{swagger}",
        swagger_ui_parameters={"validatorUrl": None, "tryItOutEnabled": True, "displayRequestDuration": True},
    )
    body = bytes(page.body)
    inline = re.findall(rb"<script>(.*?)</script>", body, re.S)
    scripts = " ".join(f"'sha256-{b64encode(sha256(script).digest()).decode()}'" for script in inline)
    policy = {
        "Content-Security-Policy": f"default-src 'none'; script-src 'self' {scripts}; "
        "style-src 'self' 'unsafe-inline'; img-src 'self' data:; connect-src 'self'; base-uri 'none'; "
        "form-action 'none'; frame-ancestors 'none'",
        "X-Content-Type-Options": "nosniff",
    }
    fresh = {"Cache-Control": "no-cache"}  # the next start may have other settings
    files = {
        "/openapi.json": File(msgspec.json.encode(document), ".json", fresh),
        "/docs": File(body, ".html", fresh | policy),
    }
    # The page requests them by version.
    lasting = {"Cache-Control": "max-age=31536000, immutable", "X-Content-Type-Options": "nosniff"}
    for asset in resources.files("fastapi_swagger").joinpath("resources").iterdir():
        suffix = Path(asset.name).suffix
        if suffix in MEDIA_TYPES:
            files[f"/docs/assets/{asset.name}"] = File(asset.read_bytes(), suffix, lasting, "/docs/assets")
    return files
