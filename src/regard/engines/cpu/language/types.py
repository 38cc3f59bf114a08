"""Types of one vector lane."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from llvmlite import ir


class _BFloat(ir.HalfType):  # type: ignore[misc]
    """The type bfloat16, which LLVM has and llvmlite's IR builder lacks."""

    intrinsic_name = "bf16"

    def __str__(self) -> str:
        return "bfloat"


_BFloat._create_instance()


@dataclass(frozen=True)
class Type:
    """The type of one lane. category: "float", "int" (signed) or "bool"."""

    name: str
    category: str
    size: int
    raw: Any

    def __repr__(self) -> str:
        return self.name


F16 = Type("f16", "float", 2, ir.HalfType())
BF16 = Type("bf16", "float", 2, _BFloat())
F32 = Type("f32", "float", 4, ir.FloatType())
F64 = Type("f64", "float", 8, ir.DoubleType())
I8 = Type("i8", "int", 1, ir.IntType(8))
I16 = Type("i16", "int", 2, ir.IntType(16))
I32 = Type("i32", "int", 4, ir.IntType(32))
I64 = Type("i64", "int", 8, ir.IntType(64))
BOOL = Type("bool", "bool", 1, ir.IntType(1))
BY_DTYPE = {
    "float16": F16,
    "bfloat16": BF16,
    "float32": F32,
    "float64": F64,
    "bool": I8,
    "int32": I32,
    "int64": I64,
}


def type_of(dtype: Any) -> Type:
    """Return the type of a dtype's elements in memory; booleans are bytes."""
    return BY_DTYPE[np.dtype(dtype).name]
