"""Which of these models holds 100,000 tokens in 24 GiB of KV cache?"""

from llminfer import kv_footprint

for name in ("llama-3.1-8b", "gemma-3-27b", "deepseek-v3", "qwen3-next-80b-a3b", "mamba-2.8b"):
    kv = kv_footprint(name, tokens=100_000, dtype="bfloat16")
    verdict = "fits" if kv.total_bytes <= 24 * 1024**3 else "does not fit"
    print(f"{name:<20} {kv.total_bytes:>15,} B  {verdict}")
