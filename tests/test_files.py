"""Files of ours are whole or not there; what others wrote is never touched."""

from __future__ import annotations

import json
import os

import pytest

from megagraph import files


def test_a_file_is_replaced_in_one_move_or_not_at_all(tmp_path):
    path = tmp_path / "file"
    files.write(path, "one")
    with pytest.raises(ZeroDivisionError), files.replacing(path) as file:
        file.write(b"half of two")
        assert path.read_text() == "one"
        _ = 1 / 0
    assert path.read_text() == "one"
    (tmp_path / "file.partial").write_text("of a process that was killed")
    files.write(path, "two")
    assert path.read_text() == "two"
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


def test_what_is_no_file_is_not_read(tmp_path):
    """A pipe that nobody writes would be waited for."""
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path):
        with pytest.raises(ValueError, match=f"expected a plan, got {path}, which is no file; write it again"):
            files.parse_json(path, "a plan")


def test_what_is_no_file_is_not_replaced(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    for name in ("pipe", "folder"):
        with pytest.raises(FileExistsError, match=f"expected a file, or nothing, at .*{name} to write it"):
            files.write(tmp_path / name, "new")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "pipe"]
    assert (tmp_path / "pipe").is_fifo()


def test_nothing_is_written_through_a_link(tmp_path):
    (tmp_path / "theirs").write_text("precious")
    (tmp_path / "file.partial").symlink_to(tmp_path / "theirs")
    (tmp_path / "file").symlink_to(tmp_path / "theirs")
    files.write(tmp_path / "file", "ours")
    assert (tmp_path / "theirs").read_text() == "precious"
    assert (tmp_path / "file").read_text() == "ours" and not (tmp_path / "file").is_symlink()


VALUES = {"rate": 0.01, "name": "ä", "none": None, "list": [1, 2.5, float("inf")], "nested": {"a": True}}


def test_json_comes_back(tmp_path):
    files.write_json(tmp_path / "a.json", VALUES)
    assert files.read_json(tmp_path / "a.json", "a file") == VALUES
    files.write_json(tmp_path / "b.json", {"path": tmp_path})
    assert files.read_json(tmp_path / "b.json", "a file") == {"path": str(tmp_path)}


def test_every_flipped_bit_of_json_is_noticed_or_changes_nothing(tmp_path):
    path = tmp_path / "a.json"
    files.write_json(path, VALUES)
    content = path.read_bytes()
    refused = 0
    for bit in range(8 * len(content)):
        damaged = bytearray(content)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        try:
            assert files.read_json(path, "a file") == VALUES, bit
        except ValueError as error:
            assert str(path) in str(error)
            refused += 1
    assert refused > 0.9 * 8 * len(content)


def test_json_by_hand_needs_no_checksum_but_a_right_one_if_any(tmp_path):
    path = tmp_path / "a.json"
    path.write_text(json.dumps(VALUES))
    assert files.read_json(path, "a file", by_hand=True) == VALUES
    with pytest.raises(ValueError, match=r"expected a file as it was written, got .*a\.json"):
        files.read_json(path, "a file")
    path.write_text(json.dumps(VALUES | {"checksum": "0" * 32}))
    with pytest.raises(ValueError, match=r'has changed since or is damaged; .* by hand, delete its line "checksum"'):
        files.read_json(path, "a file", by_hand=True)
    for text, message in (
        ("[]", "a JSON object, got list"),
        ("{", "is not a whole JSON"),
        ("[" * 10**5, "is not a whole JSON"),
    ):
        path.write_text(text)
        with pytest.raises(ValueError, match=message):
            files.read_json(path, "a file", by_hand=True)


def test_what_is_not_ours_is_found_and_stays(tmp_path):
    folder, outside = tmp_path / "run", tmp_path / "outside"
    (folder / "deep" / "empty").mkdir(parents=True)
    (folder / "linked-inside").mkdir()
    outside.mkdir()
    ours = ["a", "deep/b", "linked/c", "d", "never-written"]
    for path in (folder / "a", folder / "deep/b", folder / "theirs", outside / "c", folder / "linked-inside/x"):
        path.write_text("content")
    (folder / "linked").symlink_to(outside)
    (folder / "d").symlink_to(outside / "c")
    assert files.others(folder, ours) == ["d", "linked", "linked-inside/x", "theirs"]
    files.remove(folder, ours)
    assert (outside / "c").exists() and (folder / "d").is_symlink() and (folder / "theirs").exists()
    assert not (folder / "a").exists() and not (folder / "deep/b").exists()
    for name in ("theirs", "linked-inside/x", "d", "linked"):
        (folder / name).unlink()
    (folder / "deep/empty").rmdir()
    (folder / "linked-inside").rmdir()
    files.remove(folder, ours)
    assert not folder.exists()
