"""The operations of PyTorch's dispatcher.

| Module | Contents |
|---|---|
| `registration` | attention, its derivatives and a seed, defined; calls by the dispatcher or by the kernel |
| `fakes` | the shapes of their results, without values |
| `flops` | their floating-point operations |
"""
