"""What formats are made of: files opened, decompressed and cut, and what they hold made elements."""
