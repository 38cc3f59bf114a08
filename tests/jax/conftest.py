"""Four devices on one processor, and programs that compile fast: what is tested is not how fast XLA's code runs."""

import os

FLAGS = (
    "--xla_force_host_platform_device_count=4 --xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false"
)
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {FLAGS}"
