"""Elements that cannot be read or computed: their origin, their errors, and leaving them out."""
