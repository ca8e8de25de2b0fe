"""Seeds, and the numbers of passes that change them."""
