"""How each runtime turns a model's layers into bytes: one file a runtime, `table.py` the list of them."""
