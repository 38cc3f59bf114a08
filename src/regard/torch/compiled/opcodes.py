"""Bytecode of the functions that are recorded: what Dynamo would run wrongly, or not at all, in their place.

CPython renames and reorders opcodes with each minor version. `VERSIONS` are the ones whose bytecode was read in tests.
"""

import builtins
import dis
import sys
from itertools import pairwise
from types import CodeType

import numpy as np

VERSIONS = (3, 11), (3, 12), (3, 13)
NULL_FOLLOWS = sys.version_info >= (3, 13)  # PUSH_NULL, which marks a call, follows the callable that it preceded


def version() -> tuple[int, int]:
    """Return the minor version of CPython that runs."""
    return sys.version_info[:2]


def calls_numpy_or_inverts(code: CodeType) -> bool:
    """Return True if code takes a function of ``np``, or has ``~``, which Dynamo does not call on objects of a class.

    The code of inner functions counts too.
    """
    for module, member in pairwise(dis.get_instructions(code)):
        if module.opname == "UNARY_INVERT":
            return True
        if module.argval in ("np", "numpy") and module.opname.startswith("LOAD"):
            x = getattr(np, str(member.argval), None)
            if callable(x) and not isinstance(x, type):
                return True
    return any(calls_numpy_or_inverts(x) for x in code.co_consts if isinstance(x, CodeType))


def compares_others(code: CodeType) -> bool:
    """Return True if code compares a variable that is not its own; for equality, also an assigned or computed one.

    Functions that it calls may compare too: True for all but those of Python and of modules other than `operator`.
    """
    steps = [x for x in dis.get_instructions(code) if x.opname != "CACHE"]
    assigned = set[str]().union(*[variables(x) for x in steps if x.opname.startswith("STORE_FAST")])
    for n, x in enumerate(steps[:-1]):
        called = "NULL" in x.argrepr or steps[n + 1 if NULL_FOLLOWS else n - 1].opname == "PUSH_NULL"
        # An attribute is a method, or a function of a module.
        called = called and "LOAD_ATTR" not in (x.opname, steps[n + 1].opname)
        if "LOAD" in x.opname and (called or x.argval == "operator") and not hasattr(builtins, str(x.argval)):
            return True
        if x.opname == "COMPARE_OP" and any(other(y, assigned, x.argval) for y in steps[max(n - 2, 0) : n]):
            return True
    return any(compares_others(x) for x in code.co_consts if isinstance(x, CodeType))


def other(operand: dis.Instruction, assigned: set[str], comparison: str) -> bool:
    """Return True if an operand of a comparison may be a number of the graph."""
    if operand.opname in ("LOAD_DEREF", "LOAD_GLOBAL"):
        return True
    return comparison in ("==", "!=") and (operand.opname == "BINARY_OP" or bool(variables(operand) & assigned))


def variables(step: dis.Instruction) -> set[str]:
    """Return the local variables of an instruction: one, or two since CPython 3.13."""
    if "_FAST" not in step.opname:
        return set()
    return set(step.argval) if isinstance(step.argval, tuple) else {step.argval}
