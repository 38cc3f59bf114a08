"""Attention of other libraries in Chromium, for lab/webassembly.md: python tests/wasm_others.py FOLDER

FOLDER holds what `npm install onnxruntime-web @tensorflow/tfjs-core @tensorflow/tfjs-backend-cpu
@tensorflow/tfjs-backend-wasm` leaves. Needs onnx. One thread each, 2 heads, d = 64; all take turns, the best counts.
"""

import sys
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np

import regard
from in_browser import FLAGS

HEADS, D, SECONDS, ROUNDS = 2, 64, 1.0, 3
SIZES = 256, 1024, 4096
SLOW = 4096  # keys from which a loop takes too long
SCRIPTS = (
    "onnxruntime-web/dist/ort.wasm.min.js",
    "@tensorflow/tfjs-core/dist/tf-core.min.js",
    "@tensorflow/tfjs-backend-cpu/dist/tf-backend-cpu.min.js",
    "@tensorflow/tfjs-backend-wasm/dist/tf-backend-wasm.min.js",
)
RUN = {
    "regard": """async (x, n, heads, d, causal) => {
        const name = causal ? "causal" : "plain";
        const attention = await (await import(`/${name}.js`)).load(`/${name}.wasm`);
        return () => attention({ q: x, k: x, v: x, heads, d });
    }""",
    "ONNX Runtime Web": """async (x, n, heads, d, causal) => {
        ort.env.wasm.numThreads = 1;
        ort.env.wasm.wasmPaths = "/node_modules/onnxruntime-web/dist/";
        const session = await ort.InferenceSession.create(causal ? "causal.onnx" : "plain.onnx");
        const t = new ort.Tensor("float32", x, [heads, n, d]);
        const hidden = Float32Array.from({ length: causal ? n * n : 0 }, (_, p) => p % n > p / n ? -1e30 : 0);
        const mask = causal ? { mask: new ort.Tensor("float32", hidden, [n, n]) } : {};
        return () => session.run({ q: t, k: t, v: t, ...mask });
    }""",
    "TensorFlow.js, wasm": "(x, n, heads, d) => tensorflow('wasm', x, n, heads, d)",
    "TensorFlow.js, cpu": "(x, n, heads, d) => tensorflow('cpu', x, n, heads, d)",
}
TENSORFLOW = """async function tensorflow(backend, x, n, heads, d) {
    tf.wasm.setWasmPaths("/node_modules/@tensorflow/tfjs-backend-wasm/dist/");
    tf.wasm.setThreadsCount(1);
    await tf.setBackend(backend);
    const t = tf.tensor(x, [heads, n, d]);
    const attended = () => tf.matMul(tf.softmax(tf.mul(tf.matMul(t, t, false, true), d ** -0.5)), t);
    return async () => { const out = tf.tidy(attended); await out.data(); out.dispose(); };
}"""
TIMED = """async ([n, heads, d, causal, seconds]) => {
    const x = Float32Array.from({ length: heads * n * d }, () => Math.random() - 0.5);
    const run = await (%s)(x, n, heads, d, causal);
    let best = Infinity;
    const stop = performance.now() + 1000 * seconds;
    do {
        const begun = performance.now();
        await run();
        best = Math.min(best, performance.now() - begun);
    } while (performance.now() < stop);
    return best;
}"""


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *args: Any) -> None: ...


def write_models(folder: Path) -> None:
    """Attention as a graph of ONNX, plain and with a mask that is added."""
    import onnx
    from onnx import TensorProto, helper

    def value(name: str, *shape: Any) -> Any:
        return helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)

    for name in ("plain", "causal"):
        scores, added = (
            ("added", [helper.make_node("Add", ["s", "mask"], ["added"])]) if name == "causal" else ("s", [])
        )
        nodes = [
            helper.make_node("Transpose", ["k"], ["kt"], perm=[0, 2, 1]),
            helper.make_node("Mul", ["q", "scale"], ["scaled"]),
            helper.make_node("MatMul", ["scaled", "kt"], ["s"]),
            *added,
            helper.make_node("Softmax", [scores], ["p"], axis=-1),
            helper.make_node("MatMul", ["p", "v"], ["o"]),
        ]
        inputs = [value(x, HEADS, "n", D) for x in "qkv"] + ([value("mask", "n", "n")] if added else [])
        scale = helper.make_tensor("scale", TensorProto.FLOAT, [], [D**-0.5])
        graph = helper.make_graph(nodes, name, inputs, [value("o", HEADS, "n", D)], [scale])
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
        model.ir_version = 9
        onnx.save(model, str(folder / f"{name}.onnx"))


def main(folder: Path) -> None:
    from playwright.sync_api import sync_playwright

    write_models(folder)
    for name in ("plain", "causal"):
        regard.export_wasm(folder / name, causal=name == "causal")
    scripts = "".join(f'<script src="node_modules/{x}"></script>' for x in SCRIPTS)
    (folder / "index.html").write_text(f"<!doctype html><title>x</title>{scripts}<script>{TENSORFLOW}</script>")
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with sync_playwright() as driver:
            page = driver.chromium.launch(executable_path="/usr/bin/chromium", args=list(FLAGS)).new_page()
            page.goto(f"http://127.0.0.1:{server.server_address[1]}/index.html")
            for n in SIZES:
                kinds = [
                    (name, causal) for name in RUN for causal in (False, True) if not (causal and "Tensor" in name)
                ]
                kinds = [x for x in kinds if not (n >= SLOW and x[0].endswith("cpu"))]
                times = dict.fromkeys(kinds, np.inf)
                for _ in range(ROUNDS):
                    for name, causal in kinds:
                        found = page.evaluate(TIMED % RUN[name], [n, HEADS, D, causal, SECONDS])
                        times[name, causal] = min(times[name, causal], found)
                for (name, causal), ms in times.items():
                    work = 4 * HEADS * n * (n + 1 if causal else 2 * n) / 2 * D / 1e6
                    print(f"{n} {name}, {'causal' if causal else 'plain'}: {work / ms:.1f} GFLOP/s", flush=True)
        server.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
