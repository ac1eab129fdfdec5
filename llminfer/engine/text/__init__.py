"""Text in and out: prompts to ids, ids to text, and what ends an output."""
