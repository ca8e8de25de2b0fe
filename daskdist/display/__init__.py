"""How plans and values look."""
