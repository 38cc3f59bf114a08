"""Arguments of callers: values checked, options named, frameworks recognized.

| Module | Contents |
|---|---|
| `values` | checks of single arguments; the names that options of other libraries have here |
| `frameworks` | arrays of PyTorch and JAX: recognized without an import, dispatched to their adapter |
| `packages` | packages that only some calls need: errors that name one and its extra |
| `signatures` | signatures as `help` shows them; errors for unknown options |
"""
