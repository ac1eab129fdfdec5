"""From logits to a token: what was asked for, the sampler's steps, the fast draw."""
