"""One call on tensors, as data.

| Module | Contents |
|---|---|
| `record` | options, the names of inputs and results, and sizes: all of a call but its tensors |
| `bound` | its `Problem` once its tensors are arrays |
| `text` | rules and calls as text, saved with a graph |
| `prepared` | small calls, cached by shape and options |
| `kernels` | an engine's five functions on tensors |
| `fused` | plain calls on a device, by PyTorch's fused functions |
"""
