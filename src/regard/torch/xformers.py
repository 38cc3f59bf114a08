"""No names: `regard.torch.stand_in("xformers")` provides `xformers.ops`, and an import from here says so."""

from regard.torch.dropins.xformers import missing as __getattr__  # noqa: F401
