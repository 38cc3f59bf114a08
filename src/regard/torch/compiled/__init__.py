"""Calls in graphs that PyTorch traces.

| Module | Contents |
|---|---|
| `traced` | a call as one operation of a graph |
| `recorded` | functions of tensors that become rules |
| `opcodes` | what Dynamo would run wrongly in such functions, from bytecode, by versions of CPython |
"""
