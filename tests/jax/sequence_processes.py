"""What each process of test_jax_sequence.py runs: python sequence_processes.py PORT PROCESSES PROCESS."""

import sys
from typing import Any

import numpy as np

N = 2304


def main(port: int, processes: int, process: int) -> None:
    """Print what differs from one device, or "same"."""
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 2)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", processes, process)
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    import regard
    import regard.jax

    mesh = jax.make_mesh((2 * processes,), ("s",), axis_types=(jax.sharding.AxisType.Auto,))
    row = P(None, "s")
    rng = np.random.default_rng(0)
    whole = [rng.standard_normal((2, N, 16), dtype=np.float32) for _ in range(4)]
    spread = [jax.make_array_from_callback(x.shape, NamedSharding(mesh, row), x.__getitem__) for x in whole]
    options: dict[str, Any] = {"causal": True, "dropout": 0.1, "seed": 7}

    def step(call: Any, q: Any, k: Any, v: Any, dout: Any) -> Any:
        out, back = jax.vjp(lambda *x: call(*x, **options), q, k, v)
        return out, *back(dout)

    def inside(*x: Any, **options: Any) -> Any:
        def call(*x: Any) -> Any:
            return regard.jax.context_parallel_attention(*x, axis_name="s", **options)

        return jax.shard_map(call, mesh=mesh, in_specs=(row,) * 3, out_specs=row)(*x)

    expected = step(regard.attention, *map(jax.numpy.asarray, whole))
    for call in (regard.attention, inside):
        found = jax.jit(lambda *x, call=call: step(call, *x))(*spread)
        for name, x, y in zip(("out", "dq", "dk", "dv"), found, expected, strict=True):
            assert len(x.addressable_shards) == 2
            for shard in x.addressable_shards:
                assert shard.data.size == x.size // mesh.size, name
                np.testing.assert_array_equal(shard.data, np.asarray(y)[shard.index], name)
    sink = jax.numpy.float32([0.5, -1.0])  # whose gradient is whole on every device
    gradient = jax.grad(lambda sink, *x: (regard.attention(*x, sink=sink, **options) ** 2).sum())
    one = gradient(sink, *map(jax.numpy.asarray, whole[:3]))
    for shard in jax.jit(gradient)(np.asarray(sink), *spread[:3]).addressable_shards:
        np.testing.assert_array_equal(shard.data, one)
    whole[0][:, -5:] *= 1e4  # the last device alone has scores that gradients refuse, and the others do not wait for it
    hot = [jax.make_array_from_callback(whole[0].shape, NamedSharding(mesh, row), whole[0].__getitem__), *spread[1:]]
    for call in (regard.attention, inside):
        error = ""
        try:
            jax.block_until_ready(jax.jit(lambda *x, call=call: step(call, *x))(*hot))
        except jax.errors.JaxRuntimeError as raised:
            error = str(raised)
        assert "need scores of at most 2.9e+03" in error, error
    print("same")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
