"""How a pipeline's elements are made to flow: read ahead within bounds, and handed on in order."""
