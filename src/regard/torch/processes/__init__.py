"""Calls over several processes.

| Module | Contents |
|---|---|
| `context_parallel` | a sequence over the processes of a device mesh |
| `ranks` | the call of one rank |
| `dtensors` | `regard.attention` of DTensors |
| `replaced` | PyTorch's functions meanwhile |
"""
