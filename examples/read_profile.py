"""Reading a profile: the time of each kind of launch in a step, with the GB/s and GOP/s it reached.

    python examples/read_profile.py [MODEL]

The data is that of `tandem bench MODEL --profile --json`. Decoding one sequence is bound by memory: the GB/s of its
matmuls should be near `limits.bytes_per_s`, which the benchmark measures on this machine.
"""

import json
import subprocess
import sys

MODEL = sys.argv[1] if len(sys.argv) > 1 else "qwen2.5-coder-0.5b"
COMMAND = [sys.executable, "-m", "tandem", "bench", MODEL, "-p", "16", "-n", "8", "--profile", "--json"]

result = json.loads(subprocess.run(COMMAND, check=True, capture_output=True, text=True).stdout)
print(f"{result['device']}; memory {result['limits']['bytes_per_s'] / 1e9:.0f} GB/s")
for label, groups in result["profiles"].items():
    total = sum(group["seconds"] for group in groups)
    print(f"\n{label}: {total * 1e3:.2f} ms in launches, each timed alone")
    print(f"{'kernel':22} {'value':14} {'launches':>8} {'ms':>8} {'%':>5} {'GB/s':>7} {'GOP/s':>7}")
    for group in groups[:8]:
        seconds = group["seconds"]
        rates = group["bytes"] / seconds / 1e9, group["ops"] / seconds / 1e9
        print(
            f"{group['kernel']:22} {group['name']:14} {group['launches']:8} {seconds * 1e3:8.3f} "
            f"{seconds / total:5.0%} {rates[0]:7.1f} {rates[1]:7.1f}"
        )
