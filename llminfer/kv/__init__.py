"""What a cache weighs: configs, layers, footprints. Pure Python: neither torch nor transformers."""
