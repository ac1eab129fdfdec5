"""llminfer: run a Hugging Face language model token by token and see what every step costs."""

__version__ = "0.1.0"
