"""New ids to logits: plain, prepared, compiled; grouped attention; whether a cache may be reused."""
