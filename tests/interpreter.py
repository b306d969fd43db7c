"""Triton's interpreter, as it is but for work that it does again and again, most of its time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from triton.language import core
from triton.runtime import interpreter


def patch_once() -> None:
    if hasattr(interpreter, "_LangPatchScope"):  # older Tritons have none
        _patch_the_language_once_a_launch()
    _make_types_once()
    builder = interpreter.interpreter_builder
    # without debug, nobody is told of an overflow: every sum and product of integers would be made again for nothing
    assert not builder.options.debug
    builder.options = replace(builder.options, sanitize_overflow=False)


def _patch_the_language_once_a_launch() -> None:
    """Not anew in every call of a function within it."""
    patch, seen = interpreter._patch_lang, set[int]()

    def patch_lang(function: Any) -> Any:
        launched, module = bool(seen), id(function.__globals__)
        if module in seen:
            return interpreter._LangPatchScope()
        scope = patch(function)
        seen.add(module)
        if not launched:
            restore = scope.restore

            def end() -> None:
                seen.clear()
                restore()

            scope.restore = end
        return scope

    interpreter._patch_lang = patch_lang


def _make_types_once() -> None:
    """A block's type checks its shape and spells its name, a tensor wraps its shape: once for each shape and dtype."""
    make_type, make_tensor, numpy_dtype = core.block_type.__init__, core.tensor.__init__, interpreter._get_np_dtype
    types: dict[tuple, dict[str, Any]] = {}
    shapes: dict[str, tuple[Any, Any]] = {}
    dtypes: dict[str, Any] = {}

    def init_type(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = [size.value if type(size) is core.constexpr else size for size in shape]
        key = (element_ty.name, *sizes)
        if key in types and {*map(type, sizes)} == {int}:  # 8.0 is an error, but the same key
            self.__dict__.update(types[key])
        else:
            make_type(self, element_ty, shape)
            types[key] = dict(self.__dict__)

    def init_tensor(self: Any, handle: Any, type: Any) -> None:
        if type.name in shapes:
            self.handle, self.type, self.dtype = handle, type, type.scalar
            self.numel, self.shape = shapes[type.name]
        else:
            make_tensor(self, handle, type)
            shapes[type.name] = self.numel, self.shape

    def get_np_dtype(type: Any) -> Any:
        if type.name not in dtypes:
            dtypes[type.name] = numpy_dtype(type)
        return dtypes[type.name]

    core.block_type.__init__, core.tensor.__init__, interpreter._get_np_dtype = init_type, init_tensor, get_np_dtype
