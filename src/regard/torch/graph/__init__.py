"""Calls in graphs that PyTorch traces.

| Module | Contents |
|---|---|
| `traced` | a call as one operation of a graph |
| `operators` | the operations of PyTorch's dispatcher |
| `texts` | rules and calls as text, saved with a graph |
"""
