"""Triton's interpreter in tests, where nearly all of the time goes into what it does anew for every operation."""

import math
from typing import Any

import pytest


def language_patched_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A launch replaces functions of triton.language; so does every call of a function in it, for nothing, and for most
    of its time. What a shape or a dtype says is found out for every value; here it is kept.
    """
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

    dtypes: dict[str, Any] = {}
    shapes: dict[Any, Any] = {}
    blocks: dict[Any, Any] = {}
    dtype_of, new_block = interpreter._get_np_dtype, core.block_type.__init__

    def np_dtype(kind: Any) -> Any:
        name = kind.scalar.name
        if name not in dtypes:
            dtypes[name] = dtype_of(kind)
        return dtypes[name]

    def tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        shape = type.shape if type.is_block() else ()
        if shape not in shapes:
            shapes[shape] = core.tuple([core.constexpr(n) for n in shape]), core.constexpr(math.prod(shape))
        self.shape, self.numel = shapes[shape]

    def block(self: Any, element_ty: Any, shape: Any) -> None:
        key = element_ty.name, *(getattr(n, "value", n) for n in shape)
        if key not in blocks:
            new_block(self, element_ty, shape)
            blocks[key] = self.shape, self.numel, self.name
        self.element_ty = element_ty
        self.shape, self.numel, self.name = blocks[key]

    monkeypatch.setattr(interpreter, "_patch_lang", once)
    monkeypatch.setattr(interpreter, "_get_np_dtype", np_dtype)
    monkeypatch.setattr(core.tensor, "__init__", tensor)
    monkeypatch.setattr(core.block_type, "__init__", block)
