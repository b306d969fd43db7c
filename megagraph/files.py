"""Files of ours: whole or not there, known again by a checksum; and what is not ours is never touched.

A checksum (XXH3, 128 bits) finds damage, not malice: whoever can write a file can write its checksum, too.
"""

from __future__ import annotations

import difflib
import json
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, BinaryIO, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import xxhash
from typeguard import TypeCheckError, check_type

from megagraph.flags import short

T = TypeVar("T")

CHUNK_BYTES = 1 << 16  # read at once: more would stay in memory and grow with a file, as a leak does


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A new file, which takes the place of ``path`` in one move once it is complete and on disk.

    It is written beside it, as NAME.partial, and never through a link.

    Raises:
        FileExistsError: at ``path`` is something else, such as a folder or a device.
        FileNotFoundError: its folder is not there.
    """
    if os.path.lexists(path) and not (path.is_file() or path.is_symlink()):
        raise FileExistsError(f"expected a file, or nothing, at {path} to write it, got something else; name another")
    check_folder(path)
    partial = path.parent / f"{path.name}.partial"
    with suppress(FileNotFoundError):
        partial.unlink()  # of a process that was killed
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0)
    try:
        with open(partial, "w+b", opener=lambda name, _: os.open(name, flags, 0o666)) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        with suppress(FileNotFoundError):
            partial.unlink()
        raise
    sync_folder(path.parent)


def check_folder(path: Path) -> None:
    """Raise FileNotFoundError where there is no folder to write ``path`` in."""
    if not path.parent.is_dir():
        raise FileNotFoundError(
            f"expected a folder to write {path} in, got {path.parent}, which is none; make it before"
        )


def write(path: Path, content: bytes | str) -> None:
    """Replace a file in one move."""
    with replacing(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


def sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on disk, where the system can be asked to."""
    with suppress(OSError):  # Windows opens no folders, some file systems sync none
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def checksum(file: Path | BinaryIO) -> str:
    """XXH3 of a file's contents, as 32 hexadecimal digits."""
    if isinstance(file, Path):
        with file.open("rb") as opened:
            return checksum(opened)
    digest = xxhash.xxh3_128()
    while chunk := file.read(CHUNK_BYTES):
        digest.update(chunk)
    return digest.hexdigest()


def write_json(path: Path, values: dict[str, Any]) -> None:
    """Write an object with the checksum of its values; paths become strings."""
    write(path, json.dumps(add_checksum(values), indent=2) + "\n")


def read_json(path: Path, what: str, *, by_hand: bool = False) -> dict[str, Any]:
    """The values that ``write_json`` wrote.

    Args:
        what: names the file in errors, as in "the configuration of a run".
        by_hand: people may write this file, too, without a checksum.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is not as it was written.
    """
    values = parse_json(path, what)
    if not isinstance(values, dict):
        raise ValueError(f"expected {what}, a JSON object, got {type(values).__name__} in {path}")
    check_values(values, f"{what} as it was written, got {path}", by_hand=by_hand)
    return values


def meant(path: Path) -> str:
    """What an error adds of a path where nothing is: a name beside it that may have been meant, or nothing."""
    if path.exists():
        return ""
    try:
        names = {name.lower(): name for name in os.listdir(path.parent)}
    except OSError:
        return f" (there is no folder {path.parent})"
    close = difflib.get_close_matches(path.name.lower(), names, n=1, cutoff=0.75)
    return f" (did you mean {path.parent / names[close[0]]}?)" if close else ""


def check_readable(path: Path, what: str, again: str) -> None:
    """Raise FileNotFoundError or ValueError, with what to do, where ``path`` is no file."""
    if not os.path.lexists(path):
        raise FileNotFoundError(f"expected {what}, got {path}, which does not exist{meant(path)}; {again}")
    if not path.is_file():  # to read a pipe is to wait for who writes it
        raise ValueError(f"expected {what}, got {path}, which is no file; {again}")


def read_text(path: Path, what: str) -> str:
    """What a text file holds; FileNotFoundError or ValueError where it is none."""
    check_readable(path, what, "name another")
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"expected {what}, got {path}, which is no text in UTF-8 ({error}); name another") from error


def parse_json(path: Path, what: str, again: str = "write it again") -> Any:
    """What a JSON file holds; FileNotFoundError or ValueError where it is none, with what to do."""
    check_readable(path, what, again)
    try:
        return json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"expected {what}, got {path}, which is not a whole JSON file ({error}); {again}") from error


def add_checksum(values: dict[str, Any]) -> dict[str, Any]:
    """An object with the checksum of its values; paths become strings."""
    values = json.loads(json.dumps(values, default=str))
    return values | {"checksum": _of_values(values)}


def check_values(values: dict[str, Any], what: str, *, by_hand: bool = False) -> None:
    """Take the checksum out of an object; ValueError, which names ``what``, unless it is that of the values."""
    expected = values.pop("checksum", None)
    if expected != _of_values(values) and not (by_hand and expected is None):
        changed = '; where it was changed by hand, delete its line "checksum"' if by_hand else ""
        raise ValueError(f"expected {what}, which has changed since or is damaged{changed}")


def typed(kind: type[T], values: Any, what: str) -> T:
    """The dataclass ``kind`` made of the values of a JSON object; lists become tuples, and strings paths, where it has
    these.

    Raises:
        ValueError: it is no object, a field is unknown, missing or of another type, or the dataclass refuses it; names
            ``what``.
    """
    hints = get_type_hints(kind)
    if not isinstance(values, dict) or not values.keys() <= hints.keys():
        raise ValueError(f"a file of ours must hold {what} with the fields {sorted(hints)}, got {short(values)}")
    fields = {name: _as_hinted(hints[name], value) for name, value in values.items()}
    made = error = None
    try:
        made = kind(**fields)
    except (WrongType, TypeError, AttributeError, OverflowError) as caught:  # its checks of values may not expect it
        error = caught
    for name, value in fields.items():
        of_type(hints[name], value, what, name)
    if made is None:
        raise ValueError(f"expected {what}, got one that is not whole: {error}") from error
    return made


def of_type(hint: Any, value: Any, what: str, name: str) -> Any:
    """A value of a JSON object, a path or tuple where these are hinted; ValueError if it is of another type."""
    value = _as_hinted(hint, value)
    if _is_odd_bool(hint, value):
        raise ValueError(f"expected {what} whose {name} is right, got {value!r}: it is {_none_of(hint)}")
    try:
        check_type(value, hint)
    except TypeCheckError as wrong:
        why = f"it is {_none_of(hint)}" if _is_union(hint) else wrong
        raise ValueError(f"expected {what} whose {name} is right, got {value!r}: {why}") from wrong
    return value


class WrongType(ValueError):
    """A field of a dataclass is not of the type that it has there."""


def check_fields(made: Any) -> None:
    """Raise WrongType where a field of a dataclass is of another type than its hint, or none of the words that it has.

    Before, where the hint has these, NumPy's scalars become Python's, lists tuples, strings paths, and paths strings.
    """
    for name, hint in get_type_hints(type(made)).items():
        given = getattr(made, name)
        if type(given) is hint:
            continue
        value = _as_hinted(hint, _of_python(given))
        try:
            check_type(value, hint)
        except TypeCheckError as wrong:
            raise WrongType(f"{name} must be {_some_of(hint)}, got {short(given)}") from wrong
        if _is_odd_bool(hint, value):
            raise WrongType(f"{name} must be {_some_of(hint)}, got {short(given)}")
        if value is not given:
            object.__setattr__(made, name, value)  # it may be frozen


def _of_python(value: Any) -> Any:
    numpy = sys.modules.get("numpy")  # who has not imported it has none of its scalars
    return value.item() if numpy is not None and isinstance(value, numpy.generic) else value


def _is_odd_bool(hint: Any, value: Any) -> bool:
    """Python's bool is an int, and would pass as one."""
    return isinstance(value, bool) and bool not in (hint, *get_args(hint))


def _some_of(hint: Any) -> str:
    """The words, or the types, of a hint."""
    if get_origin(hint) is Literal:
        return " or ".join(map(str, get_args(hint)))
    return " or ".join(_kinds(hint, "None"))


def _is_union(hint: Any) -> bool:
    return get_origin(hint) in (Union, UnionType)


def _none_of(hint: Any) -> str:
    """That a value has none of these types, in words."""
    words = _kinds(hint, "nothing")
    return f"no {words[0]}" if len(words) == 1 else f"neither {' nor '.join(words)}"


def _kinds(hint: Any, none: str) -> list[str]:
    kinds = get_args(hint) if _is_union(hint) else (hint,)
    return [none if kind is NoneType else str(kind) if get_args(kind) else kind.__name__ for kind in kinds]


def _as_hinted(hint: Any, value: Any) -> Any:
    if isinstance(value, str) and Path in (hint, *get_args(hint)):
        return Path(value)
    if isinstance(value, Path) and hint is str:
        return str(value)
    return tuple(value) if isinstance(value, list) and get_origin(hint) is tuple else value


def _of_values(values: dict[str, Any]) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(values, sort_keys=True).encode())


def others(folder: Path, ours: Iterable[str]) -> list[str]:
    """What lies in a folder, at any depth, and is not a plain file of ours: names relative to it, sorted.

    Args:
        ours: names relative to the folder, with "/"; folders that hold nothing else are ours, links never are.
    """
    known, found = set(ours), []
    for place, folders, names in os.walk(folder):
        for name in (*folders, *names):
            path = Path(place, name)
            relative = path.relative_to(folder).as_posix()
            if path.is_symlink() or not (path.is_dir() or (path.is_file() and relative in known)):
                found.append(relative)
    return sorted(found)


def remove(folder: Path, ours: Iterable[str]) -> None:
    """Remove files of ours, and the folders that are empty then; what else is there stays. No link is followed."""
    places = {folder}
    for name in ours:
        path = folder / name
        if any(parent.is_symlink() for parent in (path, *path.parents) if parent.is_relative_to(folder)):
            continue
        places |= {parent for parent in path.parents if parent.is_relative_to(folder)}
        with suppress(FileNotFoundError, NotADirectoryError):
            path.unlink()
    for place in sorted(places, key=lambda place: len(place.parts), reverse=True):
        with suppress(OSError):  # not empty, or not there
            place.rmdir()
