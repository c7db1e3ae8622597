"""The page at /: files of static/, as they are, with headers under which nothing but them runs in it.

Their links are relative, so that any prefix of a proxy works.
"""

from __future__ import annotations

from pathlib import Path

from service.http.context import Service
from service.http.files import File
from service.http.request import Request, header_lines

STATIC = Path(__file__).parent / "static"
INDEX = "index.html"
HEADERS = {
    # Trusted types: no script can put text into the page as markup.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",  # asks each time, with the ETag, so that all files are of one version
}


def page() -> dict[str, File]:
    """The files of the page by path: / and page/NAME."""
    files: dict[str, File] = {"/": Index((STATIC / INDEX).read_bytes(), ".html", HEADERS)}
    for file in sorted(STATIC.iterdir()):
        if file.name != INDEX:
            files[f"/page/{file.name}"] = File(file.read_bytes(), file.suffix, HEADERS)
    return files


class Index(File):
    def handler(self, service: Service, request: Request) -> None:
        if request.path.endswith("/"):
            super().handler(service, request)
        else:  # a proxy's prefix alone
            request.respond(b"", header_lines({"Location": request.path.rpartition("/")[2] + "/"}), 307)
