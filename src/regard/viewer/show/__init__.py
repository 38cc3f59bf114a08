"""Terminals and pictures.

| Module | Contents |
|---|---|
| `terminal` | the heads of a model in a terminal |
| `steps` | `regard steps` in a terminal |
| `blocks` | matrices as characters and colours |
| `picture`, `drawing` | the heads of a model as SVG or PNG |
| `colour` | colour scales |
"""
