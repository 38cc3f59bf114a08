"""The contract of the second-pass kernel, in addition to forward's."""

from dataclasses import dataclass

from regard.engines.cpu.spec.forward import KernelSpec

FIELDS = ("row_bins", "tile_bins", "edges")
STATISTIC_FIELDS = ("visible", "received", "profile", "mass", "max_map", "row")


@dataclass(frozen=True)
class SecondPassSpec(KernelSpec):
    """The spec of a second pass; statistics: some of STATISTIC_FIELDS."""

    statistics: tuple[str, ...]

    @property
    def fields(self) -> tuple[str, ...]:
        return (*super().fields, *FIELDS)

    @property
    def block_fields(self) -> tuple[str, ...]:
        return (*super().block_fields, *STATISTIC_FIELDS)

    @property
    def key(self) -> str:
        return repr(("second", super().key, self.statistics))
