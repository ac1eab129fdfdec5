"""Where a model's files are, whether they are whole, and what they are converted to."""
