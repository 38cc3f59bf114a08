"""`stand_in`: regard's functions under the names of other packages."""

from __future__ import annotations  # so that `help` shows the names of types

from contextlib import ExitStack
from functools import partial

from regard.arguments.values import boolean, choice
from regard.torch.dropins import flash_modules, natten, triangle, xformers
from regard.torch.dropins.packages import Package, Shared

PACKAGES: dict[str, Package] = {x.PACKAGE.name: x.PACKAGE for x in (triangle, flash_modules, natten, xformers)}
_shared: dict[str, Shared] = {name: Shared() for name in PACKAGES}


def stand_in(package: str, *, force: bool = False) -> ExitStack:
    """Put regard's functions in the place of another package, in the whole process.

    An installed package keeps its modules, and its functions that compute attention become ours.
    Where it is not installed, modules of its name are provided: `import`, `find_spec` and
    `importlib.metadata.version` succeed.

    The change is made at once. It stays, or ends with the `with` that it is used in, or when the
    returned stack is closed. All threads see it; it ends when the last of its users ends it.

    Args:
        package: "cuequivariance_ops_torch" (triangle attention alone), "flash_attn", "natten" or
            "xformers".
        force: hide an installed package that stand_in would refuse to replace.

    Raises ValueError for another package, RuntimeError for an installed one that is not replaced
    without force.

    >>> import regard.torch
    >>> with regard.torch.stand_in("natten"):
    ...     from natten.functional import na2d
    """
    package = choice("package of stand_in", package, tuple(PACKAGES))
    force = boolean("force of stand_in", force)
    return _shared[package].held(partial(PACKAGES[package].applied, force))
