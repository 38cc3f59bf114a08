"""The contract of the second-pass kernel, in addition to forward's."""

from dataclasses import dataclass

from regard.engines.cpu.spec.forward import KernelSpec

FIELDS = ("row_bins", "tile_bins", "edges")
MAPS = ("mass", "max_map", "seen_map")
STATISTIC_FIELDS = ("visible", "received", "profile", *MAPS, "row")


@dataclass(frozen=True)
class SecondPassSpec(KernelSpec):
    """The spec of a second pass; statistics: some of STATISTIC_FIELDS.

    Of the pairs of a bin `mass` is the sum of weights, `max_map` the largest, and `seen_map` 1 if any is visible.
    """

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
