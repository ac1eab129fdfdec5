"""Linear layers packed into fewer bytes, and what packing did."""
