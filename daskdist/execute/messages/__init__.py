"""Functions, values and errors in the form in which processes send them."""
