"""The caches that hold keys and values: one file a kind, what each layer holds, the dry run."""
