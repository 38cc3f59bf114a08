"""Compare two devices with one: python sequence_figures.py [N [HEADS]].

Causal calls, d = 64, forward, and forward and backward: seconds of the process's threads together, the least of three
calls in turns. Then temporaries of a device, in shares of all keys and values, for 1 to 8 devices; of derivatives too.
"""

import os
import sys
import time
from typing import Any

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax
import regard

ROW = P(None, "s")


def forward(q: Any, k: Any, v: Any, dout: Any) -> Any:
    return regard.attention(q, k, v, causal=True)


def both(q: Any, k: Any, v: Any, dout: Any) -> Any:
    out, back = jax.vjp(lambda *x: regard.attention(*x, causal=True), q, k, v)
    return out, back(dout)


def forward_mode(q: Any, k: Any, v: Any, dout: Any) -> Any:
    return jax.jvp(lambda *x: regard.attention(*x, causal=True), (q, k, v), (dout, dout, dout))


def bias_and_sink(q: Any, k: Any, v: Any, dout: Any) -> Any:
    def call(q: Any, k: Any, v: Any, bias: Any, sink: Any) -> Any:
        return regard.attention(q, k, v, causal=True, bias=bias, sink=sink)

    return jax.vjp(call, q, k, v, jnp.zeros((len(q), 1, q.shape[1])), jnp.zeros(len(q)))[1](dout)


def double_backward(q: Any, k: Any, v: Any, dout: Any) -> Any:
    def gradients(q: Any, k: Any, v: Any, dout: Any) -> Any:
        return both(q, k, v, dout)[1]

    return jax.vjp(gradients, q, k, v, dout)[1]((dout, dout, dout))


def mapped(q: Any, k: Any, v: Any, dout: Any) -> Any:
    return jax.vmap(lambda *x: both(*(a[None] for a in x)))(q, k, v, dout)


def mesh(devices: int) -> Mesh:
    return Mesh(np.array(jax.devices()[:devices]), ("s",), axis_types=(AxisType.Auto,))


def seconds(n: int = 16384, heads: int = 1) -> None:
    """Print the seconds of one device and of two, and their ratio."""
    regard.set_num_threads(1)
    rng = np.random.default_rng(0)
    arrays = [jnp.asarray(rng.standard_normal((heads, n, 64), dtype=np.float32)) for _ in range(4)]
    spread = [jax.device_put(x, NamedSharding(mesh(2), ROW)) for x in arrays]
    for function in (forward, both):
        compiled = jax.jit(function)
        least = {1: np.inf, 2: np.inf}
        for _ in range(4):
            for devices, operands in ((1, arrays), (2, spread)):
                start = time.process_time()
                jax.block_until_ready(compiled(*operands))
                least[devices] = min(least[devices], time.process_time() - start)
        print(function.__name__, f"one {least[1]:.2f} s, two {least[2]:.2f} s together", f"{least[2] / least[1]:.2f}")


def memory(n: int) -> None:
    """Print the temporaries of a device."""
    for devices in (1, 2, 4, 8):
        x = jax.ShapeDtypeStruct((8, n, 64), np.float32, sharding=NamedSharding(mesh(devices), ROW))
        for function in (forward, both, forward_mode, bias_and_sink, double_backward, mapped):
            found = jax.jit(function).lower(x, x, x, x).compile().memory_analysis()
            share = found.temp_size_in_bytes / (2 * 8 * n * 64 * 4)
            print(f"{devices} devices, {function.__name__}: {share:.2f} of all keys and values")


if __name__ == "__main__":
    seconds(*map(int, sys.argv[1:]))
    memory(65536)
