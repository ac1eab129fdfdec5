"""Our compiled engine: packed weights and a decoder step in C++, built on the machine that runs it."""
