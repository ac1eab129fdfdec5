"""How each architecture caches: one row a family, one rule a kind of layer."""
