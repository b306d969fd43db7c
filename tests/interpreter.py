"""Triton's interpreter, as it is but for work that it does again and again: a good part of the time of every test."""

from __future__ import annotations

from typing import Any

from triton.runtime import interpreter


def patch_once() -> None:
    """Let each launch patch Triton's language once, not anew in every call of a function within it."""
    if not hasattr(interpreter, "_LangPatchScope"):
        return  # of an older Triton
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
