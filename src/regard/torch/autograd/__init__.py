"""Derivatives and transforms of a call.

| Module | Contents |
|---|---|
| `functions` | the six autograd functions |
| `vmap` | `vmap` of calls |
"""
