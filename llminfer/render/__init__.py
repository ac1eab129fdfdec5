"""Events to text, tables and JSON: the floor where Rich lives."""
