"""The machine under a run: its clock, devices, memory, disk, and how other libraries fail."""
