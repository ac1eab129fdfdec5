"""Load, prompt, cache, sampler, stop, text, clock and the loop: the floor where torch lives."""
