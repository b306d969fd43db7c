"""Checkpoints: all that the next step of a run depends on, so that a run may stop at any moment and go on elsewhere.

RUN/checkpoints/latest          name of the checkpoint to go on from
                step-000123/    begun.json             whose it is and of which save, before anything else is written
                                *.distcp               parameters and optimizer state (torch.distributed.checkpoint)
                                metadata.json          which tensor lies where in them
                                copies of files of the run, as they were at that step
                                manifest.json          run, data, configuration, progress, checksums of the files above
                                committed              checksum of manifest.json

Names are those of the whole model and tensors are saved in parts, so that any plan can read what another has written.
A folder is written once, ``committed`` and then ``latest`` last, and the checkpoint before it stays: a process that is
killed while it saves loses nothing. There is no random state: batches and dropout depend on seed, epoch and step alone.
Nothing here is unpickled: what is in a file is numbers and JSON.
"""

from __future__ import annotations

import json
import re
import time
import uuid
import warnings
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from itertools import count, islice
from pathlib import Path
from typing import Any, BinaryIO

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from megagraph import files
from megagraph.parallel.mesh import all_gather, on_every_rank, on_rank_zero, rank, world_size
from megagraph.progress import log
from megagraph.state import check_finite

warnings.filterwarnings("ignore", "torch.distributed is disabled")  # one process is meant

_METADATA = "metadata.json"
_TENSOR_FILE = re.compile(r"__\d+_\d+\.distcp")
_FILES = {_METADATA, "metrics.jsonl", "model.safetensors", "begun.json", "manifest.json", "committed"}


class Checkpoints:
    """The checkpoints of one run. All methods are collective.

    Args:
        folder: RUN/checkpoints, on a file system that all processes share.
        run: id of the run.
        data: fingerprint of what it is trained on.
        config: JSON values that stay as they are for the whole run.
        keep: how many to keep.
    """

    def __init__(
        self, folder: Path, *, run: str = "", data: str = "", config: dict[str, Any] | None = None, keep: int = 2
    ) -> None:
        self.folder = folder
        self._run, self._data, self._keep = run, data, keep
        self._config = json.loads(json.dumps(config or {}, default=str))
        self.seconds = 0.0  # that the last save took, behind the caller
        self._newest: str | None = None  # written or read last
        self._pending: Future[None] | None = None
        self._thread: ThreadPoolExecutor
        # of the thread, whose collectives must not meet those of a step
        self._group = dist.new_group(backend="gloo") if dist.is_initialized() else None
        self._stager: DefaultStager | None = None

    def save(self, step: int, tensors: dict[str, Tensor], progress: dict[str, Any], kept: Iterable[Path] = ()) -> None:
        """Write a checkpoint, and then remove old ones, while the caller goes on; it waits for the one before only.

        Args:
            step: its name; that of the newest checkpoint is not written again.
            tensors: copied before this returns, into memory that is used again.
            progress: JSON values.
            kept: files to copy as they are now, where they exist; only ever appended to or replaced as a whole.

        Raises:
            OSError, FloatingPointError: as ``wait``, of the save before.
        """
        name = f"step-{step:06d}"
        if name == self._newest:
            return
        self.wait()
        staged = self._copy(tensors)
        opened: dict[str, tuple[BinaryIO, int]] = {}
        if rank() == 0:
            for path in kept:
                with suppress(FileNotFoundError):
                    file = path.open("rb")
                    opened[path.name] = file, file.seek(0, 2)
        self._newest = name
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="megagraph-checkpoint")
        self._pending = self._thread.submit(self._write, name, staged, progress, opened)
        self._thread.shutdown(wait=False)  # it ends with this save

    def wait(self) -> None:
        """Return when the last save is complete.

        Raises:
            OSError: it cannot be written; the checkpoints before are as they were.
            FloatingPointError: a tensor of it is not finite; likewise.
        """
        if self._pending is not None:
            pending, self._pending = self._pending, None
            self._thread.shutdown()
            pending.result()

    def check(self) -> None:
        """Raise the error of a save that has failed meanwhile; return at once. Not collective."""
        if self._pending is not None and self._pending.done():
            self.wait()

    def settle(self) -> None:
        """Let a save come to its end after an error of the caller; peers that may be gone are not waited for."""
        if self._pending is not None and not dist.is_initialized():
            self._thread.shutdown()

    def load(self, tensors: dict[str, Tensor], step: int | None = None) -> tuple[Path, dict[str, Any]]:
        """Read the newest checkpoint that is whole, and say which others are not.

        Args:
            tensors: as for :meth:`save`, under this or another plan; they are filled in place.
            step: read this one, and no other.

        Returns:
            the folder of the checkpoint and its progress, the same on every rank.

        Raises:
            FileNotFoundError: there is no checkpoint that is whole; the message says why.
            ValueError: it is one of another model or of other data.
        """
        self.wait()
        refused = []
        for name in on_rank_zero(self._names) if step is None else [f"step-{step:06d}"]:
            try:
                manifest, metadata = self._verify(name)
                break
            except Exception as error:  # whatever it is: it cannot be used
                refused.append(f"{name} cannot be used: {error}")
        else:
            raise FileNotFoundError("\n  ".join([f"{self.folder} holds no checkpoint to go on from", *refused]))
        if rank() == 0:
            for reason in refused:
                log.warning(f"{reason}; going on from {name}")
        folder = self.folder / name
        on_rank_zero(lambda: self._check_continues(folder, manifest))  # paths may differ from machine to machine
        try:
            with _errors_of(folder):
                dcp.load(dict(tensors), storage_reader=_Reader(folder, metadata), no_dist=not dist.is_initialized())
        except OSError as error:
            raise ValueError(f"{folder} does not fit this model: {error}") from error
        self._newest = name
        return folder, manifest["progress"]

    def _check_continues(self, folder: Path, manifest: dict[str, Any]) -> None:
        """Raise ValueError if a checkpoint is of other data or of another configuration."""
        if manifest["data"] != self._data:
            raise ValueError(
                f"a resumed run needs the data it was started on: their fingerprint was {manifest['data']}, got "
                f"{self._data}; pass the --dataset and --root of the run, or train anew with another --out"
            )
        for field, value in manifest["config"].items():
            if self._config.get(field, value) != value:
                raise ValueError(
                    f"{folder} was written by a run whose {field} was {value!r}, got {self._config[field]!r}; "
                    "its config.json has been replaced"
                )

    def _copy(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Copies of tensors on the CPU, in memory that the next save uses again."""
        if self._stager is None or torch.__version__ < "2.13":  # 2.11 closes a stager that was used
            on_gpu = any(x.is_cuda for x in tensors.values())
            self._stager = DefaultStager(StagingOptions(on_gpu, False, False, on_gpu))
        staged = self._stager.stage(dict(tensors))
        assert isinstance(staged, dict)
        return staged

    def _write(
        self,
        name: str,
        tensors: dict[str, Tensor],
        progress: dict[str, Any],
        opened: dict[str, tuple[BinaryIO, int]],
    ) -> None:
        folder, started = self.folder / name, time.perf_counter()

        def start() -> str:
            self._remove(folder)  # of a save that was killed, or one that load refused
            if folder.exists() and any(_is_ours(path.name) or path.name == ".metadata" for path in folder.iterdir()):
                aside = next(path for i in count(1) if not (path := folder.with_name(f"{name}-aside-{i}")).exists())
                folder.rename(aside)
                log.warning(f"{folder} was not written by this run, it is now {aside}")
            folder.mkdir(parents=True, exist_ok=True)
            save = uuid.uuid4().hex
            files.write_json(folder / "begun.json", {"run": self._run, "save": save})
            for file_name, (file, size) in opened.items():
                file.seek(0)
                with files.replacing(folder / file_name) as copy:
                    for first in range(0, size, files.CHUNK_BYTES):
                        copy.write(file.read(min(files.CHUNK_BYTES, size - first)))
            return save

        def look() -> None:
            if _begun(folder) != save:  # a copy of the run may have such a folder, too
                raise FileNotFoundError(
                    f"{folder}, made by rank 0, is not there; put the run on a file system that all share"
                )
            check_finite(tensors)

        def commit() -> None:
            written = {place.relative_path for place in _metadata_of(folder).storage_data.values()}
            if lost := sorted(written - checksums.keys()):
                raise FileNotFoundError(
                    f"{folder} lacks {', '.join(lost)} of other ranks; put the run on a file system that all share"
                )
            content = {"run": self._run, "data": self._data, "config": self._config}
            content |= {"progress": progress, "files": checksums}
            manifest = json.dumps(content, indent=2)
            files.write(folder / "manifest.json", manifest)
            files.write(folder / "committed", files.checksum(folder / "manifest.json"))
            files.sync_folder(self.folder)
            files.write(self.folder / "latest", name)
            step = _step_of(folder)
            others = sorted((path for path in self._folders() if path.name != name), key=_step_of, reverse=True)
            before = [path for path in others if _step_of(path) < step]
            for old in {*others} - {*islice(before, self._keep - 1)}:
                self._remove(old)

        with ExitStack() as stack:
            for file, _ in opened.values():
                stack.enter_context(file)
            save = on_rank_zero(start, self._group)
            on_every_rank(look, self._group)
        with _errors_of(folder):
            dcp.save(
                dict(tensors),
                storage_writer=_Writer(folder),
                process_group=self._group,
                no_dist=not dist.is_initialized(),
            )
        names = on_rank_zero(lambda: sorted(path.name for path in folder.iterdir() if _is_ours(path.name)), self._group)
        own = on_every_rank(
            lambda: {name: files.checksum(folder / name) for name in names[rank() :: world_size()]}, self._group
        )
        checksums = {name: value for part in all_gather(own, self._group) for name, value in part.items()}
        on_rank_zero(commit, self._group)
        self.seconds = time.perf_counter() - started

    def _folders(self) -> list[Path]:
        return [path for path in self.folder.glob("step-*") if path.name[5:].isdecimal() and not path.is_symlink()]

    def _names(self) -> list[str]:
        """``latest`` first, then the others, newest first."""
        latest = self.folder / "latest"
        first = latest.read_text(errors="replace") if latest.is_file() else None
        folders = sorted(self._folders(), key=lambda path: (path.name == first, _step_of(path)), reverse=True)
        return [path.name for path in folders]

    def _verify(self, name: str) -> tuple[dict[str, Any], Metadata]:
        """The manifest of a checkpoint all of whose files are as they were written, and what lies where in it; each
        rank reads some of them."""
        folder = self.folder / name

        def read() -> dict[str, Any]:
            if not folder.is_dir():
                raise FileNotFoundError("there is none")
            if not (folder / "committed").is_file():
                raise FileNotFoundError("it was not finished (no file committed)")
            _check(folder / "manifest.json", (folder / "committed").read_text(errors="replace"))
            manifest = json.loads((folder / "manifest.json").read_text())
            if manifest["run"] != self._run:
                raise ValueError("it is one of another run")
            if not all(isinstance(manifest[name], dict) for name in ("progress", "files", "config")):
                raise ValueError("its manifest names no progress, no files or no configuration")
            _ = manifest["data"]
            return manifest

        def check() -> Metadata:
            for file, expected in own:
                _check(folder / file, expected)
            return _metadata_of(folder)

        manifest = on_rank_zero(read)
        own = list(manifest["files"].items())[rank() :: world_size()]
        return manifest, on_every_rank(check)

    def _remove(self, folder: Path) -> None:
        """Remove a checkpoint of this run, finished or not: what its manifest names, or names that we give out."""
        with suppress(OSError, ValueError, KeyError):
            if files.read_json(folder / "begun.json", "a checkpoint")["run"] != self._run:
                return
            ours = {path.name for path in folder.iterdir() if _is_ours(path.name)} - {"begun.json"}
            # the marks of what it is first and last: whoever is killed here leaves what can be removed
            for part in (["committed"], ours, ["begun.json"]):
                files.remove(folder, part)


class _Writer(FileSystemWriter):
    """Tensors as torch writes them, and what lies where as JSON, where torch would pickle it."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, overwrite=True)

    def finish(self, metadata: Metadata, results: list[list[Any]]) -> None:
        places = {result.index: result.storage_data for part in results for result in part}
        tensors = {}
        for name, tensor in metadata.state_dict_metadata.items():
            assert isinstance(tensor, TensorStorageMetadata), name
            chunks = []
            for chunk in tensor.chunks:
                place = places[MetadataIndex(name, chunk.offsets)]
                where = {"file": place.relative_path, "start": place.offset, "bytes": place.length}
                chunks.append({"offsets": list(chunk.offsets), "sizes": list(chunk.sizes), **where})
            dtype = str(tensor.properties.dtype).removeprefix("torch.")
            tensors[name] = {"dtype": dtype, "size": list(tensor.size), "chunks": chunks}
        files.write_json(Path(self.path) / _METADATA, {"tensors": tensors})


class _Reader(FileSystemReader):
    def __init__(self, folder: Path, metadata: Metadata) -> None:
        super().__init__(folder)
        self._metadata = metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._metadata


def _metadata_of(folder: Path) -> Metadata:
    """What lies where in a checkpoint; ValueError where its file does not say so."""
    values = files.read_json(folder / _METADATA, "what lies where in a checkpoint")
    tensors: dict[str, Any] = {}
    places: dict[MetadataIndex, _StorageInfo] = {}
    try:
        for name, tensor in values["tensors"].items():
            chunks = []
            for chunk in tensor["chunks"]:
                if not _TENSOR_FILE.fullmatch(chunk["file"]):
                    raise ValueError(f"expected {name} in a file of the checkpoint, got {chunk['file']!r}")
                offsets, start, length = torch.Size(chunk["offsets"]), int(chunk["start"]), int(chunk["bytes"])
                if min(start, length, *offsets, *chunk["sizes"]) < 0:
                    raise ValueError(f"expected {name} at places and of sizes of at least 0, got {chunk}")
                chunks.append(ChunkStorageMetadata(offsets, torch.Size(chunk["sizes"])))
                places[MetadataIndex(name, offsets)] = _StorageInfo(chunk["file"], start, length)
            dtype = getattr(torch, tensor["dtype"])
            properties = TensorProperties(dtype=dtype)
            tensors[name] = TensorStorageMetadata(properties, torch.Size(tensor["size"]), chunks)
    except (KeyError, TypeError, AttributeError, OverflowError, RuntimeError) as error:
        raise ValueError(f"expected what lies where in a checkpoint in {folder / _METADATA}, got {error!r}") from error
    return Metadata(tensors, planner_data={name: (name,) for name in tensors}, storage_data=places)


@contextmanager
def _errors_of(folder: Path) -> Iterator[None]:
    """OSError on every rank where torch's checkpoint fails on one."""
    try:
        yield
    except CheckpointException as error:  # a BaseException, which nobody expects
        failed, (cause, _) = min(error.failures.items())
        own = cause if rank() in error.failures else dist.DistError("a peer could not")  # which names itself
        raise OSError(f"{folder} (rank {failed}): {cause}") from own


def _begun(folder: Path) -> str | None:
    """Name of the save that has begun in a folder, if one has."""
    with suppress(OSError, ValueError):
        return files.read_json(folder / "begun.json", "a checkpoint").get("save")
    return None


def _is_ours(name: str) -> bool:
    """Whether a file of a checkpoint may have this name."""
    name = name.removesuffix(".partial")
    return name in _FILES or _TENSOR_FILE.fullmatch(name) is not None


def _step_of(folder: Path) -> int:
    return int(folder.name[5:])


def _check(file: Path, expected: str) -> None:
    if not file.is_file():
        raise FileNotFoundError(f"{file.name} is missing")
    if files.checksum(file) != expected:
        raise ValueError(f"{file.name} is not as it was written")
