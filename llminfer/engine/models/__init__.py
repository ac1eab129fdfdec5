"""What a model class can do, which are supported, and the table of quirks."""
