"""Triton's interpreter in tests, where nearly all of the time goes into what it does once for every operation."""

from functools import lru_cache
from typing import Any

import pytest


def language_patched_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A launch replaces functions of triton.language; so does every call of a function in it, for nothing, and for most
    of its time. Types of blocks are made anew for every value, and so are tables of dtypes; here they are kept.
    """
    import triton.language as tl
    from triton.language import core, standard
    from triton.runtime import interpreter

    patch, launches = interpreter._patch_lang, []

    class Inner:
        def restore(self) -> None:
            pass

    class Outer:
        def __init__(self, *scopes: Any) -> None:
            self.scopes = scopes

        def restore(self) -> None:
            launches.clear()
            for scope in reversed(self.scopes):
                scope.restore()

    def once(function: Any) -> Any:
        if launches:
            return Inner()
        launches.append(function)
        return Outer(patch(function), patch(standard.max.fn))  # triton.language, triton.language.core

    monkeypatch.setattr(interpreter, "_patch_lang", once)
    of, made = interpreter._get_np_dtype, lru_cache(maxsize=None)(lambda kind: of(kind))
    monkeypatch.setattr(interpreter, "_get_np_dtype", lambda x: made(x.scalar if x.is_block() else x))
    checked = lru_cache(maxsize=None)(core.validate_block_shape)
    monkeypatch.setattr(core, "validate_block_shape", checked)
    assert tl.block_type is core.block_type
