"""Attention over a sequence that is spread over ranks, with the bits of one process.

| Module | Contents |
|---|---|
| `dealing` | the rows that each rank has: contiguous shards, or stripes round robin |
| `choosing` | which of both, by live tiles and bytes |
| `sight` | the tiles that each rank sees, by the bounds of the rules |
| `pipeline` | who computes which gradients when |
| `unordered` | the same without the order of one process |
| `gradients` | what one rank computes of all gradients in one pass, and sends on |
| `programs` | what one rank computes, and the rows that it asks for |
| `together` | all ranks in one process, in lockstep: the specification of the exchange |

A rank's program is a generator: it yields an `Exchange` or a `Transfer`, is sent what that asks for, and returns its
results. It knows no framework and no network. `together` runs programs side by side; `regard.torch` runs one in each
process.
"""
