"""Find the files of `--data`, and read them as text: plain or gzip, with any line breaks.

A file with a byte-order mark is read as the mark says: UTF-8, UTF-16 or UTF-32. Any other file is UTF-8.
"""

from __future__ import annotations

import codecs
import gzip
import hashlib
import io
import itertools
import os
import shlex
import urllib.request
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from training.messages import Refusal, plural

CHUNK_BYTES = 1 << 22
UTF8 = "utf-8-sig"  # leaves out a byte-order mark
MARKS = {  # the other byte-order marks; UTF-32's LE mark begins with UTF-16's
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}
HEAD_BYTES = 1 << 13  # bytes read to recognize a binary file
PACKED = {b"\xfd7zXZ\0": "xz -dk", b"BZh": "bunzip2 -k", b"PK\3\4": "unzip", b"\x28\xb5\x2f\xfd": "zstd -d"}
MAX_LISTED = 5  # binary files named in a message
TINYSHAKESPEARE = "tinyshakespeare"
TINYSHAKESPEARE_URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
TINYSHAKESPEARE_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"


class DataError(Refusal):
    """A text that cannot be found, read or trained on; the message says why and what to do."""


class NotTextError(DataError):
    """A file that is not text in its encoding. The message names the first byte that is wrong."""


def cache_dir() -> Path:
    """Return the folder of downloads and encoded corpora: $XDG_CACHE_HOME/chargpt, or ~/.cache/chargpt."""
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base) / "chargpt"
    try:
        return Path.home() / ".cache" / "chargpt"
    except RuntimeError:
        raise DataError(
            "there is no home folder to keep encoded texts in: set HOME or XDG_CACHE_HOME to a folder you can write"
        ) from None


def find_texts(
    data: Sequence[str], glob: Sequence[str] = (), exclude: Sequence[str] = (), notes: set[str] | None = None
) -> list[Path]:
    """Return the files of `--data`. A folder stands for all text files below it, sorted, except hidden ones.

    glob: patterns such as *.py or docs/*.md. A file below a folder must match one of them; a path is matched from the
    right. exclude: patterns that a file below a folder must not match.
    Binary files below a folder are skipped. A file with several names, such as a link or a folder given twice, is
    read once, under the first. `notes` counts both, and names the patterns of `exclude` that match nothing.

    Raises:
        DataError: a folder has no such files, or `find_text` raises it.
    """
    notes = set() if notes is None else notes
    files, unused, folders = list[Path](), [*exclude], [name for name in data if Path(name).is_dir()]
    for name in data:
        if name in folders:
            seen = _files_below(name)
            files += _texts_among(seen, name, glob, exclude, notes)
            unused = [pattern for pattern in unused if not any(path.match(pattern) for path in seen)]
        else:
            files.append(find_text(name))
    if unused:
        where = f"no file in {', '.join(folders)}" if folders else "nothing: --data names no folder"
        notes.add(f"--exclude {shlex.join(unused)} matches {where}")
    once, again = dict[tuple[int, int], Path](), list[Path]()
    for file in files:
        about = file.stat()
        if once.setdefault((about.st_dev, about.st_ino), file) is not file:
            again.append(file)
    if again:
        notes.add(f"read once, under its first name: {_listed(again, 'file')}")
    return [*once.values()]


def _files_below(folder: str) -> list[Path]:
    """Return the relative paths of all files that are not hidden, sorted."""
    below = sorted(path.relative_to(folder) for path in Path(folder).rglob("*") if path.is_file())
    return [path for path in below if not any(part.startswith(".") for part in path.parts)]


def _texts_among(
    seen: list[Path], folder: str, glob: Sequence[str], exclude: Sequence[str], notes: set[str]
) -> list[Path]:
    """Return the text files among those seen in a folder, as `find_texts` chooses them."""
    if not seen:
        raise DataError(f"the folder {folder} has no files")
    matching = [path for path in seen if not glob or any(path.match(pattern) for pattern in glob)]
    if not matching:
        raise DataError(f"none of the {plural(len(seen), 'file')} in {folder} matches --glob {' '.join(glob)}")
    chosen = [path for path in matching if not any(path.match(pattern) for pattern in exclude)]
    if not chosen:
        raise DataError(f"--exclude {' '.join(exclude)} leaves none of {plural(len(matching), 'file')} in {folder}")
    binary = [path for path in chosen if _is_binary(Path(folder) / path)]
    if len(binary) == len(chosen):
        raise DataError(f"the folder {folder} has no text files: skipped {_listed(binary)}")
    if binary:
        notes.add(f"{folder}: skipped {_listed(binary)}")
    return [Path(folder) / path for path in chosen if path not in set(binary)]


def _listed(paths: list[Path], noun: str = "binary file") -> str:
    """Return the number of paths and the names of the first MAX_LISTED."""
    more = f" and {len(paths) - MAX_LISTED:,} more" if len(paths) > MAX_LISTED else ""
    return f"{plural(len(paths), noun)}: {', '.join(str(path) for path in paths[:MAX_LISTED])}{more}"


def _is_binary(file: Path) -> bool:
    """Return whether a file's first bytes include a NUL, or are neither UTF-8 nor printable Latin-1.

    A file with a byte-order mark is text.
    """
    head = next(_read_bytes(file, HEAD_BYTES), b"")
    encoding = _encoding(head)
    if b"\0" in head and encoding == UTF8:
        return True
    try:
        codecs.getincrementaldecoder(encoding)().decode(head)  # may end within a character
    except UnicodeDecodeError:
        return encoding != UTF8 or any(byte < 32 and byte not in b"\t\n\f\r\x1b" for byte in head)
    return False


def _encoding(head: bytes) -> str:
    return next((encoding for mark, encoding in MARKS.items() if head.startswith(mark)), UTF8)


def find_text(data: str) -> Path:
    """Return the file at path `data`. tinyshakespeare is read from $CHARGPT_DATA_DIR or downloaded once.

    Raises:
        DataError: the file does not exist, the download failed, or tinyshakespeare has the wrong SHA-256.
    """
    if Path(data).is_file():
        return Path(data)
    if data != TINYSHAKESPEARE:
        refusal = f"{data} is not a regular file or folder" if Path(data).exists() else f"no file or folder {data}"
        raise DataError(
            f"{refusal}; --data takes UTF-8 files, plain or gzip, folders of them, or the name {TINYSHAKESPEARE}"
        )
    name = f"{TINYSHAKESPEARE}.txt"
    folder = os.environ.get("CHARGPT_DATA_DIR")
    if folder and (Path(folder) / name).is_file():
        file = Path(folder) / name
    else:
        file = cache_dir() / name
        if not file.is_file():
            _download(TINYSHAKESPEARE_URL, file)
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    if digest != TINYSHAKESPEARE_SHA256:
        raise DataError(
            f"{file} is not {TINYSHAKESPEARE}: SHA-256 {digest}, expected {TINYSHAKESPEARE_SHA256}; delete the file"
        )
    return file


def _download(url: str, file: Path) -> None:
    part = file.with_name(f"{file.name}.{os.getpid()}.part")
    try:
        with urllib.request.urlopen(url, timeout=30) as response:
            content = response.read()
    except OSError as error:
        reason = getattr(error, "reason", None) or error
        raise DataError(
            f"cannot download {url} ({reason}); pass a text of your own with --data FILE, or save the file as {file}"
        ) from None
    file.parent.mkdir(parents=True, exist_ok=True)
    part.write_bytes(content)
    part.replace(file)


def read_text(files: Sequence[Path], notes: set[str] | None = None, errors: str = "strict") -> Iterator[str]:
    """Yield the concatenated files in chunks, as if each had been written on Linux.

    Line breaks of Windows and of old Macs are read as \\n, a file's byte-order mark is left out, and UTF-16 and UTF-32
    are decoded. `notes` gets a sentence about each of these. A line break is inserted between two files if it is
    missing. `errors`: the argument of bytes.decode.

    Raises:
        DataError: a file cannot be read or is not UTF-8, or a file named .gz is not gzip. For bytes that are not UTF-8
            the message gives the offset, and the other such files.
    """
    notes = set() if notes is None else notes
    for number, file in enumerate(files):
        last = "\n"
        try:
            for text in _decoded(file, notes, errors):
                last = text[-1]
                yield text
        except NotTextError as error:
            leave_out = f", or leave it out with --exclude {shlex.quote(file.name)}" if len(files) > 1 else ""
            others = [str(other) for other in files[number + 1 :] if not _is_decodable(other)]
            likewise = f"; {plural(len(others), 'other file')} likewise: {', '.join(others)}" if others else ""
            raise DataError(f"{error}{leave_out}{likewise}") from None
        if file is not files[-1] and last != "\n":
            yield "\n"


def _decoded(file: Path, notes: set[str], errors: str) -> Iterator[str]:
    """Yield a file's text in chunks that are not empty, as `read_text` reads it. Raises NotTextError."""
    chunks = itertools.chain(_read_bytes(file), [b""])
    head = next(chunks)
    encoding = _encoding(head)
    if encoding == UTF8 and (offset := head.find(b"\0", 0, HEAD_BYTES)) >= 0:
        raise _not_text(file, head, 0, offset, "NUL")
    decoder = io.IncrementalNewlineDecoder(codecs.getincrementaldecoder(encoding)(errors), translate=True)
    end = 0  # of the chunk
    for chunk in itertools.chain([head], chunks):
        end += len(chunk)
        try:
            text = decoder.decode(chunk, final=not chunk)
        except UnicodeDecodeError as error:  # its object ends with the chunk, and begins with what an earlier one cut
            offset = end - len(error.object) + error.start
            raise _not_text(file, head, error.object[error.start], offset, error.reason) from None
        if text:
            yield text
    if encoding != UTF8:
        notes.add(f"{file.name}: {encoding.upper()} read as text")
    elif head.startswith(codecs.BOM_UTF8):
        notes.add(f"{file.name}: byte-order mark left out")
    if set(decoder.newlines or ()) - {"\n"}:
        notes.add(f"{file.name}: line breaks of Windows or an old Mac read as \\n")


def _not_text(file: Path, head: bytes, byte: int, offset: int, reason: str) -> NotTextError:
    """Return an error that says what to do about a file that is not in its encoding. head: its first bytes."""
    path, encoding = shlex.quote(str(file)), _encoding(head)
    command = "iconv -f ENCODING -t UTF-8"
    command = f"zcat {path} | {command}" if file.suffix == ".gz" else f"{command} {path}"
    if head.startswith(b"\x1f\x8b"):
        hint = "it is compressed by gzip: its name must end with .gz"
    elif packed := next((name for magic, name in PACKED.items() if head.startswith(magic)), None):
        hint = f"it is packed: unpack it first, with {packed} {path}"
    elif encoding != UTF8:
        hint = "it may be cut off"
    elif byte == 0:
        hint = f"it is a binary file, or UTF-16 without a byte-order mark: convert it with {command} > converted.txt"
    elif _is_binary(file):
        hint = "it is a binary file; of a folder, binary files are skipped"
    else:
        hint = f"convert it first, with {command} > converted.txt"
    name = encoding.removesuffix("-sig").upper()
    return NotTextError(f"{file} is not {name}: byte 0x{byte:02X} at offset {offset} ({reason}); {hint}")


def _is_decodable(file: Path) -> bool:
    try:
        return all(True for _ in read_text([file]))  # reads the file to its end
    except DataError:
        return False


def _read_bytes(file: Path, size: int = 0) -> Iterator[bytes]:
    try:
        with gzip.open(file) if file.suffix == ".gz" else open(file, "rb") as binary:
            while chunk := binary.read(size or CHUNK_BYTES):
                yield chunk
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DataError(f"{file} is not a complete gzip file: {error}") from None
    except OSError as error:
        raise DataError(f"{file} cannot be read: {error.strerror or error}") from None


def split_lines(texts: Iterable[str]) -> Iterator[str]:
    """Yield the lines of a text, with their line breaks."""
    rest = ""
    for text in texts:
        *lines, rest = (rest + text).split("\n")
        yield from (f"{line}\n" for line in lines)
    if rest:
        yield rest


def read_lines(file: Path) -> Iterator[str]:
    """Yield the lines of a text, without their line breaks. Bytes that are not UTF-8 become lone surrogates.

    Raises:
        DataError: the file cannot be read.
    """
    for line in split_lines(read_text([file], errors="surrogateescape")):
        yield line.removesuffix("\n")
