"""Seeds, and pass numbers, which vary them."""
