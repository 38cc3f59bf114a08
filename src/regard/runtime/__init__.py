"""Threads, memory and files of this process.

| Module | Contents |
|---|---|
| `threads` | the number of threads; helpers; work spread over them |
| `memory` | results on huge pages, reused by later calls |
| `bounded` | caches of a bounded size |
| `system` | memory and processors, within the limits of a control group |
| `forks` | locks and cached properties that a forked child can use |
| `diskcache` | files in the user's cache directory that only their owner may change |
| `arrayfile` | named arrays in a safetensors file, mapped into memory |
| `progress` | stages of long work |
"""
