"""Weights as safetensors files that know their run and their checksum."""

from __future__ import annotations

from pathlib import Path

import torch
import xxhash
from torch import Tensor, nn

from megagraph import files


def read_weights(path: Path, *, run: str | None = None) -> dict[str, Tensor]:
    """Named tensors of a safetensors file, on the CPU.

    Args:
        run: whose they must be; ``None`` also takes a file that was not written here.

    Raises:
        FileNotFoundError, ValueError: there are none, or they are damaged or of another run.
    """
    from safetensors import SafetensorError, safe_open

    if not path.is_file():
        raise FileNotFoundError(f"expected weights, a safetensors file, at {path}, got nothing")
    try:
        with safe_open(path, framework="pt") as opened:
            notes = opened.metadata() or {}
            weights = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118  # no mapping
    except (SafetensorError, UnicodeDecodeError) as error:
        raise ValueError(f"expected weights as they were written, got {path}, which cannot be read: {error}") from error
    if (run is not None or "checksum" in notes) and notes.get("checksum") != _of_weights(weights, notes.get("run")):
        raise ValueError(f"expected weights as they were written, got {path}, which has changed since or is damaged")
    if run is not None and notes.get("run") != run:
        raise ValueError(f"expected the weights of this run, got {path}, which has those of another run")
    return weights


def fill(model: nn.Module, weights: dict[str, Tensor], where: Path) -> None:
    """Put weights into a model; ValueError, which names ``where`` they are from, where it is another one."""
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    found = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    wrong = [name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name)]
    if wrong:
        name = min(wrong)
        raise ValueError(
            f"expected the weights of this model in {where}, but {name} has shape {found.get(name)} there and "
            f"{expected.get(name)} in the model; {len(wrong)} of {len(expected)} tensors differ"
        )
    model.load_state_dict(weights)


def write_weights(path: Path, weights: dict[str, Tensor], *, run: str) -> None:
    """Write named tensors as a safetensors file that knows its run and its checksum."""
    from safetensors.torch import save

    weights = {name: tensor.detach().contiguous() for name, tensor in weights.items()}
    with files.replacing(path) as file:
        # not save_file, which renames a file of its own into place, with a mode of its own and not synced
        file.write(save(weights, metadata={"run": run, "checksum": _of_weights(weights, run)}))


def _of_weights(weights: dict[str, Tensor], run: str | None) -> str:
    digest = xxhash.xxh3_128(str(run).encode())
    for name, tensor in sorted(weights.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()
