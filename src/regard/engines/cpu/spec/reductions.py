"""What the kernel of the second pass and its caller agree on."""

from dataclasses import dataclass

from regard.engines.cpu.spec.forward import Kind

FIELDS = ("row_cells", "tile_cells", "edges")
WORDS = ("visible", "received", "profile", "mass", "max_map", "row")


@dataclass(frozen=True)
class SecondKind(Kind):
    """What a second pass is compiled for; wants: some of WORDS."""

    wants: tuple[str, ...]

    @property
    def fields(self) -> tuple[str, ...]:
        return (*super().fields, *FIELDS)

    @property
    def item(self) -> tuple[str, ...]:
        return (*super().item, *WORDS)

    @property
    def key(self) -> str:
        return repr(("second", super().key, self.wants))
