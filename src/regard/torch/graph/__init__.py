"""Calls in graphs that PyTorch traces.

| Module | Contents |
|---|---|
| `traced` | a call as one operation of a graph |
| `operators` | the operations of PyTorch's dispatcher |
| `recorded` | functions of tensors that become rules |
| `opcodes` | bytecode of such functions, by versions of CPython |
| `texts` | rules and calls as text, saved with a graph |
"""
