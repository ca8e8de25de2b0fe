"""The workers of the data service: what produces elements, and which consumer gets which."""
