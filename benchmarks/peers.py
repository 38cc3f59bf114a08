"""Other implementations of attention, each an adapter of a few lines.

An adapter takes query, key and value, (h, n, d) each, whether the call is causal, and the number of threads. It
converts them once. It returns the call to time, without arguments, and a function from its result to an array. It
raises `Unable` for calls that it does not support. Any other error is reported in the library's words.
"""

import os
import shutil
from collections.abc import Callable
from typing import Any

import numpy as np

import regard
from benchmarks import naive

Array = np.ndarray[Any, np.dtype[Any]]
Call = Callable[[], Any]
Prepared = tuple[Call, Callable[[Any], Array]]
Adapter = Callable[[Array, Array, Array, bool, int], Prepared]


class Unable(Exception):
    """Raised with the reason why a peer does not take part."""


def naive_numpy(q: Array, k: Array, v: Array, causal: bool, threads: int) -> Prepared:
    """Prepare `bench.naive`; heads that share a key are broadcast."""
    if q.itemsize == 2:
        raise Unable("NumPy has no products of 16-bit floats that use the processor's")
    shared = (len(k), len(q) // len(k), *q.shape[1:])
    query, key, value = (q, k, v) if len(k) == len(q) else (q.reshape(shared), k[:, None], v[:, None])
    return lambda: naive.attention(query, key, value, causal), lambda out: out.reshape(*q.shape[:-1], v.shape[-1])


def tiled(q: Array, k: Array, v: Array, causal: bool, threads: int) -> Prepared:
    """Prepare `regard`'s engine on NumPy alone."""
    regard.set_num_threads(threads)
    return lambda: regard.attention(q, k, v, causal=causal, engine="tiled"), lambda out: out


def tensor(x: Array) -> Any:
    """Return a PyTorch tensor that shares the array's memory."""
    import torch

    return torch.from_numpy(x) if x.dtype.kind == "f" else torch.from_numpy(x.view(np.int16)).view(torch.bfloat16)


def tensors(*arrays: Array) -> list[Any]:
    """Return arrays (h, n, d) as PyTorch tensors (1, h, n, d) on the same memory."""
    return [tensor(x)[None] for x in arrays]


def array(x: Any) -> Array:
    """Return a tensor (1, h, n, d) as an array of the nearest dtype in NumPy."""
    return np.asarray((x.float() if x.element_size() == 2 else x)[0].numpy())


def torch_sdpa(q: Array, k: Array, v: Array, causal: bool, threads: int) -> Prepared:
    import torch

    torch.set_num_threads(threads)
    args = tensors(q, k, v)
    options = {"is_causal": causal, "enable_gqa": len(k) != len(q)}

    def call() -> Any:
        with torch.inference_mode():
            return torch.nn.functional.scaled_dot_product_attention(*args, **options)

    return call, array


def torch_flex(q: Array, k: Array, v: Array, causal: bool, threads: int) -> Prepared:
    import torch
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    if q.dtype == np.float64:
        raise Unable("takes no float64 on processors")
    if not any(map(shutil.which, ("c++", "g++", "clang++"))):
        raise Unable("needs a C++ compiler")
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    torch.set_num_threads(threads)
    args = tensors(q, k, v)
    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, q.shape[1], k.shape[1], "cpu") if causal else None
    compiled = torch.compile(flex_attention, dynamic=False)

    def call() -> Any:
        with torch.inference_mode():
            return compiled(*args, block_mask=mask, enable_gqa=len(k) != len(q))

    return call, array


def jax_dpa(q: Array, k: Array, v: Array, causal: bool, threads: int) -> Prepared:
    """Prepare `jax.nn`'s function, with positions before heads.

    Its number of threads is that of the process's cores.
    """
    import jax

    jax.config.update("jax_enable_x64", True)
    args = [jax.numpy.asarray(np.ascontiguousarray(x.swapaxes(0, 1))[None]) for x in (q, k, v)]
    compiled = jax.jit(jax.nn.dot_product_attention, static_argnames="is_causal")
    return (
        lambda: compiled(*args, is_causal=causal).block_until_ready(),
        lambda out: np.asarray(out[0]).swapaxes(0, 1),
    )


def onnx_mha(q: Array, k: Array, v: Array, causal: bool, threads: int) -> Prepared:
    """Prepare the operator com.microsoft.MultiHeadAttention over (1, n, h · d)."""
    import onnxruntime as ort
    from onnx import TensorProto, helper

    kinds = {"float32": TensorProto.FLOAT, "float16": TensorProto.FLOAT16}
    if len(k) != len(q):
        raise Unable("MultiHeadAttention has no grouped heads")
    if q.dtype.name not in kinds:
        raise Unable(f"its operator takes no {q.dtype.name}")
    h = len(q)
    packed = {
        name: np.ascontiguousarray(x.swapaxes(0, 1)).reshape(1, x.shape[1], -1)
        for name, x in zip("qkv", (q, k, v), strict=True)
    }
    node = helper.make_node(
        "MultiHeadAttention", list(packed), ["out"], domain="com.microsoft", num_heads=h, unidirectional=int(causal)
    )
    kind = kinds[q.dtype.name]
    given = [helper.make_tensor_value_info(name, kind, x.shape) for name, x in packed.items()]
    made = helper.make_tensor_value_info("out", kind, packed["q"].shape)
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(
        helper.make_graph([node], "attention", given, [made]), opset_imports=opsets, ir_version=10
    )
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    options.log_severity_level = 4
    session = ort.InferenceSession(model.SerializeToString(), options, ["CPUExecutionProvider"])
    binding = session.io_binding()
    for name, x in packed.items():
        binding.bind_cpu_input(name, x)
    binding.bind_output("out")
    return (
        lambda: session.run_with_iobinding(binding),
        lambda _: binding.copy_outputs_to_cpu()[0].reshape(-1, h, v.shape[-1]).swapaxes(0, 1),
    )


def openvino_sdpa(q: Array, k: Array, v: Array, causal: bool, threads: int) -> Prepared:
    import openvino as ov
    from openvino import opset13 as ops

    if len(k) != len(q):
        raise Unable("scaled_dot_product_attention has no grouped heads")
    kinds = {"float32": ov.Type.f32, "float16": ov.Type.f16, "bfloat16": ov.Type.bf16}
    if q.dtype.name not in kinds:
        raise Unable(f"computes no {q.dtype.name} on processors")
    kind = kinds[q.dtype.name]
    arrays = [np.ascontiguousarray(x)[None].view(np.uint16 if x.itemsize == 2 else x.dtype) for x in (q, k, v)]
    inputs = [ops.parameter(x.shape, kind) for x in arrays]
    node = ops.scaled_dot_product_attention(*inputs, causal=causal)
    request = (
        ov.Core()
        .compile_model(
            ov.Model([node], inputs, "attention"),
            "CPU",
            {
                "INFERENCE_NUM_THREADS": threads,
                "NUM_STREAMS": 1,
                "ENABLE_CPU_PINNING": False,
                # Told float16 it computes in bfloat16.
                "INFERENCE_PRECISION_HINT": ov.Type.bf16 if kind == ov.Type.bf16 else ov.Type.f32,
            },
        )
        .create_infer_request()
    )
    for n, x in enumerate(arrays):
        request.set_input_tensor(n, ov.Tensor(x, x.shape, kind))

    def call() -> Any:
        request.infer()
        return arrays  # the tensors share their memory

    return call, lambda _: np.asarray(request.get_output_tensor().data).view(q.dtype)[0]


PEERS: dict[str, Adapter] = {
    "PyTorch": torch_sdpa,
    "FlexAttention": torch_flex,
    "JAX": jax_dpa,
    "ONNX Runtime": onnx_mha,
    "OpenVINO": openvino_sdpa,
    "NumPy": naive_numpy,
    "tiled": tiled,
}


def reason(error: BaseException) -> str:
    """Return the reason why a peer does not take part, in one line."""
    if isinstance(error, ImportError) and error.name:
        return f"not installed: {error.name}"
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0][:160]
