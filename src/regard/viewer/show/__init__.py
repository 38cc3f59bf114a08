"""Terminals and pictures.

| Module | Contents |
|---|---|
| `terminal` | the heads of a model in a terminal |
| `steps` | `regard steps` in a terminal |
| `blocks` | matrices as characters and colours |
| `picture`, `drawing` | the same view as SVG or PNG |
| `colour` | colour scales |
"""
