"""Stores that are not as they were written, for the tests of this folder."""

import json

import numpy as np
import xxhash

from megagraph import files
from megagraph.data.cache import npy_head


def header_of(store):
    return json.loads((store / "header.json").read_text())


def edit_header(store, change):
    """Change the header, whose own checksum is right again."""
    header = header_of(store)
    del header["checksum"]
    changed = change(header)
    files.write_json(store / "header.json", header if changed is None else changed)


def replace_array(store, name, array):
    """Give a store another array of any form, and a header that describes it."""
    array = np.ascontiguousarray(array)
    content = npy_head(array.shape, array.dtype) + array.tobytes()
    (store / f"{name}.npy").write_bytes(content)
    digest = xxhash.xxh3_128_hexdigest(content)
    described = {"shape": list(array.shape), "dtype": array.dtype.str, "xxh3": digest}
    edit_header(store, lambda header: header["arrays"].update({name: described}))


def change_array(store, name, change):
    """Put what ``change`` makes of an array in its place, and its checksum into the header."""
    replace_array(store, name, change(np.load(store / f"{name}.npy")))


def put(position, value):
    def change(array):
        array[position] = value
        return array

    return change
