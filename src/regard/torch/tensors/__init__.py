"""What all calls need of tensors and of PyTorch's state.

| Module | Contents |
|---|---|
| `modes` | active modes, traces and transforms; PyTorch's private names; all others stand on it |
| `arrays` | checks of tensors, their values, autocast |
| `parameters` | the modules whose parameters rules read |
| `tables` | rules that read tensors |
| `team` | PyTorch's OpenMP threads, which run the cpu engine's kernels |
| `process_group` | the `context_parallel` that is entered, for all that would compute with one process alone |
"""
